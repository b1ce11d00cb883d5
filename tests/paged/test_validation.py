"""Recorded runs, and how far their simulation is off: by the library, by `paged validate` and by `paged profile --import`."""

import json

import numpy as np
import pytest

from paged.errors import BadRun, InvalidConfig
from paged.study.hardware.kernels.layer_tables import LayerTables
from paged.study.simulator import (
    METRICS,
    STATISTICS,
    Asked,
    closed_loops,
    engine_named,
    engine_names,
    read_run,
    validated,
)
from paged.study.simulator.validation import prepared, simulation_of, taken_in
from paged.study.traces import Trace

from .files_of_others import ARRIVAL, META, meta_of, table, write_folder, write_run  # noqa: TID252


@pytest.fixture
def recorded(tmp_path):
    """recorded(...): a run as files_of_others writes it, read; its description may be exchanged afterwards."""

    def made(name="run", *, described_as=None, **options):
        write_run(tmp_path / name, **options)
        if described_as is not None:
            (tmp_path / name / "meta.json").write_text(json.dumps(described_as))
        return read_run(tmp_path / name)

    return made


RANKS = meta_of(data_parallel_size=2)


def test_a_run_of_the_simulated_engine_is_met(tmp_path):
    simulation = write_run(tmp_path / "run")
    assert simulation.scheduler.stats().preemptions_recompute > 0, "the pool is to be too small"
    found = validated(read_run(tmp_path / "run"))
    for metric in METRICS:
        assert found.errors[metric] == pytest.approx(dict.fromkeys(STATISTICS, 0.0), abs=1e-6)
    assert found.engine == "vllm-0.19"
    assert "rtx4090-llama-3.1-8b" in found.cost_model


