"""The simulator: the real `BlockManager` and `Scheduler` on a virtual clock, with a cost model in place of the model."""

from paged.study.hardware.step_work import StepTime
from paged.study.simulator.binding import Binding, Effect, what_binds
from paged.study.simulator.closed_loops import Cell, by_engine, closed_loops
from paged.study.simulator.ledger import UNBOUNDED
from paged.study.simulator.plan import Find, Miss, P99s, Plan, Probe, Progress, Targets
from paged.study.simulator.planning import plans
from paged.study.simulator.recorded_run import read_run
from paged.study.simulator.recording import Recording, decision_of, differences, predict, record, replay
from paged.study.simulator.replicas import ROUTERS, Replicas, Routing
from paged.study.simulator.result import Percentiles, SimulationResult, Spread
from paged.study.simulator.scenario import Device, Load, Outcome, Scenario, outcome_of, run
from paged.study.simulator.sessions import KEEPS, TURN_GROUPS, SessionResult, SessionRun, Tiers
from paged.study.simulator.simulation import Simulation, Step
from paged.study.simulator.stretch import work_of
from paged.study.simulator.study import by_seed, grid, grouped, interval, run_all
from paged.study.simulator.trace_facts import Lengths, TraceFacts
from paged.study.simulator.validation import (
    METRICS,
    STATISTICS,
    RunOptions,
    Validation,
    engine_named,
    engine_names,
    validated,
)

__all__ = [
    "KEEPS",
    "METRICS",
    "ROUTERS",
    "STATISTICS",
    "TURN_GROUPS",
    "UNBOUNDED",
    "Binding",
    "Cell",
    "Device",
    "Effect",
    "Find",
    "Lengths",
    "Load",
    "Miss",
    "Outcome",
    "P99s",
    "Percentiles",
    "Plan",
    "Probe",
    "Progress",
    "Recording",
    "Replicas",
    "Routing",
    "RunOptions",
    "Scenario",
    "SessionResult",
    "SessionRun",
    "Simulation",
    "SimulationResult",
    "Spread",
    "Step",
    "StepTime",
    "Targets",
    "Tiers",
    "TraceFacts",
    "Validation",
    "by_engine",
    "by_seed",
    "closed_loops",
    "decision_of",
    "differences",
    "engine_named",
    "engine_names",
    "grid",
    "grouped",
    "interval",
    "outcome_of",
    "plans",
    "predict",
    "read_run",
    "record",
    "replay",
    "run",
    "run_all",
    "validated",
    "what_binds",
    "work_of",
]
