"""Every named policy's goodput: the highest load at which 99th percentiles stay under targets, at one token budget.

    python benchmarks/goodput.py --traces DIR --out benchmarks/results/goodput

Arrivals are the second half's of each trace, of which every seed keeps a share, stretched in time until a target is missed. A load meets a pair of
targets when it does with every seed, and no request was rejected. Rates are sought within 3 %. The budget is the roofline's knee for all
that split prompts. Those that compute a prompt whole could not let two long ones in together by that: they have their systems' own budgets,
and `static` and `orca` none.
"""

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from pathlib import Path

import msgspec
from rich.progress import track
from study import KNOWN, LOADS, SETUPS, TOLD, origin, policies, reported, table, titled, written

from paged import Policy
from paged.study.simulator import Load, Scenario, run
from paged.study.simulator.scenario import Budget
from paged.study.simulator.search import Rates, search
from paged.study.simulator.workers import processes

TTFTS, GAPS = (10.0, 20.0, 40.0), (0.2, 1.0)
TARGETS = tuple((ttft, gap) for gap in GAPS for ttft in TTFTS)
"""p99 of time to first token and of a request's longest gap between two tokens, seconds."""
TOLERANCE = 0.03


class Point(msgspec.Struct, frozen=True):
    """What one simulation says of targets; seconds."""

    ttft: float
    gap: float
    rejected: int

    def meets(self, ttft: float, gap: float) -> bool:
        return not self.rejected and self.ttft <= ttft and self.gap <= gap


class Found(msgspec.Struct, frozen=True):
    """A policy's goodput under each of TARGETS, requests a second (None: no rate met), and every simulation: rate, seed, what it said."""

    goodput: list[float | None]
    points: list[tuple[float, int, Point]]


class Curve:
    """A policy under rising load, simulated on demand and once: one simulation answers for all targets."""

    def __init__(self, base: Scenario, seeds: int) -> None:
        self._base, self._seeds = base, seeds
        self.points: dict[tuple[float, int], Point] = {}

    def meets(self, rate: float, ttft: float, gap: float) -> bool:
        return all(self._at(rate, seed).meets(ttft, gap) for seed in range(self._seeds))

    def _at(self, rate: float, seed: int) -> Point:
        if (rate, seed) not in self.points:
            load = msgspec.structs.replace(self._base.load, rate=rate, seed=seed)
            result = run(msgspec.structs.replace(self._base, load=load)).result
            self.points[rate, seed] = Point(result.ttft_s.p99, result.longest_gap_s.p99, result.rejected)
        return self.points[rate, seed]

    def highest(self, start: float, ttft: float, gap: float) -> float | None:
        """The highest rate that meets, sought from `start`."""
        tries = search(Rates(start, TOLERANCE))
        try:
            rate = next(tries)
            while True:
                rate = tries.send(self.meets(rate, ttft, gap))
        except StopIteration as stopped:
            best: float | None = stopped.value[0]
            return best


def arrivals_per_s(load: Load) -> float:
    """At rate 1, of the first seed."""
    trace = load.build()
    return len(trace) / float(trace.arrival_s[-1])


def goodput(base: Scenario, seeds: int) -> Found:
    """Under each of TARGETS; the searches begin at one request a second, so that they share what they try."""
    each = arrivals_per_s(base.load)
    curve = Curve(base, seeds)
    rates = [curve.highest(1 / each, ttft, gap) for ttft, gap in TARGETS]
    points = [(rate * each, seed, point) for (rate, seed), point in sorted(curve.points.items())]
    return Found([None if rate is None else rate * each for rate in rates], points)


def scenarios(arguments: argparse.Namespace) -> Iterator[tuple[str, str, Scenario]]:
    """(load, policy, scenario) of all that is compared; each load keeps so many requests."""
    chosen: dict[str, Policy] = {
        name: policy for name, policy in policies().items() if not arguments.policies or name in arguments.policies
    }
    for name in arguments.loads:
        base = reported(name, arguments.traces, arguments.setup, arguments.requests)
        for called, policy in chosen.items():
            budget: Budget = "knee" if policy.chunked else "own"
            yield name, called, msgspec.structs.replace(base, policy=policy, max_tokens_per_step=budget)


def lines_of(load: str, found: dict[str, Found]) -> list[str]:
    """A load's table: requests a second, and beside `paged` its share of the best of the others and of itself with known lengths."""

    def cell(rate: float | None) -> str:
        return "none" if rate is None else f"{rate:.2f}"

    def ratio(others: Sequence[str]) -> list[str]:
        cells = []
        for place, own in enumerate(found["paged"].goodput):
            best = max((found[name].goodput[place] or 0.0 for name in others), default=0.0)
            cells.append(f"{(own or 0.0) / best:.3f}" if best else "-")
        return cells

    head = ("policy", *(f"TTFT {ttft:g}, gap {gap:g}" for ttft, gap in TARGETS))
    rows: list[list[str]] = [[titled(name), *map(cell, each.goodput)] for name, each in found.items()]
    if "paged" in found:
        rows.append(["`paged` ÷ best other", *ratio([name for name in found if name not in ("paged", *TOLD)])])
        rows.append(["`paged` ÷ itself, lengths known", *ratio([name for name in found if name == KNOWN])])
    return ["", f"## {load}", "", *table(head, rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description="The highest load at which each policy meets targets.")
    parser.add_argument("--traces", type=Path, required=True, help="folder with the Azure and Mooncake traces")
    parser.add_argument("--setup", choices=list(SETUPS), default=next(iter(SETUPS)))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--policies", nargs="+", choices=list(policies()), default=[])
    parser.add_argument("--requests", type=int, default=1_500, help="that each seed keeps of a half trace, about")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="write NAME.md and NAME.json", metavar="NAME")
    parser.add_argument(
        "--again", action="store_true", help="only --policies; what they do not change is taken over from NAME.json"
    )
    arguments = parser.parse_args()
    if arguments.again and (arguments.out is None or not arguments.policies):
        parser.error("--again goes with --out and --policies")
    cells = list(scenarios(arguments))
    found: dict[str, dict[str, Found]] = {load: {} for load in arguments.loads}
    if arguments.again:
        before = msgspec.json.decode(arguments.out.with_suffix(".json").read_bytes(), type=dict[str, dict[str, Found]])
        found |= before
    with processes(arguments.jobs) as pool:
        futures = {pool.submit(goodput, base, arguments.seeds): (load, name) for load, name, base in cells}
        for future in track(as_completed(futures), total=len(futures)):
            load, name = futures[future]
            found[load][name] = future.result()
    lines = [
        "# Goodput",
        "",
        *(__doc__ or "").split("\n\n", 2)[2].strip().splitlines(),
        f"{arguments.setup}, about {arguments.requests:,} requests a seed, {arguments.seeds} seeds. Figures are requests a second.",
        "",
        *origin(),
    ]
    if arguments.again:
        lines += [
            "",
            "The figures of policies that the command does not name are of an earlier run: nothing in them has changed.",
        ]
    for load in found:
        # In the order of the names, not in that of their ends.
        lines += lines_of(load, {name: found[load][name] for name in policies() if name in found[load]})
    print("\n".join(lines))
    if arguments.out is not None:
        written(arguments.out, lines, found)


if __name__ == "__main__":
    main()
