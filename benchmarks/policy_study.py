"""Every named policy on saturated loads, at one token budget: what memory holds, what is computed twice, what comes out.

    python benchmarks/policy_study.py --traces DIR --out benchmarks/results/policies

A closed loop three times oversubscribed, the second half of each trace (what can be tuned was tuned on the first), one budget for all that have
one: at the roofline's knee, unless the command says another; below, each with the budget that its system uses by default. Memory shares are
weighted by time while requests wait. `static` and `orca` have no budget, as their systems have none. "of the best" is of the first, without
those with given lengths.
"""

import argparse
from pathlib import Path

import msgspec
from rich.progress import track
from study import LOADS, SETUPS, TOLD, origin, policies, reported, saturated, table, titled, written

from paged.study.simulator import Scenario, SimulationResult, run_all

HEAD = (
    *("policy", "tokens/s", "of the best", "of the pool", "of what is held", "waste", "preempted", "most, one request"),
    *("gap p50", "gap p99", "rows", "steps", "seconds"),
)


OWN = ", own budget"


def label(name: str, result: SimulationResult) -> str:
    """What a policy is called in its line; with a budget of its own that, too."""
    if name.endswith(OWN):
        return f"`{name.removesuffix(OWN)}` at {result.max_tokens_per_step:,}"
    return titled(name)


def row(name: str, result: SimulationResult, best: float) -> tuple[object, ...]:
    """One policy's line."""
    memory, gap = result.memory_while_waiting, result.longest_gap_s
    return (
        *(label(name, result), f"{result.throughput:,.0f}", f"{result.throughput / best:.3f}"),
        *(f"{memory.of_pool:.1%}", f"{memory.of_held:.1%}", f"{result.waste:.2%}"),
        *(f"{result.preemptions.recompute + result.preemptions.swap:,}", result.max_preemptions),
        *(f"{gap.p50:.2f}", f"{gap.p99:.2f}", f"{result.row_occupancy * result.max_sequences:.1f}"),
        *(f"{result.steps:,}", f"{result.wall_s:.0f}"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Policies side by side on saturated loads.")
    parser.add_argument("--traces", type=Path, required=True, help="folder with the Azure and Mooncake traces")
    parser.add_argument("--requests", type=int, default=3_000, help="of each half trace")
    parser.add_argument("--policies", nargs="+", choices=list(policies()), default=list(policies()))
    parser.add_argument(
        "--budget", type=int, default=None, help="tokens a step for all that have a budget; the knee by default"
    )
    parser.add_argument("--only", default="", help="loads whose name contains this")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="write NAME.md and NAME.json", metavar="NAME")
    arguments = parser.parse_args()
    cells: list[tuple[str, str]] = []
    scenarios: list[Scenario] = []
    for setup in SETUPS:
        for load in LOADS:
            if arguments.only not in f"{setup}, {load}":
                continue
            base = saturated(reported(load, arguments.traces, setup, arguments.requests, arguments.budget or "knee"))
            for name in arguments.policies:
                policy = policies()[name]
                scenarios.append(msgspec.structs.replace(base, policy=policy))
                cells.append((f"{setup}, {load}", name))
                if policy.default_budget is not None:
                    scenarios.append(msgspec.structs.replace(base, policy=policy, max_tokens_per_step="own"))
                    cells.append((f"{setup}, {load}", name + OWN))
    found: dict[str, dict[str, SimulationResult]] = {}
    for place, outcome in track(run_all(scenarios, jobs=arguments.jobs), total=len(scenarios)):
        cell, name = cells[place]
        found.setdefault(cell, {})[name] = outcome.result
    lines = [
        "# Policies on saturated loads",
        "",
        *(__doc__ or "").split("\n\n", 2)[2].strip().splitlines(),
        "",
        *origin(),
    ]
    for cell in dict.fromkeys(cell for cell, _ in cells):
        order = [*policies(), *(name + OWN for name in policies())]
        results = {name: found[cell][name] for name in order if name in found[cell]}
        alike = {name: result for name, result in results.items() if not name.endswith(OWN)}
        best = max((result.throughput for name, result in alike.items() if name not in TOLD), default=1.0)
        # Of one that has a budget, if any has.
        first = max(alike.values(), key=lambda result: result.max_tokens_per_step or 0)
        lines += [
            *("", f"## {cell}", ""),
            f"{first.requests:,} requests, {first.num_blocks:,} blocks of {first.block_size}, budget {first.max_tokens_per_step or 0:,}.",
            *("", *table(HEAD, (row(name, result, best) for name, result in results.items()))),
        ]
    print("\n".join(lines))
    if arguments.out is not None:
        written(arguments.out, lines, found)


if __name__ == "__main__":
    main()
