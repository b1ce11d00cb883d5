"""The summary: a figure a line, an outcome a column."""

from collections.abc import Callable, Sequence

import msgspec

from paged.study.report.naming import Named
from paged.study.simulator import Percentiles, SimulationResult

Figure = Callable[[SimulationResult], float | None]


class Line(msgspec.Struct, frozen=True, eq=False):
    """One figure of each outcome.

    best   which end of it is good: max, min, or None where neither is
    """

    name: str
    unit: str
    figure: Figure
    text: Callable[[float], str]
    best: Callable[[Sequence[float]], float] | None = None

    def cells(self, outcomes: Sequence[Named]) -> list[tuple[str, bool]]:
        """A text an outcome, and whether it is the best; none is, where all are equal or alone."""
        values = [self.figure(named.outcome.result) for named in outcomes]
        texts = ["–" if value is None else self.text(value) for value in values]
        known = [value for value in values if value is not None]
        if self.best is None or not known or len(set(texts)) == 1:
            return [(text, False) for text in texts]
        best = self.text(self.best(known))
        return [(text, text == best) for text in texts]


def lines(outcomes: Sequence[Named]) -> list[tuple[str, list[Line]]]:
    """The lines under their headings. What no outcome has (cost without a price) is left out."""
    groups = [
        ("Throughput", _throughput()),
        ("Latency", _latency()),
        ("Memory", _memory()),
        ("Preemptions", _preemptions()),
        ("Requests and steps", _counts()),
    ]
    results = [named.outcome.result for named in outcomes]
    sections = [
        (heading, [line for line in group if any(line.figure(result) is not None for result in results)])
        for heading, group in groups
    ]
    return [(heading, group) for heading, group in sections if group]


def _throughput() -> list[Line]:
    return [
        Line("Output tokens", "tokens/s", lambda r: r.throughput, _one, max),
        Line("Requests", "requests/s", lambda r: r.requests_per_s, _three, max),
        Line("Makespan", "s", lambda r: r.makespan_s, _one, min),
        Line("Price of 1,000,000 output tokens", "", lambda r: r.cost_per_million_tokens, _three, min),
    ]


def _latency() -> list[Line]:
    named: list[tuple[str, Callable[[SimulationResult], Percentiles]]] = [
        ("Time to first token", lambda r: r.ttft_s),
        ("Between tokens", lambda r: r.itl_s),
        ("Longest gap of a request", lambda r: r.longest_gap_s),
        ("End to end", lambda r: r.e2e_s),
    ]
    return [
        Line(f"{name}, {percentile}", "s", _percentile(spread, percentile), _seconds, min)
        for name, spread in named
        for percentile in ("p50", "p90", "p99")
    ]


def _percentile(spread: Callable[[SimulationResult], Percentiles], percentile: str) -> Figure:
    return lambda result: getattr(spread(result), percentile)


def _memory() -> list[Line]:
    return [
        Line("Tokens, of what is held or promised", "%", lambda r: r.memory.of_held, _percent, max),
        Line("Tokens, of the pool", "%", lambda r: r.memory.of_pool, _percent, max),
        Line("… of what is held, while requests wait", "%", lambda r: r.memory_while_waiting.of_held, _percent, max),
        Line("… of the pool, while requests wait", "%", lambda r: r.memory_while_waiting.of_pool, _percent, max),
        Line("Blocks held, mean", "%", lambda r: r.mean_block_usage, _percent),
        Line("Blocks held, peak", "%", lambda r: r.peak_block_usage, _percent),
        Line("Rows in flight, of the most allowed", "%", lambda r: r.row_occupancy, _percent),
        Line("Tokens a step, of the budget", "%", lambda r: r.token_occupancy, _percent),
        Line("Prompt tokens hit in the prefix cache", "%", lambda r: r.prefix_hit_rate, _percent),
    ]


def _preemptions() -> list[Line]:
    return [
        Line("By recompute", "", lambda r: r.preemptions.recompute, _whole),
        Line("By swap", "", lambda r: r.preemptions.swap, _whole),
        Line("Most of one request", "", lambda r: r.max_preemptions, _whole, min),
        Line("Tokens computed again", "tokens", lambda r: r.wasted_tokens, _whole, min),
        Line("Blocks swapped out", "blocks", lambda r: r.swapped_out_blocks, _whole),
        Line("Blocks swapped in", "blocks", lambda r: r.swapped_in_blocks, _whole),
        Line("Waste, of all computed tokens", "%", lambda r: 100 * r.waste, _two, min),
    ]


def _counts() -> list[Line]:
    return [
        Line("Requests", "", lambda r: r.requests, _whole),
        Line("Finished", "", lambda r: r.finished, _whole),
        Line("Rejected", "", lambda r: r.rejected, _whole),
        Line("Output", "tokens", lambda r: r.output_tokens, _whole),
        Line("Token budget", "tokens/step", lambda r: r.max_tokens_per_step, _whole),
        Line("Pool", "blocks", lambda r: r.num_blocks, _whole),
        Line("Steps", "", lambda r: r.steps, _whole),
        Line("Invariant violations in checked steps", "", lambda r: r.violations if r.checked_steps else None, _whole),
        Line("Simulated in, real time", "s", lambda r: r.wall_s, _one),
    ]


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _one(value: float) -> str:
    return f"{value:,.1f}"


def _two(value: float) -> str:
    return f"{value:,.2f}"


def _three(value: float) -> str:
    return f"{value:,.3f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value >= 100 else f"{value:.2f}" if value >= 10 else f"{value:.3f}"
