"""`paged validate` and `paged profile --import`: what they print, write and refuse."""

import pytest

from paged.study.hardware.kernels.layer_tables import LayerTables
from paged.study.simulator import METRICS, STATISTICS

from .files_of_others import table, write_folder, write_run  # noqa: TID252


@pytest.fixture
def run_folder(tmp_path):
    write_run(tmp_path / "run", slower=1.25)
    return tmp_path / "run"


def test_a_run_is_a_table_and_a_page(printed, run_folder, tmp_path, monkeypatch):
    pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)
    out = printed("validate", run_folder)
    assert "time to first token, p90" in out
    assert out.count("-20.0%") == 12, "each of three metrics was a quarter longer"
    assert "Steps are timed by measured layers of rtx4090-llama-3.1-8b" in out
    page = (tmp_path / "validate-run.html").read_text()
    assert "measured and simulated" in page
    assert "Content-Security-Policy" in page


def test_as_json_it_is_one_document_with_errors_by_metric_and_statistic(document, run_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    errors = document("validate", run_folder)["errors"]
    assert {metric: set(of) for metric, of in errors.items()} == {metric: set(STATISTICS) for metric in METRICS}
    assert errors["tpot"]["p99"] == pytest.approx(-0.2, abs=1e-6)
    assert not list(tmp_path.glob("*.html")), "nobody asked for a page"


def test_closed_loops_are_medians_by_engine_and_devices(printed, document, tmp_path):
    out = printed("validate", table(tmp_path))
    assert "vllm" in out and "version is not stated" in out
    (cell,) = document("validate", table(tmp_path))
    assert cell["tpot_error"] == pytest.approx(cell["simulated_tpot_s"] / cell["tpot_s"] - 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "vllm-9"], "unknown engine"),
        (["--model", "no-such"], "unknown model"),
        (["--device", "abacus"], "unknown device"),
    ],
)
def test_what_is_unknown_ends_in_a_line(refused, run_folder, options, words):
    assert words in refused("validate", run_folder, "--json", *options)


def test_a_broken_line_ends_in_a_line(refused, run_folder):
    path = run_folder / "requests.jsonl"
    path.write_text(path.read_text().replace('"output_toks": 20', '"output_toks": null', 1))
    assert "row 2: output_toks is None" in refused("validate", run_folder, "--json")


def test_tables_of_others_become_a_file_that_a_simulation_goes_by(printed, refused, tmp_path):
    folder = write_folder(tmp_path)
    (folder / "meta.yaml").write_text("vllm_version: 1.2\nmodel: meta-llama/Llama-3.1-8B\n")
    out = tmp_path / "own.json"
    assert "attention, mixed" in printed("profile", "--import", folder, "--on", "rtx4090", "--out", out)
    assert LayerTables.load(out).versions == {"vLLM": "1.2"}
    options = ("simulate", "azure", "--limit", 5, "--model", "llama-3.1-8b", "--profile", out)
    assert "vLLM 1.2" in printed(*options, "--device", "rtx4090")
    assert "timed on rtx4090, not on h100" in refused(*options, "--device", "h100")


def test_an_import_says_what_it_needs(refused, tmp_path):
    into = ("profile", "--out", tmp_path / "own.json", "--import")
    folder = write_folder(tmp_path)
    assert "--on" in refused(*into, folder)
    assert "--shape" in refused(*into, folder, "--on", "rtx4090")
    assert "nowhere: no such folder" in refused(*into, tmp_path / "nowhere", "--on", "h100")


def test_capacity_and_simulate_say_what_times_a_step(printed):
    few = ("simulate", "azure", "--limit", 3, "--model", "llama-3-8b")
    for options in (("capacity", "llama-3-8b"), few):
        assert "measured kernels of h100" in printed(*options, "--device", "h100")
