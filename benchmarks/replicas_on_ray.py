"""Routers over two real replicas of the model that ships, on Ray, beside the same requests simulated. `results/replicas.md`.

    python -m paged profile --backend torch_gather --max-sequences 4 --max-context 700 --out benchmarks/results/replicas-profile.json  # two at once
    PYTHONPATH=. python benchmarks/replicas_on_ray.py run --out benchmarks/results/replicas
    python benchmarks/replicas_on_ray.py simulate --out benchmarks/results/replicas
    python benchmarks/replicas_on_ray.py page --out benchmarks/results/replicas

Open loop: requests come at their times, whatever became of those before. Prompts of up to 900 tokens stand behind one of `HEADS` prefixes, of which
a replica's pool holds about half. All routers ask the same two replicas, one after the other, in another order for each seed; no two runs share
content. The routers beside ours are the simulator's (`paged.study.simulator.ROUTERS`). Each cell is written as it ends, so that a run that was cut
short goes on where it stopped.

The engine attends by torch_gather: with its C path Ray binds before the engines do, and no router matters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from routing import behind

from paged import BlockManager, Scheduler
from paged.engine.replica_index import NO_KEYS
from paged.engine.routing import Prompt
from paged.model.machine import machine
from paged.serving.settings import SERVED, Settings
from paged.study.hardware import Profile
from paged.study.simulator import ROUTERS, Replicas, Routing as Simulated
from paged.study.traces import Trace

# To simulate, and to make the page, no Ray is needed.
RequestRouter: Any = object
if find_spec("ray") is not None:
    # isort: off
    # It sets Ray's environment up, and comes before Ray.
    from paged.integrations.ray import local
    from paged.integrations.ray.routing import Routing
    from ray.serve.config import RequestRouterConfig
    from ray.serve.request_router import RequestRouter
    # isort: on

OURS = "exact"
SEEDS = (0, 1, 2)
SEATS, BLOCKS, BLOCK_SIZE = 4, 320, 16
HEADS, VOCABULARY = 20, 1_000
HEAD_TOKENS, OWN_TOKENS, OUTPUT = (560, 830), (30, 70), 3
RATE, REQUESTS, TARGET_S = 8.0, 240, 0.3
"""Requests a second over both replicas, how many, and within how many seconds the first token has to come."""
COLD = 800
"""Tokens of the prompts by which the speed of the replicas is probed before each run."""
BACKEND = "torch_gather"
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
        if self._name and self._ours is not None:
            # It reads events no more.
            self._ours._see({})
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
    """One run: seconds, shares from 0 to 1, and requests a second that met the target.

    idle_s  to the first token of a prompt of one block on idle replicas, before the run; of a simulation, what was added for Ray
    cold_s  to that of one of `COLD` tokens, while the other replica has one, too; of a simulation, by its profile
    others  share of the cores' time that went meanwhile to programs that gave way to these, and to other machines
    """

    router: str
    seed: int
    is_real: bool
    requests: int
    failed: int
    ttft_p50: float
    ttft_p99: float
    goodput: float
    hits: float
    idle_s: float = 0.0
    cold_s: float = 0.0
    others: float = 0.0


def load_of(seed: int) -> tuple[Trace, np.ndarray]:
    """The requests of a seed, and the prefix of each."""
    draw = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, HEADS + 1) ** 0.8
    lengths = draw.integers(*HEAD_TOKENS, HEADS)
    heads, own = draw.choice(HEADS, REQUESTS, p=weights / weights.sum()), draw.integers(*OWN_TOKENS, REQUESTS)
    arrivals = draw.exponential(1 / RATE, REQUESTS).cumsum()
    plain = Trace.from_lengths(arrivals, own, np.full(REQUESTS, OUTPUT), name="replicas", seed=seed)
    return behind(plain, heads, lengths[heads], own), heads


def prompts(seed: int, router: str) -> list[list[int]]:
    """The token ids of a seed's requests, of which a run shares none with another one."""
    trace, heads = load_of(seed)
    lengths, draw = trace.segment_lengths.reshape(-1, 2), np.random.default_rng([seed, *router.encode()])
    shared = draw.integers(20, VOCABULARY, (HEADS, HEAD_TOKENS[1])).tolist()
    return [
        shared[head][:first] + draw.integers(20, VOCABULARY, own).tolist() for head, (first, own) in zip(heads, lengths)
    ]


