"""A property-based test kit for KV-cache managers and schedulers: ours, or one that you put behind the same methods.

    SchedulerRig, ManagerRig      drive one subject, call by call, with every oracle watching; raise Violation
    World, ManagerWorld           the tiny sizes that a rig runs in
    ShadowKV, NaiveManager        two of those oracles: KV memory without tensors, the memory manager in dicts and lists
    INVARIANTS, memory_violations the numbered invariants, recomputed from public attributes
    RandomEngine, random_program  random programs for a rig
    replay, shrink                running one again, on either rig; making a failing one short
    ManagerAdapter                puts another engine's allocator in front of the kit: a few methods of yours, the rest is derived
    held_to, BrokenPromise        a subject whose every answer has the promised shape, or is named
    soak                          thousands of random requests through one scheduler
    machines                      Hypothesis state machines over both rigs (needs the extra `testing`)

A subject that cannot do everything says so in its `Capabilities`, and the machines leave those rules out:

    class MyMachine(paged.testing.machines.SchedulerMachine):
        build = staticmethod(lambda world: MyScheduler(world.num_blocks, world.block_size))
        capabilities = Capabilities(fork=False, async_moves=False)

    paged.testing.machines.run_machine(MyMachine, few=200)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paged.testing.adapter import ManagerAdapter
from paged.testing.conformance import BrokenPromise, held_to
from paged.testing.invariants import INVARIANTS, memory as memory_violations
from paged.testing.manager_rig import ManagerRig, ManagerWorld
from paged.testing.naive_model import NaiveManager
from paged.testing.programs import RandomEngine, random_program, random_world
from paged.testing.protocol import Capabilities, KVManager, StepScheduler, capabilities_of
from paged.testing.scheduler_rig import SchedulerRig
from paged.testing.shadow_kv import ShadowKV
from paged.testing.shrinking import replay, shrink
from paged.testing.soaking import SoakReport, soak
from paged.testing.violation import Violation
from paged.testing.world import World

if TYPE_CHECKING:
    from paged.testing import machines

__all__ = [
    "INVARIANTS",
    "BrokenPromise",
    "Capabilities",
    "KVManager",
    "ManagerAdapter",
    "ManagerRig",
    "ManagerWorld",
    "NaiveManager",
    "RandomEngine",
    "SchedulerRig",
    "ShadowKV",
    "SoakReport",
    "StepScheduler",
    "Violation",
    "World",
    "capabilities_of",
    "held_to",
    "machines",
    "memory_violations",
    "random_program",
    "random_world",
    "replay",
    "shrink",
    "soak",
]


if not TYPE_CHECKING:
    # Hypothesis is an extra: the rigs, the soak and the oracles work without it.
    def __getattr__(name: str) -> Any:
        if name == "machines":
            return import_module("paged.testing.machines")
        raise AttributeError(f"module 'paged.testing' has no attribute {name!r}")
