"""Routers over simulated replicas: goodput, time to first token and hits, on sessions of an agent, Mooncake, and made-up prefixes. `results/routing.md`.

    python benchmarks/routing.py run --agents ../shared/traces/agent_sessions.jsonl --mooncake ../shared/traces/mooncake_conversation.jsonl --out benchmarks/results/routing
    python benchmarks/routing.py page --out benchmarks/results/routing

Open loop: requests come when the trace says, whatever became of those before. Caches are empty at first, and as large as the device leaves
them. Each cell is a process of its own and is written as it ends, so that a run that was cut short goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from paged.study.simulator import ROUTERS, Device, Load, Replicas, Routing, Scenario
from paged.study.traces import Trace, read_trace, synthetic

OURS = "exact"
SEEDS = (0, 1, 2)
AGENT_BLOCK = 64


class Workload(NamedTuple):
    """What comes, and what is promised: seconds to the first token, and between two tokens of a request at most.

    trace  of so many replicas and a seed, made of a file or of nothing
    """

    about: str
    trace: Callable[[int, int, Path | None], Trace]
    ttft_s: float
    gap_s: float
    block_size: int = 16
    file: str = ""


def agents(replicas: int, seed: int, path: Path | None, *, each: float = 5.0, span_s: float = 420.0) -> Trace:
    """So many sessions a replica, which begin over a minute and are followed for `span_s`, with their own pauses."""
    assert path is not None, "agents are a file's"
    lines = path.read_text(encoding="utf-8").splitlines()
    random = np.random.default_rng(seed)
    chosen = random.choice(len(lines), math.ceil(each * replicas), replace=len(lines) < each * replicas)
    rows: list[tuple[float, list[int], int, int]] = []
    for session, line in enumerate(chosen.tolist()):
        record = json.loads(lines[line])
        start = random.uniform(0, 60)
        # Some begin in the middle, as sessions do that are there when replicas start.
        turns = flattened(record["requests"])
        first = turns[int(random.integers(0, max(1, len(turns) // 2)))]["t"]
        for turn in turns:
            at = turn["t"] - first
            if not 0 <= at < span_s - start:
                continue
            ids = [session << 16 | block for low, high in turn["blocks"] for block in range(low, high)]
            if ids and len(ids) < 1 << 16:
                rows.append((start + at, ids, max(1, turn["in"] - AGENT_BLOCK * (len(ids) - 1)), max(1, turn["out"])))
    rows.sort(key=lambda row: row[0])
    return trace_of("agents", rows, seed)


def flattened(turns: list[dict]) -> list[dict]:
    """Requests and those of sub-agents, in order of time."""
    found = []
    for turn in turns:
        if "blocks" in turn and turn.get("in"):
            found.append(turn)
        found += flattened(turn.get("requests", []))
    return sorted(found, key=lambda turn: turn["t"])


def trace_of(name: str, rows: list[tuple[float, list[int], int, int]], seed: int) -> Trace:
    """Of rows of (arrival, ids of blocks, tokens in the last of them, output tokens)."""
    _, where = np.unique(np.concatenate([row[1] for row in rows]), return_inverse=True)
    counts = np.array([len(row[1]) for row in rows])
    starts = np.concatenate(([0], counts.cumsum()))
    lengths = np.full(starts[-1], AGENT_BLOCK, np.int64)
    lengths[starts[1:] - 1] = np.minimum([row[2] for row in rows], AGENT_BLOCK)
    plain = Trace.from_lengths([row[0] for row in rows], counts, [row[3] for row in rows], name=name, seed=seed)
    return Trace(
        name=name,
        arrival_s=plain.arrival_s,
        output_tokens=plain.output_tokens,
        segment_starts=starts.astype(np.int64),
        segment_ids=where.astype(np.int64),
        segment_lengths=lengths,
        max_tokens=plain.max_tokens,
        priority=plain.priority,
        tenant=plain.tenant,
        output_ids=plain.output_ids,
        seed=seed,
    )


def mooncake(replicas: int, seed: int, path: Path | None, *, rate: float = 1.1, each: int = 400) -> Trace:
    """So many requests a replica, one after the other in the file, so many a second and replica."""
    assert path is not None, "Mooncake's requests are a file's"
    trace = read_trace(path, seed=seed)
    count = min(each * replicas, len(trace))
    # Another part of the hour for each seed, so far as there is one.
    first = (len(trace) - count) * seed // max(1, len(SEEDS) - 1)
    part = trace.window(float(trace.arrival_s[first])).head(count)
    return part.scaled(rate=rate * replicas * float(part.arrival_s[-1]) / count)


def prefixes(replicas: int, seed: int, path: Path | None, *, rate: float = 20.0, each: int = 600) -> Trace:
    """Prompts of a few hundred tokens behind one of eight prefixes a replica, of 4,000 tokens on average; some are asked for much more often."""
    random, count = np.random.default_rng(seed), each * replicas
    num = 8 * replicas
    weights = 1.0 / np.arange(1, num + 1) ** 0.8
    heads = random.choice(num, count, p=weights / weights.sum())
    lengths = random.integers(1_000, 7_000, num)
    own = np.maximum(16, random.lognormal(5.5, 0.8, count)).astype(np.int64)
    outputs = np.maximum(1, random.lognormal(4.8, 0.7, count)).astype(np.int64)
    arrivals = random.exponential(1 / (rate * replicas), count).cumsum()
    plain = Trace.from_lengths(arrivals, own, outputs, name="prefixes", seed=seed)
    return behind(plain, heads, lengths[heads], own)


def behind(plain: Trace, heads: np.ndarray, head_lengths: np.ndarray, own: np.ndarray) -> Trace:
    """The same requests, each with a shared segment in front."""
    count = len(plain)
    return Trace(
        name=plain.name,
        arrival_s=plain.arrival_s,
        output_tokens=plain.output_tokens,
        segment_starts=np.arange(0, 2 * count + 1, 2, dtype=np.int64),
        segment_ids=np.stack([heads, np.full(count, -1)], axis=1).ravel().astype(np.int64),
        segment_lengths=np.stack([head_lengths, own], axis=1).ravel().astype(np.int64),
        max_tokens=plain.max_tokens,
        priority=plain.priority,
        tenant=plain.tenant,
        output_ids=plain.output_ids,
        seed=plain.seed,
    )


def unshared(replicas: int, seed: int, path: Path | None, *, rate: float = 9.0, each: int = 400) -> Trace:
    """Nothing is shared: lengths of ShareGPT's kind, prompts four times as long."""
    random, count = np.random.default_rng(seed), each * replicas
    prompts = np.clip(random.lognormal(7.0, 1.0, count), 16, 16_000).astype(np.int64)
    outputs = np.clip(random.lognormal(4.8, 0.8, count), 1, 1_000).astype(np.int64)
    return Trace.from_lengths(random.exponential(1 / (rate * replicas), count).cumsum(), prompts, outputs, seed=seed)


