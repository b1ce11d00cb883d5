"""A subject that does not keep its side of the protocol is told so by the name of the method, before anything goes wrong inside the kit."""

# ruff: noqa: F401  # the calls of the file take them from here

from types import SimpleNamespace

import numpy as np
import pytest

from paged import BlockManager, LayerGroup, Request, Scheduler
from paged.errors import PagedError
from paged.testing import *  # noqa: F403
from paged.testing import BrokenPromise, Capabilities, StepScheduler, Violation, World, held_to, replay
from paged.testing.machines import SchedulerMachine, run_machine
from paged.testing.world import build_scheduler

from ..shown import assert_refused, shown_in  # noqa: TID252


def answering(name, answer):
    """A manager whose member `name` is a method that answers with something else."""

    class Ours(BlockManager):
        pass

    setattr(Ours, name, lambda self, *arguments, **named: answer)
    return held_to("KVManager", Ours(4, 2))


def test_a_method_that_is_missing_is_named_with_what_it_promises():
    class Empty:
        num_blocks = 4

    with pytest.raises(
        BrokenPromise, match=r"Empty has no `num_host_blocks`; KVManager asks for one that gives an int"
    ):
        held_to("KVManager", Empty())


def figure(part, name, answer):
    """A figure of a manager that says something else."""
    manager = BlockManager(4, 2)
    figures = getattr(manager, part)
    kept = {each: getattr(figures, each) for each in dir(figures) if not each.startswith("_")}
    setattr(manager, part, SimpleNamespace(**kept | {name: answer}))
    return getattr(getattr(held_to("KVManager", manager), part), name)


@pytest.mark.parametrize(("call", "shown"), shown_in("properties/broken_promises.txt", ">>>"))
def test_an_answer_of_the_wrong_shape_is_told_with_the_method_its_arguments_and_the_promise(call, shown):
    assert_refused(call, shown, globals(), BrokenPromise)


@pytest.mark.parametrize(("call", "shown"), shown_in("properties/refused_by_the_kit.txt", ">>>"))
def test_what_the_kit_cannot_run_is_refused_by_name_and_no_part_of_a_program(call, shown):
    added = [("add", (Request(id="a", prompt=[0]),))]
    rig = replay(World(), added)
    assert_refused(call, shown, globals() | {"rig": rig}, (PagedError, TypeError, ValueError))
    assert rig.calls == added and not rig.has_failed


@pytest.mark.parametrize(
    ("missing", "capability"),
    [
        ("fork", "fork"),
        ("swap_in", "host_tier"),
        ("take_moves", "host_content"),
        ("retain", "retention"),
        ("take_events", "events"),
    ],
)
def test_a_feature_that_is_missing_is_named_when_it_is_called_with_the_way_to_leave_it_out(missing, capability):
    class Ours:
        def __getattr__(self, name):
            if name == missing:
                raise AttributeError(name)
            return getattr(BlockManager(4, 2), name)

    with pytest.raises(BrokenPromise, match=rf"Ours has no `{missing}`.*Capabilities\({capability}=False\)"):
        getattr(held_to("KVManager", Ours()), missing)


class ReturnsNothing(Scheduler):
    """Its batches get lost."""

    def schedule(self, now=0.0):
        super().schedule(now)


def test_a_scheduler_that_breaks_a_promise_is_a_violation_with_its_program():
    calls = [("add", (Request(id="a", prompt=[1], max_tokens=1),)), ("schedule", ())]
    told = r"ReturnsNothing\.schedule\(\) gave None; StepScheduler promises a batch"
    with pytest.raises(Violation, match=told) as caught:
        replay(World(), calls, lambda world: build_scheduler(world, ReturnsNothing))
    assert caught.value.program.lines[-1] == "rig.schedule()"


class Bare:
    """Our scheduler with what the protocol asks for, and nothing else."""

    def __init__(self, world):
        self._ours = build_scheduler(world)

    def __getattr__(self, name):
        if name.startswith("_") or name not in dir(StepScheduler):
            raise AttributeError(name)
        return getattr(self._ours, name)

    def update(self, batch, token_ids, counts=None, now=0.0):
        assert counts is None, "counts, and it takes no drafts"
        return [promised(output) for output in self._ours.update(batch, token_ids, now=now)]

    def abort(self, request_id):
        output = self._ours.abort(request_id)
        return output and promised(output)


def promised(output):
    """What an output has to have."""
    return SimpleNamespace(**{name: getattr(output, name) for name in ("id", "sequence", "token_ids", "finish_reason")})


def test_a_scheduler_with_nothing_but_the_protocol_passes():
    class Machine(SchedulerMachine):
        build = Bare
        policy = "vllm"
        capabilities = Capabilities(
            append=False, cancel=False, drafts=False, external_tokens=False, fork=False, groups=False, hints=False
        )

    run_machine(Machine, few=12, steps=20)
