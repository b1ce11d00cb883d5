"""A simulation that is told the engine's seconds and tokens decides what the engine decided, entry by entry, under memory pressure."""

import msgspec
import numpy as np
import pytest

from paged import Engine, Policy
from paged.errors import RecordingFailed
from paged.study.simulator import Recording, StepTime, differences, predict, record, replay
from paged.study.traces import Trace, synthetic
from paged.testing.tiny_model import tiny_model

from ..shown import assert_refused, shown_in  # noqa: TID252

POOL, BLOCK_SIZE = 48, 4
# Lets everybody in, so that pressure preempts, and takes tails in the cheaper way.
GREEDY = Policy(name="greedy", take="tail", preemption="cheapest")


def trace_of(num_requests=60, rate=None, seed=0):
    """Log-normal lengths; all at once, or so many a second."""
    rng = np.random.default_rng(seed)
    arrivals = np.zeros(num_requests) if rate is None else rng.exponential(1 / rate, num_requests).cumsum()
    prompts, outputs = (np.clip(rng.lognormal(2.6, 0.6, num_requests), 1, 80).astype(int) for _ in range(2))
    return Trace.from_lengths(arrivals, prompts, outputs)


def engine_with(**options):
    usual = {"num_blocks": POOL, "block_size": BLOCK_SIZE, "max_tokens_per_step": 32, "max_sequences": 32}
    return Engine(tiny_model(64), **{**usual, **options})


def clients_for(trace, oversubscription):
    final = float((trace.prompt_tokens + trace.output_tokens).mean())
    return max(1, round(oversubscription * POOL * BLOCK_SIZE / final))


def replay_until_it_ends(recording, trace):
    """A replay with more seconds than were recorded, should it want them."""
    return replay(msgspec.structs.replace(recording, seconds=recording.seconds * 20), trace)


@pytest.mark.parametrize(
    ("policy", "oversubscription", "host_blocks"),
    [(GREEDY, 1.4, 16), (GREEDY, 3.0, 0)]
    + [(name, 1.4, 0) for name in ("paged", "vllm", "fastgen", "static", "tgi", "orca-oracle")],
)
def test_the_logs_are_identical_in_a_closed_loop(policy, oversubscription, host_blocks):
    trace = trace_of(40, seed=int(10 * oversubscription))
    engine = engine_with(policy=policy, host_blocks=host_blocks)
    recording = record(engine, trace, clients=clients_for(trace, oversubscription))
    assert differences(recording.decisions, replay(recording, trace)) == []
    if policy is GREEDY:
        assert recording.preemptions.recompute + recording.preemptions.swap > 5
        assert (recording.preemptions.swap > 0) == (host_blocks > 0)
    assert sorted(int(id) for step in recording.decisions for id in step.ended) == list(range(40))
    assert [len(tokens) for tokens in recording.outputs] == trace.output_tokens.tolist()


def test_other_seconds_or_another_pool_give_other_decisions_and_the_difference_is_told():
    ticks = iter(range(100_000))
    trace = trace_of(rate=400)
    recording = record(engine_with(policy=GREEDY, host_blocks=16), trace, clock=lambda: 5e-3 * next(ticks))
    replayed = replay(recording, trace)
    assert differences(recording.decisions, replayed) == []
    assert recording.makespan_s == replayed[-1].end_s >= trace.arrival_s[-1]
    faster = msgspec.structs.replace(recording, seconds=tuple(second / 8 for second in recording.seconds))
    smaller = msgspec.structs.replace(recording, setup=msgspec.structs.replace(recording.setup, num_blocks=POOL - 4))
    others = [replay_until_it_ends(other, trace) for other in (faster, smaller)]
    for found in (differences(recording.decisions, other) for other in others):
        assert found and found[0].startswith("step ")
    sizes = [[(each.requests, each.tokens) for each in found] for found in (recording.decisions, *others)]
    assert sizes[0] not in sizes[1:]


def test_prompts_that_share_prefixes_are_found_in_both():
    trace = synthetic("poisson", requests=30, turns=4, system_tokens=200, seed=1).scaled(prompts=1 / 16, outputs=1 / 8)
    trace = trace.fitted(120)
    engine = engine_with(num_blocks=96, max_sequences=8)
    recording = record(engine, trace, clients=8)
    assert engine.scheduler.stats().hit_tokens > 0
    assert differences(recording.decisions, replay(recording, trace)) == []


def test_the_clock_of_a_recording_is_the_one_that_is_given():
    ticks = map(float, range(1000))
    trace = Trace.from_lengths(np.zeros(2), [5, 5], [3, 3])
    recording = record(engine_with(), trace, clients=1, clock=lambda: next(ticks))
    assert (recording.seconds, recording.makespan_s) == ((1.0,) * 6, 6)
    assert (recording.ttft_s.p50, recording.itl_s.max, recording.e2e_s.p99) == (1, 1, 3)


def test_with_the_formula_that_timed_them_the_figures_are_the_engines():
    """Were every step of the engine to take a second, a simulation by that price would have its figures."""
    trace, ticks = trace_of(seed=5), map(float, range(100_000))
    recording = record(engine_with(policy=GREEDY), trace, clients=9, clock=lambda: next(ticks))
    found = predict(recording, trace, StepTime(weights_ms=1000, context_us=0, token_us=0, swap_us=0))
    assert found.steps == len(recording.decisions)
    assert (found.makespan_s, found.ttft_s, found.itl_s) == (recording.makespan_s, recording.ttft_s, recording.itl_s)
    assert found.preemptions == recording.preemptions
    assert found.preemptions.recompute > 5


def test_a_step_that_runs_out_of_memory_ends_the_recording(monkeypatch):
    def out_of_memory(step):
        raise MemoryError

    engine = engine_with()
    monkeypatch.setattr(engine.worker, "logits", out_of_memory)
    with pytest.raises(RecordingFailed, match="step 1 of the engine failed"):
        record(engine, trace_of(3), clients=1)
    assert engine.on_batch is None


THREE = trace_of(3)


@pytest.mark.parametrize(("call", "shown"), shown_in("model/refused_recordings.txt", ">>>"))
def test_what_cannot_be_recorded_or_replayed_is_refused(call, shown):
    used = engine_with()
    found = record(used, THREE, clients=1)
    assert_refused(call, shown, globals() | {"used": used, "found": found})


def test_who_can_never_fit_is_rejected_in_both_and_a_recording_survives_json():
    trace = Trace.from_lengths(np.zeros(3), [5, 250, 6], [3, 3, 3])
    recording = record(engine_with(), trace, clients=1)
    assert (recording.rejected, [id for step in recording.decisions for id in step.ended]) == (1, ["0", "2"])
    again = msgspec.json.decode(msgspec.json.encode(recording), type=Recording)
    assert (again, differences(recording.decisions, replay(again, trace))) == (recording, [])
