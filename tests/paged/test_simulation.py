"""Replays, on one engine and on replicas: all requests end, and times, hits and outputs are what they have to be."""

from functools import cache

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from paged import BlockManager, Request, Scheduler
from paged.errors import InvalidConfig, SimulationStuck
from paged.study.hardware import Profile, Tiling
from paged.study.simulator import (  # noqa: F401
    ROUTERS,
    Load,
    Replicas,
    Routing,
    Scenario,
    Simulation,
    StepTime,
    run,
    work_of,
)
from paged.study.simulator.arrivals import Answers
from paged.study.simulator.result import Latencies, Percentiles
from paged.study.traces import EXCERPTS, Trace, read_trace, synthetic

from ..driving import steps_of  # noqa: TID252
from .files_of_others import assert_by_hand, by_hand_in  # noqa: TID252

SECOND_A_STEP = StepTime(weights_ms=1000, context_us=0, token_us=0, swap_us=0)


@pytest.fixture
def trace_of(tmp_path):
    def made(*rows):
        head = "arrival_s,prompt_tokens,output_tokens,prefix_id,prefix_tokens"
        (tmp_path / "trace.csv").write_text("\n".join([head, *rows, ""]))
        return read_trace(tmp_path / "trace.csv")

    return made


def scheduler_of(num_blocks=64, block_size=4, *, host_blocks=0, **options):
    return Scheduler(BlockManager(num_blocks, block_size, host_blocks=host_blocks), **options)


def test_violations_are_counted_and_the_first_ones_told(trace_of, monkeypatch):
    scheduler = scheduler_of()
    monkeypatch.setattr(scheduler, "check", lambda: ["block 3 is lost"])
    result = Simulation(trace_of("0,5,20,,"), scheduler, check=True).run()
    assert result.violations == 2 * result.steps == 40
    assert (len(result.violation_messages), result.violation_messages[0]) == (10, "step 1: block 3 is lost")


def test_a_scheduler_that_does_nothing_is_reported_and_not_waited_for(trace_of, monkeypatch):
    scheduler = scheduler_of()
    empty = scheduler.schedule(0.0)
    monkeypatch.setattr(scheduler, "schedule", lambda now: empty)
    with pytest.raises(SimulationStuck, match="nothing was scheduled twice"):
        list(Simulation(trace_of("0,5,3,,"), scheduler).steps())


def latencies_of(*steps):
    """Of two requests that arrive at 0 s and 1 s, and have tokens in these steps: (requests, when)."""
    latencies = Latencies(2)
    latencies.arrived(0, 0.0)
    latencies.arrived(1, 1.0)
    for requests, now in steps:
        latencies.tokens(np.array(requests), now)
    return latencies


def test_latencies_count_gaps_between_tokens_and_keep_the_longest():
    latencies = latencies_of(([0, 1], 2.0), ([0], 3.0), ([0, 1], 7.0))
    latencies.finished(np.array([0]), 7.0)
    found = {"ttft_s": (1, 2, 2, 2), "itl_s": (4, 5, 5, 5), "longest_gap_s": (4, 5, 5, 5), "e2e_s": (7, 7, 7, 7)}
    assert latencies.percentiles() == {name: Percentiles(*values) for name, values in found.items()}


def test_tokens_at_once_are_the_tokens_one_by_one():
    at_once, times = latencies_of(), [2.0, 3.0, 7.0, 8.0]
    at_once.steady_tokens(np.array([0, 1]), np.array(times))
    one_by_one = latencies_of(*(([0, 1], now) for now in times))
    assert at_once.longest_gap.tolist() == one_by_one.longest_gap.tolist() == [4, 4]
    assert at_once.percentiles() == one_by_one.percentiles()