def chat(replicas: int, seed: int, path: Path | None, *, rate: float = 24.0, each: int = 600) -> Trace:
    """Conversations of eight turns or so on one system prompt, 20 s between answer and question."""
    spec = {"turns": 8.0, "think_s": 20.0, "system_tokens": 600, "requests": each * replicas, "rate": rate * replicas}
    return synthetic("poisson", lengths="sharegpt", seed=seed, **spec)


WORKLOADS = {
    "agents": Workload("sessions of a coding agent, 5 a replica", agents, 5.0, 0.5, AGENT_BLOCK, "agents"),
    "mooncake": Workload("Mooncake's conversations", mooncake, 3.0, 0.4, 16, "mooncake"),
    "prefixes": Workload("eight prefixes a replica", prefixes, 1.0, 0.2),
    "chat": Workload("conversations of eight turns", chat, 0.5, 0.2),
    "unshared": Workload("nothing shared", unshared, 1.0, 0.2),
}


class Cell(msgspec.Struct, frozen=True):
    """One simulation: shares from 0 to 1, seconds, and requests a second."""

    workload: str
    replicas: int
    router: str
    seed: int
    requests: int
    prompt_tokens: float
    met: int
    goodput: float
    ttft_p50: float
    ttft_p99: float
    hits: float
    imbalance: float
    cpu_s: float
    ingresses: int = 1
    tells: bool = True
    delay_s: float = 0.02


