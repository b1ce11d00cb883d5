"""Simulated replicas share a trace, and each router deals it as its rule says."""

from functools import cache

import msgspec
import numpy as np
import pytest

from paged import BlockManager, Scheduler
from paged.errors import InvalidConfig
from paged.study.simulator import ROUTERS, Load, Replicas, Routing, Scenario, StepTime, run
from paged.study.traces import synthetic

BASE = Scenario(
    load=Load(trace="synthetic:poisson,rate=40,requests=60,turns=3,think_s=0.5,system_tokens=40"), blocks=2000
)
CONVERSATIONS = synthetic("poisson", rate=30, requests=60, turns=4.0, think_s=0.5, lengths="sharegpt", seed=3)


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


def test_round_robin_deals_in_turn():
    places = usual("round-robin").replica_of
    assert ((places[1:] - places[:-1]) % 3 == 1).all()


def test_ingresses_that_tell_nothing_still_spread_what_nobody_has():
    trace = synthetic("poisson", rate=60, requests=90, lengths="sharegpt", seed=1)
    counts = np.bincount(replicas_of("exact", trace, ingresses=3, tells=False).replica_of, minlength=3)
    assert counts.min() >= 15


def test_events_that_come_late_cost_hits_and_nothing_else():
    late = replicas_of("exact", delay_s=1e6).result()
    assert late.finished == len(CONVERSATIONS)
    assert late.prefix_hit_rate <= usual("exact").result().prefix_hit_rate


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
