"""What a service promises of its latencies, and what of it a simulation breaks."""

from typing import Literal

import msgspec

from paged.errors import InvalidConfig
from paged.study.simulator.result import Percentiles
from paged.study.simulator.simulation import Simulation
from paged.study.traces import Trace
from paged.study.traces.limits import positive

Promise = Literal["ttft_s", "gap_s", "itl_s", "rejected", "cut_off"]
"""A target by name; or what is promised always: that no request is rejected, and no output cut off, because the pool is too small for it."""


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """The most that 99th percentiles may be, in seconds; None: no such target. Raises InvalidConfig without any, and for what is no time.

    ttft_s  of time to first token, a value a request
    gap_s   of the longest gap between two tokens, a value a request
    itl_s   of all gaps between two tokens
    """

    ttft_s: float | None = None
    gap_s: float | None = None
    itl_s: float | None = None

    def __post_init__(self) -> None:
        if not self.given():
            raise InvalidConfig("no target was given; at least one of ttft, gap and itl is needed")
        for name, seconds in self.given():
            positive(f"the target {name}", seconds)

    def given(self) -> list[tuple[Promise, float]]:
        """Names and seconds of the targets that there are."""
        targets: tuple[tuple[Promise, float | None], ...] = (
            ("ttft_s", self.ttft_s),
            ("gap_s", self.gap_s),
            ("itl_s", self.itl_s),
        )
        return [(name, seconds) for name, seconds in targets if seconds is not None]


class Miss(msgspec.Struct, frozen=True):
    """A promise that was broken.

    limit  seconds; 0 requests of `rejected`, 0 tokens of `cut_off`
    found  what it was instead, in the same unit; None where the simulation was given up as soon as it could not be `limit` any more
    """

    promise: Promise
    limit: float
    found: float | None


class Watch:
    """Whether a simulation that is under way has broken a promise already, whatever is still to come.

    A 99th percentile (nearest rank) of n values is above a limit exactly when more than ⌊n ÷ 100⌋ of them are. No value that came is taken
    back, and n is at most what the whole trace gives. So once more than a hundredth of that is above the limit, the target is missed; and a
    run that is never given up is judged at its end. Both verdicts are the same.
    """

    def __init__(self, targets: Targets, trace: Trace) -> None:
        """`trace`: all requests that are judged together; the simulation may run a part of them."""
        outputs = trace.output_tokens
        self._targets = targets
        self._spared: dict[Promise, int] = {
            "ttft_s": Percentiles.spared(len(trace)),
            "gap_s": Percentiles.spared(int((outputs > 1).sum())),
            "itl_s": Percentiles.spared(int((outputs - 1).sum())),
        }
        self._num_notes = self._num_gaps_over = 0

    def broken(self, simulation: Simulation) -> Promise | None:
        """The first promise that cannot be kept any more. To be asked about one simulation only, as often as one likes."""
        if simulation.scheduler.counts()["rejected"]:
            return "rejected"
        for name, limit in self._targets.given():
            if self._num_over(name, limit, simulation) > self._spared[name]:
                return name
        return None

    def _num_over(self, name: Promise, limit: float, simulation: Simulation) -> int:
        latencies = simulation.latencies
        # Who has no value yet has NaN, which is not above anything.
        if name == "ttft_s":
            return int((latencies.ttft_of_each() > limit).sum())
        if name == "gap_s":
            return int((latencies.longest_gap_of_each() > limit).sum())
        gaps, counts = latencies.gaps(self._num_notes)
        self._num_notes = latencies.num_notes
        self._num_gaps_over += int(counts[gaps > limit].sum())
        return self._num_gaps_over
