"""Routers over two real replicas of the model that ships, on Ray: time to first token, goodput and hits. `results/replicas.md`.

    PYTHONPATH=. python benchmarks/replicas_on_ray.py --out benchmarks/results/replicas

Open loop: requests come at their times, whatever became of those before. Prompts of 400 to 900 tokens stand behind one of 16 prefixes, of which a
replica's pool holds about half. All routers ask the same two replicas, one after the other, in another order for each seed; no two runs share
content. The routers beside ours are the simulator's (`paged.study.simulator.ROUTERS`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from paged.engine.replica_index import NO_KEYS
from paged.engine.routing import Prompt
from paged.integrations.ray.routing import Routing
from paged.serving.settings import SERVED, Settings
from paged.study.simulator import ROUTERS

# isort: split
# It sets Ray's environment up, and comes before Ray.
from paged.integrations.ray import local

# isort: split
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import RequestRouter

OURS = "exact"
SEATS, BLOCKS, BLOCK_SIZE = 8, 320, 16
HEADS, VOCABULARY = 16, 1_000
ASKED = "PAGED_ROUTER_OF_STUDY"
"""The variable that names the router of the run, and its seed: the ingress and its router are in this process."""


class StudyRouter(RequestRouter):
    """The router that `ASKED` names; another one begins with nothing."""

    def initialize_state(self) -> None:
        """Begin without any."""
        self._name = ""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Replicas, the best first."""
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        if os.environ[ASKED] != self._name:
            self._begin(os.environ[ASKED], sorted(by_name))
        id, asked = pending_request.metadata.internal_request_id, pending_request.args[0]
        if self._ours is not None:
            names = self._ours.ranked(id, asked, {name: each.routing_stats for name, each in by_name.items()})
            return [[by_name[name]] for name in names]
        number = self._numbers.setdefault(id, len(self._numbers))
        keys = asked.prompt.keys(BLOCK_SIZE) if asked.prompt else NO_KEYS
        self._prompts[number] = Prompt(id, keys, len(asked.prompt.tokens) if asked.prompt else 0)
        place = self._balancer.choose(number, time.monotonic())
        self._place_of[id] = place
        self._ongoing[place] += 1
        return [[by_name[self._names[place]]], list(candidate_replicas)]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """A replica took it."""
        if self._ours is not None:
            id, asked = pending_request.metadata.internal_request_id, pending_request.args[0]
            self._ours.routed(id, asked, replica_id.unique_id)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """It has ended."""
        if self._ours is not None:
            self._ours.completed(internal_request_id)
        elif internal_request_id in self._place_of:
            self._ongoing[self._place_of.pop(internal_request_id)] -= 1
            self._balancer.ended(self._numbers[internal_request_id], time.monotonic())

    def _begin(self, name: str, names: list[str]) -> None:
        kind, _, seed = name.partition(":")
        self._name, self._names = name, names
        self._numbers: dict[str, int] = {}
        self._prompts: dict[int, Prompt] = {}
        self._place_of: dict[str, int] = {}
        self._ongoing = [0] * len(names)
        self._ours = Routing() if kind == OURS else None
        fleet = SimpleNamespace(
            ongoing=self._ongoing,
            block_size=BLOCK_SIZE,
            prompt_of=self._prompts.__getitem__,
            counts=lambda place: (max(0, self._ongoing[place] - SEATS), min(SEATS, self._ongoing[place])),
        )
        if self._ours is None:
            self._balancer = ROUTERS[kind](fleet, 0, int(seed), None)


class Cell(msgspec.Struct, frozen=True):
    """One run: seconds, shares from 0 to 1, and requests a second that met the target."""

    router: str
    seed: int
    rate: float
    requests: int
    failed: int
    ttft_p50: float
    ttft_p99: float
    goodput: float
    hits: float


def prompts(seed: int, router: str, count: int) -> list[list[int]]:
    """Token ids, of which a run shares none with another one."""
    # Of equal seeds all routers get equal lengths and arrivals.
    alike, draw = np.random.default_rng(seed), np.random.default_rng([seed, *router.encode()])
    weights = 1.0 / np.arange(1, HEADS + 1) ** 0.8
    heads = [draw.integers(20, VOCABULARY, length).tolist() for length in alike.integers(300, 750, HEADS)]
    chosen, own = alike.choice(HEADS, count, p=weights / weights.sum()), alike.integers(60, 150, count)
    return [heads[head] + draw.integers(20, VOCABULARY, length).tolist() for head, length in zip(chosen, own)]


