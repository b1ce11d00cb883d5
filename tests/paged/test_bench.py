"""`paged bench attention`, `engine` and `step`: what is timed is what is said, and figures follow from one another."""

import itertools
import re
from pkgutil import resolve_name

import msgspec
import numpy as np
import pytest
import torch

from paged.attention.native.backend import ELEMENTS
from paged.errors import InvalidConfig
from paged.model import limits
from paged.model.limits import product_rate
from paged.model.loading import load_model
from paged.model.native.coded import coded_library
from paged.model.native.large_pages import aligned
from paged.model.native.packed import is_compiled, model_library
from paged.model.random_weights import random_model
from paged.model.shape import shape_of
from paged.study.bench import WORKLOADS, Measured, attention, step as bench_step, workload  # noqa: F401
from paged.study.bench.attention import AttentionBench, AttentionTimes, HeadShape, Load, chosen_backends
from paged.study.bench.engine import EngineTimes, Serving, blocks_wanted, engine_run
from paged.study.bench.step import StepParts
from paged.study.hardware import ModelShape
from paged.study.traces import Trace

from .files_of_others import assert_by_hand, by_hand_in  # noqa: TID252

SHAPE = ModelShape(
    name="tiny", hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=48, vocab=64, max_length=128,
    tied_embeddings=True,
)  # fmt: skip


@pytest.fixture
def quick_limits(monkeypatch):
    """Limits of the machine that are measured in no time, and pools that a processor's cache holds."""
    monkeypatch.setattr(attention, "_MOST_LAYERS", 2)
    monkeypatch.setattr(limits, "_BYTES", 2**16)
    monkeypatch.setattr(limits, "_SIDE", 64)


@pytest.fixture
def bench(printed, quick_limits):
    """What the command's JSON holds."""
    return lambda *arguments: msgspec.json.decode(printed("bench", "engine", *arguments, "--json"), type=EngineTimes)


def test_every_run_has_the_workloads_tokens_and_its_figures_follow_from_one_another(bench):
    found = bench("--limit", 6, "--scale", 8, "--runs", 2)
    asked = workload("offline", limit=6, scale=8)
    assert (found.model, found.workload, found.requests) == ("embedded", "offline", 6)
    assert found.prompt_tokens == asked.prompt_tokens.sum()
    assert (found.output_tokens, len(found.runs)) == (asked.output_tokens.sum(), 2)
    for run in found.runs:
        assert (run.output_tokens, run.computed_prompt_tokens) == (found.output_tokens, found.prompt_tokens)
        # All come at once and none waits: a first step, and one for each further token of the longest.
        assert run.steps == asked.output_tokens.max()
        assert run.tokens_per_s == pytest.approx(found.output_tokens / run.seconds)
        assert run.floor_s > 0
        assert run.times_floor == pytest.approx(run.seconds / run.floor_s)
        assert 0 < run.ttft_s.p50 <= run.ttft_s.p99 <= run.seconds
        assert 0 < run.itl_s.p50 <= run.itl_s.p99 <= run.seconds
        assert (run.preemptions, run.recomputed_tokens) == (0, 0)
    assert found.runs[0].floor_s == found.runs[1].floor_s


def test_a_shared_prefix_is_computed_once_and_so_is_each_prompts_own_part(bench):
    found = bench("--workload", "shared_prefix", "--limit", 16, "--scale", 8, "--runs", 1)
    (run,) = found.runs
    assert (found.prompt_tokens, run.computed_prompt_tokens) == (16 * (64 + 4), 4 * 64 + 16 * 4)


def test_what_preemptions_cost_is_counted_beside_the_prompts(model):
    trace = Trace.from_lengths(np.zeros(8), np.full(8, 16), np.full(8, 50))
    run = engine_run(Serving(num_blocks=12).engine(model), trace)
    assert run.preemptions > 0 and run.recomputed_tokens > 0
    assert (run.computed_prompt_tokens, run.output_tokens) == (8 * 16, 8 * 50)
    assert (run.floor_s, run.times_floor) == (None, None)


