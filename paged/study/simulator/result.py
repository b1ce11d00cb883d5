"""The result of a simulation, one struct, ready for JSON; and the times of each request's tokens, of which its percentiles are."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

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
    def of(cls, seconds: NDArray[np.float64], counts: NDArray[np.int64] | None = None) -> "Percentiles":
        """Return the percentiles of float64 [n] without NaN, or of values that occur `counts` times each, int64 [n]."""
        seconds = seconds[~np.isnan(seconds)] if counts is None else seconds
        if not len(seconds):
            return cls(None, None, None, None)
        # Nearest rank: always one of the values.
        order = np.argsort(seconds, kind="stable")
        ranked = seconds[order]
        upto = np.arange(1, len(seconds) + 1) if counts is None else counts[order].cumsum()
        total = int(upto[-1])
        ranks = [-(-total * percent // 100) for percent in (50, 90, 99)]
        p50, p90, p99 = ranked[np.searchsorted(upto, ranks)].tolist()
        return cls(p50, p90, p99, float(ranked[-1]))

    @staticmethod
    def spared(total: int) -> int:
        """Return how many of `total` values may be above a limit that their 99th percentile is not above."""
        return total // 100


class Preemptions(msgspec.Struct, frozen=True):
    """How often a running request gave blocks back, by what happened to their content."""

    recompute: int
    swap: int


class Spread(msgspec.Struct, frozen=True):
    """Shares of memory from 0 to 1, weighted by time.

    of_held   slots with computed KV of live sequences ÷ slots of blocks that sequences hold or that are reserved for them
    of_pool   the same slots ÷ all slots of the pool
    """

    of_held: float
    of_pool: float


class SimulationResult(msgspec.Struct, frozen=True):
    """A simulation's figures. Seconds are virtual, but for `wall_s` and `us_per_step`; shares are from 0 to 1."""

    trace: str
    policy: str
    num_blocks: int
    """Pages where layers are of several kinds."""
    block_size: int
    groups: tuple[str, ...]
    """Pages of a block or a sequence for each kind of layer, in words; empty if a block is of all layers."""
    host_blocks: int
    max_tokens_per_step: int | None
    """None: no bound."""
    max_sequences: int
    prefix_caching: bool

    requests: int
    finished: int
    rejected: int
    """Requests that could never fit the pool, and those that were left out as longer than the context."""
    steps: int
    skipped_steps: int
    """Of them, taken at once with others, because they had nothing to decide."""
    makespan_s: float
    """From the first arrival to the last token."""
    busy_s: float
    """Of it, time in steps; the rest was idle."""
    prompt_tokens: int
    """Of the admitted requests."""
    output_tokens: int
    throughput: float
    """Output tokens a second of the makespan."""
    requests_per_s: float
    ttft_s: Percentiles
    """Time to first token, from arrival, of each request."""
    itl_s: Percentiles
    """Inter-token latency, of each gap between two tokens."""
    longest_gap_s: Percentiles
    """Longest gap, of each request with two tokens or more."""
    e2e_s: Percentiles
    """Arrival to last token, of each finished request."""

    preemptions: Preemptions
    max_preemptions: int
    """Of one request."""
    memory: Spread
    """Over all steps."""
    memory_while_waiting: Spread
    """Over the steps after which a request waited; 0 if there are none."""
    peak_block_usage: float
    mean_block_usage: float
    """Blocks that sequences hold ÷ all blocks, weighted by step time."""
    row_occupancy: float
    """Sequences in flight ÷ max_sequences, weighted by step time."""
    token_occupancy: float | None
    """Tokens computed ÷ the budgets of all steps; None without a bound."""
    hit_tokens: int
    prefix_hit_rate: float
    """Share of prompt tokens that were in the prefix cache when their request was first admitted."""
    computed_tokens: int
    wasted_tokens: int
    """Computed again because a preemption gave them up."""
    swapped_out_blocks: int
    swapped_in_blocks: int
    waste: float
    """Tokens computed again, swapped out and swapped in, of all computed."""
    cost_per_million_tokens: float | None
    """Of output tokens; None without a price per hour."""

    checked_steps: int
    violations: int
    """Violations that `check()` found in all checked steps."""
    violation_messages: tuple[str, ...]
    """The first ten of them."""
    wall_s: float
    us_per_step: float
    """Host time of the whole simulation, by step."""

    replicas: int = 1
    router: str | None = None
    """The router among replicas."""
    imbalance: float = 1.0
    """Tokens that the busiest replica computed ÷ the mean."""


