"""Captured passes: the numbers of each step reach the tensors that a graph reads.

What stands in for a graph here runs the captured pass again, on those tensors alone; `make gpu` runs real ones.
"""

import gc
import os
import weakref
from contextlib import contextmanager
from dataclasses import replace
from threading import Barrier, BrokenBarrierError, Thread

import msgspec
import numpy as np
import pytest
import torch
from transformers.models.mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from paged import SamplingParams
from paged.attention import StepTokens, get_backend
from paged.attention.torch_gather import Backend
from paged.base.growing import rising
from paged.engine import engine as engine_module
from paged.engine.engine import Engine
from paged.errors import PagedWarning
from paged.model import runner
from paged.model.captured import CapturedPasses
from paged.model.loading import load_model
from paged.model.runner import Runner, runner_for
from paged.model.states.trial import Trial
from paged.testing.engine_world import EngineRequest
from paged.testing.pressure import answers_of, differences

from ..driving import tokens_of  # noqa: TID252

STATES = ["mamba2", "qwen3_next", "recurrent_gemma", "minimax", "rwkv"]


class Renewing(Backend):
    """torch_gather, whose plan of a step can be replaced by that of another one."""

    name, piece = "renewing", 1

    def prepare(self, step, pool):
        return [super().prepare(step, pool)]

    def renew(self, plan, step, pool):
        plan[:] = self.prepare(step, pool)

    def attend(self, queries, pool, layer, plan, options):
        return super().attend(queries, pool, layer, plan[0], options)


@pytest.fixture
def replays(monkeypatch):
    """Passes run where they are called, and what is captured runs when it is replayed."""
    monkeypatch.setattr(CapturedPasses, "_run", lambda self, forward, *given: forward(*given))
    monkeypatch.setattr(CapturedPasses, "_capture", lambda self, work: work)


class Cuda:
    """Streams and captures as torch's: a capture that fails leaves its stream as the current one. What is captured runs, once."""

    def __init__(self, monkeypatch, fails_at=None):
        self.ours = self.current = self.Stream()
        self.fails_at, self.captures = fails_at, []
        for name in ("Stream", "stream", "CUDAGraph", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.current)

    class Stream:
        def __init__(self, device=None):
            self.behind = None

        def wait_stream(self, other):
            self.behind = other

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    class CUDAGraph:
        def pool(self):
            return "the memory of graphs"

        def replay(self):
            pass

    @contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        before, self.current = self.current, stream
        self.captures.append((stream, pool))
        yield
        if len(self.captures) == self.fails_at:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.current = before


def engine_of(model, *, captures=False, batch_invariant=False, **options):
    engine = Engine(
        model, num_blocks=options.pop("num_blocks", 60), block_size=options.pop("block_size", 4),
        backend="torch_gather", batch_invariant=batch_invariant, max_sequences=8, **options,
    )  # fmt: skip
    if captures:
        engine.runner = engine.worker.runner = Runner(
            engine.model, engine.pool, Renewing(batch_invariant), engine.runner.tile, captures=True
        )
    return engine


def requests():
    words = np.random.default_rng(3)
    lengths = [1, 2, 3, 9, 17, 30]
    return [
        EngineRequest(id=str(length), prompt=words.integers(3, 97, length).tolist(), max_tokens=4 + length % 20)
        for length in lengths
    ]


def assert_same(found, wanted):
    assert found.tokens == wanted.tokens and not found.violations
    for who, rows in wanted.logits.items():
        np.testing.assert_allclose(np.array(found.logits[who]), np.array(rows), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "options"),
    # Alike, and in groups with tables of their own.
    [
        *(("llama", options) for options in ({"num_blocks": 14, "host_blocks": 20}, {"steps_ahead": 1})),
        *(("gemma3_text", options) for options in ({}, {"num_blocks": 30, "host_blocks": 60})),
    ],
    ids=str,
)
def test_replayed_decodes_give_what_decodes_give(loaded, replays, architecture, options):
    model = loaded(architecture)
    engine = engine_of(model, captures=True, **options)
    assert_same(answers_of(engine, requests()), answers_of(engine_of(model, **options), requests()))
    assert len(engine.runner._captured._groups) == (1 if architecture == "llama" else 2)
    shapes = set(engine.runner._captured.graphs)
    assert len(shapes) > 3 and all(n.bit_count() == columns.bit_count() == 1 for n, columns in shapes)
    assert engine.pool.pages.on_device[-1].eq(0).all()


