"""Recorded runs, and how far their simulation is off: by the library, by `paged validate` and by `paged profile --import`."""
# ruff: noqa: F401  # the calls of the file take them from here

import json
from itertools import islice

import numpy as np
import pytest

from paged.errors import BadRun, InvalidConfig
from paged.study.hardware.kernels.layer_tables import LayerTables
from paged.study.simulator import (
    METRICS,
    STATISTICS,
    RunOptions,
    closed_loops,
    engine_named,
    engine_names,
    read_run,
    validated,
)
from paged.study.simulator.validation import prepared, simulation_of, taken_in
from paged.study.traces import Trace

from .files_of_others import META, assert_by_hand, by_hand_in, meta_of, table, write_folder, write_run  # noqa: TID252


def test_a_run_of_the_simulated_engine_is_met(tmp_path):
    simulation = write_run(tmp_path / "run")
    assert simulation.ranks[0].scheduler.stats().preemptions_recompute > 0, "the pool is to be too small"
    found = validated(read_run(tmp_path / "run"))
    for metric in METRICS:
        assert found.errors[metric] == pytest.approx(dict.fromkeys(STATISTICS, 0.0), abs=1e-6)
    assert found.engine == "vllm-0.19"
    assert "rtx4090-llama-3.1-8b" in found.cost_model


def test_over_time_is_compared_where_it_was_recorded(tmp_path):
    simulation = write_run(tmp_path / "run")
    columns = simulation.ranks[0].timeline.columns()
    ticks = np.arange(0.5, columns["end_s"][-1], 0.5)
    place = np.searchsorted(columns["end_s"], ticks)
    lines = ["t,running,waiting,kv_cache_pct"]
    lines += [
        f"{t},{columns['rows'][i]},{columns['waiting'][i]},{columns['held'][i] / (400 * 16) * 100 - 10}"
        for t, i in zip(ticks, place)
    ]
    (tmp_path / "run" / "timeseries.csv").write_text("\n".join(lines))
    error = validated(read_run(tmp_path / "run")).series_error
    assert error.running == pytest.approx(0, abs=1e-9)
    assert error.kv_points == pytest.approx(10)
    assert error.kv_points_mean == pytest.approx(10)


@pytest.fixture
def run_folder(tmp_path):
    write_run(tmp_path / "run", slower=1.25)
    return tmp_path / "run"


def test_a_run_is_a_table_and_a_page(printed, run_folder, tmp_path, monkeypatch):
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
    assert set(errors) == set(METRICS)
    # Each was a quarter longer.
    for metric in ("ttft", "tpot", "e2e"):
        assert errors[metric] == pytest.approx(dict.fromkeys(STATISTICS, -0.2), abs=1e-6)
    assert not list(tmp_path.glob("*.html")), "nobody asked for a page"


def test_closed_loops_are_medians_by_engine_and_devices(printed, document, tmp_path):
    assert "version is not stated" in printed("validate", table(tmp_path))
    (cell,) = document("validate", table(tmp_path))
    assert cell["tpot_error"] == pytest.approx(cell["simulated_tpot_s"] / cell["tpot_s"] - 1)


def test_tables_of_others_become_a_file_that_a_simulation_goes_by(printed, refused, tmp_path):
    folder = write_folder(tmp_path)
    (folder / "meta.yaml").write_text("vllm_version: 1.2\nmodel: meta-llama/Llama-3.1-8B\n")
    out = tmp_path / "own.json"
    assert "attention, mixed" in printed("profile", "--import", folder, "--on", "rtx4090", "--out", out)
    assert LayerTables.load(out).versions == {"vLLM": "1.2"}
    options = ("simulate", "azure", "--limit", 5, "--model", "llama-3.1-8b", "--profile", out)
    assert "vLLM 1.2" in printed(*options, "--device", "rtx4090")
    assert "timed on rtx4090, not on h100" in refused(*options, "--device", "h100")


RANKS = meta_of(data_parallel_size=2)
SHARED = meta_of("Qwen/Qwen3-30B-A3B", data_parallel_size=2, enable_expert_parallel=True)
UNSAID = {**META, "kv_cache": {}, "vllm_version": "0.21.3", "hardware": {}, "engine_kwargs": {}}
RESOLVED = {
    **meta_of(),
    "resolved_config": {"parallel_config": {"data_parallel_size": 2}, "scheduler_config": {"async_scheduling": False}},
}
SERVED = {
    "model_id": "meta-llama/Llama-3.1-8B", "input_lens": [100, 200, 300], "output_lens": [3, 2, 0],
    "ttfts": [0.1, 0.2, 0.0], "itls": [[0.02, 0.03], [0.04], []], "start_times": [5.0, 4.0, 4.5],
}  # fmt: skip
SLOW = RunOptions(link_gbps=4, link_us=50)
UNSTATED = {"precision": "", "backend": "trtllm", "version": "1.0"}


def stepped(setup, *columns, **options):
    """The simulation of a trace by such a setup, to its end."""
    simulation = simulation_of(Trace.from_lengths(*columns), setup, **options)
    list(simulation.steps())
    return simulation


@pytest.mark.parametrize(("call", "by_hand"), by_hand_in("validations.txt"))
def test_what_is_made_of_a_run_is_what_it_is_by_hand(tmp_path, call, by_hand):
    def recorded(described_as=META, **options):
        """A run as files_of_others writes it, read, with this description."""
        folder = tmp_path / "rtx4090-x"
        write_run(folder, **options)
        (folder / "meta.json").write_text(json.dumps(described_as))
        return read_run(folder)

    def served(**changed):
        """A result of vLLM's bench serve, read; what is None is not in it."""
        fields = {name: value for name, value in {**SERVED, **changed}.items() if value is not None}
        (tmp_path / "bench.json").write_text(json.dumps(fields))
        return read_run(tmp_path / "bench.json")

    def setup(described_as, **asked):
        run = recorded(described_as)
        return prepared(run.setup, RunOptions(**asked), name=run.name)

    def said(described_as, *words):
        notes = " ".join(setup(described_as).assumed)
        return [each in notes for each in words]

    def share_of(metric, statistic, one, two):
        less, more = (getattr(validated(recorded(each)).simulated[metric], statistic) for each in (two, one))
        return less / more

    def first_tokens(described_as):
        return stepped(setup(described_as), [0, 0], [1000, 10], [2, 40]).latencies.first.tolist()

    def link(asked):
        return validated(recorded(meta_of(tensor_parallel_size=2)), asked)

    def loop(**changed):
        (cell,) = closed_loops(table(tmp_path, **changed))
        return cell

    def on_h100(model=META["model"], *, asked=(), **fields):
        return setup(meta_of(model, **fields), device="h100", published=True, **dict(asked)).step

    assert_by_hand(call, by_hand, globals() | locals())
