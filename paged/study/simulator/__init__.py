"""The simulator: the real `BlockManager` and `Scheduler` on a virtual clock, with a cost model in place of the model."""

from paged.study.simulator.binding import Binding, Effect, what_binds
from paged.study.simulator.closed_loops import Cell, by_engine, closed_loops
from paged.study.simulator.decisions import Decision, decision_of, differences
from paged.study.simulator.engine_description import EngineDescription, engine_named, engine_names
from paged.study.simulator.ledger import UNBOUNDED
from paged.study.simulator.plan import Find, Plan, Progress
from paged.study.simulator.planning import plans
from paged.study.simulator.recorded_run import RecordedRun, RunSetup, read_run
from paged.study.simulator.recording import Recording, predict, record, replay
from paged.study.simulator.replicas import Replicas
from paged.study.simulator.result import Percentiles, Preemptions, SimulationResult, Spread
from paged.study.simulator.routers import ROUTERS, Routing
from paged.study.simulator.scenario import Device, Load, Outcome, Scenario, outcome_of, run
from paged.study.simulator.sessions import KEEPS, TURN_GROUPS, SessionResult, SessionRun, Tiers
from paged.study.simulator.simulation import Simulation, Step, simulate
from paged.study.simulator.step_time import StepTime
from paged.study.simulator.study import Interval, by_seed, grid, grouped, interval, run_all
from paged.study.simulator.targets import Miss, P99s, Probe, Targets
from paged.study.simulator.trace_facts import Lengths, TraceFacts
from paged.study.simulator.validation import METRICS, STATISTICS, Figures, RunOptions, Validation, validated
from paged.study.simulator.work import work_of

__all__ = [
    "KEEPS",
    "METRICS",
    "ROUTERS",
    "STATISTICS",
    "TURN_GROUPS",
    "UNBOUNDED",
    "Binding",
    "Cell",
    "Decision",
    "Device",
    "Effect",
    "EngineDescription",
    "Figures",
    "Find",
    "Interval",
    "Lengths",
    "Load",
    "Miss",
    "Outcome",
    "P99s",
    "Percentiles",
    "Plan",
    "Preemptions",
    "Probe",
    "Progress",
    "RecordedRun",
    "Recording",
    "Replicas",
    "Routing",
    "RunOptions",
    "RunSetup",
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
    "simulate",
    "validated",
    "what_binds",
    "work_of",
]