def cell(trace: Trace, firsts: np.ndarray, cached: float, **more: Any) -> Cell:
    """What became of a seed's requests: seconds to the first token, NaN for those that failed, and prompt tokens that were cached."""
    return Cell(
        requests=len(trace),
        failed=int(np.isnan(firsts).sum()),
        ttft_p50=float(np.nanpercentile(firsts, 50)),
        ttft_p99=float(np.nanpercentile(firsts, 99)),
        goodput=RATE * float((firsts <= TARGET_S).mean()),
        hits=cached / float(trace.prompt_tokens.sum()),
        seed=trace.seed,
        **more,
    )


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


async def ran(ingress: Any, router: str, seed: int) -> Cell:
    """One router, one seed, on the replicas."""
    found, (trace, _) = prompts(seed, router), load_of(seed)
    idle_s, cold_s = await probed(ingress, np.random.default_rng([seed, *router.encode(), 1]))
    os.environ[ASKED] = f"{router}:{seed}"
    used, began = _used(), time.perf_counter()

    async def later(at: float, prompt: list[int]) -> tuple[float | None, int]:
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        return await asked(ingress, prompt, OUTPUT)

    answers = await asyncio.gather(*[later(at, prompt) for at, prompt in zip(trace.arrival_s.tolist(), found)])
    spent = _used() - used
    firsts = np.array([np.nan if first is None else first for first, _ in answers])
    more = {"idle_s": idle_s, "cold_s": cold_s, "others": float(spent[[1, 7]].sum() / spent.sum())}
    return cell(trace, firsts, sum(cached for _, cached in answers), router=router, is_real=True, **more)


async def probed(ingress: Any, draw: np.random.Generator) -> tuple[float, float]:
    """Medians of seconds to the first token: of prompts of a block, one by one, and of `COLD` tokens, two at a time on a replica each."""
    os.environ[ASKED] = f"round-robin:{draw.integers(1 << 30)}"
    rounds = [(BLOCK_SIZE, 1)] * 20 + [(COLD, 2)] * 5
    found: dict[int, list[float]] = {BLOCK_SIZE: [], COLD: []}
    for length, num in rounds:
        each = [asked(ingress, draw.integers(20, VOCABULARY, length).tolist(), 1) for _ in range(num)]
        found[length] += [first for first, _ in await asyncio.gather(*each) if first is not None]
    return float(np.median(found[BLOCK_SIZE])), float(np.median(found[COLD]))


def _used() -> np.ndarray:
    """What the cores did so far, in the kernel's ticks and columns: the second is of nice programs, the eighth of other machines."""
    return np.array(Path("/proc/stat").read_text().split("\n")[0].split()[1:9], np.float64)


def run(arguments: argparse.Namespace) -> None:
    """Ask the replicas what is not in the file yet, and add it line by line."""
    path = arguments.out.with_suffix(".jsonl")
    there = {(each.router, each.seed) for each in read(path) if each.is_real}
    # In another order for each seed: a machine that slows down slows no router alone.
    wanted = [(name, seed) for seed in SEEDS for name in random.Random(seed).sample(list(ROUTERS), len(ROUTERS))]
    left = [each for each in wanted if each not in there][: arguments.cells]
    if not left:
        return
    engine = SERVED.but(num_blocks=BLOCKS, block_size=BLOCK_SIZE, max_sequences=SEATS, backend=BACKEND)
    router = RequestRouterConfig(request_router_class="replicas_on_ray.StudyRouter", request_routing_stats_period_s=1.0)
    os.environ[ASKED] = f"{left[0][0]}:0"

    async def run_all(ingress: Any) -> None:
        # The first pass pays for what is made once.
        await asyncio.gather(*[asked(ingress, each, OUTPUT) for each in prompts(99, "warm")[:12]])
        for name, seed in left:
            found = await ran(ingress, name, seed)
            with path.open("ab") as file:
                file.write(msgspec.json.encode(found) + b"\n")

    with local.replicas(Settings(engine=engine, log="off"), 2, request_router_config=router) as ingress:
        asyncio.run(run_all(ingress))


def simulated(trace: Trace, router: str, step: Profile) -> Replicas:
    """Requests on the same two replicas, on a virtual clock."""
    engine = SERVED.scheduling
    schedulers = [
        Scheduler(
            BlockManager(BLOCKS, BLOCK_SIZE),
            policy=engine.policy,
            max_tokens_per_step=engine.budget_on("cpu"),
            max_sequences=SEATS,
        )
        for _ in range(2)
    ]
    fleet = Replicas(trace, schedulers, step, Simulated(replicas=2, router=router))
    for _ in fleet.steps():
        pass
    return fleet


def slowed(step: Profile, times: float) -> Profile:
    """Steps that take so many times as long."""
    prices = [name for name in step.__struct_fields__ if name.startswith("seconds_per_")]
    return msgspec.structs.replace(step, **{name: times * getattr(step, name) for name in prices})


