"""A property-based test kit for KV-cache managers, schedulers and serving engines: ours, or one that you put behind the same methods.

    SchedulerRig, ManagerRig, EngineRig
                                  drive one subject, call by call, with every oracle watching; raise Violation
    World, ManagerWorld, EngineWorld
                                  the tiny sizes that a rig runs in
    SCENARIOS, run_scenario       failures of the field, ready to run on a scheduler
    pressure_differences          what of an engine's answers is another one when memory is short
    ShadowKV, NaiveManager        two of those oracles: KV memory without tensors, the memory manager in dicts and lists
    INVARIANTS, memory_violations the numbered invariants, recomputed from public attributes
    expected_hits, hit_violations how many prompt tokens have to be prefix hits
    RandomEngine, random_program  random programs for a rig
    replay, shrink                running one again, on either rig; making a failing one short
    ManagerAdapter                puts another engine's allocator in front of the kit: a few methods of yours, the rest is derived
    held_to, BrokenPromise        a subject whose every answer has the promised shape, or is named
    soak                          thousands of random requests through one scheduler
    machines, strategies          Hypothesis state machines over the rigs, and what they draw (need the extra `testing`)

A subject that cannot do everything says so in its `Capabilities`, and the machines leave those rules out:

    class MyMachine(paged.testing.machines.SchedulerMachine):
        build = staticmethod(lambda world: MyScheduler(world.num_blocks, world.block_size))
        capabilities = Capabilities(fork=False, drafts=False)

    paged.testing.machines.run_machine(MyMachine, few=200)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paged.testing.adapter import ManagerAdapter
from paged.testing.conformance import BrokenPromise, held_to
from paged.testing.engine_rig import EngineRig
from paged.testing.engine_world import EngineRequest, EngineWorld
from paged.testing.expected_hits import expected_hits, hit_violations
from paged.testing.invariants import INVARIANTS, memory as memory_violations
from paged.testing.manager_rig import ManagerRig, ManagerWorld
from paged.testing.naive_model import NaiveManager
from paged.testing.pressure import pressure_differences
from paged.testing.programs import RandomEngine, random_program, random_world
from paged.testing.protocol import Capabilities, KVManager, ServingEngine, StepScheduler, capabilities_of
from paged.testing.scenarios import SCENARIOS, Scenario, run_scenario
from paged.testing.scheduler_rig import SchedulerRig
from paged.testing.shadow_kv import ShadowKV
from paged.testing.shrinking import replay, shrink
from paged.testing.soaking import SoakReport, soak
from paged.testing.stand_in_engine import StandInEngine
from paged.testing.violation import Violation
from paged.testing.world import World

if TYPE_CHECKING:
    from paged.testing import machines, strategies

__all__ = [
    "INVARIANTS",
    "SCENARIOS",
    "BrokenPromise",
    "Capabilities",
    "EngineRequest",
    "EngineRig",
    "EngineWorld",
    "KVManager",
    "ManagerAdapter",
    "ManagerRig",
    "ManagerWorld",
    "NaiveManager",
    "RandomEngine",
    "Scenario",
    "SchedulerRig",
    "ServingEngine",
    "ShadowKV",
    "SoakReport",
    "StandInEngine",
    "StepScheduler",
    "Violation",
    "World",
    "capabilities_of",
    "expected_hits",
    "held_to",
    "hit_violations",
    "machines",
    "memory_violations",
    "pressure_differences",
    "random_program",
    "random_world",
    "replay",
    "run_scenario",
    "shrink",
    "soak",
    "strategies",
]


if not TYPE_CHECKING:
    # Hypothesis is an extra: the rigs, the soak and the oracles work without it.
    def __getattr__(name: str) -> Any:
        if name in ("machines", "strategies"):
            return import_module(f"paged.testing.{name}")
        raise AttributeError(f"module 'paged.testing' has no attribute {name!r}")