def cell(workload: str, replicas: int, router: str, seed: int, path: Path | None, options: dict | None = None) -> Cell:
    """Simulate one cell."""
    began, promised, options = time.process_time(), WORKLOADS[workload], options or {}
    trace = promised.trace(replicas, seed, path)
    scenario = Scenario(
        load=Load(trace="unused"),
        device=Device(model="llama-3.1-8b", device="h100"),
        block_size=promised.block_size,
        routing=Routing(replicas=replicas, router=router, **options),
    )
    step, routing = scenario.device.cost_model(), scenario.routing
    run = Replicas(trace, [scenario.scheduler() for _ in range(replicas)], step, routing)
    for _ in run.steps():
        pass
    latencies, result = run.latencies, run.result()
    ttft, gap = latencies.ttft, np.nan_to_num(latencies.longest_gap)
    met = int(((ttft <= promised.ttft_s) & (gap <= promised.gap_s)).sum())
    return Cell(
        workload,
        replicas,
        router,
        seed,
        len(trace),
        float(trace.prompt_tokens.mean()),
        met,
        met / float(trace.arrival_s[-1]),
        float(np.nanpercentile(ttft, 50)),
        float(np.nanpercentile(ttft, 99)),
        result.prefix_hit_rate,
        result.imbalance,
        time.process_time() - began,
        routing.ingresses,
        routing.tells,
        routing.delay_s,
    )


PLANNED = (
    ("agents", 2), ("prefixes", 2), ("unshared", 2), ("mooncake", 2), ("chat", 2), ("agents", 8), ("prefixes", 8), ("unshared", 8),
    ("mooncake", 8), ("chat", 8), ("prefixes", 64), ("unshared", 64), ("agents", 64), ("mooncake", 64), ("chat", 64),
)  # fmt: skip
"""In the order in which they are run: what is small first."""
INGRESSES = ("prefixes", 8, 8)
"""Workload, replicas and ingresses of the second table."""
Key = tuple[str, int, str, int, int, bool, float]


def key_of(each: Cell) -> Key:
    """What a cell is of."""
    return (each.workload, each.replicas, each.router, each.seed, each.ingresses, each.tells, each.delay_s)


def wanted(most: int) -> list[tuple[str, int, str, int, dict]]:
    """Arguments of all cells of up to so many replicas, a workload's routers and seeds together."""
    planned = [each for each in PLANNED if each[1] <= most]
    found = [(*each, router, seed, {}) for each in planned for seed in SEEDS for router in ROUTERS]
    workload, replicas, ingresses = INGRESSES
    for seed in SEEDS if replicas <= most else ():
        found.append((workload, replicas, "approximate-prefix", seed, {"ingresses": ingresses}))
        for tells in (True, False):
            found.append((workload, replicas, OURS, seed, {"ingresses": ingresses, "tells": tells}))
        found.append((workload, replicas, OURS, seed, {"delay_s": 1.0}))
    return found


def run(arguments: argparse.Namespace) -> None:
    """Simulate what is not in the file yet, and add it line by line."""
    path, files = arguments.out.with_suffix(".jsonl"), {"agents": arguments.agents, "mooncake": arguments.mooncake}
    there, left = {key_of(each) for each in read(path)}, arguments.cells
    for workload, replicas, router, seed, options in wanted(arguments.most):
        routing = Routing(**options)
        if (workload, replicas, router, seed, routing.ingresses, routing.tells, routing.delay_s) in there:
            continue
        if not left:
            return
        left -= 1
        done = cell(workload, replicas, router, seed, files.get(WORKLOADS[workload].file), options)
        with path.open("ab") as file:
            file.write(msgspec.json.encode(done) + b"\n")