def test_when_the_engine_took_requests_in_counts_and_not_when_they_were_sent(tmp_path):
    simulation = write_run(tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert run.arrival == pytest.approx(ARRIVAL)
    # Two clocks, a billion seconds apart.
    assert np.ptp(run.queued - taken_in(ARRIVAL, simulation)) < 1e-6
    assert (run.queued > run.arrival + 0.005).any()


def test_what_a_run_does_not_say_is_assumed_and_said(recorded):
    unsaid = {**META, "kv_cache": {}, "vllm_version": "0.21.3", "hardware": {}, "engine_kwargs": {}}
    run = recorded("rtx4090-x", described_as=unsaid)
    said = " ".join(validated(run).assumed)
    for words in ("how many blocks", "vLLM 0.21.3 is not described: vllm-0.19", "by the run's name", "dtype None"):
        assert words in said
    asked = prepared(run.setup, Asked(blocks=500, engine="vllm-0.24", dtype="bf16"), name=run.name)
    assert (asked.blocks, asked.max_tokens_per_step) == (499, 8192)
    assert not any("blocks" in note for note in asked.assumed)


def test_over_time_is_compared_where_it_was_recorded(tmp_path):
    simulation = write_run(tmp_path / "run")
    columns = simulation.timeline.columns()
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


def test_requests_that_never_fit_are_left_out_of_both_and_said_and_a_pool_that_holds_none_is_refused(recorded):
    found = validated(recorded(), Asked(blocks=60))
    assert any("10 requests do not fit into 59 blocks" in note for note in found.assumed)
    with pytest.raises(InvalidConfig, match="none of the run's 40 requests fits into 2 blocks"):
        validated(recorded(), Asked(blocks=3))


def test_a_time_of_nothing_has_an_error_without_bound(recorded):
    run = recorded(spoil=lambda rows: [{**row, "first_token_ts": row["queued_ts"]} for row in rows])
    assert validated(run).errors["ttft"]["p50"] == np.inf


def test_a_result_of_bench_serve_is_a_run(tmp_path):
    found = {
        "model_id": "meta-llama/Llama-3.1-8B",
        "input_lens": [100, 200, 300],
        "output_lens": [3, 2, 0],
        "ttfts": [0.1, 0.2, 0.0],
        "itls": [[0.02, 0.03], [0.04], []],
        "start_times": [5.0, 4.0, 4.5],
    }
    (tmp_path / "bench.json").write_text(json.dumps(found))
    run = read_run(tmp_path / "bench.json")
    # In order of arrival; who has no token is left out.
    assert (run.arrival.tolist(), run.prompt_tokens.tolist()) == ([0, 1], [200, 100])
    assert run.last == pytest.approx([0.24, 1.15])
    assert validated(run, Asked(device="h100")).measured["tpot"].mean == pytest.approx((0.04 + 0.025) / 2)
    del found["start_times"]
    (tmp_path / "bench.json").write_text(json.dumps({**found, "max_concurrency": 2}))
    assert read_run(tmp_path / "bench.json").clients == 2
    (tmp_path / "bench.json").write_text(json.dumps(found))
    with pytest.raises(BadRun, match="neither start_times nor max_concurrency"):
        read_run(tmp_path / "bench.json")


def test_two_data_parallel_ranks_have_a_pool_each_and_share_the_requests(recorded):
    one, two = (validated(recorded(described_as=meta)) for meta in (meta_of(), RANKS))
    assert one.preemptions > 0 == two.preemptions
    assert two.simulated["ttft"].p99 < 0.7 * one.simulated["ttft"].p99
    assert two.simulated["tpot"].mean < one.simulated["tpot"].mean
    assert any("the rank with the least to do" in note for note in two.assumed)


def stepped(setup, *columns, **options):
    """The simulation of a trace by such a setup, to its end."""
    simulation = simulation_of(Trace.from_lengths(*columns), setup, **options)
    list(simulation.steps())
    return simulation


def test_a_dense_models_ranks_do_not_wait_for_each_other(recorded):
    both = stepped(prepared(recorded(described_as=RANKS).setup, Asked()), [0, 0], [1000, 10], [2, 40])
    assert both.replica_of.tolist() == [0, 1]
    # The short prompt has its first token long before the long one.
    assert both.latencies.first[1] < 0.5 * both.latencies.first[0]


def test_ranks_that_share_experts_step_together(recorded):
    meta = meta_of("Qwen/Qwen3-30B-A3B", data_parallel_size=2, enable_expert_parallel=True)
    setup = prepared(recorded(described_as=meta).setup, Asked())
    both = stepped(setup, [0, 0], [1000, 10], [2, 40])
    first = both.latencies.first
    assert first[0] == first[1]
    for words in ("step together", "experts were not timed"):
        assert any(words in note for note in setup.assumed)
    # Who has nothing to do is waited for, too.
    assert both.ranks[0].now_s == both.ranks[1].now_s


def test_a_request_goes_to_the_rank_with_the_least_to_do_and_a_closed_loop_serves_all(recorded):
    setup = prepared(recorded(described_as=RANKS).setup, Asked())
    assert stepped(setup, [0, 0, 2, 2.5], [10] * 4, [500, 5, 5, 5]).replica_of.tolist() == [0, 1, 1, 1]
    loop = stepped(setup, [0] * 12, [50] * 12, [20] * 12, clients=4)
    assert np.isfinite(loop.latencies.e2e).all()
    assert set(loop.replica_of.tolist()) == {0, 1}


def test_two_devices_by_tensor_parallel_are_timed_by_measured_layers_and_a_link(recorded):
    run = recorded(described_as=meta_of(tensor_parallel_size=2))
    usual, slow = validated(run, Asked()), validated(run, Asked(link_gbps=4, link_us=50))
    assert "derived from the measured ones" in usual.cost_model
    assert any("a link of 16 GB/s and 12 µs a message" in note for note in usual.assumed)
    assert any("a link of 4 GB/s and 50 µs a message (as it was given)" in note for note in slow.assumed)
    assert slow.simulated["tpot"].mean > 1.3 * usual.simulated["tpot"].mean


@pytest.mark.parametrize("quantization", ["awq_marlin", "bitsandbytes"])
def test_weights_in_a_format_that_the_model_is_not_stored_in_are_refused_until_somebody_says_how_to_count(
    recorded, quantization
):
    run = recorded(described_as=meta_of(quantization=quantization))
    with pytest.raises(InvalidConfig, match=f"quantization = '{quantization}', and llama-3.1-8b is not known to be"):
        prepared(run.setup, Asked())
    assert "were not timed" not in prepared(run.setup, Asked(dtype="bf16")).cost_model
    assert "weights in int4" in prepared(run.setup, Asked(device="h100", quantization="int4")).cost_model


def test_fields_that_nobody_knows_are_named_and_harmless_ones_are_not(recorded):
    fields = {"seed": 7, "enforce_eager": True, "some_new_field": 3, "another": None, "pipeline_parallel_size": 1}
    said = validated(recorded(described_as=meta_of(**fields))).assumed
    assert [note for note in said if "not modelled" in note] == [
        "not modelled: enforce_eager = True",
        "not modelled: some_new_field = 3",
    ]


def test_what_an_engine_made_of_its_configuration_counts_where_nobody_asked(recorded):
    resolved = {"parallel_config": {"data_parallel_size": 2}, "scheduler_config": {"async_scheduling": False}}
    run = recorded(described_as={**meta_of(), "resolved_config": resolved})
    setup = prepared(run.setup, Asked())
    assert (setup.data_parallel, setup.engine.runs_ahead) == (2, False)
    assert prepared(run.setup, Asked(data_parallel=1)).data_parallel == 1


def test_a_closed_loop_is_simulated_by_its_line(tmp_path):
    (cell,) = closed_loops(table(tmp_path))
    assert (cell.dtype, cell.tensor_parallel, cell.clients) == ("fp8", 4, 4)
    assert 0.01 < cell.simulated_ttft_s < 0.5
    assert 0.005 < cell.simulated_tpot_s < 0.03
    assert cell.assumed == ("version is not stated: as vllm-0.24", "K and V are kept in bf16 (--kv-dtype)")
    (unstated,) = closed_loops(table(tmp_path, precision="", backend="trtllm", version="1.0"))
    assert unstated.assumed[0] == "precision is not stated: bf16"
    assert "keeps one for itself" in unstated.assumed[1]
    # One of four clients waits for another's whole answer.
    assert unstated.simulated_ttft_s > 0.5 * 64 * unstated.simulated_tpot_s / 4
    assert unstated.simulated_tpot_s > cell.simulated_tpot_s


@pytest.mark.parametrize("name", engine_names())
def test_engines_are_described_with_their_sources(name):
    found = engine_named(name)
    assert found.name == name
    assert found.source
    assert found.own_policy().watermark == found.watermark


def test_an_engine_that_runs_ahead_sees_requests_a_step_later(recorded):
    setup = prepared(recorded().setup, Asked())
    assert setup.engine.runs_ahead
    steps = simulation_of(Trace.from_lengths([0, 0.001], [100, 100], [400, 5]), setup).steps()
    # The second request came while the first step ran; the second step was decided on before.
    assert [set(next(steps).batch.ids.tolist()) for _ in range(3)] == [{"0"}, {"0"}, {"0", "1"}]


@pytest.mark.parametrize(
    ("changed", "asked", "dtype", "kept"),
    [
        ({}, {}, "bf16", "bf16"),
        ({"kv_cache_dtype": "auto"}, {}, "bf16", "bf16"),
        ({"kv_cache_dtype": "fp8_e4m3"}, {}, "bf16", "fp8"),
        ({"kv_cache_dtype": "fp8"}, {"kv_dtype": "bf16"}, "bf16", "bf16"),
        ({}, {"dtype": "fp8"}, "fp8", "bf16"),
    ],
)
def test_a_run_s_k_and_v_have_a_dtype_of_their_own(recorded, changed, asked, dtype, kept):
    run = recorded(described_as=meta_of(**changed))
    step = prepared(run.setup, Asked(device="h100", published=True, **asked)).step
    assert (step.dtype, step.kept_dtype) == (dtype, kept)


def test_a_run_knows_its_models_shape_and_dtype_by_a_longer_name_and_what_of_it_is_not_modelled(recorded):
    run = recorded(described_as={**META, "model": "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8"})
    found = prepared(run.setup, Asked(device="h100", published=True))
    assert (found.step.model.name, found.step.dtype, found.step.kept_dtype) == ("qwen3-30b-a3b", "fp8", "bf16")
    assert "K and V are kept in bf16 (--kv-dtype)" in found.assumed
    found = prepared(recorded(described_as={**META, "model": "mistralai/Mistral-7B-v0.1"}).setup, Asked())
    assert any(note.startswith("memory keeps all tokens of every layer") for note in found.assumed)


def test_a_run_of_a_model_with_states_is_refused_and_one_with_windows_holds_all_tokens(recorded):
    with pytest.raises(InvalidConfig, match="lfm2-1.2b has layers that keep a state"):
        prepared(recorded(described_as={**META, "model": "LiquidAI/LFM2-1.2B"}).setup, Asked())
    unsaid = {**META, "model": "openai/gpt-oss-20b", "kv_cache": {}}
    found = prepared(recorded(described_as=unsaid).setup, Asked(device="a100-80g"))
    # K and V of 24 layers with 8 heads of 64 in bf16: pages of half of them would be more.
    assert 40_000 < found.blocks < 80e9 / (24 * 2048 * 16)


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
