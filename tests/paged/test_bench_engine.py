"""`paged bench engine`: tokens are the workload's, prompts are computed once, the floor is what its formula says, and what wrong input gets."""

import io
import itertools
import json

import msgspec
import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from paged.errors import InvalidConfig
from paged.model import limits
from paged.model.checkpoint import checkpoint_path
from paged.model.limits import Limits, product_rate
from paged.model.loading import load_model
from paged.model.random_weights import random_model
from paged.model.shape import num_parameters, shape_of
from paged.study.bench import WORKLOADS, workload
from paged.study.bench.engine import EngineBench, EngineTimes, Serving, blocks_wanted, engine_run
from paged.study.bench.floor import Floor
from paged.study.hardware import ModelShape, StepWork
from paged.study.traces import Trace

SHAPE = ModelShape(
    name="tiny",
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=48,
    vocab=64,
    max_length=128,
    tied_embeddings=True,
)


@pytest.fixture(scope="module")
def model():
    return load_model(checkpoint_path())


@pytest.fixture
def bench(paged, monkeypatch):
    """Run the command, with limits that are measured in no time, and return what its JSON holds."""
    monkeypatch.setattr(limits, "_BYTES", 2**16)
    monkeypatch.setattr(limits, "_SIDE", 64)

    def call(*arguments):
        status, out, err = paged("bench", "engine", *arguments, "--json")
        assert (status, err) == (0, "")
        return msgspec.json.decode(out, type=EngineTimes)

    return call


def test_every_run_has_the_workloads_tokens_and_its_figures_follow_from_one_another(bench):
    found = bench("--limit", 6, "--scale", 8, "--runs", 2)
    asked = workload("offline", limit=6, scale=8)
    assert (found.model, found.workload, found.requests) == ("embedded", "offline", 6)
    assert found.prompt_tokens == asked.prompt_tokens.sum()
    assert found.output_tokens == asked.output_tokens.sum()
    assert len(found.runs) == 2
    for run in found.runs:
        assert run.output_tokens == found.output_tokens
        assert run.computed_prompt_tokens == found.prompt_tokens
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
    assert found.prompt_tokens == 16 * (64 + 4)
    assert run.computed_prompt_tokens == 4 * 64 + 16 * 4


def test_the_three_workloads_are_as_they_are_described():
    offline, shared, single = (workload(name) for name in WORKLOADS)
    assert len(offline) == len(shared) == 64
    assert offline.prompt_tokens.min() >= 8 and offline.prompt_tokens.max() <= 512
    assert offline.output_tokens.min() >= 8 and offline.output_tokens.max() <= 256
    assert 120 < offline.prompt_tokens.mean() < 200
    assert 72 < offline.output_tokens.mean() < 120
    assert set(shared.prompt_tokens) == {544} and set(shared.output_tokens) == {64}
    prefixes = [shared.prompt(number)[:512].tolist() for number in range(64)]
    assert prefixes[:4] * 16 == prefixes
    assert len({tuple(shared.prompt(number)[512:].tolist()) for number in range(64)}) == 64
    assert (single.prompt_tokens.tolist(), single.output_tokens.tolist()) == ([128], [128])


def test_what_preemptions_cost_is_counted_beside_the_prompts(model):
    trace = Trace.from_lengths(np.zeros(8), np.full(8, 16), np.full(8, 120))
    run = engine_run(Serving(num_blocks=20).engine(model), trace)
    assert run.preemptions > 0 and run.recomputed_tokens > 0
    assert run.computed_prompt_tokens == 8 * 16
    assert run.output_tokens == 8 * 120
    assert (run.floor_s, run.times_floor) == (None, None)