async def asked(ingress: Any, prompt: list[int], num_output: int) -> tuple[float | None, int]:
    """Seconds to the first piece, None where there was an error, and how many tokens of the prompt were cached."""
    body = {"prompt": prompt, "max_tokens": num_output, "stream": True, "ignore_eos": True, "temperature": 0}
    content = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
    began, first, text, status = time.perf_counter(), 0.0, b"", 0

    async def receive() -> dict[str, Any]:
        nonlocal content
        if content:
            found, content = content, b""
            return {"type": "http.request", "body": found, "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError("no client leaves")

    async def send(message: dict[str, Any]) -> None:
        nonlocal first, text, status
        status = message.get("status", status)
        if message.get("body"):
            first = first or time.perf_counter() - began
            text += message["body"]

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "http_version": "1.1",
        "headers": [(b"host", b"here"), (b"content-type", b"application/json")], "client": ("127.0.0.1", 1),
    }  # fmt: skip
    await ingress(scope, receive, send)
    if status != 200 or b'"error"' in text:
        return None, 0
    usages = [json.loads(line[6:]).get("usage") for line in text.split(b"\n\n") if line.startswith(b"data: {")]
    return first, next(usage for usage in reversed(usages) if usage)["prompt_tokens_details"]["cached_tokens"]


async def run(ingress: Any, router: str, seed: int, options: argparse.Namespace) -> Cell:
    """One router, one seed."""
    os.environ[ASKED] = f"{router}:{seed}"
    found = prompts(seed, router, options.requests)
    arrivals = np.random.default_rng(seed).exponential(1 / options.rate, options.requests).cumsum()
    began = time.perf_counter()

    async def later(at: float, prompt: list[int]) -> tuple[float | None, int]:
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        return await asked(ingress, prompt, options.output)

    answers = await asyncio.gather(*[later(at, prompt) for at, prompt in zip(arrivals.tolist(), found)])
    firsts = np.array([first for first, _ in answers if first is not None] or [np.nan])
    return Cell(
        router,
        seed,
        options.rate,
        options.requests,
        sum(first is None for first, _ in answers),
        float(np.percentile(firsts, 50)),
        float(np.percentile(firsts, 99)),
        options.rate * float((firsts <= options.target).sum()) / options.requests,
        sum(cached for _, cached in answers) / sum(map(len, found)),
    )


def page(cells: list[Cell], options: argparse.Namespace) -> str:
    """A table, the best goodput first; numbers are medians of the seeds."""
    lines = [
        f"Two replicas of the model that ships ({BLOCKS} blocks of {BLOCK_SIZE}, {SEATS} places each), {options.rate:g} requests a second, "
        f"target {options.target:g} s to the first token, {len(options.seeds)} seeds: medians. {os.cpu_count()} cores.\n",
        "| router | TTFT p50, s | p99, s | goodput, requests/s | hits | failed |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    rows = []
    for router in dict.fromkeys(cell.router for cell in cells):
        mine = [cell for cell in cells if cell.router == router]
        middle = {name: float(np.median([getattr(cell, name) for cell in mine])) for name in Cell.__struct_fields__[5:]}
        failed = sum(cell.failed for cell in mine)
        rows.append(
            (
                -middle["goodput"],
                f"| {router}{' (ours)' if router == OURS else ''} | {middle['ttft_p50']:.3f} | {middle['ttft_p99']:.3f} | "
                f"{middle['goodput']:.2f} | {middle['hits']:.0%} | {failed} |",
            )
        )
    return "\n".join([*lines, *[row for _, row in sorted(rows)]]) + "\n"


def main() -> None:
    """Run what is not there yet, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second, over both replicas")
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--output", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--target", type=float, default=0.5, help="seconds to the first token")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--routers", nargs="*", default=list(ROUTERS), choices=list(ROUTERS))
    options = parser.parse_args()
    engine = SERVED.but(num_blocks=BLOCKS, block_size=BLOCK_SIZE, max_sequences=SEATS)
    router = RequestRouterConfig(request_router_class="replicas_on_ray.StudyRouter", request_routing_stats_period_s=1.0)
    os.environ[ASKED] = f"{options.routers[0]}:0"
    cells = []
    with local.replicas(Settings(engine=engine, log="off"), 2, request_router_config=router) as ingress:

        async def run_all() -> None:
            await run(ingress, options.routers[0], 99, argparse.Namespace(**{**vars(options), "requests": 8}))
            for seed in options.seeds:
                for name in random.Random(seed).sample(options.routers, len(options.routers)):
                    cells.append(await run(ingress, name, seed, options))
                    print(msgspec.json.encode(cells[-1]).decode(), flush=True)

        asyncio.run(run_all())
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "cells.jsonl").write_bytes(b"".join(msgspec.json.encode(cell) + b"\n" for cell in cells))
    options.out.with_suffix(".md").write_text(page(cells, options))


if __name__ == "__main__":
    main()
