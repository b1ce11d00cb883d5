"""The kit's state machine and thousands of random requests through the plug-in: what vLLM's runner makes of every step is what was decided."""

import os
import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from integrations.plugged import CAPABILITIES, Plugged, PluggedAhead

from conformance.vllm.whole_machine import OneBatchRig, VllmClients, VllmSchedulerMachine
from paged.integrations.vllm.ahead import RunnerViewAhead
from paged.integrations.vllm.groups import BETWEEN_STATES
from paged.testing import Violation
from paged.testing.machines import SchedulerMachine, settings_for
from paged.testing.scheduler_machine import MAX_LIVE
from paged.testing.scheduler_rig import SchedulerRig
from paged.testing.strategies import Wish, layer_worlds, where, wishes
from paged.testing.world import World

SOAK = int(os.environ.get("PAGED_SOAK", "100"))


class PluggedRig(OneBatchRig):
    """Salts alone tell tenants apart: vLLM's requests have no key besides, and adapters wait for a slot (test_vllm_plug_in.py)."""

    def add(self, request):
        super().add(msgspec.structs.replace(request, adapter=None, extra_key=None, writes_cache=True, retention=None))


class PluggedMachine(VllmSchedulerMachine):
    """Our scheduler, asked through vLLM's interface, first come first served."""

    build = staticmethod(Plugged)
    capabilities = CAPABILITIES
    rig_class = PluggedRig
    policies = ("paged", "paged", "vllm", "sarathi")


class AheadRig(PluggedRig):
    """Two batches out at a time."""

    def step(self, counts=(), *, is_patient=True, ahead=None):
        SchedulerRig.step(self, (), is_patient=is_patient, ahead=1)


class AheadMachine(PluggedMachine):
    """The same for asynchronous scheduling, by priority. Steps may be empty between two that are not, and then three are out."""

    build = staticmethod(lambda world: PluggedAhead(world, scheduling_policy="priority"))
    has_priorities = True
    policies = ("paged", "vllm", "vllm", "sarathi")
    rig_class = AheadRig
    resumes_known = True
    go_ahead = SchedulerMachine.go_ahead

    @where(lambda self: len(self.rig.live) < MAX_LIVE - 1)
    @rule(wish=wishes())
    def leave_out(self, wish):
        """A prompt that takes whole steps comes before a request that samples, which keeps its blocks meanwhile."""
        self.add(replace(wish, share=0.1, output=1.0, priority=1, min_tokens=0, eos=None, stop=()), again=False)
        self.go_on(2, ())
        self.add(Wish([0] * 99, share=0.8, output=0.01, priority=-2, salt=f"{self.rig.num_added}"), again=False)
        self.go_on(6, ())

    @where(lambda self: len(self.rig.flights) < 2)
    @rule()
    def schedule(self):
        self.rig.schedule()

    @where(lambda self: self.rig.live and not self.rig.flights)
    @rule(ahead=st.just(2))
    def schedule_ahead(self, ahead):
        for _ in range(ahead):
            self.rig.schedule()


@st.composite
def layered(draw, policies, resumes_known):
    """A model of several kinds of layers; its states are one group of ours, and none with two batches out."""
    most = 0 if resumes_known else 1
    world = draw(layer_worlds().filter(lambda world: [each.kind for each in world.groups].count("state") <= most))
    rest = {"host_blocks": 0, "drafts": 0, "steps_ahead": 0, "event_stride": 0, "max_outstanding": 4}
    if all(group.kind == "state" for group in world.groups):
        # Nothing gives a size, and the plug-in takes its own.
        rest["block_size"] = BETWEEN_STATES
    rest |= dict.fromkeys(("preemption", "max_chunk", "max_waiting", "watermark", "max_preemptions", "known_outputs"))
    return replace(
        world,
        policy=draw(st.sampled_from(policies)),
        max_tokens_per_step=draw(st.sampled_from([8, 12, 32])),
        resumes_known=resumes_known,
        **rest,
    )


class LayeredMachine(PluggedMachine):
    """Windows, chunks and states beside full layers, and without."""

    worlds = staticmethod(layered)


class LayeredAheadMachine(AheadMachine):
    worlds = staticmethod(layered)


class ClientsAhead(VllmClients):
    """Random clients of an engine that has two batches out."""

    num_out = 2


@pytest.mark.parametrize("machine", [PluggedMachine, AheadMachine, LayeredMachine, LayeredAheadMachine])
def test_the_machine_finds_nothing_in_the_plug_in(machine):
    run_state_machine_as_test(machine, settings=settings_for(6))


def test_the_machine_leaves_a_request_out_of_steps_that_has_to_be_told_its_tokens(monkeypatch):
    def tell_the_resumed(self, batch, lives, tell=RunnerViewAhead.output_of):
        output = tell(self, batch, lives)
        told = output.scheduled_cached_reqs
        told.all_token_ids = {id: told.all_token_ids[id] for id in told.resumed_req_ids}
        return output

    monkeypatch.setattr(RunnerViewAhead, "output_of", tell_the_resumed)
    machine, sizes = AheadMachine(), {"num_blocks": 12, "block_size": 4, "max_tokens_per_step": 8}
    machine.rig = AheadRig(World(policy="vllm", resumes_known=True, **sizes), AheadMachine.build)
    with pytest.raises(Violation, match="raised KeyError: 'r0'"):
        machine.leave_out(Wish([0, 1]))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("policy", "rig_class", "plugged", "clients_class"),
    [("vllm", PluggedRig, Plugged, VllmClients), ("paged", AheadRig, PluggedAhead, ClientsAhead)],
    ids=["one batch out", "two batches out"],
)
def test_random_requests_leave_the_plug_in_as_it_was(policy, rig_class, plugged, clients_class):
    is_ahead = plugged.is_ahead
    world = World(
        num_blocks=12, block_size=2, max_tokens_per_step=16, max_sequences=6, policy=policy, resumes_known=is_ahead
    )
    rig = rig_class(world, plugged)
    clients = clients_class(rig, random.Random(0), trouble=0.3)
    while rig.num_added < SOAK:
        clients.do()
    rig.drain()
    core = rig.scheduler.core
    assert rig.manager.device.num_used == 0
    assert (core._live, core._held, core._unplaced, core._out, core._drafts) == ({}, {}, {}, [], {})
    assert core._answers._special == {}
