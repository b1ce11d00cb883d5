"""Policies are data, and so are costs: what may be said in them, and what a wrong word is told."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from paged.block_manager import BlockManager
from paged.errors import InvalidConfig, UnknownPolicy
from paged.scheduler import POLICIES, Costs, Policy, Scheduler
from paged.scheduler.policies import _STRATEGIES, policy_named
from paged.study import tgi

NAMES = (
    *("vllm", "trtllm-guaranteed-no-evict", "trtllm-max-utilization", "fastgen", "sarathi", "paged", "paged-fair"),
    *("static", "orca-max", "orca-pow2", "orca-oracle", "tgi"),
)
REGION = {"layout": "region", "reservation": "max"}


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


@pytest.mark.parametrize("name", ["", "VLLM", "sglang", None, 3])
def test_an_unknown_policy_is_told_the_known_ones(name):
    with pytest.raises(UnknownPolicy, match="known are " + ", ".join(NAMES)) as raised:
        Scheduler(BlockManager(4, 4), policy=name)
    assert raised.value.known == NAMES


@pytest.mark.parametrize("field", _STRATEGIES)
def test_a_wrong_strategy_is_told_the_known_ones(field):
    known = ", ".join(_STRATEGIES[field])
    with pytest.raises(InvalidConfig, match=f"policy mine: {field} has to be one of {known}; got 'sideways'"):
        Policy(name="mine", **{field: "sideways"})


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"layout": "counted"}, "layout counted goes with reservation max or expected; got prompt"),
        ({"layout": "region"}, "layout region goes with reservation max or expected; got prompt"),
        (REGION | {"take": "tail"}, "layout region goes with take whole; got tail"),
        (REGION | {"preemption": "swap"}, "layout region goes with preemption recompute; got swap"),
        (REGION, "layout region needs strategies that hand out regions"),
        ({"strategies": "mine"}, "strategies has to be a function, or None; got 'mine'"),
        *[
            ({"watermark": wrong}, r"watermark has to be a share of the pool in \[0, 1\)")
            for wrong in (-0.1, 1, 1.5, math.nan)
        ],
        ({"watermark": "2 %"}, "watermark has to be a share of the pool in \\[0, 1\\); got '2 %'"),
        *[({"max_preemptions": wrong}, "max_preemptions has to be at least 1") for wrong in (0, -1, 1.0, True)],
        *[({"default_budget": wrong}, "default_budget has to be at least 1") for wrong in (0, -1, 2.0, True)],
        ({"foresight": "guessed"}, "foresight has to be one of none, predicted, expected"),
        (
            {"foresight": "predicted", "reservation": "max"},
            "foresight predicted goes with reservation prompt",
        ),
        ({"quantile": 0.9}, "quantile has to be in quantile_range"),
        ({"quantile": math.nan}, "quantile has to be in quantile_range"),
        ({"quantile_range": (0.8, 0.1)}, "quantile_range has to be two shares"),
        ({"quantile_range": 0.5}, "quantile_range has to be two shares"),
        ({"waste_target": 0.0}, "waste_target has to be in"),
        ({"stall_target": 1.0}, "stall_target has to be in"),
        ({"stall_limit": -1}, "stall_limit has to be at least 0"),
        ({"known_outputs": -1}, "known_outputs has to be at least 0"),
        ({"max_passes": -1}, "max_passes has to be at least 0"),
        ({"chunked": "no"}, "chunked has to be"),
        *[({"watermark": wrong}, "watermark has to be") for wrong in (True, math.nan)],
        ({"known_outputs": True}, "known_outputs has to be"),
        ({"quantile_range": (math.nan, 1.0)}, "quantile_range has to be"),
        ({"waste_target": math.nan}, "waste_target has to be"),
        ({"stall_target": 1}, "stall_target has to be"),
        ({"victim": np.array(["latest", "latest"])}, "victim has to be"),
    ],
    ids=repr,
)
def test_a_policy_that_makes_no_sense_is_refused(fields, told):
    with pytest.raises(InvalidConfig, match=f"policy mine: {told}"):
        Policy(name="mine", **fields)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        *[
            ({"ratio": wrong}, "ratio has to be a finite number")
            for wrong in (-0.1, math.nan, math.inf, "1.2", True, None)
        ],
        *[({"most_steps": wrong}, "most_steps has to be at least 1") for wrong in (0, -1, 2.0, True)],
    ],
)
def test_when_newcomers_interrupt_is_told_in_numbers_that_make_sense(fields, told):
    with pytest.raises(InvalidConfig, match=told):
        tgi("mine", **fields)


def test_a_policy_cannot_be_changed():
    with pytest.raises(AttributeError):
        POLICIES["vllm"].take = "tail"


def test_a_swapped_block_travels_twice():
    assert Costs(seconds_per_swapped_block=0.5).swap(3) == 3.0


@pytest.mark.parametrize(
    ("costs", "span", "seconds"),
    [
        (Costs(seconds_per_token=2.0, attention_knee=math.inf), (10, 15), 10.0),
        # Positions 2, 3, 4, 5: four tokens, (2 + 6) / 2 = 4 tokens of context, a knee of 8: half as much again.
        (Costs(seconds_per_token=1.0, attention_knee=8.0), (2, 6), 6.0),
    ],
    ids=["without attention", "with it"],
)
def test_attention_adds_the_mean_context_over_the_knee(costs, span, seconds):
    assert costs.recompute(*span) == seconds


def test_recomputing_in_two_parts_costs_as_much_as_in_one():
    costs = Costs(seconds_per_token=1.0, attention_knee=8.0)
    assert costs.recompute(0, 4) + costs.recompute(4, 16) == costs.recompute(0, 16)


@pytest.mark.parametrize("name", Costs.__struct_fields__)
@pytest.mark.parametrize("value", [-1.0, math.nan, "1", None, True, 10**400])
def test_a_cost_is_a_number_of_at_least_0(name, value):
    with pytest.raises(InvalidConfig, match=f"costs: {name} has to be a number of at least 0"):
        Costs(**{name: value})


def test_a_knee_of_0_is_refused():
    with pytest.raises(InvalidConfig, match="infinity leaves attention out"):
        Costs(attention_knee=0)