def test_requests_of_a_trace_come_when_it_says_if_that_is_asked_for(model):
    trace = Trace.from_lengths([0.0, 10.0], [4, 4], [2, 2])
    # Each look at this clock takes 0.05 s, a look a step; the second request comes at 0.2 s.
    clock = itertools.count(0.0, 0.05).__next__
    run = engine_run(Serving(num_blocks=8).engine(model), trace, rate=50, clock=clock)
    assert run.seconds > 0.2 > run.ttft_s.max
    assert run.steps == 4


def test_a_traces_lengths_are_divided_and_clipped_to_the_model_and_that_is_said(bench):
    trace = "synthetic:poisson,rate=1,requests=3,prompt=2400,output=8"
    found = bench("--workload", trace, "--scale", 2, "--limit", 2, "--runs", 1)
    assert found.applied[-2] == "lengths(prompts=0.5, outputs=0.5): 2 of 2 requests"
    assert found.applied[-1] == "fitted(context=1024, how=clip): 2 of 2 requests, 2 clipped"
    assert (found.prompt_tokens, found.output_tokens) == (2 * 1020, 2 * 4)


def test_the_pool_is_a_share_of_what_requests_that_run_at_once_want(bench):
    trace = Trace.from_lengths(np.zeros(3), [10, 20, 30], [6, 12, 2])
    assert [blocks_wanted(trace, 16, most) for most in (1, 2, 3, 9)] == [2, 4, 5, 5]
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


def test_figures_are_lines_with_their_range(paged, monkeypatch):
    monkeypatch.setattr(limits, "_BYTES", 2**16)
    monkeypatch.setattr(limits, "_SIDE", 64)
    status, out, err = paged("bench", "engine", "--limit", 4, "--scale", 8, "--runs", 3)
    lines = dict(line.split(": ", 1) for line in out.splitlines())
    assert (status, err) == (0, "")
    assert lines["model"].startswith("embedded, 918,656 parameters, float32, ")
    assert " to " in lines["output tokens/s"]
    assert lines["preemptions"] == lines["recomputed tokens"] == "0"
    assert "GB/s, products " in lines["the floor"]


@pytest.mark.parametrize("command", ["attention", "engine", "step"])
def test_the_command_explains_itself_with_an_example(paged, command):
    status, out, err = paged("bench", command, "--help")
    assert (status, err) == (0, "")
    assert f"Example: paged bench {command}" in " ".join(out.split())
    assert "bool" not in out.lower()


def test_in_a_terminal_it_is_a_table(paged, monkeypatch):
    monkeypatch.setattr(limits, "_BYTES", 2**16)
    monkeypatch.setattr(limits, "_SIDE", 64)
    screen = io.StringIO()
    monkeypatch.setattr("paged.cli.show.console", lambda: Console(file=screen, force_terminal=True, width=80))
    assert paged("bench", "engine", "--limit", 2, "--scale", 8, "--runs", 1) == (0, "", "")
    for words in ("the median, the least and the most", "times the floor", "TTFT p99, ms"):
        assert words in screen.getvalue()


def test_an_interrupt_shows_the_runs_that_had_ended(paged, monkeypatch):
    ran, num_begun = EngineBench.run, []

    def third_is_interrupted(self):
        num_begun.append(1)
        if len(num_begun) == 3:
            raise KeyboardInterrupt
        return ran(self)

    monkeypatch.setattr(EngineBench, "run", third_is_interrupted)
    status, out, err = paged("bench", "engine", "--limit", 2, "--scale", 8, "--runs", 5, "--json")
    assert status == 130
    assert len(json.loads(out)["runs"]) == 1
    assert err == "paged: interrupted; 1 of 5 runs had ended\n"


def test_an_engine_that_has_been_used_is_refused(model):
    trace = Trace.from_lengths([0.0], [4], [2])
    engine = Serving(num_blocks=8).engine(model)
    engine_run(engine, trace)
    with pytest.raises(InvalidConfig, match="has had requests"):
        engine_run(engine, trace)


