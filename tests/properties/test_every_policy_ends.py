"""Liveness: whatever the policy, the pool and the requests, every step computes something until everything has ended.

The state machines draw the named policies, too, with every call that there is; here they are tried one by one on traces that
press, and beside them any combination of strategies that somebody may make his own policy of.
"""

from collections import Counter
from contextlib import suppress
from typing import get_args, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st, target

from paged import POLICIES, BlockManager, Policy, Request, Scheduler
from paged.errors import NeverFits
from paged.scheduler.reservations import expected
from paged.study import orca, static, tgi
from paged.study.policies.orca import context, expected_pow2
from paged.testing.reserving import DRAWN

STRATEGIES = {
    name: get_args(hint) for name, hint in get_type_hints(Policy).items() if str(hint).startswith("typing.Lit")
}


@st.composite
def arrivals(draw):
    """How many steps after the one before it a request comes, after how many outputs each sequence of it ends, and its fields."""
    max_tokens, expects = draw(st.integers(1, 24)), draw(st.sampled_from([None, 1, 6, 24]))
    fields = {
        "prompt": [draw(st.integers(0, 2))] * draw(st.integers(1, 30)),
        "max_tokens": max_tokens,
        "eos_token_id": 9,
        "expected_tokens": None if expects is None else min(expects, max_tokens),
        "num_sequences": draw(st.sampled_from([1, 1, 1, 1, 2, 3])),
        "priority": draw(st.sampled_from([0, 0, 0, 1, -1])),
        "tenant": draw(st.sampled_from([None, None, "a", "b"])),
    }
    return draw(st.sampled_from([0, 0, 0, 1, 3, 9])), draw(st.integers(1, 24)), fields


pools = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(2, 16),
        "block_size": st.sampled_from([1, 2, 4]),
        "host_blocks": st.sampled_from([0, 0, 6]),
        "prefix_caching": st.booleans(),
    }
)
limits = st.fixed_dictionaries(
    {
        "max_tokens_per_step": st.sampled_from([3, 8, 64]),
        "max_sequences": st.sampled_from([3, 4, 8]),
        "max_chunk": st.sampled_from([None, None, 2]),
        "max_model_len": st.sampled_from([None, 24]),
    }
)


def run(policy, pool, limits, trace):
    """Serve the trace to its end, and return the scheduler and how many steps it took. A sequence of a request ends after so many
    outputs as the request says, or sooner."""
    scheduler = Scheduler(BlockManager(**pool), policy=policy, **limits)
    ends = {}
    coming = list(enumerate(trace))
    patience = trace[0][0]
    steps = 0
    most = 60 + 12 * sum(
        (len(fields["prompt"]) + fields["max_tokens"]) * fields["num_sequences"] for *_, fields in trace
    )
    outputs = Counter()
    while coming or scheduler.has_unfinished:
        while coming and (patience <= 0 or not scheduler.has_unfinished):
            number, (_, ends[f"r{number}"], fields) = coming.pop(0)
            with suppress(NeverFits):
                scheduler.add(Request(id=f"r{number}", **fields), now=float(steps))
            patience = coming[0][1][0] if coming else 0
        patience -= 1
        if not scheduler.has_unfinished:
            continue
        batch = scheduler.schedule(now=float(steps))
        if not batch.is_empty:
            sampling = np.flatnonzero(batch.samples)
            keys = [(batch.ids[i], int(batch.sequences[i])) for i in sampling]
            outputs.update(keys)
            sampled = [9 if outputs[key] >= ends[key[0]] else 7 for key in keys]
            scheduler.update(batch, np.array(sampled, np.int32), now=float(steps))
        steps += 1
        assert scheduler.check() == []
        assert len(batch.rows) or batch.has_outputs, scheduler.counts()
        assert steps <= most, scheduler.counts()
    return scheduler


def assert_all_is_over(scheduler, trace):
    counts = scheduler.counts()
    assert counts["finished"] + counts["rejected"] == counts["submitted"] == len(trace)
    assert scheduler.manager.device.num_used == 0


traces = st.lists(arrivals(), min_size=2, max_size=8)
BOUNDED = {name for name, policy in POLICIES.items() if policy.max_preemptions is not None}
RESERVES = {name for name, policy in POLICIES.items() if policy.reservation == "max"}


@pytest.mark.parametrize("name", POLICIES)
def test_under_every_named_policy_everything_ends(name):
    @settings(max_examples=25)
    @given(pool=pools, limits=limits, trace=traces)
    def everything_ends(pool, limits, trace):
        scheduler = run(name, pool, limits, trace)
        assert_all_is_over(scheduler, trace)
        preemptions = scheduler.stats().max_preemptions
        # More examples like those that preempted most.
        target(preemptions)
        if name in RESERVES:
            assert preemptions == 0
        if name in BOUNDED:
            # The bound, and one more where a batch that had to go on took what was reserved.
            assert preemptions <= POLICIES[name].max_preemptions + 1

    everything_ends()


@st.composite
def policies(draw):
    """Any combination that the policy's own check lets pass."""
    fields = {name: draw(st.sampled_from(known)) for name, known in STRATEGIES.items()}
    if fields["foresight"] != "none":
        fields["reservation"] = "prompt"
    if fields["reservation"] == "prompt" or fields["layout"] == "region":
        fields["layout"] = "blocks"
    if fields["order"] == "cached":
        fields["max_lead"] = draw(st.sampled_from([0.0, 3.0, 100.0]))
    usual = Policy(
        name="any",
        chunked=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.2, 0.6])),
        max_preemptions=draw(st.sampled_from([None, None, 1, 3])),
        known_outputs=draw(st.sampled_from([0, 0, 2])),
        waste_target=draw(st.sampled_from([None, 0.01])),
        stall_target=draw(st.sampled_from([None, 0.01])),
        stall_limit=draw(st.sampled_from([0, 5])),
        max_passes=draw(st.sampled_from([0, 0, 1, 4])),
        **fields,
    )
    modelled = draw(modelled_systems)
    if modelled is None:
        return usual
    if modelled.layout == "region":
        return msgspec.structs.replace(usual, strategies=modelled.strategies, **REGION)
    return msgspec.structs.replace(usual, strategies=modelled.strategies, foresight="none")


REGION = {"foresight": "none", "reservation": "max", "layout": "region", "take": "whole", "preemption": "recompute"}
modelled_systems = st.one_of(
    st.none(),
    st.builds(static, st.just("any"), is_padded=st.booleans(), reserves=st.booleans()),
    st.builds(orca, st.just("any"), total_of=st.sampled_from([context, expected, expected_pow2])),
    st.builds(tgi, st.just("any"), ratio=st.sampled_from([0.0, 1.2, 50.0]), most_steps=st.sampled_from([None, 1, 20])),
)


def test_the_strategies_that_are_combined_are_all_there_are():
    assert " ".join(sorted(STRATEGIES)) == "composition foresight layout order preemption reservation take victim"


@settings(max_examples=150)
@given(policy=policies(), pool=pools, limits=limits, trace=traces)
def test_under_any_combination_of_strategies_everything_ends(policy, pool, limits, trace):
    assert_all_is_over(run(policy, pool, limits, trace), trace)


def test_the_machines_draw_every_named_policy_but_the_one_whose_order_the_kit_cannot_foresee():
    assert set(POLICIES) - set(DRAWN) == {"paged-fair"}
