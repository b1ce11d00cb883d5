"""One value of a search, tried: its simulations over seeds and replicas, and what they say together."""

from collections.abc import Sequence

import msgspec
import numpy as np

from paged.study.simulator.result import Percentiles
from paged.study.simulator.targets import Miss, Targets
from paged.study.simulator.trial import Tally, Trial


class P99s(msgspec.Struct, frozen=True):
    """99th percentiles over all replicas, of the seed in which each is highest, in seconds; None where there is no value."""

    ttft_s: float | None
    gap_s: float | None
    itl_s: float | None


class Probe(msgspec.Struct, frozen=True):
    """A value that was tried.

    misses       the promises that were broken; none: it met
    p99          None where a simulation was given up
    ttft_by_quarter_s
                 median time to first token of each quarter of the requests by arrival, of the seed in which the last one waits longest:
                 what a queue that only grows looks like. Empty where a simulation was given up
    simulations  how many were run: seeds × replicas, fewer where one of them decided
    """

    value: float
    misses: tuple[Miss, ...]
    p99: P99s | None
    ttft_by_quarter_s: tuple[float | None, ...]
    simulations: int
    steps: int
    wall_s: float

    @property
    def met(self) -> bool:
        """Whether every promise was kept, with every seed."""
        return not self.misses


class Round(msgspec.Struct, frozen=True):
    """What is to be run for a value: a trial for each replica, seed after seed."""

    value: float
    replicas: int
    targets: Targets
    trials: tuple[Trial, ...]

    def misses(self, tallies: Sequence[Tally]) -> tuple[Miss, ...] | None:
        """What the first tallies, in order of the trials, say: promises broken; none of all; None while that is open.

        To be asked after each tally. The first seed that breaks one decides, whichever ran beside it.
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
        """What these tallies, which decided, come to."""
        misses = self.misses(tallies)
        assert misses is not None
        is_whole = tallies[-1].broken is None
        seeds = [tallies[i : i + self.replicas] for i in range(0, len(tallies), self.replicas)] if is_whole else []
        return Probe(
            value=self.value,
            misses=misses,
            p99=_highest([_p99s(seed) for seed in seeds]) if is_whole else None,
            ttft_by_quarter_s=max(map(_ttft_by_quarter, seeds), key=lambda quarters: quarters[-1] or 0.0, default=()),
            simulations=len(tallies),
            steps=sum(tally.steps for tally in tallies),
            wall_s=sum(tally.wall_s for tally in tallies),
        )


def _misses(tallies: Sequence[Tally], targets: Targets) -> tuple[Miss, ...]:
    """Of the replicas of one seed, which went to their end."""
    p99 = _p99s(tallies)
    late = [(name, limit, getattr(p99, name)) for name, limit in targets.given()]
    found = [Miss(name, limit, seconds) for name, limit, seconds in late if seconds is not None and seconds > limit]
    num_rejected, num_cut_off = (
        sum(getattr(tally, name) for tally in tallies) for name in ("num_rejected", "num_cut_off")
    )
    if num_rejected:
        found.append(Miss("rejected", 0, num_rejected))
    if num_cut_off:
        found.append(Miss("cut_off", 0, num_cut_off))
    return tuple(found)


def _p99s(tallies: Sequence[Tally]) -> P99s:
    ttft = np.concatenate([tally.ttft_s for tally in tallies])
    longest_gap = np.concatenate([tally.longest_gap_s for tally in tallies])
    gaps = np.concatenate([tally.gaps_s for tally in tallies])
    counts = np.concatenate([tally.gap_counts for tally in tallies])
    return P99s(
        Percentiles.of(ttft[~np.isnan(ttft)]).p99,
        Percentiles.of(longest_gap[~np.isnan(longest_gap)]).p99,
        Percentiles.of(gaps, counts).p99,
    )


def _highest(found: Sequence[P99s]) -> P99s:
    def highest(name: str) -> float | None:
        return max((seconds for p99 in found if (seconds := getattr(p99, name)) is not None), default=None)

    return P99s(highest("ttft_s"), highest("gap_s"), highest("itl_s"))


def _ttft_by_quarter(tallies: Sequence[Tally]) -> tuple[float | None, ...]:
    """Of the replicas of one seed: dealt in turn, each has a quarter of its requests in each quarter of the trace."""
    quarters = zip(*(np.array_split(tally.ttft_s, 4) for tally in tallies))
    together = [np.concatenate(parts) for parts in quarters]
    return tuple(Percentiles.of(ttft[~np.isnan(ttft)]).p50 for ttft in together)