def merged(results: Sequence[SimulationResult], router: str, left_out: int) -> SimulationResult:
    """Merge the results of replicas that share latencies: counts add up, and shares are weighted by time in steps."""
    first, num = results[0], len(results)
    busy = sum(each.busy_s for each in results)

    def total(name: str) -> Any:
        return sum(map(attrgetter(name), results))

    def mean(name: str) -> float:
        of = attrgetter(name)
        return sum(of(each) * each.busy_s for each in results) / busy if busy else 0.0

    def spread(name: str) -> Spread:
        return Spread(mean(f"{name}.of_held"), mean(f"{name}.of_pool"))

    counts = {name: total(name) for name in _ADDED}
    # Each replica counts the requests that were left out of the trace.
    counts["rejected"] -= (num - 1) * left_out
    makespan, computed, prompts = first.makespan_s, counts["computed_tokens"], counts["prompt_tokens"]
    # Each replica is paid for until the last token of all, with outputs or without.
    spent = [each.cost_per_million_tokens * each.output_tokens for each in results if each.cost_per_million_tokens]
    cost = num * max(spent) / counts["output_tokens"] if spent else None
    moved = (counts["swapped_out_blocks"] + counts["swapped_in_blocks"]) * first.block_size
    return msgspec.structs.replace(
        first,
        **counts,
        throughput=counts["output_tokens"] / makespan if makespan else 0.0,
        requests_per_s=counts["finished"] / makespan if makespan else 0.0,
        preemptions=Preemptions(total("preemptions.recompute"), total("preemptions.swap")),
        max_preemptions=max(each.max_preemptions for each in results),
        memory=spread("memory"),
        memory_while_waiting=spread("memory_while_waiting"),
        peak_block_usage=max(each.peak_block_usage for each in results),
        mean_block_usage=mean("mean_block_usage"),
        row_occupancy=mean("row_occupancy"),
        token_occupancy=None if first.token_occupancy is None else mean("token_occupancy"),
        prefix_hit_rate=counts["hit_tokens"] / prompts if prompts else 0.0,
        waste=(counts["wasted_tokens"] + moved) / computed if computed else 0.0,
        cost_per_million_tokens=cost,
        violation_messages=sum((each.violation_messages for each in results), ())[:10],
        wall_s=max(each.wall_s for each in results),
        us_per_step=max(each.wall_s for each in results) / max(1, counts["steps"]) * 1e6,
        replicas=num,
        router=router,
        imbalance=max(each.computed_tokens for each in results) * num / computed if computed else 1.0,
    )


_ADDED = (
    "finished", "rejected", "steps", "skipped_steps", "busy_s", "prompt_tokens", "output_tokens", "hit_tokens",
    "computed_tokens", "wasted_tokens", "swapped_out_blocks", "swapped_in_blocks", "checked_steps", "violations",
)  # fmt: skip
"""Counts that add up over replicas."""


Seconds = NDArray[np.float64]


class Latencies:
    """Columns over a trace's requests, float64 [requests]: seconds, NaN for what has not happened.

    arrival      of the request
    first, last  of its first and its latest token
    longest_gap  longest time between two of its tokens
    """

    def __init__(self, num_requests: int) -> None:
        self.arrival, self.first, self.last, self._end, self.longest_gap = np.full((5, num_requests), np.nan)
        # Gaps between tokens, an array for each note, and how many tokens had each of a note's gaps.
        self._gaps: list[Seconds] = []
        self._gap_counts: list[int] = []
        # Percentiles of the gaps, and the number of notes that they are of: replicas share latencies, and each reads them.
        self._itl = 0, Percentiles.of(np.empty(0))

    def arrived(self, request: int, now: float) -> None:
        """Note that the request came."""
        self.arrival[request] = now

    def tokens(self, requests: NDArray[np.int64], now: float) -> None:
        """Note a new token of each of these distinct requests."""
        gaps = now - self.last[requests]
        self.last[requests] = now
        is_first = np.isnan(gaps)
        if is_first.any():
            self.first[requests[is_first]] = now
            requests, gaps = requests[~is_first], gaps[~is_first]
        self._note(requests, gaps, gaps, 1)

    def steady_tokens(self, requests: NDArray[np.int64], times: Seconds) -> None:
        """Note a new token of each of these distinct requests at each of these rising `times`, all after their last ones."""
        self.tokens(requests, float(times[0]))
        gaps = times[1:] - times[:-1]
        if len(gaps) and len(requests):
            self.last[requests] = times[-1]
            self._note(requests, gaps.max(), gaps, len(requests))

    def finished(self, requests: NDArray[np.int64], now: float) -> None:
        """Note that these requests had their last token."""
        self._end[requests] = now

    def _note(self, requests: NDArray[np.int64], longest: Any, gaps: Seconds, count: int) -> None:
        """Note gaps that `count` of these requests had each, and the longest gap of each request."""
        if len(gaps):
            self.longest_gap[requests] = np.fmax(self.longest_gap[requests], longest)
            self._gaps.append(gaps)
            self._gap_counts.append(count)

    @property
    def last_token_s(self) -> float:
        """The time of the latest token of all requests; 0 before the first."""
        return float(np.nanmax(self.last)) if np.isfinite(self.last).any() else 0.0

    @property
    def ttft(self) -> Seconds:
        """Time to first token by request, float64 [requests]."""
        return self.first - self.arrival

    @property
    def e2e(self) -> Seconds:
        """Arrival to last token by request, float64 [requests]; NaN for unfinished requests."""
        return self._end - self.arrival

    @property
    def num_notes(self) -> int:
        """The number of notes of gaps so far."""
        return len(self._gaps)

    def gaps(self, first_note: int = 0) -> tuple[Seconds, NDArray[np.int64]]:
        """Return the noted gaps from that note on, float64 [n], and how many tokens had each, int64 [n]."""
        gaps = self._gaps[first_note:]
        if not gaps:
            return np.empty(0), np.empty(0, np.int64)
        counts = np.repeat(np.array(self._gap_counts[first_note:], np.int64), [len(part) for part in gaps])
        return np.concatenate(gaps), counts

    def percentiles(self) -> dict[str, Any]:
        """Return `Percentiles` of ttft_s, itl_s (all gaps), longest_gap_s and e2e_s by these names."""
        if self._itl[0] != self.num_notes:
            self._itl = self.num_notes, Percentiles.of(*self.gaps())
        return {
            "ttft_s": Percentiles.of(self.ttft),
            "itl_s": self._itl[1],
            "longest_gap_s": Percentiles.of(self.longest_gap),
            "e2e_s": Percentiles.of(self.e2e),
        }