def alone_s(step: Profile, tokens: int) -> float:
    """Seconds to the first token of one prompt."""
    return float(simulated(Trace.from_lengths([0.0], [tokens], [1]), "random", step).latencies.ttft[0])


def simulate(arguments: argparse.Namespace) -> None:
    """Simulate all routers and seeds anew, as fast as the replicas were by their probes."""
    path, step = arguments.out.with_suffix(".jsonl"), Profile.load(f"{arguments.out}-profile.json")
    real = [each for each in read(path) if each.is_real]
    carried_s = middle(real, "idle_s") - alone_s(step, BLOCK_SIZE)
    cold_s = alone_s(step, COLD)
    step = slowed(step, (middle(real, "cold_s") - carried_s) / cold_s)
    cells = []
    for seed in SEEDS:
        trace, _ = load_of(seed)
        for name in ROUTERS:
            fleet = simulated(trace, name, step)
            cached = fleet.result().prefix_hit_rate * float(trace.prompt_tokens.sum())
            more = {"idle_s": carried_s, "cold_s": cold_s}
            cells.append(cell(trace, fleet.latencies.ttft + carried_s, cached, router=name, is_real=False, **more))
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in [*real, *cells]))


def middle(cells: list[Cell], name: str) -> float:
    """The median of a field."""
    return float(np.median([getattr(each, name) for each in cells]))


