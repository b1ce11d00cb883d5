"""A service's targets for latencies, and the outcome at a value of a search."""

from typing import Literal

import msgspec

from paged.base.fields import Finite
from paged.errors import InvalidConfig
from paged.study.limits import check

Promise = Literal["ttft_s", "gap_s", "itl_s", "rejected", "cut_off"]
"""A target by name; or one of every service: no request is rejected, and no output cut off, because the pool is too small for it."""
_TARGETS: tuple[Promise, ...] = ("ttft_s", "gap_s", "itl_s")


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """The most that 99th percentiles may be, in seconds; None: no such target. Raises InvalidConfig without a target, and for one that is not above 0.

    ttft_s  of time to first token, a value a request
    gap_s   of the longest gap between two tokens, a value a request
    itl_s   of all gaps between two tokens
    """

    ttft_s: Finite | None = None
    gap_s: Finite | None = None
    itl_s: Finite | None = None

    def __post_init__(self) -> None:
        if not self.given():
            raise InvalidConfig("no target was given; at least one of ttft, gap and itl is needed")
        check(self)

    def given(self) -> list[tuple[Promise, float]]:
        """Return names and seconds of the targets that are set."""
        return [(name, seconds) for name in _TARGETS if (seconds := getattr(self, name)) is not None]


class Miss(msgspec.Struct, frozen=True):
    """A promise that was broken.

    limit  seconds; 0 requests for `rejected`, 0 tokens for `cut_off`
    found  the figure, in the same unit; None if the simulation ended early, when it could no longer meet `limit`
    """

    promise: Promise
    limit: float
    found: float | None


class P99s(msgspec.Struct, frozen=True):
    """99th percentiles over all replicas, each of the seed in which it is highest, in seconds; None without a value."""

    ttft_s: float | None
    gap_s: float | None
    itl_s: float | None


class Probe(msgspec.Struct, frozen=True):
    """A value that was tried.

    misses       the broken promises; empty: it met
    p99          None if a simulation ended early
    ttft_by_quarter_s
                 median time to first token of each quarter of the requests by arrival, of the seed in which the last quarter waits longest: it
                 shows a queue that only grows. Empty if a simulation ended early
    simulations  that were run: seeds × replicas, or fewer if one decided before
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