@pytest.mark.parametrize(("architecture", "num_blocks"), [("llama", 14), ("gemma3_text", 30)])
def test_replayed_tiles_give_a_request_what_it_gets_alone_to_the_last_bit(loaded, replays, architecture, num_blocks):
    model = loaded(architecture)
    options = {"batch_invariant": True, "max_tokens_per_step": 40}
    engine = engine_of(model, captures=True, num_blocks=num_blocks, host_blocks=60, **options)
    found = answers_of(engine, requests())
    assert not differences(found, answers_of(engine_of(model, num_blocks=200, **options), requests()))
    graphs = engine.runner._captured.graphs
    assert {n for n, _ in graphs} == {engine.runner.tile} and len(graphs) > 2
    its = engine.scheduler.stats()
    assert its.preemptions_swap + its.preemptions_recompute
    assert engine.pool.pages.on_device[-1].eq(0).all()


@pytest.mark.parametrize(
    ("architecture", "batch_invariant"), [*((each, True) for each in STATES), ("mamba2", False), ("qwen3_next", False)]
)
def test_states_are_read_from_and_written_to_the_pages_of_each_step(
    checkpoint, replays, monkeypatch, architecture, batch_invariant
):
    # As on a GPU, which finds pages by the numbers there, and has no packed weights.
    monkeypatch.setattr(Trial, "recurrence", lambda *arguments: None)
    monkeypatch.setattr("paged.model.states.projections.NativeLinear", ())

    def capture(self, work):
        def replay():
            with monkeypatch.context() as within:
                # What takes numbers to a device cannot be captured.
                within.setattr(torch, "tensor", None)
                work()

        return replay

    monkeypatch.setattr(CapturedPasses, "_capture", capture)
    model = load_model(checkpoint(architecture))
    options = {"batch_invariant": batch_invariant, "max_tokens_per_step": 40}
    engine = engine_of(model, captures=True, num_blocks=90, host_blocks=200, **options)
    found = answers_of(engine, requests())
    wanted = answers_of(engine_of(model, num_blocks=400, **options), requests())
    assert not batch_invariant or not differences(found, wanted)
    assert_same(found, wanted)
    assert len(engine.runner._captured.graphs) > 1


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="test_on_gpus.py starts it with the interpreter")
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_our_kernels_interpreted_find_each_step_in_the_tensors_of_a_plan(loaded, replays, monkeypatch, batch_invariant):
    model = loaded("gemma3_text", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    engine = engine_of(model, batch_invariant=batch_invariant)
    backend, tile = get_backend("triton", invariant=batch_invariant), engine.runner.tile and 4
    engine.runner = engine.worker.runner = Runner(engine.model, engine.pool, backend, tile, captures=True)
    # A prompt, a decode that is captured and two that replay it, in a short tile: the interpreter takes long for each place.
    asked = [msgspec.structs.replace(each, max_tokens=4) for each in requests()[:3]]
    found, wanted = answers_of(engine, asked), answers_of(engine_of(model), asked)
    assert_same(found, wanted)
    assert engine.runner._captured.graphs


def test_a_pass_in_which_a_token_is_written_nowhere_is_not_captured(loaded, replays):
    engine = engine_of(loaded("gemma3_text"), captures=True)
    captured, tables = engine.runner._captured, [np.zeros((2, 1, 16), np.int32) for _ in range(2)]
    step = StepTokens.of_groups(np.array([1, 2]), rising(3), np.array([2, 3]), tuple(tables), 4)
    assert captured.logits(engine.runner._replayed, step, np.array([5, 6], np.int32)) is not None
    tables[1][1] = -1
    assert captured.logits(engine.runner._replayed, step, np.array([5, 6], np.int32)) is None


def test_the_logits_of_one_decode_outlive_the_next(loaded, replays):
    engine = engine_of(loaded("llama"), captures=True)
    kept = []
    engine.on_logits = lambda id, place, row: kept.append((row, row.clone()))
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True))
    tokens_of(engine)
    assert len(kept) == 6 and all(row.equal(copy) for row, copy in kept)


@pytest.mark.parametrize("architecture", ["llama", "recurrent_gemma"])
def test_where_capturing_fails_it_is_said_once_and_decodes_go_on(loaded, replays, monkeypatch, architecture):
    def fail(self, work):
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    monkeypatch.setattr(CapturedPasses, "_capture", fail)
    model = loaded(architecture)
    engine = engine_of(model, captures=True, num_blocks=200)
    with pytest.warns(PagedWarning, match=r"passes run uncaptured, which is slower: operation .* capturing$") as said:
        found = answers_of(engine, requests())
    assert len(said) == 1
    assert not differences(found, answers_of(engine_of(model, num_blocks=200), requests()))


def test_graphs_are_captured_on_one_stream_into_one_memory_and_share_logits(loaded, monkeypatch):
    cuda = Cuda(monkeypatch)
    engine = engine_of(loaded("llama"), captures=True)
    answers_of(engine, requests())
    graphs = engine.runner._captured.graphs
    assert len(cuda.captures) == len(graphs) > 3
    (stream,) = {stream for stream, _ in cuda.captures}
    assert stream is not cuda.ours
    assert [pool for _, pool in cuda.captures] == [None] + ["the memory of graphs"] * (len(graphs) - 1)
    logits = {(n, graph.logits.data_ptr()) for (n, _), graph in graphs.items()}
    assert len(logits) == len({n for n, _ in graphs}) < len(graphs)


