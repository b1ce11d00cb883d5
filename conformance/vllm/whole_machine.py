"""The kit's state machine for vLLM's whole scheduler, and thousands of random requests through it.

Left out, because vLLM does not have it or leaves it to others: several batches outstanding of which a row is in one at most, cancel,
append, groups, tokens that exist elsewhere, a number of sampled tokens other than one, `min_tokens` (its sampler masks the stop
tokens until then), and a cap on chunks (its own does not hold for a request that is alone). All oracles of the kit stay.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from conformance.vllm.manager import CAPABILITIES
from conformance.vllm.whole import VllmScheduler
from paged.testing.machines import SchedulerMachine
from paged.testing.programs import RandomEngine
from paged.testing.scheduler_machine import MAX_LIVE
from paged.testing.scheduler_rig import SchedulerRig
from paged.testing.strategies import Wish, where, wishes
from paged.testing.violation import Call
from paged.testing.world import World


def worlds(policies: Sequence[str], resumes_known: bool) -> st.SearchStrategy[World]:
    """Sizes that vLLM's configuration takes, under these policies: a step has room for a token of each sequence."""
    return st.builds(
        World,
        num_blocks=st.integers(3, 12),
        block_size=st.sampled_from([1, 2, 4]),
        prefix_caching=st.sampled_from([True, True, True, True, True, True, False]),
        policy=st.sampled_from(policies),
        max_tokens_per_step=st.sampled_from([8, 8, 12, 32]),
        max_sequences=st.sampled_from([1, 2, 4, 8]),
        max_model_len=st.sampled_from([None, None, None, 10]),
        vocabulary=st.sampled_from([2, 3]),
        resumes_known=st.just(resumes_known),
    )


def build_fcfs(world: World) -> VllmScheduler:
    """First come, first served: vLLM's default."""
    return VllmScheduler(world, "fcfs")


def build_priority(world: World) -> VllmScheduler:
    """By priority, then by arrival."""
    return VllmScheduler(world, "priority")


class OneBatchRig(SchedulerRig):
    """One batch out at a time, and one token of each row that samples, whatever a rule asks for."""

    def update(self, counts: Sequence[int] = ()) -> dict[Any, Any]:
        return super().update(())

    def step(self, counts: Sequence[int] = (), *, is_patient: bool = True, ahead: int | None = None) -> None:
        super().step((), is_patient=is_patient, ahead=0)


class VllmSchedulerMachine(SchedulerMachine):
    """First come first served; without what is named above."""

    build = staticmethod(build_fcfs)
    capabilities = CAPABILITIES
    has_priorities: ClassVar[bool] = False

    rig_class: ClassVar[type[SchedulerRig]] = OneBatchRig
    policies: ClassVar[Sequence[str]] = ("vllm",)
    resumes_known: ClassVar[bool] = False
    worlds: ClassVar[Callable[[Sequence[str], bool], st.SearchStrategy[World]]] = staticmethod(worlds)

    append = None
    go_ahead = None
    starve = None

    @initialize(data=st.data(), opening=st.lists(wishes(), min_size=1, max_size=4))
    def begin(self, data: st.DataObject, opening: list[Wish]) -> None:
        world = data.draw(type(self).worlds(self.policies, self.resumes_known))
        # vLLM's interface has no hints, so nothing is pinned.
        world = replace(world, max_pinned=0, max_pinned_per_tenant=None, max_cached_per_tenant=None)
        self.rig = self.rig_class(world, type(self).build)
        for wish in opening:
            self.add(wish, again=False)

    @where(lambda self: len(self.rig.live) < MAX_LIVE)
    @rule(wish=wishes(), again=st.sampled_from([False, False, False, True]))
    def add(self, wish: Wish, again: bool) -> None:
        number = max(0, self.rig.num_added - 1) if again else self.rig.num_added
        request = wish.request(f"r{number}", self.rig.world, self.capabilities)
        self.rig.add(within_vllm(request, self.has_priorities))

    @where(lambda self: not self.rig.flights)
    @rule()
    def schedule(self) -> None:
        self.rig.schedule()

    @where(lambda self: self.rig.live and not self.rig.flights)
    @rule(ahead=st.integers(2, 3))
    def schedule_ahead(self, ahead: int) -> None:
        self.rig.schedule()


class EmptyStepsCounted(OneBatchRig):
    """A rig that counts steps without tokens instead of ending at the first: vLLM's priority policy is known to make some."""

    def _fail_on(self, found: list[str]) -> None:
        rest = [sentence for sentence in found if not sentence.startswith("10:")]
        self.events["step without tokens"] += len(rest) < len(found)
        super()._fail_on(rest)


class VllmPriorityMachine(VllmSchedulerMachine):
    """The same under vLLM's priority policy; see `an_empty_step` of programs.py for what it would stop at."""

    build = staticmethod(build_priority)
    rig_class = EmptyStepsCounted
    has_priorities = True


class VllmClients(RandomEngine):
    """Random clients that ask for nothing which vLLM does not have, of an engine that has `num_out` batches out at a time."""

    num_out: ClassVar[int] = 1

    def next_call(self) -> Call:
        while True:
            verb, arguments = super().next_call()
            if verb in ("step", "update"):
                return verb, ((),)
            if verb not in ("cancel", "append") and not (verb == "schedule" and len(self.rig.flights) >= self.num_out):
                return verb, arguments

    def request(self) -> Any:
        return within_vllm(super().request(), False)


def within_vllm(request: Any, has_priorities: bool) -> Any:
    """The request without what is named above."""
    priority = request.priority if has_priorities else 0
    usual = {"min_tokens": 0, "num_sequences": 1, "num_computed": 0, "saves": False}
    return msgspec.structs.replace(request, priority=priority, **usual)


def soak(num_requests: int, seed: int, world: World) -> SchedulerRig:
    """So many requests with aborts on one scheduler, drained. Raises Violation."""
    rig = OneBatchRig(world, build_fcfs)
    clients = VllmClients(rig, random.Random(seed), trouble=0.3)
    while rig.num_added < num_requests:
        clients.do()
    rig.drain()
    return rig