@pytest.mark.parametrize("fast_forward", [False, True])
def test_blocks_kept_by_count_are_memory_that_is_taken(trace_of, fast_forward):
    """4 tokens of prompt and 12 of output are 4 blocks of 4: what the row does not hold of them yet is kept for it, in every step."""
    shares = {}
    for policy in ("trtllm-guaranteed-no-evict", "vllm"):
        trace, scheduler = trace_of("0,4,12,,"), scheduler_of(policy=policy)
        simulation = Simulation(trace, scheduler, SECOND_A_STEP, fast_forward=fast_forward)
        assert sum(1 + step.skipped for step in simulation.steps()) == 12
        columns = simulation.timeline.columns()
        if policy == "vllm":
            assert not columns["promised"].any()
        else:
            assert columns["held"] + columns["promised"] == pytest.approx(16)
        shares[policy] = simulation.result().memory.of_held
    # In step i of 12, from 0 on, 4 + i tokens are computed in 16 slots.
    assert shares["trtllm-guaranteed-no-evict"] == pytest.approx(sum(4 + i for i in range(12)) / (12 * 16))
    assert shares["vllm"] > 0.8


# Under every policy the steps themselves are compared in tests/properties/test_stretches.py.
@pytest.mark.parametrize(("name", "policy"), [("azure", "tgi"), ("mooncake", "static")])
def test_steps_taken_at_once_change_no_figure(name, policy):
    trace = read_trace(EXCERPTS[name].path, limit=30).scaled(prompts=1 / 16, outputs=1 / 4, rate=0.5)
    results = []
    for fast_forward in (False, True):
        scheduler = scheduler_of(120, 8, host_blocks=16, policy=policy, max_tokens_per_step=64, max_sequences=16)
        simulation = Simulation(trace, scheduler, fast_forward=fast_forward)
        for _ in simulation.steps():
            pass
        results.append(simulation.result())
    slow, fast = results
    assert slow.skipped_steps == 0
    assert fast.skipped_steps > fast.steps / 10
    host = {"wall_s", "us_per_step", "skipped_steps"}
    averages = {"memory", "memory_while_waiting", "mean_block_usage", "row_occupancy"}
    for field in set(slow.__struct_fields__) - host - averages:
        assert getattr(slow, field) == getattr(fast, field), field
    # Sums of the same numbers in another order.
    for field in averages:
        left, right = (msgspec.to_builtins(getattr(result, field)) for result in results)
        assert left == pytest.approx(right, rel=1e-9)


LENGTHS = [3, 40, 1, 7, 19, 2, 90, 5, 11, 4, 8, 6]
TRACE = Trace.from_lengths(np.zeros(len(LENGTHS)), [4] * len(LENGTHS), LENGTHS)


@settings(max_examples=40)
@given(st.lists(st.sets(st.integers(0, len(LENGTHS) - 1), min_size=1), max_size=8), st.data())
def test_tokens_are_those_of_the_outputs_whoever_was_forgotten_before(steps, data):
    answers = Answers(TRACE)
    for chosen in steps:
        requests = np.array(sorted(chosen))
        places = np.array([data.draw(st.integers(0, LENGTHS[request] - 1)) for request in requests])
        expected = [int(TRACE.output(request)[place]) for request, place in zip(requests, places, strict=True)]
        answers.begin(requests.tolist())
        assert answers.tokens(requests, places).tolist() == expected
        answers.forget(data.draw(st.lists(st.sampled_from(range(len(LENGTHS))), unique=True)))


SMALL = Tiling(places=4, piece=8)
PROFILE = Profile(
    seconds_per_step=1e-3, seconds_per_computed_token=0, seconds_per_sampled_row=1e-5,
    seconds_per_context_token=0, seconds_per_attended_pair=1e-7, seconds_per_moved_token=0,
    seconds_per_tile=7e-3, seconds_per_sampling_tile=3e-3, seconds_per_tile_position=1.3e-5, tiling=SMALL,
)  # fmt: skip


def batches(prompts, max_tokens=3, budget=9):
    """The batches of requests with prompts so long."""
    scheduler = Scheduler(BlockManager(64, 4, prefix_caching=False), max_tokens_per_step=budget)
    for number, length in enumerate(prompts):
        scheduler.add(Request(id=str(number), prompt=[1] * length, max_tokens=max_tokens))
    return iter(steps_of(scheduler, token=0))