def test_a_capture_that_fails_frees_all_graphs_and_leaves_the_stream_that_was(loaded, monkeypatch):
    cuda = Cuda(monkeypatch, fails_at=3)
    engine = engine_of(loaded("llama"), captures=True)
    with pytest.warns(PagedWarning, match=r"passes run uncaptured"):
        answers_of(engine, requests())
    decodes = engine.runner._captured
    assert len(cuda.captures) == 3 and not decodes.graphs and not decodes._logits and decodes._memory is None
    assert cuda.current is cuda.ours


def test_what_an_interrupted_trial_pass_writes_comes_before_the_next_step(loaded, monkeypatch):
    cuda = Cuda(monkeypatch)
    engine = engine_of(loaded("llama"), captures=True)
    decodes, attend = engine.runner._captured, engine.runner.backend.attend

    def interrupted(*arguments):
        if cuda.current is not cuda.ours:
            raise KeyboardInterrupt
        return attend(*arguments)

    engine.runner.backend.attend = interrupted
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True))
    with pytest.raises(KeyboardInterrupt):
        tokens_of(engine)
    assert cuda.ours.behind is decodes._stream is not None and cuda.current is cuda.ours


def test_engines_in_two_threads_capture_one_after_the_other(loaded, replays, monkeypatch):
    both, met = Barrier(2), []

    first = CapturedPasses._first

    def meets(self, *arguments):
        try:
            both.wait(0.2)
            met.append(self)
        except BrokenBarrierError:
            pass
        return first(self, *arguments)

    monkeypatch.setattr(CapturedPasses, "_first", meets)
    engines = [engine_of(loaded("llama"), captures=True) for _ in range(2)]
    threads = [Thread(target=answers_of, args=(engine, requests()[:1])) for engine in engines]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not met and all(engine.runner._captured.graphs for engine in engines)


def test_an_engine_that_is_forgotten_frees_its_pool_at_once(loaded, monkeypatch):
    Cuda(monkeypatch)
    engine = engine_of(loaded("llama"), captures=True)
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True))
    tokens_of(engine)
    assert engine.runner._captured.graphs
    pool = weakref.ref(engine.pool)
    gc.collect()
    gc.disable()
    try:
        del engine
        assert pool() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("architecture", "can_be"), [("llama", True), ("gpt2", True), ("deepseek_v3", False), ("falcon", False)]
)
def test_captured_are_models_whose_attention_a_backend_does_on_k_and_v(loaded, architecture, can_be):
    assert runner.can_be_captured(loaded(architecture)) == can_be


def test_experts_that_get_the_rows_that_chose_them_are_not_captured_but_where_the_device_alone_counts_those(
    loaded, monkeypatch
):
    model = loaded("mixtral")
    assert runner.can_be_captured(model)
    # As on a GPU, where they are not in C.
    monkeypatch.setattr(runner, "PackedExperts", ())
    assert not runner.can_be_captured(model)
    experts = MixtralExperts(MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=2))
    assert runner._groups_rows(experts)
    counts = {}
    for case in (("grouped_mm", torch.bfloat16), ("grouped_mm", torch.float32), ("eager", torch.bfloat16)):
        experts.config._experts_implementation, dtype = case
        counts[case] = runner._counts_on_device(experts, dtype)
    assert list(counts.values()) == [True, False, False]


def test_on_a_gpu_decodes_are_captured_unless_each_kernel_is_to_be_launched(loaded, monkeypatch):
    monkeypatch.setattr(runner, "get_backend", lambda name, invariant: Renewing(invariant))
    model = loaded("llama")
    pool = engine_of(model).pool

    def captures(device, **options):
        its = replace(model, device=torch.device(device))
        # What it would try, on the device.
        its.tiles["renewing", torch.get_num_threads()] = 32, False
        asked = {"batch_invariant": False, **options}
        return runner_for(its, pool, backend="renewing", **asked)._captured is not None

    assert captures("cuda") and captures("cuda", batch_invariant=True)
    assert not captures("cuda", enforce_eager=True) and not captures("cpu")


@pytest.mark.parametrize("is_eager", [False, True])
def test_enforce_eager_reaches_the_runners_of_a_model_and_of_its_draft(loaded, monkeypatch, is_eager):
    asked = []

    def asks(*arguments, enforce_eager, **options):
        asked.append(enforce_eager)
        return runner_for(*arguments, **options)

    monkeypatch.setattr(engine_module, "runner_for", asks)
    engine_of(loaded("llama"), enforce_eager=is_eager, speculate="draft", draft_model=loaded("llama"))
    assert asked == [is_eager, is_eager]
