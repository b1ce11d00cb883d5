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
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from paged.engine.routing import RoutingRules
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
    ids, where = np.unique(np.concatenate([row[1] for row in rows]), return_inverse=True)
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
    return msgspec_free(plain, heads, lengths[heads], own)


def msgspec_free(plain: Trace, heads: np.ndarray, head_lengths: np.ndarray, own: np.ndarray) -> Trace:
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
    ttft, gap = latencies.ttft_of_each(), np.nan_to_num(latencies.longest_gap_of_each())
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
