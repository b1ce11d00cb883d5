"""Trials of searches, each a simulation that runs to its end or until it can no longer meet its targets; the verdict on a value; and searches side by
side, which yield rounds of trials, that run in this process or in others, and receive their tallies.
"""

import time
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import lru_cache
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.study.limits import at_least
from paged.study.simulator.plan import Miss, P99s, Probe, Promise, Targets
from paged.study.simulator.result import Percentiles
from paged.study.simulator.scenario import Load, Scenario
from paged.study.simulator.simulation import Simulation
from paged.study.simulator.workers import processes
from paged.study.traces import Trace

LOOK_EVERY = 256
"""Steps between two checks of the targets: a check costs two passes over the requests, and the verdict does not depend on its time."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario, of whose requests this replica gets every `replicas`-th. The run ends early when it can no longer meet `targets`; None: it does not."""

    scenario: Scenario
    replica: int = 0
    replicas: int = 1
    targets: Targets | None = None


class Tally(msgspec.Struct, frozen=True):
    """The figures of a simulation by which targets are judged, small enough to cross processes.

    broken        the promise whose breach ended the run early; None: it ran to its end
    num_rejected  requests that the pool could never hold
    num_cut_off   output tokens that were not written because the pool could not hold their request whole; 0 of a run that ended early
    ttft_s, longest_gap_s
                  float64 [requests of the replica], NaN for requests without one
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
    """Run a trial. Raises what a scenario's parts raise, and SimulationStuck."""
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
    latencies = simulation.latencies
    ttft_s, (gaps, counts) = latencies.ttft, latencies.gaps()
    distinct, places = np.unique(gaps, return_inverse=True)
    served = simulation.trace.output_tokens[~np.isnan(ttft_s)]
    return Tally(
        broken=broken,
        num_rejected=simulation.scheduler.counts()["rejected"],
        num_cut_off=0 if broken else int(served.sum()) - simulation.ledger.output_tokens,
        ttft_s=ttft_s,
        longest_gap_s=latencies.longest_gap,
        gaps_s=distinct,
        gap_counts=np.bincount(places, counts, len(distinct)).astype(np.int64),
        steps=simulation.ledger.num_steps,
        wall_s=time.perf_counter() - started,
    )


# The probes of a search over memory or devices share a load, which each of many replicas would read again.
@lru_cache(maxsize=4)
def trace_of(load: Load) -> Trace:
    """Return the load's trace. Raises what `Load.build` raises."""
    return load.build()


class Watch:
    """Finds promises that a running simulation has already broken, whatever follows.

    A 99th percentile (nearest rank) of n values is above a limit exactly if more than ⌊n ÷ 100⌋ of them are. Values do not go away, and n is at most
    that of the whole trace. So once more than a hundredth of that is above the limit, the target is missed. A judgement at the end of the run gives
    the same verdict.
    """

    def __init__(self, targets: Targets, trace: Trace) -> None:
        """`trace`: all requests that are judged together, of which the simulation may run a part."""
        outputs = trace.output_tokens
        self._targets = targets
        self._spared: dict[Promise, int] = {
            "ttft_s": Percentiles.spared(len(trace)),
            "gap_s": Percentiles.spared(int((outputs > 1).sum())),
            "itl_s": Percentiles.spared(int((outputs - 1).sum())),
        }
        self._num_notes = self._num_gaps_over = 0

    def broken(self, simulation: Simulation) -> Promise | None:
        """Return the first promise that cannot be kept any more; None: there is none. A watch is for one simulation."""
        if simulation.scheduler.counts()["rejected"]:
            return "rejected"
        for name, limit in self._targets.given():
            if self._num_over(name, limit, simulation) > self._spared[name]:
                return name
        return None

    def _num_over(self, name: Promise, limit: float, simulation: Simulation) -> int:
        latencies = simulation.latencies
        if name != "itl_s":
            # A request without a value has NaN, which is not above anything.
            return int(((latencies.ttft if name == "ttft_s" else latencies.longest_gap) > limit).sum())
        gaps, counts = latencies.gaps(self._num_notes)
        self._num_notes = latencies.num_notes
        self._num_gaps_over += int(counts[gaps > limit].sum())
        return self._num_gaps_over


