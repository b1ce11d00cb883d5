"""One simulation of a search: run until it ends, or until it cannot meet its targets any more."""

import time
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.study.simulator.scenario import Load, Scenario
from paged.study.simulator.simulation import Simulation
from paged.study.simulator.targets import Promise, Targets, Watch
from paged.study.traces import Trace

LOOK_EVERY = 256
"""Steps between two looks at the targets: a look costs two passes over the requests, and the verdict does not depend on when it comes."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario, of whose requests this replica gets every `replicas`-th; `targets`, by which the run is given up. None: it is not."""

    scenario: Scenario
    replica: int = 0
    replicas: int = 1
    targets: Targets | None = None


class Tally(msgspec.Struct, frozen=True):
    """What targets ask of a simulation, small enough to cross processes.

    broken        the promise for which the run was given up; None: it went to its end
    num_rejected  requests that the pool could never hold
    num_cut_off   output tokens that were not written because the pool could not hold their request whole; 0 of a run that was given up
    ttft_s, longest_gap_s
                  float64 [requests of the replica], NaN for who has none
    gaps_s, gap_counts
                  gaps between tokens, float64 [n] rising, and how many tokens had each, int64 [n]
    """

    broken: Promise | None
    num_rejected: int
    num_cut_off: int
    ttft_s: NDArray[np.float64]
    longest_gap_s: NDArray[np.float64]
    gaps_s: NDArray[np.float64]
    gap_counts: NDArray[np.int64]
    steps: int
    wall_s: float


def tried(trial: Trial) -> Tally:
    """Run it. Raises what a scenario's parts raise, and SimulationStuck."""
    started = time.perf_counter()
    whole = trace_of(trial.scenario.load)
    part = whole if trial.replicas == 1 else whole.dealt(trial.replica, trial.replicas)
    simulation = trial.scenario.simulation(trace=part)
    watch = None if trial.targets is None else Watch(trial.targets, whole)
    broken = None
    for number, _ in enumerate(simulation.steps(), 1):
        if watch is not None and number % LOOK_EVERY == 0:
            broken = watch.broken(simulation)
            if broken is not None:
                break
    return _tally(simulation, broken, started)


# The probes of one search over memory or devices share a load, and each of many replicas would read the file again.
@lru_cache(maxsize=4)
def trace_of(load: Load) -> Trace:
    """The load's trace. Raises what `Load.build` raises."""
    return load.build()


def _tally(simulation: Simulation, broken: Promise | None, started: float) -> Tally:
    latencies = simulation.latencies
    ttft_s = latencies.ttft_of_each()
    gaps, places = np.unique(latencies.gaps()[0], return_inverse=True)
    served = simulation.trace.output_tokens[~np.isnan(ttft_s)]
    return Tally(
        broken=broken,
        num_rejected=simulation.scheduler.counts()["rejected"],
        num_cut_off=0 if broken else int(served.sum()) - simulation.num_output_tokens,
        ttft_s=ttft_s,
        longest_gap_s=latencies.longest_gap_of_each(),
        gaps_s=gaps,
        gap_counts=np.bincount(places, latencies.gaps()[1], len(gaps)).astype(np.int64),
        steps=simulation.num_steps,
        wall_s=time.perf_counter() - started,
    )