def test_a_simulation_by_tiles_has_the_same_clock_whether_it_takes_steps_at_once_or_not():
    rng = np.random.default_rng(0)
    trace = Trace.from_lengths(rng.uniform(0, 2, 40).cumsum(), rng.integers(1, 40, 40), rng.integers(1, 60, 40))

    def ends(fast_forward):
        scheduler = Scheduler(BlockManager(48, 4), max_tokens_per_step=32)
        simulation = Simulation(trace, scheduler, PROFILE, fast_forward=fast_forward)
        found = {number: step.now_s for step in simulation.steps() for number in step.ended}
        return found, simulation.ledger.num_skipped

    (at_once, skipped), (one_by_one, none) = ends(True), ends(False)
    assert at_once == one_by_one
    assert skipped > 100
    assert none == 0


@pytest.mark.parametrize(("call", "by_hand"), by_hand_in("simulations.txt"))
def test_a_replay_is_what_it_is_by_hand(trace_of, call, by_hand):
    def ran(rows, change=lambda trace: trace, *, clients=None, fast_forward=True, **pool):
        trace, scheduler = change(trace_of(*rows)), scheduler_of(**pool)
        simulation = Simulation(trace, scheduler, SECOND_A_STEP, clients=clients, fast_forward=fast_forward)
        for _ in simulation.steps():
            pass
        return simulation.result()

    assert_by_hand(call, by_hand, globals() | {"ran": ran})


BASE = Scenario(
    load=Load(trace="synthetic:poisson,rate=40,requests=60,turns=3,think_s=0.5,system_tokens=40"), blocks=2000
)
CONVERSATIONS = synthetic("poisson", rate=30, requests=60, turns=4.0, think_s=0.5, lengths="sharegpt", seed=3)


APART = synthetic("poisson", rate=60, requests=90, lengths="sharegpt", seed=1)


def replicas_of(router, trace=CONVERSATIONS, num=3, **options):
    routing = Routing(replicas=num, router=router, **options)
    schedulers = [Scheduler(BlockManager(4000, 16), max_tokens_per_step=512) for _ in range(num)]
    simulated = Replicas(trace, schedulers, StepTime(), routing)
    for _ in simulated.steps():
        pass
    return simulated


@cache
def usual(router):
    """The usual conversations on three replicas, to their end."""
    return replicas_of(router)


@pytest.mark.parametrize("router", ROUTERS)
def test_all_requests_end_once_and_none_before_it_came(router):
    simulated = usual(router)
    result = simulated.result()
    assert (result.finished, result.replicas, result.router) == (len(CONVERSATIONS), 3, router)
    assert (simulated.latencies.ttft > 0).all()
    assert simulated.ongoing == [0, 0, 0]
    assert set(simulated.replica_of.tolist()) <= {0, 1, 2}
    assert result.output_tokens == CONVERSATIONS.output_tokens.sum()


def test_the_turns_of_a_conversation_stay_together_where_there_is_time():
    simulated = usual("exact")
    heads = [tuple(CONVERSATIONS.prompt(number)[:32].tolist()) for number in range(len(CONVERSATIONS))]
    places = {}
    for head, place in zip(heads, simulated.replica_of.tolist(), strict=True):
        places.setdefault(head, set()).add(place)
    stayed = sum(len(found) == 1 for found in places.values())
    assert stayed >= 0.9 * len(places)


def test_figures_of_replicas_add_up():
    simulated = usual("least-loaded")
    result, parts = simulated.result(), [rank.result() for rank in simulated.ranks]
    assert result.computed_tokens == sum(part.computed_tokens for part in parts)
    assert result.hit_tokens + result.computed_tokens >= result.prompt_tokens
    assert result.imbalance == pytest.approx(max(part.computed_tokens for part in parts) * 3 / result.computed_tokens)
    assert 0 < result.memory.of_pool < 1 and result.requests == len(CONVERSATIONS)


def test_one_replica_is_a_simulation_as_it_was():
    outcome = run(BASE)
    assert (outcome.result.replicas, outcome.result.router) == (1, None) and len(outcome.timeline["end_s"])
    several = msgspec.structs.replace(BASE, routing=Routing(replicas=2))
    assert run(several).result.replicas == 2
    with pytest.raises(InvalidConfig, match="replicas is 2"):
        several.simulation()
