"""The kit's state machine and thousands of random requests through the plug-in: what vLLM's runner makes of every step is what was decided."""

import os
import random

import msgspec
import pytest
from hypothesis.stateful import run_state_machine_as_test
from integrations.plugged import CAPABILITIES, Plugged

from conformance.vllm.whole_machine import OneBatchRig, VllmClients, VllmSchedulerMachine
from paged.testing.machines import settings_for
from paged.testing.world import World

SOAK = int(os.environ.get("PAGED_SOAK", "500"))


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


def test_the_machine_finds_nothing_in_the_plug_in():
    run_state_machine_as_test(PluggedMachine, settings=settings_for(100))


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["paged", "vllm"])
def test_random_requests_leave_the_plug_in_as_it_was(policy):
    world = World(num_blocks=12, block_size=2, max_tokens_per_step=16, max_sequences=6, policy=policy)
    rig = PluggedRig(world, Plugged)
    clients = VllmClients(rig, random.Random(0), trouble=0.3)
    while rig.num_added < SOAK:
        clients.do()
    rig.drain()
    core = rig.scheduler.core
    assert rig.manager.num_used == 0
    assert (core._live, core._held, core._unplaced, core._out, core._drafts) == ({}, {}, {}, [], {})
    assert core._answers._special == {}
