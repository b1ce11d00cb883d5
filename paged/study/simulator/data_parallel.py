"""Data-parallel ranks: each a scheduler and a pool of its own, and a balancer that says whose the next request is.

Ranks of a dense model run on their own. Those of a model with experts share these, so they step together: a step ends when the slowest has,
and who has no request computes a token of nobody. As vLLM has both.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from paged import Scheduler
from paged.study.hardware import CostModel, StepWork
from paged.study.hardware.measured_step import MeasuredStep
from paged.study.hardware.roofline import Roofline
from paged.study.simulator.arrivals import Arrivals
from paged.study.simulator.latencies import Latencies
from paged.study.simulator.simulation import Simulation, Step
from paged.study.traces import Trace

_WAITING_WEIGHS = 4
"""How many running sequences one that waits counts for, in vLLM's choice of a rank."""
_OF_NOBODY = StepWork(
    computed_tokens=1.0, context_tokens=1.0, attended_pairs=1.0, decode_rows=1.0, decode_context=1.0, rows=1.0
)


class DataParallel:
    """A trace on its way through several schedulers.

    ranks    their simulations, which share arrivals and latencies
    rank_of  the rank of each request, int64 [requests]; −1: it has not come
    """

    def __init__(
        self,
        trace: Trace,
        schedulers: Sequence[Scheduler],
        cost_model: CostModel,
        *,
        clients: int | None = None,
        runs_ahead: bool = False,
    ) -> None:
        self.latencies = Latencies(len(trace))
        self._arrivals = Arrivals(trace, clients)
        self.ranks = [
            Simulation(
                trace, scheduler, cost_model, runs_ahead=runs_ahead, shared=self._arrivals, latencies=self.latencies
            )
            for scheduler in schedulers
        ]
        for rank in self.ranks:
            rank.deliver = self._deliver
        self.rank_of: NDArray[np.int64] = np.full(len(trace), -1, np.int64)
        self._step = cost_model if isinstance(cost_model, MeasuredStep | Roofline) else None

    def steps(self) -> Iterator[Step]:
        """Run to the end, yielding after each step of a rank. Raises SimulationStuck rather than spin."""
        is_lockstep = self._step is not None and self._step.is_lockstep
        while self._arrivals.are_left or any(rank.scheduler.has_unfinished for rank in self.ranks):
            busy = [rank for rank in self.ranks if rank.scheduler.has_unfinished]
            if not busy:
                # Nobody is here: skip to when somebody comes.
                now_s = self._arrivals.next_s()
                for rank in self.ranks:
                    rank.now_s = max(rank.now_s, now_s)
                self._deliver(max(rank.now_s for rank in self.ranks))
            elif is_lockstep:
                self._deliver(min(rank.seen_s for rank in busy))
                yield from self._together()
            else:
                # Whoever is furthest behind, so that who comes is told apart by what runs at about that time.
                rank = min(busy, key=lambda rank: rank.now_s)
                self._deliver(rank.seen_s)
                step = rank.advance()
                if step is not None:
                    yield step

    def _together(self) -> Iterator[Step]:
        """A step of all ranks."""
        assert self._step is not None, "ranks that step together are timed by a model on a device"
        batches = [rank.scheduler.schedule(rank.now_s) for rank in self.ranks]
        works = [_OF_NOBODY if batch.is_empty else rank.work_of(batch) for rank, batch in zip(self.ranks, batches)]
        if all(batch.is_empty for batch in batches):
            for rank, batch in zip(self.ranks, batches):
                rank.nothing_ran(batch)
            return
        seconds = self._step.together(works)
        ends_s = max(rank.now_s for rank in self.ranks) + seconds
        for rank, batch, work in zip(self.ranks, batches, works):
            if batch.is_empty:
                rank.scheduler.update(batch, np.empty(0, np.int32), now=ends_s)
                rank.now_s = ends_s
            else:
                yield rank.finish(batch, work, ends_s - rank.now_s)

    def _deliver(self, seen_s: float) -> None:
        """Add who has come until then, each to the rank with the least to do."""
        while (arrival := self._arrivals.next_s()) <= seen_s:
            number = self._arrivals.take()
            loads = [_load(rank.scheduler) for rank in self.ranks]
            self.rank_of[number] = chosen = loads.index(min(loads))
            rank = self.ranks[chosen]
            if not rank.scheduler.has_unfinished:
                rank.now_s = max(rank.now_s, arrival)
            rank.add(number, arrival)


def _load(scheduler: Scheduler) -> int:
    counts = scheduler.counts()
    return _WAITING_WEIGHS * counts["waiting"] + counts["running"]