def read(path: Path) -> list[Cell]:
    """The cells of a file, none where there is none."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Cell) for line in lines]


def differences(cells: list[Cell], name: str, one: str, other: str) -> np.ndarray:
    """By how much a router's figure is above another one's, for each seed."""
    found = {(each.router, each.seed): getattr(each, name) for each in cells}
    return np.array([found[one, seed] - found[other, seed] for seed in SEEDS])


def sign(difference: np.ndarray) -> int:
    """Which is better: 1 or −1, and 0 where the mean over the seeds is no more than their range."""
    mean = float(difference.mean())
    return 0 if abs(mean) <= np.ptp(difference) else (1 if mean > 0 else -1)


def compared(real: list[Cell], virtual: list[Cell], name: str) -> tuple[str, list[str]]:
    """The row of a figure: pairs of routers that are told apart, and how. And the pairs that lie the other way round."""
    signs = {
        pair: (sign(differences(real, name, *pair)), sign(differences(virtual, name, *pair)))
        for pair in combinations(ROUTERS, 2)
    }
    both = [each for each in signs.values() if all(each)]
    against = [f"{one} and {other}" for (one, other), (here, there) in signs.items() if here * there < 0]
    numbers = [
        len(both),
        len(both) - len(against),
        len(against),
        sum(bool(here) and not there for here, there in signs.values()),
        sum(bool(there) and not here for here, there in signs.values()),
        sum(not here and not there for here, there in signs.values()),
    ]
    return f"| {name} | " + " | ".join(map(str, numbers)) + " |", against


def order(cells: list[Cell], name: str) -> str:
    """The routers, the best first, with their means."""
    means = {
        router: float(np.mean([getattr(each, name) for each in cells if each.router == router])) for router in ROUTERS
    }
    return ", ".join(f"{router} {means[router]:.3g}" for router in sorted(means, key=means.__getitem__, reverse=True))


def page(arguments: argparse.Namespace) -> None:
    """Write what was found, losses first."""
    cells = read(arguments.out.with_suffix(".jsonl"))
    real, virtual = ([each for each in cells if each.is_real is which] for which in (True, False))
    rows = {name: compared(real, virtual, name) for name in ("goodput", "hits")}
    lost = [f"By {name}, {pair} lie the other way round." for name, (_, against) in rows.items() for pair in against]
    for router in ROUTERS:
        if router != OURS:
            for name in rows:
                for which, part in (("real", real), ("simulated", virtual)):
                    if sign(differences(part, name, router, OURS)) > 0:
                        lost.append(f"{router} has more {name} than {OURS}, ours: {which}.")
    p50 = {
        router: [np.mean([each.ttft_p50 for each in part if each.router == router]) for part in (virtual, real)]
        for router in ROUTERS
    }
    early = [float(there / here) for there, here in p50.values()]
    lost.append(
        f"Simulated first tokens (p50) take {min(early):.2f} to {max(early):.2f} times as long as the real ones. It is least for routers that "
        "overload the replicas: there a small error of speed grows into a queue."
    )
    carried_s, cold_s = middle(virtual, "idle_s"), middle(virtual, "cold_s")
    probes = [(each.cold_s - carried_s) / cold_s for each in real]
    lines = [
        "# Routers over two real replicas, and simulated",
        "",
        f"`benchmarks/replicas_on_ray.py`: two replicas of the model that ships under Ray on this machine, {BLOCKS} blocks of {BLOCK_SIZE} tokens and {SEATS} "
        f"places each, asked by each router with {REQUESTS} requests of up to {HEAD_TOKENS[1] + OWN_TOKENS[1]} tokens behind one of {HEADS} prefixes, {RATE:g} a second, "
        f"{OUTPUT} tokens an answer; {len(SEEDS)} seeds, caches empty at first. Goodput counts requests a second whose first token came within {TARGET_S:g} s. Beside it the same "
        "requests in the simulator. Means over the seeds.",
        "",
        "## What is lost",
        "",
        *(f"* {each}" for each in lost),
        f"* {sum(each.failed for each in real)} of {sum(each.requests for each in real)} requests failed.",
        "",
        "## All routers",
        "",
        "| router | p50 first, real | simulated | p99 first, real | simulated | goodput /s, real (range) | simulated (range) | hits, real | simulated |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for router in sorted(ROUTERS, key=lambda name: -np.mean([each.goodput for each in real if each.router == name])):
        pair = [[each for each in part if each.router == router] for part in (real, virtual)]
        mean = [
            {name: float(np.mean([getattr(each, name) for each in part])) for name in Cell.__struct_fields__[5:9]}
            for part in pair
        ]
        ranges = [
            f"{min(each.goodput for each in part):.2f} to {max(each.goodput for each in part):.2f}" for part in pair
        ]
        shown = [f"{each[name]:.3f} s" for name in ("ttft_p50", "ttft_p99") for each in mean]
        shown += [f"{each['goodput']:.2f} ({span})" for each, span in zip(mean, ranges)] + [
            f"{each['hits']:.1%}" for each in mean
        ]
        lines.append(f"| {f'**{router}**' if router == OURS else router} | " + " | ".join(shown) + " |")
    lines += [
        "",
        "## The order",
        "",
        "Of two routers' differences over the seeds, which have equal arrivals and lengths, a pair is told apart where the mean is larger than the range.",
        "",
        f"| of {len(list(combinations(ROUTERS, 2)))} pairs, by | told apart in both | alike | the other way round | real only | simulated only | in neither |",
        "|---|--:|--:|--:|--:|--:|--:|",
        *(row for row, _ in rows.values()),
        "",
        *(
            f"* {name}, {which}: {order(part, name)}"
            for name in rows
            for which, part in (("real", real), ("simulated", virtual))
        ),
        "",
        "## How it was taken",
        "",
        f"* {', '.join(f'{name} {value}' for name, value in machine().items())}, Ray 2.60.0. Replicas, ingress and client share two hardware threads with other work, "
        "to which they did not give way. That work had "
        f"{min(each.others for each in real):.0%} to {max(each.others for each in real):.0%} of their time during a run.",
        f"* The engine attends by {BACKEND}. With its C path Ray and the ingress bind before the engines do: tried at 6, 12 and 20 requests a second and 24 tokens an answer, `random` and `exact` "
        "met a target of 0.5 s at 12 all but alike, and neither did at 20.",
        f"* The simulator's steps are those of [a profile](replicas-profile.json) that was taken two at a time, times {np.median(probes):.2f}: before each run, prompts of {COLD} tokens on idle "
        f"replicas took {min(probes):.2f} to {max(probes):.2f} times what it says. Ray carries a request and its first token in {1e3 * carried_s:.0f} ms, which is added to each. "
        "Nothing was fitted to the runs themselves.",
        "* Both make their reports by one function, every 250 ms at most. The simulator's take 20 ms to the router, as events do; Ray's come with each answer and once a second.",
        "* Before that a real replica's report counted what was cached of waiting prompts, too, and `exact` lost more: "
        "[routing.md](../../docs/routing.md#beside-real-replicas).",
        "",
        "```",
        *__doc__.split("\n\n")[1].replace("    ", "").splitlines(),
        "```",
    ]
    arguments.out.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Run what is not there yet, simulate, or write the page."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    for name, does in (("run", run), ("simulate", simulate), ("page", page)):
        each = commands.add_parser(name)
        each.add_argument("--out", type=Path, required=True)
        each.set_defaults(does=does)
        if name == "run":
            each.add_argument("--cells", type=int, default=10**6)
    arguments = parser.parse_args()
    arguments.does(arguments)


if __name__ == "__main__":
    main()
