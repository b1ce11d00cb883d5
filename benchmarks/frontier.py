"""What boldness buys and what it costs: `paged` with its quantile held fast, from bold to careful, on saturated loads.

    python benchmarks/frontier.py --traces DIR --out benchmarks/results/frontier

A closed loop three times oversubscribed, the second half of each trace, the budget at the roofline's knee. Below: `paged` as it steers itself,
with lengths known, and those that look no further than today. None has both ends: recomputation rides in arithmetic that is idle while
weights are read, so the bold get tokens out sooner, and some of their requests stand still for seconds.
"""

import argparse
from pathlib import Path

import msgspec
from rich.progress import track
from study import KNOWN, LOADS, SETUPS, origin, policies, reported, saturated, table, titled, written

from paged import POLICIES, Policy
from paged.study.simulator import Scenario, SimulationResult, run_all

QUANTILES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
HEAD = (
    *("policy", "tokens/s", "of the pool", "waste", "preempted", "gap p50", "gap p90", "gap p99", "longest gap"),
    *("TTFT p50", "TTFT p99"),
)


def compared() -> dict[str, Policy]:
    """By what they are called in the table."""
    held = {"waste_target": None, "stall_target": None, "quantile_range": (0.0, 1.0)}
    named = policies()
    return {
        **{
            f"quantile {share:g}": msgspec.structs.replace(POLICIES["paged"], quantile=share, **held)
            for share in QUANTILES
        },
        **{titled(name): named[name] for name in ("paged", KNOWN, "vllm", "fastgen")},
    }


def row(name: str, result: SimulationResult) -> tuple[object, ...]:
    gap, ttft = result.longest_gap_s, result.ttft_s
    return (
        *(name, f"{result.throughput:,.0f}", f"{result.memory_while_waiting.of_pool:.1%}", f"{result.waste:.2%}"),
        f"{result.preemptions.recompute + result.preemptions.swap:,}",
        *(f"{gap.p50:.2f}", f"{gap.p90:.2f}", f"{gap.p99:.2f}", f"{gap.max:.2f}"),
        *(f"{ttft.p50:.0f}", f"{ttft.p99:.0f}"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput against stalls, by how boldly one admits.")
    parser.add_argument("--traces", type=Path, required=True, help="folder with the Azure and Mooncake traces")
    parser.add_argument("--setup", choices=list(SETUPS), default=next(iter(SETUPS)))
    parser.add_argument("--requests", type=int, default=2_000, help="of each half trace")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="write NAME.md and NAME.json", metavar="NAME")
    arguments = parser.parse_args()
    cells: list[tuple[str, str]] = []
    scenarios: list[Scenario] = []
    for load in LOADS:
        base = saturated(reported(load, arguments.traces, arguments.setup, arguments.requests))
        for name, policy in compared().items():
            cells.append((load, name))
            scenarios.append(msgspec.structs.replace(base, policy=policy))
    found: dict[str, dict[str, SimulationResult]] = {load: {} for load in LOADS}
    for place, outcome in track(run_all(scenarios, jobs=arguments.jobs), total=len(scenarios)):
        load, name = cells[place]
        found[load][name] = outcome.result
    lines = ["# Boldness", "", *(__doc__ or "").split("\n\n", 2)[2].strip().splitlines()]
    lines += [f"{arguments.setup}. Seconds, but for the shares.", "", *origin()]
    for load, results in found.items():
        lines += ["", f"## {load}", "", *table(HEAD, (row(name, results[name]) for name in compared()))]
    print("\n".join(lines))
    if arguments.out is not None:
        written(arguments.out, lines, found)


if __name__ == "__main__":
    main()
