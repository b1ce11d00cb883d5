"""What a replay found: one struct, ready for JSON.

Knows figures and units. Does not know how they are shown.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray


class Percentiles(msgspec.Struct, frozen=True):
    """The 50th, 90th and 99th percentile and the maximum of a set of seconds; all None for an empty set."""

    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, seconds: NDArray[np.float64]) -> "Percentiles":
        if not len(seconds):
            return cls(None, None, None, None)
        # The nearest rank: a value that was seen, never one between two.
        p50, p90, p99 = np.percentile(seconds, [50, 90, 99], method="inverted_cdf").tolist()
        return cls(p50, p90, p99, float(seconds.max()))


class Preemptions(msgspec.Struct, frozen=True):
    """How often a running request gave blocks back, by what became of them."""

    recompute: int
    swap: int


class ReplayResult(msgspec.Struct, frozen=True):
    """A replay's figures. Seconds are virtual, but for `wall_s` and `us_per_step`; shares are from 0 to 1."""

    trace: str
    policy: str
    num_blocks: int
    block_size: int
    host_blocks: int
    max_tokens_per_step: int
    max_sequences: int
    prefix_caching: bool

    requests: int
    finished: int
    rejected: int
    """Requests that the pool could never have held."""
    steps: int
    makespan_s: float
    """From the first arrival to the last token."""
    busy_s: float
    """Of it, time in steps: the rest was idle, and skipped."""
    prompt_tokens: int
    """Of the requests that were let in."""
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_s: Percentiles
    """Time to first token, from arrival; a value a request."""
    itl_s: Percentiles
    """Inter-token latency: gaps between tokens; a value a gap."""
    longest_gap_s: Percentiles
    """Each request's longest gap; a value a request with two tokens or more."""
    e2e_s: Percentiles
    """Arrival to last token; a value a finished request."""

    preemptions: Preemptions
    max_preemptions: int
    """Of one request."""
    peak_block_usage: float
    mean_block_usage: float
    """Weighted by step time."""
    hit_tokens: int
    prefix_hit_rate: float
    """Prompt tokens found in the prefix cache when their request was first let in, of all such prompt tokens."""
    computed_tokens: int
    wasted_tokens: int
    """Computed again because a preemption gave them up."""
    swapped_out_blocks: int
    swapped_in_blocks: int

    checked_steps: int
    violations: int
    """What `check()` found wrong, over all checked steps."""
    violation_messages: tuple[str, ...]
    """The first ten of them."""
    wall_s: float
    us_per_step: float
    """Host time of `schedule` and `update`, a step."""
