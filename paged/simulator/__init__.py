"""The simulator: the real `BlockManager` and `Scheduler` on a virtual clock, with a cost model in place of the model.

Nothing about memory or decisions is written here. Knows traces, clocks and figures. Does not know how anything is shown.
"""

from paged.simulator.result import Percentiles, Preemptions, SimulationResult, Spread
from paged.simulator.scenario import Device, Load, Outcome, Scenario, outcome_of, run
from paged.simulator.simulation import Simulation, SimulationStuck, Step, simulate
from paged.simulator.step_time import StepTime
from paged.simulator.study import Interval, by_seed, grid, interval, run_all
from paged.simulator.timeline import Timeline

__all__ = [
    "Device",
    "Interval",
    "Load",
    "Outcome",
    "Percentiles",
    "Preemptions",
    "Scenario",
    "Simulation",
    "SimulationResult",
    "SimulationStuck",
    "Spread",
    "Step",
    "StepTime",
    "Timeline",
    "by_seed",
    "grid",
    "interval",
    "outcome_of",
    "run",
    "run_all",
    "simulate",
]
