"""Policies are data, and so are costs: what may be said in them, and what a wrong word is told."""

import math
from functools import partial

import msgspec
import pytest

from paged.block_manager import BlockManager
from paged.errors import UnknownPolicy
from paged.scheduler import POLICIES, Costs, Policy, Scheduler
from paged.scheduler.policies import policy_named

from ..shown import assert_refused, shown_in  # noqa: TID252

NAMES = (
    *("vllm", "trtllm-guaranteed-no-evict", "trtllm-max-utilization", "fastgen", "sarathi"),
    *("paged", "paged-fair", "paged-cached"),
    *("static", "orca-max", "orca-pow2", "orca-oracle", "tgi"),
)


@pytest.mark.parametrize("name", POLICIES)
def test_a_named_policy_is_one_entry_that_says_what_it_is(name):
    policy = policy_named(name)
    assert policy is POLICIES[name] and policy_named(policy) is policy
    assert policy.name == name and policy.summary


def test_a_policy_of_which_nothing_is_said_keeps_nothing_back_and_waits_for_nothing():
    mine = Policy(name="mine")
    assert (mine.watermark, mine.max_passes, mine.strategies) == (0.0, 0, None)
    assert (mine.chunked, mine.max_preemptions, mine.default_budget) == (True, None, None)
    assert (mine.waste_target, mine.stall_target) == (None, None)


def test_what_was_measured_is_this_default():
    """The figures of README and of docs/policies.md are of these values."""
    paged = POLICIES["paged"]
    assert (paged.quantile, paged.quantile_range, paged.known_outputs) == (0.55, (0.2, 0.8), 64)
    assert (paged.waste_target, paged.stall_target, paged.stall_limit) == (0.01, 0.01, 5)
    assert (paged.max_passes, paged.max_preemptions, paged.watermark) == (4, 3, 0.02)


def test_no_two_named_policies_are_the_same_combination():
    labels = {"name": "any", "summary": "", "default_budget": None}
    combinations = {msgspec.structs.astuple(msgspec.structs.replace(policy, **labels)) for policy in POLICIES.values()}
    assert len(combinations) == len(POLICIES)


@pytest.mark.parametrize(("call", "shown"), shown_in("scheduler/refused_policies.txt", ">>>"))
def test_an_unknown_policy_and_a_wrong_strategy_are_told_the_known_ones(call, shown):
    error = assert_refused(call, shown, {"Policy": Policy, "named": partial(Scheduler, BlockManager(4, 4))})
    assert not isinstance(error, UnknownPolicy) or error.known == NAMES


KNEE = Costs(seconds_per_token=1.0, attention_knee=8.0)


@pytest.mark.parametrize(
    ("found", "seconds"),
    [
        # There and back.
        (Costs(seconds_per_swapped_block=0.5).swap(3), 3.0),
        (Costs(seconds_per_token=2.0, attention_knee=math.inf).recompute(10, 15), 10.0),
        # Positions 2, 3, 4, 5: four tokens, (2 + 6) / 2 = 4 tokens of context, a knee of 8: half as much again.
        (KNEE.recompute(2, 6), 6.0),
        (KNEE.recompute(0, 4) + KNEE.recompute(4, 16), KNEE.recompute(0, 16)),
    ],
    ids=["a swap", "without attention", "with the mean context over the knee", "in two parts as in one"],
)
def test_what_costs_say(found, seconds):
    assert found == seconds