def test_requests_of_a_trace_come_when_it_says_if_that_is_asked_for(model):
    trace = Trace.from_lengths([0.0, 10.0], [4, 4], [2, 2])
    # Each look at this clock takes 0.05 s, a look a step; the second request comes at 0.2 s.
    clock = itertools.count(0.0, 0.05).__next__
    engine = Serving(num_blocks=8).engine(model)
    run = engine_run(engine, trace, rate=50, clock=clock)
    assert run.seconds > 0.2 > run.ttft_s.max
    assert run.steps == 4
    with pytest.raises(InvalidConfig, match="has had requests"):
        engine_run(engine, trace)


def test_a_traces_lengths_are_divided_and_clipped_to_the_model_and_that_is_said(bench):
    trace = "synthetic:poisson,rate=1,requests=3,prompt=2400,output=8"
    found = bench("--workload", trace, "--scale", 2, "--limit", 2, "--runs", 1)
    assert found.applied[-2] == "lengths(prompts=0.5, outputs=0.5): 2 of 2 requests"
    assert found.applied[-1] == "fitted(context=1024, how=clip): 2 of 2 requests, 2 clipped"
    assert (found.prompt_tokens, found.output_tokens) == (2 * 1020, 2 * 4)


def test_the_pool_is_a_share_of_what_requests_that_run_at_once_want(bench):
    wanted = blocks_wanted(workload("offline", limit=8, scale=4), 8, 128)
    found = bench("--limit", 8, "--scale", 4, "--block-size", 8, "--memory-share", 0.5, "--runs", 1)
    assert found.serving.num_blocks == round(wanted / 2)


def test_a_shape_has_random_weights_and_the_other_mode_is_packed(bench, tmp_path):
    path = tmp_path / "tiny.json"
    path.write_bytes(msgspec.json.encode(SHAPE))
    found = bench(
        "--shape", path, "--workload", "single", "--scale", 8, "--runs", 1, "--fast", "--backend", "torch_gather"
    )
    assert (found.model, found.parameters) == (str(path), SHAPE.parameters)
    assert (found.backend, found.serving.batch_invariant) == ("torch_gather", False)
    assert found.runs[0].computed_prompt_tokens == 16


def test_figures_are_lines_with_their_range_and_a_table_in_a_terminal(printed, quick_limits, terminal):
    tiny = ("bench", "engine", "--limit", 4, "--scale", 8, "--runs", 2)
    lines = dict(line.split(": ", 1) for line in printed(*tiny).splitlines())
    assert lines["model"].startswith("embedded, 918,656 parameters, float32, ")
    # Two runs may take equally long: then there is no range, which benches.txt has.
    assert re.fullmatch(r"[\d,]+( \([\d,]+ to [\d,]+\))?", lines["output tokens/s"])
    assert lines["preemptions"] == lines["recomputed tokens"] == "0"
    assert "GB/s, products " in lines["the floor"]
    screen = terminal(80)
    assert printed(*tiny) == ""
    for words in ("the median, the least and the most", "times the floor", "TTFT p99, ms"):
        assert words in screen.getvalue()


def test_a_model_that_no_shape_describes_has_no_floor(monkeypatch):
    loaded = random_model(SHAPE)
    monkeypatch.setattr("paged.model.shape.num_parameters", lambda _model: 2 * SHAPE.parameters)
    assert shape_of(loaded) is None