class Round(msgspec.Struct, frozen=True):
    """The trials of a value: one for each replica, seed after seed."""

    value: float
    replicas: int
    targets: Targets
    trials: tuple[Trial, ...]

    def misses(self, tallies: Sequence[Tally]) -> tuple[Miss, ...] | None:
        """Return the promises that the first tallies, in order of the trials, show as broken: () if all trials keep them, None while that is open.

        Call it after each tally. The first seed with a broken promise decides, whichever ran beside it.
        """
        last = tallies[-1]
        if last.broken is not None:
            limit = dict(self.targets.given()).get(last.broken, 0)
            return (Miss(last.broken, limit, None),)
        if len(tallies) % self.replicas == 0:
            found = _misses(tallies[-self.replicas :], self.targets)
            if found:
                return found
        return () if len(tallies) == len(self.trials) else None

    def probe(self, tallies: Sequence[Tally]) -> Probe:
        """Return the probe of these tallies, which decided."""
        misses = self.misses(tallies)
        assert misses is not None
        is_whole = tallies[-1].broken is None
        seeds = [tallies[i : i + self.replicas] for i in range(0, len(tallies), self.replicas)] if is_whole else []
        return Probe(
            value=self.value,
            misses=misses,
            p99=_highest(list(map(_p99s, seeds))) if is_whole else None,
            ttft_by_quarter_s=max(map(_ttft_by_quarter, seeds), key=lambda quarters: quarters[-1] or 0.0, default=()),
            simulations=len(tallies),
            steps=sum(tally.steps for tally in tallies),
            wall_s=sum(tally.wall_s for tally in tallies),
        )


def _misses(tallies: Sequence[Tally], targets: Targets) -> tuple[Miss, ...]:
    """Return the misses of the replicas of one seed, which ran to their end."""
    p99 = _p99s(tallies)
    late = [(name, limit, getattr(p99, name)) for name, limit in targets.given()]
    found = [Miss(name, limit, seconds) for name, limit, seconds in late if seconds is not None and seconds > limit]
    promises: tuple[Promise, ...] = ("rejected", "cut_off")
    counts = ((name, sum(getattr(tally, f"num_{name}") for tally in tallies)) for name in promises)
    return (*found, *(Miss(name, 0, count) for name, count in counts if count))


def _p99s(tallies: Sequence[Tally]) -> P99s:
    ttft, longest_gap, gaps, counts = (
        np.concatenate([getattr(tally, name) for tally in tallies])
        for name in ("ttft_s", "longest_gap_s", "gaps_s", "gap_counts")
    )
    return P99s(Percentiles.of(ttft).p99, Percentiles.of(longest_gap).p99, Percentiles.of(gaps, counts).p99)


def _highest(found: Sequence[P99s]) -> P99s:
    of_each = zip(*map(msgspec.structs.astuple, found))
    return P99s(*(max((seconds for seconds in each if seconds is not None), default=None) for each in of_each))


def _ttft_by_quarter(tallies: Sequence[Tally]) -> tuple[float | None, ...]:
    """Return the median times to first token of one seed. Replicas get requests in turn, so each has a quarter of its own in each of the trace's."""
    quarters = zip(*(np.array_split(tally.ttft_s, 4) for tally in tallies))
    return tuple(Percentiles.of(np.concatenate(parts)).p50 for parts in quarters)


T = TypeVar("T")
Search = Generator[Round, list[Tally], T]
"""Yields rounds, receives the tallies that decided each, and returns its result."""


def driven(searches: Sequence[Search[T]], *, jobs: int = 1) -> list[T]:
    """Run searches and return their results: with one job one after another in this process, else all at once in `jobs` processes.

    Results do not depend on `jobs`. Raises InvalidConfig below one job, and what a trial raises, which ends the other searches.
    """
    at_least("jobs", jobs, 1)
    return [_alone(search) for search in searches] if jobs == 1 else _side_by_side(searches, jobs)


def _alone(search: Search[T]) -> T:
    tallies = None
    while True:
        try:
            asked = _sent(search, tallies)
        except StopIteration as end:
            return end.value
        tallies = []
        for trial in asked.trials:
            tallies.append(tried(trial))
            if asked.misses(tallies) is not None:
                break


def _side_by_side(searches: Sequence[Search[T]], jobs: int) -> list[T]:
    found: dict[int, T] = {}
    under_way: dict[int, tuple[Round, list[Future[Tally]]]] = {}
    with processes(jobs) as pool:

        def go_on(place: int, tallies: list[Tally] | None) -> None:
            try:
                asked = _sent(searches[place], tallies)
            except StopIteration as end:
                found[place] = end.value
                under_way.pop(place, None)
            else:
                under_way[place] = asked, [pool.submit(tried, trial) for trial in asked.trials]

        for place in range(len(searches)):
            go_on(place, None)
        while under_way:
            running = [future for _, futures in under_way.values() for future in futures if not future.done()]
            wait(running, return_when=FIRST_COMPLETED)
            for place, (asked, futures) in list(under_way.items()):
                tallies = _deciding(asked, futures)
                if tallies is not None:
                    # Cancel the seeds after the deciding one: else the report would depend on which process is faster.
                    for future in futures:
                        future.cancel()
                    go_on(place, tallies)
    return [found[place] for place in sorted(found)]


def _sent(search: Search[T], tallies: list[Tally] | None) -> Round:
    return next(search) if tallies is None else search.send(tallies)


def _deciding(asked: Round, futures: list[Future[Tally]]) -> list[Tally] | None:
    """Return the first tallies, up to the one that decides; None while one of them is missing."""
    tallies: list[Tally] = []
    for future in futures:
        if not future.done():
            return None
        tallies.append(future.result())
        if asked.misses(tallies) is not None:
            return tallies
    return None
