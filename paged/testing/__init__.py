"""A property-based test kit for KV-cache managers, schedulers and serving engines: ours, or yours.

Rigs (`ManagerRig`, `SchedulerRig`, `EngineRig`) drive one subject, call by call, with every oracle watching, and raise
`Violation`. `machines` and `strategies`, which need the extra `testing`, are Hypothesis state machines over the rigs,
and what they draw. A subject that cannot do everything says so in its `Capabilities`, and the machines leave those
rules out:

    class MyMachine(paged.testing.machines.SchedulerMachine):
        build = staticmethod(lambda world: MyScheduler(world.num_blocks, world.block_size))
        capabilities = Capabilities(fork=False, drafts=False)

    paged.testing.machines.run_machine(MyMachine, few=200)

docs/testing.md says what else there is.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paged.testing import machines, strategies
    from paged.testing.adapter import ManagerAdapter
    from paged.testing.conformance import BrokenPromise, held_to
    from paged.testing.engine_rig import EngineRig
    from paged.testing.engine_world import EngineRequest, EngineWorld
    from paged.testing.invariants import INVARIANTS, memory_violations
    from paged.testing.manager_rig import ManagerRig, ManagerWorld
    from paged.testing.naive_model import NaiveManager
    from paged.testing.prefix_hits import expected_hits, hit_violations
    from paged.testing.pressure import pressure_differences
    from paged.testing.programs import RandomEngine, SoakReport, random_program, random_world, soak
    from paged.testing.protocol import Capabilities, KVManager, ServingEngine, StepScheduler, capabilities_of
    from paged.testing.scenarios import SCENARIOS, Scenario, run_scenario
    from paged.testing.scheduler_rig import SchedulerRig
    from paged.testing.shadow_groups import ShadowGroups, views_of
    from paged.testing.shadow_kv import ShadowKV
    from paged.testing.shrinking import replay, shrink
    from paged.testing.stand_in_engine import StandInEngine
    from paged.testing.violation import Violation
    from paged.testing.world import World

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
    "ShadowGroups",
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
    "views_of",
]

# pytest imports this package, for its plugin, wherever paged is installed; so nothing is loaded before its name is
# used.
_PUBLIC_NAMES = {
    "adapter": ("ManagerAdapter",),
    "conformance": ("BrokenPromise", "held_to"),
    "engine_rig": ("EngineRig",),
    "engine_world": ("EngineRequest", "EngineWorld"),
    "prefix_hits": ("expected_hits", "hit_violations"),
    "invariants": ("INVARIANTS", "memory_violations"),
    "manager_rig": ("ManagerRig", "ManagerWorld"),
    "naive_model": ("NaiveManager",),
    "pressure": ("pressure_differences",),
    "programs": ("RandomEngine", "SoakReport", "random_program", "random_world", "soak"),
    "protocol": ("Capabilities", "KVManager", "ServingEngine", "StepScheduler", "capabilities_of"),
    "scenarios": ("SCENARIOS", "Scenario", "run_scenario"),
    "scheduler_rig": ("SchedulerRig",),
    "shadow_groups": ("ShadowGroups", "views_of"),
    "shadow_kv": ("ShadowKV",),
    "shrinking": ("replay", "shrink"),
    "stand_in_engine": ("StandInEngine",),
    "violation": ("Violation",),
    "world": ("World",),
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in ("machines", "strategies"):
            # These two need Hypothesis.
            return import_module(f"paged.testing.{name}")
        for home, public in _PUBLIC_NAMES.items():
            if name in public:
                return getattr(import_module(f"paged.testing.{home}"), name)
        raise AttributeError(f"module 'paged.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