def test_a_product_that_would_take_too_long_is_judged_by_a_smaller_one(monkeypatch):
    monkeypatch.setattr(limits, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(limits, "_SIDE", 10**6)
    assert product_rate(torch.float32) > 0


ATTENTION = ["--shapes", "4/2/16", "--block-sizes", 4, "--sequences", 3, "--context", 10, "--prompt", 3, "--rounds", 3]
HEADS = HeadShape(4, 2, 16)
LOAD = Load(dtype="float32", sequences=3, context=10, prompt=3)


def test_figures_follow_from_times_and_come_back_from_json(printed, quick_limits):
    out = printed("bench", "attention", *ATTENTION, "--backends", "torch_gather,reference", "--json")
    results = msgspec.json.decode(out, type=list[AttentionTimes])
    assert [result.backend for result in results] == ["torch_gather", "reference"]
    for result in results:
        assert (result.shape, result.block_size, result.load) == (HEADS, 4, LOAD)
        for ms in (result.decode_ms, result.prefill_ms, result.mixed_ms):
            assert 0 < ms.least <= ms.median <= ms.most
        # 3 sequences of 10 tokens, K and V, 2 heads of 16 floats.
        assert result.decode_bytes_per_s * result.decode_ms.median / 1e3 == pytest.approx(3 * 10 * 2 * 2 * 16 * 4)
        assert result.share_of_copy == pytest.approx(result.decode_bytes_per_s / result.copy_bytes_per_s)
        # Tokens 8, 9 and 10 of each of 3 sequences, 4 heads of 16: two products, an addition and a multiplication each.
        assert result.prefill_flops_per_s * result.prefill_ms.median / 1e3 == pytest.approx(3 * 27 * 4 * 16 * 4)


def test_backends_shapes_and_block_sizes_are_crossed_and_shown_step_by_step(printed, quick_limits):
    sizes = ["--sequences", 2, "--context", 4, "--rounds", 1, "--backends", "torch_gather,reference"]
    lines = printed("bench", "attention", "--shapes", "2/1/8,4/4/8", "--block-sizes", "2,4", *sizes).splitlines()
    assert lines[0].split() == ["heads", "block", "step", "backend", "ms", "range", "rate"]
    found = [tuple(line.split()[:4]) for line in lines[1:25]]
    steps, backends = ("decode", "prefill", "mixed"), ("torch_gather", "reference")
    assert found == list(itertools.product(("2/1/8", "4/4/8"), ("2", "4"), steps, backends))
    assert lines[25] == "steps: float32, 2 sequences of 4 tokens, 4 of them new in prompts"


BENCH = AttentionBench([], HEADS, 4, LOAD, torch.float32)
OFFLINE, SHARED, SINGLE = map(workload, WORKLOADS)


def chosen(heads, is_invariant):
    return chosen_backends(None, heads, 4, torch.float32, invariant=is_invariant)


def mixed_slots():
    """Where the tokens of the mixed step are, by the blocks of their sequences."""
    step = BENCH.steps["mixed"]
    return [int(step.slots_of(row, 10)[place]) for row, place in zip((0, 1, 2, 2, 2), step.positions)]


@pytest.mark.parametrize(("call", "by_hand"), by_hand_in("benches.txt"))
def test_what_is_timed_is_what_it_is_by_hand(call, by_hand):
    assert_by_hand(call, by_hand, globals())


STEP = ["--rows", 3, "--context", 8, "--steps", 4]
HOST = ("schedule_us", "inputs_us", "sampling_us", "update_us", "outputs_us")


@pytest.fixture
def parts(printed):
    """What the command's JSON holds."""
    return lambda *arguments: msgspec.json.decode(printed("bench", "step", *STEP, *arguments, "--json"), type=StepParts)


@pytest.mark.skipif(not is_compiled(), reason="nothing can be compiled here")
def test_a_decoder_that_is_one_call_is_divided_within_and_does_not_stay_watched(parts):
    before = model_library().paged_decoder_forward
    found = parts()
    assert model_library().paged_decoder_forward is before
    assert (found.model, found.backend, found.rows, found.context, found.steps) == ("embedded", "native", 3, 8, 4)
    assert found.attention_us + found.products_us + found.rest_us == pytest.approx(found.forward_us.median)
    assert found.products_us > 0
    assert found.batch_invariant


@pytest.mark.skipif(not is_compiled(), reason="nothing can be compiled here")
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_products_are_timed_in_the_calls_that_a_decoder_makes(quantization):
    module = load_model("embedded", quantization=quantization, quantize_head=quantization is not None).module
    together, layers = bench_step._together(module), module.config.num_hidden_layers
    assert [len(each) for each in together] == [3, 1, 2, 1] * layers + [1]
    linears = together[0]
    x, to = torch.randn(5, linears[0].in_features), torch.empty(3, 5 * linears[0].out_features)
    call = bench_step._Call.of(linears, to)
    work = aligned(call.room(5))
    coded_library().paged_mixed_products(
        x.data_ptr(), call.depth, 5, call.depth, ELEMENTS[x.dtype], call.products, 3, work.data_ptr()
    )
    for linear, row in zip(linears, to):
        assert torch.equal(row[: 5 * linear.out_features].view(5, -1), linear(x))


def test_the_parts_make_up_a_step_and_the_host_has_what_is_not_the_forward_pass(parts):
    found = parts("--backend", "torch_gather", "--fast")
    assert found.attention_us is found.products_us is found.rest_us is None
    all_parts = [getattr(found, name) for name in (*HOST, "forward_us")]
    for part in all_parts:
        assert 0 < part.least <= part.median <= part.most
    # Each step is the sum of its parts.
    assert sum(part.least for part in all_parts) <= found.step_us.most
    assert sum(part.most for part in all_parts) >= found.step_us.least
    assert found.host_share == pytest.approx(1 - found.forward_us.median / found.step_us.median)
    assert not found.batch_invariant


def test_parts_are_rows_of_a_table(printed):
    head, *lines = printed("bench", "step", *STEP).splitlines()
    assert head.split() == ["part", "µs", "fastest", "slowest", "of", "a", "step"]
    names = [line[:14].strip() for line in lines]
    assert names.index("schedule") < names.index("forward pass") < names.index("sampling") < names.index("a step")
    assert any(line.startswith("the host's share: ") for line in lines)
    assert "rows: 3, prompts of 8 tokens, 4 steps" in lines


AZURE = "azure --limit 40 --blocks 2000 --jobs 1"


@pytest.mark.parametrize(
    ("command", "function", "call", "words", "num", "said"),
    [
        (f"simulate {AZURE} --policy paged,vllm --csv x --json", "simulator.study.run", 2, '"policy":', 1, "1 of 2 simulations had ended"),
        (f"plan {AZURE} --find rate --ttft 10", "simulator.trial.tried", 3, " met ", 2, "2 values had been tried, and there is no answer"),
        ("bench engine --limit 2 --scale 8 --runs 5 --json", "bench.engine.EngineBench.run", 3, '"ttft_s":', 1, "1 of 5 runs had ended"),
        (
            "bench attention --shapes 4/2/16,2/1/8 --block-sizes 4 --sequences 3 --context 4 --rounds 1 --backends reference --json",
            "bench.attention.attention_times", 2, '"backend":', 1, "1 of 2 measurements had ended",
        ),
    ],
    ids=["simulate", "plan", "bench engine", "bench attention"],
)  # fmt: skip
def test_an_interrupted_command_prints_what_had_ended_and_writes_no_file(
    paged, quick_limits, monkeypatch, tmp_path, command, function, call, words, num, said
):
    monkeypatch.chdir(tmp_path)
    real, calls = resolve_name(f"paged.study.{function}"), itertools.count(1)

    def interrupted(*arguments, **options):
        if next(calls) == call:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(f"paged.study.{function}", interrupted)
    status, out, err = paged(*command.split())
    assert (status, err) == (130, f"paged: interrupted; {said}\n")
    assert out.count(words) == num and list(tmp_path.iterdir()) == []