def read(path: Path) -> list[Cell]:
    """The cells of a file, none where there is none."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Cell) for line in lines]


def page(cells: list[Cell]) -> str:
    """What was found, losses first."""
    plain = defaultdict(list)
    for each in cells:
        if (each.ingresses, each.delay_s) == (1, 0.02):
            plain[each.workload, each.replicas, each.router].append(each)
    places = list(dict.fromkeys((workload, replicas) for workload, replicas, _ in plain))
    seeds = {each: [len(plain[*each, router]) for router in ROUTERS] for each in places}
    whole = [each for each in places if min(seeds[each]) == max(seeds[each])]
    lines = [
        "# Routers over simulated replicas",
        "",
        "Made by `python benchmarks/routing.py run` and `page`: the real memory and scheduler of each replica on a virtual clock, Llama 3.1 8B on an H100, pools as "
        "large as the device leaves them, empty at first; open loop; means over the seeds. Goodput counts requests a second that "
        "met both promises of their workload. The other routers are modelled from their documentation, see [routing.md](../../docs/routing.md); they see loads at once, `exact` "
        "sees events and reports after 20 ms, and reports every 250 ms.",
        "",
        "| workload | what it is | first token within | tokens apart by at most |",
        "|---|---|--:|--:|",
        *(f"| {name} | {each.about} | {each.ttft_s:g} s | {each.gap_s:g} s |" for name, each in WORKLOADS.items()),
        "",
        "## Against the goals",
        "",
        "| workload | replicas | seeds | goodput ÷ best of the others | p99 first token ÷ least loaded's | verdict |",
        "|---|--:|--:|--:|--:|---|",
    ]
    ratios = defaultdict(list)
    for place in whole:
        goodput = {router: sum(each.goodput for each in plain[*place, router]) for router in ROUTERS}
        best = max((value, name) for name, value in goodput.items() if name != OURS)
        ratio = goodput[OURS] / best[0] if best[0] else 1.0
        late = mean_of(plain[*place, OURS], "ttft_p99") / mean_of(plain[*place, "least-loaded"], "ttft_p99")
        ratios[place[0]].append(ratio)
        missed = [] if ratio >= 0.98 else [f"{best[1]} has more"]
        if place[0] == "unshared" and late > 1.1:
            missed.append("p99 above 1.1 ×")
        lines.append(
            f"| {place[0]} | {place[1]} | {seeds[place][0]} | {ratio:.3f} | {late:.2f} | {'; '.join(missed) or 'met'} |"
        )
    for name, found in ratios.items():
        mean = math.exp(sum(map(math.log, found)) / len(found))
        lines.append(f"| {name} | mean | | {mean:.3f} | | {'met' if mean >= 1.0 else 'below 1.0'} |")
    missing = [f"{name} with {replicas}" for name, replicas in PLANNED if (name, replicas) not in whole]
    if missing:
        lines += ["", f"Not run with all routers here: {', '.join(missing)} replicas."]
    lines += ["", "## All routers", "", *_header()]
    for place in whole:
        lines += [_row(place[0], place[1], router, plain[*place, router]) for router in ROUTERS]
    others = defaultdict(list)
    for each in cells:
        if (each.ingresses, each.delay_s) != (1, 0.02):
            about = f"{each.ingresses} ingresses" + ("" if each.tells else ", which tell one another nothing")
            others[
                about if each.ingresses > 1 else f"events and reports late by {each.delay_s:g} s", each.router
            ].append(each)
    if others:
        lines += [
            "",
            f"## Several ingresses, and late events: {INGRESSES[0]}, {INGRESSES[1]} replicas",
            "",
            *_header("setting"),
        ]
        lines += [_row(about, found[0].replicas, router, found) for (about, router), found in others.items()]
    return "\n".join([*lines, ""])


def _header(first: str = "workload") -> list[str]:
    return [
        f"| {first} | replicas | router | goodput /s | met | p50 first | p99 first | hits | busiest ÷ mean |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]


def _row(first: str, replicas: int, router: str, cells: list[Cell]) -> str:
    met = sum(each.met for each in cells) / sum(each.requests for each in cells)
    return (
        f"| {first} | {replicas} | {f'**{router}**' if router == OURS else router} | {mean_of(cells, 'goodput'):.2f} | {met:.1%} "
        f"| {mean_of(cells, 'ttft_p50'):.3f} s | {mean_of(cells, 'ttft_p99'):.2f} s | {mean_of(cells, 'hits'):.1%} | {mean_of(cells, 'imbalance'):.2f} |"
    )


def mean_of(cells: list[Cell], name: str) -> float:
    """The mean of a figure over seeds."""
    return sum(getattr(each, name) for each in cells) / len(cells)


def main() -> None:
    """Run cells, or write the page of those that there are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("--agents", type=Path)
    parser.add_argument("--mooncake", type=Path)
    parser.add_argument("--most", type=int, default=64, help="replicas")
    parser.add_argument("--cells", type=int, default=-1, help="of this call, at most; all")
    parser.add_argument("--out", type=Path, required=True, help="NAME.jsonl and NAME.md")
    arguments = parser.parse_args()
    if arguments.what == "run":
        run(arguments)
    text = page(read(arguments.out.with_suffix(".jsonl")))
    print(text)
    arguments.out.with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