def test_the_floor_is_bytes_or_operations_of_each_step_whichever_take_longer():
    weights = SHAPE.layer_parameters + SHAPE.head_parameters
    kept = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim
    decode = StepWork.of_rows([1, 1], [10, 20], sampled_rows=2)
    prompt = StepWork.of_rows([50], [50], sampled_rows=0)
    slow_memory, slow_products = (Floor(SHAPE, Limits(1, "float32", *rates)) for rates in ((1.0, 1e30), (1e30, 1.0)))
    # Both rows' contexts are read, two tokens are written; a step that samples nothing reads no output projection.
    assert slow_memory.seconds([decode], [32]) == 4 * (weights + kept * (30 + 2))
    assert slow_memory.seconds([prompt], [0]) == 4 * (SHAPE.layer_parameters + kept * (50 + 50))
    attended = 4 * SHAPE.heads * SHAPE.head_dim * SHAPE.layers
    assert slow_products.seconds([decode], [32]) == 2 * 2 * weights + attended * 30
    assert slow_products.seconds([prompt], [0]) == 2 * 50 * SHAPE.layer_parameters + attended * 50 * 51 / 2
    both = Floor(SHAPE, Limits(1, "float32", 1.0, 1.0))
    assert both.seconds([decode, prompt], [32, 0]) == sum(
        max(each.seconds([step], [32]) for each in (slow_memory, slow_products)) for step in (decode, prompt)
    )


def test_what_rows_share_is_read_once_by_the_floor():
    kept = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim
    floor = Floor(SHAPE, Limits(1, "float32", 1.0, 1e30))
    work = StepWork.of_rows([1, 1], [40, 40], sampled_rows=2)
    assert floor.seconds([work], [80]) - floor.seconds([work], [48]) == 4 * kept * (80 - (48 + 2))


def test_the_shape_of_a_loaded_model_is_the_one_that_it_was_made_in():
    loaded = random_model(SHAPE)
    assert shape_of(loaded) == SHAPE
    assert num_parameters(loaded) == SHAPE.parameters


def test_a_model_that_no_shape_describes_has_no_floor(monkeypatch):
    loaded = random_model(SHAPE)
    monkeypatch.setattr("paged.model.shape.num_parameters", lambda _model: 2 * SHAPE.parameters)
    assert shape_of(loaded) is None


def test_a_product_that_would_take_too_long_is_judged_by_a_smaller_one(monkeypatch):
    monkeypatch.setattr(limits, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(limits, "_SIDE", 10**6)
    assert product_rate(torch.float32) > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workload", "offlin"], '"offlin" is none of offline, shared_prefix, single, and no trace'),
        (["--scale", "0"], "scale is 0"),
        (["--scale", "nan"], "scale is nan"),
        (["--limit", "0"], "--limit"),
        (["--rate-scale", "-1"], "--rate-scale is -1"),
        (["--shape", "smolm"], "Did you mean smollm-135m?"),
        (["--shape", "deepseek-v2"], "random weights are made for Llama's shape alone"),
        (["nowhere"], "nowhere: no such folder"),
        (["nowhere", "--shape", "smollm-135m"], "MODEL and --shape both say which model"),
        (["--dtype", "int8"], "known ones are auto, float32"),
        (["--backend", "nativ"], "unknown attention backend 'nativ'"),
        (["--blocks", "2"], "the pool has 2 blocks of 16 tokens; the largest request has 588 tokens and needs 37"),
        (["--memory-share", "0.01"], "the largest request has 588 tokens and needs 37"),
        (["--memory-share", "0"], "--memory-share is 0"),
        (["--blocks", "9", "--memory-share", "1"], "--blocks and --memory-share"),
        (["--block-size", "0"], "--block-size"),
        (["--max-sequences", "0"], "--max-sequences"),
        (["--runs", "0"], "--runs"),
    ],
    ids=" ".join,
)
def test_wrong_input_is_one_line_and_status_2(paged, arguments, words):
    status, out, err = paged("bench", "engine", *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("paged: ")
    assert words in err
