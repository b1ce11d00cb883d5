"""A replay's result, for people. Knows units and rounding. Does not know how the figures came about."""

from paged.cli.show import figures
from paged.simulator import Percentiles, SimulationResult


def print_summary(result: SimulationResult) -> None:
    """The figures of a replay on standard output."""
    figures(f"{result.trace}, policy {result.policy}", summary(result))


def summary(result: SimulationResult) -> list[tuple[str, str]]:
    """What is worth knowing of a replay: name and value, a line each."""
    computed = max(result.computed_tokens, 1)
    pool = f"{result.num_blocks:,} blocks of {result.block_size} tokens, {result.host_blocks:,} on the host"
    preemptions = f"{result.preemptions.recompute:,} by recompute, {result.preemptions.swap:,} by swap, at most {result.max_preemptions} of one request"
    lines = [
        ("requests", f"{result.requests:,}: {result.finished:,} finished, {result.rejected:,} rejected"),
        ("pool", pool),
        ("steps", f"{result.steps:,}"),
        (
            "virtual time",
            f"{result.makespan_s:,.1f} s, {result.busy_s / result.makespan_s if result.makespan_s else 0:.0%} of it busy",
        ),
        ("throughput", f"{result.output_tokens_per_s:,.1f} output tokens/s, {result.requests_per_s:,.2f} requests/s"),
        ("time to first token", _spread(result.ttft_s)),
        ("between tokens", _spread(result.itl_s)),
        ("request, end to end", _spread(result.e2e_s)),
        ("blocks used", f"{result.peak_block_usage:.1%} at the peak, {result.mean_block_usage:.1%} on average"),
        (
            "prefix hits",
            f"{result.hit_tokens:,} of {result.prompt_tokens:,} prompt tokens, {result.prefix_hit_rate:.1%}",
        ),
        ("preemptions", preemptions),
        (
            "computed again",
            f"{result.wasted_tokens:,} of {result.computed_tokens:,} tokens, {result.wasted_tokens / computed:.1%}",
        ),
        ("swapped", f"{result.swapped_out_blocks:,} blocks out, {result.swapped_in_blocks:,} in"),
        ("host time", f"{result.us_per_step:,.0f} µs a step in schedule and update; {result.wall_s:.1f} s in all"),
    ]
    if result.checked_steps:
        lines.append(("invariants", f"{result.violations:,} violations in {result.checked_steps:,} checked steps"))
        lines += [("violation", message) for message in result.violation_messages]
    return lines


def _spread(seconds: Percentiles) -> str:
    if seconds.p50 is None or seconds.p90 is None or seconds.p99 is None:
        return "none"
    return f"p50 {_time(seconds.p50)}, p90 {_time(seconds.p90)}, p99 {_time(seconds.p99)}"


def _time(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
