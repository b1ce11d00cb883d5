"""`paged validate` and `paged profile --import`: what they print, write and refuse."""

import json

import pytest

from paged.study.hardware.kernels.layer_tables import LayerTables
from paged.study.simulator import METRICS, STATISTICS

from .files_of_others import table, write_folder, write_run  # noqa: TID252


@pytest.fixture
def run_folder(tmp_path):
    write_run(tmp_path / "run", slower=1.25)
    return tmp_path / "run"


def test_a_run_is_a_table_and_a_page(paged, run_folder, tmp_path, monkeypatch):
    pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)
    status, out, err = paged("validate", str(run_folder))
    assert (status, err) == (0, "")
    assert "time to first token, p90" in out
    assert out.count("-20.0%") == 12, "each of three metrics was a quarter longer"
    assert "Steps are timed by measured layers of rtx4090-llama-3.1-8b" in out
    page = (tmp_path / "validate-run.html").read_text()
    assert "measured and simulated" in page
    assert "Content-Security-Policy" in page


def test_as_json_it_is_one_document_with_errors_by_metric_and_statistic(paged, run_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = paged("validate", str(run_folder), "--json")
    assert status == 0
    errors = json.loads(out)["errors"]
    assert {metric: set(of) for metric, of in errors.items()} == {metric: set(STATISTICS) for metric in METRICS}
    assert errors["tpot"]["p99"] == pytest.approx(-0.2, abs=1e-6)
    assert not list(tmp_path.glob("*.html")), "nobody asked for a page"


def test_closed_loops_are_medians_by_engine_and_devices(paged, tmp_path):
    status, out, err = paged("validate", str(table(tmp_path)))
    assert (status, err) == (0, "")
    assert "vllm" in out
    assert "version is not stated" in out
    status, out, _ = paged("validate", str(table(tmp_path)), "--json")
    (cell,) = json.loads(out)
    assert cell["tpot_error"] == pytest.approx(cell["simulated_tpot_s"] / cell["tpot_s"] - 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "vllm-9"], "unknown engine"),
        (["--model", "no-such"], "unknown model"),
        (["--device", "abacus"], "unknown device"),
    ],
)
def test_what_is_unknown_ends_in_a_line(paged, run_folder, options, words):
    status, out, err = paged("validate", str(run_folder), "--json", *options)
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_a_broken_line_ends_in_a_line(paged, run_folder):
    path = run_folder / "requests.jsonl"
    path.write_text(path.read_text().replace('"output_toks": 20', '"output_toks": null', 1))
    status, _, err = paged("validate", str(run_folder), "--json")
    assert status == 2
    assert "row 2: output_toks is None" in err


def test_tables_of_others_become_a_file_that_a_simulation_goes_by(paged, tmp_path):
    folder = write_folder(tmp_path)
    (folder / "meta.yaml").write_text("vllm_version: 1.2\nmodel: meta-llama/Llama-3.1-8B\n")
    out = tmp_path / "own.json"
    status, said, err = paged("profile", "--import", str(folder), "--on", "rtx4090", "--out", str(out))
    assert (status, err) == (0, "")
    assert "attention, mixed" in said
    assert LayerTables.load(out).versions == {"vLLM": "1.2"}
    options = ("simulate", "azure", "--limit", "5", "--model", "llama-3.1-8b", "--profile", str(out))
    status, said, err = paged(*options, "--device", "rtx4090")
    assert (status, err) == (0, "")
    assert "vLLM 1.2" in said
    status, _, err = paged(*options, "--device", "h100")
    assert status == 2
    assert "timed on rtx4090, not on h100" in err


def test_an_import_says_what_it_needs(paged, tmp_path):
    folder = write_folder(tmp_path)
    out = str(tmp_path / "own.json")
    status, _, err = paged("profile", "--import", str(folder), "--out", out)
    assert (status, "--on" in err) == (2, True)
    status, _, err = paged("profile", "--import", str(folder), "--on", "rtx4090", "--out", out)
    assert (status, "--shape" in err) == (2, True)
    status, _, err = paged("profile", "--import", str(tmp_path / "nowhere"), "--on", "h100", "--out", out)
    assert (status, "nowhere: no such folder" in err) == (2, True)


def test_capacity_and_simulate_say_what_times_a_step(paged):
    for options in (["capacity", "llama-3-8b"], ["simulate", "azure", "--limit", "3", "--model", "llama-3-8b"]):
        assert "measured kernels of h100" in paged(*options, "--device", "h100")[1]
    few = ["simulate", "azure", "--limit", "3", "--model", "smollm-135m", "--blocks", "500"]
    for options in (["capacity", "llama-3-8b"], few):
        said = paged(*options, "--device", "groq-lpu")[1]
        assert "nobody measured kernels of groq-lpu" in said
    document = json.loads(paged("capacity", "llama-3-8b", "--device", "h100", "--json")[1])
    assert document["timed_by"].startswith("measured kernels of h100")
