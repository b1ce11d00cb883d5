"""Failures of the field as scenarios: our scheduler survives each one, and a scheduler that fails as somebody's did is told so."""

from dataclasses import replace

import msgspec
import pytest

from paged import Request, Scheduler
from paged.errors import NeverFits
from paged.testing import SCENARIOS, Capabilities, Violation, run_scenario
from paged.testing.saved import load, rerun, save
from paged.testing.world import build_scheduler


@pytest.mark.parametrize("name", SCENARIOS)
def test_our_scheduler_survives(name):
    assert run_scenario(name) == len(SCENARIOS[name].worlds)


def test_a_scenario_may_have_more_batches_out_than_may_be():
    scenario = SCENARIOS["abort while loading"]
    calls = (*scenario.calls[:1], *[("schedule", ())] * 6)
    assert run_scenario(replace(scenario, calls=calls, counts={"finished": 1})) == 1


def test_a_scenario_that_needs_what_is_not_there_is_left_out():
    assert run_scenario("abort while loading", capabilities=Capabilities(external_tokens=False)) == 0


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_needs_what_it_calls(name):
    needed = set()
    for verb, arguments in SCENARIOS[name].calls:
        request = arguments[0] if verb == "add" else Request(id="", prompt=[])
        needed |= {verb} & {"cancel", "fork", "append"}
        needed |= {"drafts"} if verb in ("update", "step") and arguments != ((),) else set()
        needed |= {"external_tokens"} if request.num_computed else set()
        needed |= {"groups"} if request.num_sequences > 1 else set()
    assert needed <= set(SCENARIOS[name].needs)


class KeepsABlock(Scheduler):
    """A block of whoever is aborted is never given back."""

    def abort(self, request_id):
        try:
            rows = self.rows_of(request_id)
        except KeyError:
            rows = []
        for row in rows:
            self.manager._memory.device.keep(self.manager.table(row)[:1])
        return super().abort(request_id)


class WaitsForEver(Scheduler):
    """A prompt over the pool is taken."""

    def add(self, request, now=0.0):
        try:
            super().add(request, now)
        except NeverFits:
            super().add(msgspec.structs.replace(request, prompt=[0]), now)


class TakesAnAdapterForASalt(Scheduler):
    """The name of an adapter and a salt are written to the same place."""

    def add(self, request, now=0.0):
        super().add(msgspec.structs.replace(request, salt=request.salt or request.adapter, adapter=None), now)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (KeepsABlock, "abort in every state"),
        (KeepsABlock, "abort after a preemption"),
        (KeepsABlock, "hundreds of requests"),
        (WaitsForEver, "a prompt over the pool"),
        (TakesAnAdapterForASalt, "tenants of the same spelling"),
    ],
)
def test_a_scheduler_that_fails_as_somebodys_did_is_told_so(fault, name, tmp_path):
    def build(world):
        return build_scheduler(world, fault)

    with pytest.raises(Violation) as caught:
        run_scenario(name, build)
    saved = load(save(caught.value, tmp_path, build))
    assert rerun(saved, build).found[0] == caught.value.found[0]


@pytest.mark.parametrize(
    ("bound", "told"),
    [
        ({"most_steps": 3}, "takes longer, never for ever. After 3 steps"),
        ({"most_preemptions": 0}, r"preempted \d+ times, at most 0"),
    ],
)
def test_more_than_a_scenario_allows_is_a_violation(bound, told):
    with pytest.raises(Violation, match=told):
        run_scenario(replace(SCENARIOS["less and less memory"], **bound))
