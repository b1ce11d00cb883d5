"""The kit's state machine and thousands of random requests through the plug-in: what vLLM's runner makes of every step is what was decided."""

import os
import random

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test
from integrations.plugged import CAPABILITIES, Plugged

from conformance.vllm.whole_machine import OneBatchRig, VllmClients, VllmSchedulerMachine
from paged.testing.machines import settings_for
from paged.testing.strategies import wishes
from paged.testing.world import World

SOAK = int(os.environ.get("PAGED_SOAK", "500"))


def worlds():
    """Sizes that vLLM's configuration takes: a step has room for a token of each sequence."""
    return st.builds(
        World,
        num_blocks=st.integers(3, 12),
        block_size=st.sampled_from([1, 2, 4]),
        prefix_caching=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from(["paged", "paged", "vllm", "sarathi"]),
        max_tokens_per_step=st.sampled_from([8, 12, 32]),
        max_sequences=st.sampled_from([1, 2, 4, 8]),
        max_model_len=st.sampled_from([None, None, 10]),
        vocabulary=st.sampled_from([2, 3]),
    )


class PluggedRig(OneBatchRig):
    """Salts alone tell tenants apart: vLLM's requests have no key besides, and adapters wait for a slot (test_vllm_plug_in.py)."""

    def add(self, request):
        super().add(msgspec.structs.replace(request, adapter=None, extra_key=None, writes_cache=True, retention=None))


class PluggedMachine(VllmSchedulerMachine):
    """Our scheduler, asked through vLLM's interface, first come first served."""

    capabilities = CAPABILITIES

    @initialize(world=worlds(), opening=st.lists(wishes(), min_size=1, max_size=4))
    def begin(self, world, opening):
        self.rig = PluggedRig(world, Plugged)
        for wish in opening:
            self.add(wish, again=False)


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
