"""What a server adds to its engine, and what it promises: overhead a token, time to the socket, thousands of open streams, tenants, and when to come again.

    python benchmarks/serving.py overhead DIR/135m         # tokens/s of 64 streams, by the server and by the engine alone, in turns
    python benchmarks/serving.py latency                   # from the engine's token to the client's socket, idle
    python benchmarks/serving.py streams                   # 5,000 open streams, 500 of them slow readers
    python benchmarks/serving.py tenants                   # a small tenant's TTFT, alone at its share and beside one with 50 × its load
    python benchmarks/serving.py again                     # of clients that come again at their time, how many are let in
    python benchmarks/serving.py page

Each writes its part of results/serving.json, and `page` results/serving.md. Servers are processes of their own;
clients, too. Decides nothing about a result.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from threading import Thread
from typing import Annotated, Any

import numpy as np
import typer
import uvloop
from spread import spread

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "serving"))

from http_client import Heard, ask  # noqa: E402
from serving_process import Served, served  # noqa: E402

from paged.model.machine import machine  # noqa: E402

RESULTS = HERE / "results" / "serving.json"
PATH = "/v1/completions"
Rounds = Annotated[int, typer.Option(min=1)]
Model = Annotated[Path | None, typer.Argument(help="A checkpoint folder; the one that ships.")]
app = typer.Typer(add_completion=False)

ALONE = """
import json, sys, time
from paged import Engine, SamplingParams
from paged.model.checkpoint import named_or_shipped
model, streams, prompt, output = (None if sys.argv[1] == "-" else sys.argv[1]), *map(int, sys.argv[2:5])
engine = Engine(named_or_shipped(model), num_blocks=streams * (-(-(prompt + output) // 16) + 1), max_sequences=streams, max_tokens_per_step=256)
def once(first):
    for i in range(streams):
        engine.add_request([(first + i * 7 + j) % 500 + 5 for j in range(prompt)], SamplingParams(max_tokens=output, ignore_eos=True))
    times, num_tokens = [], 0
    while engine.has_unfinished:
        outputs = engine.step()
        num_tokens += sum(len(output.token_ids) for output in outputs)
        times.append((time.perf_counter(), num_tokens, len(outputs)))
    return times
once(0)
began = time.perf_counter()
times = once(100000)
print(json.dumps([times[-1][0] - began, times[-1][1]]))
"""
PROMPT, OUTPUT, STREAMS = 64, 128, 64


def keep(name: str, found: dict[str, Any]) -> None:
    out = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    out[name] = {"machine": machine(), **found}
    RESULTS.write_text(json.dumps(out, indent=1) + "\n")
    print(name, json.dumps(found), flush=True)


def prompt_of(first: int, number: int) -> list[int]:
    return [(first + number * 7 + place) % 500 + 5 for place in range(PROMPT)]


def body_of(prompt: Any, output: int, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": True, **more}


async def together(port: int, bodies: list[dict[str, Any]], **how: Any) -> list[Heard]:
    return await asyncio.gather(*(ask(port, PATH, body, **how) for body in bodies))


def in_another_process(what: str, *arguments: object) -> Any:
    """What a function of this file prints there as JSON: a client that shares nothing with the server."""
    done = subprocess.run(
        [sys.executable, __file__, what, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


class Counting(asyncio.Protocol):
    """A client that costs as little as one can: it sends its request and counts events until the last one."""

    def __init__(self, request: bytes, is_over: asyncio.Future[int]) -> None:
        self._request = request
        self._is_over = is_over
        self._num = 0

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._num += data.count(b"data: ")
        if b"data: [DONE]" in data:
            self._is_over.set_result(self._num)


@app.command(hidden=True)
def streams_once(port: int, first: int) -> None:
    """64 streams at once: seconds, and tokens."""

    async def go() -> list[float]:
        loop = asyncio.get_running_loop()
        ends = [loop.create_future() for _ in range(STREAMS)]
        began = time.perf_counter()
        for number, is_over in enumerate(ends):
            body = json.dumps(body_of(prompt_of(first, number), OUTPUT)).encode()
            head = f"POST {PATH} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            await loop.create_connection(partial(Counting, head.encode() + body, is_over), "127.0.0.1", port)
        await asyncio.gather(*ends)
        return [time.perf_counter() - began, STREAMS * OUTPUT]

    print(json.dumps(uvloop.run(go())))


@app.command()
def overhead(model: Model = None, rounds: Rounds = 5) -> None:
    """Tokens a second of 64 streams through the server, and by the engine alone, in turns."""
    runs: dict[str, list[float]] = {"alone": [], "served": []}
    blocks = STREAMS * (-(-(PROMPT + OUTPUT) // 16) + 1)
    for number in range(rounds):
        for side in ("alone", "served") if number % 2 == 0 else ("served", "alone"):
            if side == "alone":
                done = subprocess.run(
                    [sys.executable, "-c", ALONE, str(model or "-"), str(STREAMS), str(PROMPT), str(OUTPUT)],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                seconds, tokens = json.loads(done.stdout)
            else:
                options = {"blocks": blocks, "max_sequences": STREAMS, "max_tokens_per_step": 256, "log": "off"}
                with served(model, **options) as server:
                    in_another_process("streams-once", server.port, 0)
                    seconds, tokens = in_another_process("streams-once", server.port, 100_000)
            runs[side].append(tokens / seconds)
            print(side, runs[side][-1], flush=True)
    keep("overhead" if model is None else f"overhead {model.name}", {"runs": runs})


@app.command(hidden=True)
def listen_once(port: int, count: int) -> None:
    """One stream after the other: when each token came, on the machine's monotonic clock."""

    async def go() -> list[list[float]]:
        found = []
        for number in range(count):
            offset = time.monotonic() - time.perf_counter()
            began = time.perf_counter()
            asked = body_of(f"The with {number}", 64, stream_options={"continuous_usage_stats": True})
            heard = await ask(port, PATH, asked)
            came: list[float] = []
            for at, piece in heard.pieces:
                # What came while the front was busy is in one piece.
                came += [at + began + offset] * (piece["usage"]["completion_tokens"] - len(came))
            found.append(came)
        return found

    print(json.dumps(asyncio.run(go())))


@app.command()
def latency(count: int = 50) -> None:
    """Milliseconds from the end of the engine's step to the client's socket, one stream at a time. The front is in this process, so that it can be asked."""
    from paged.serving.app import build_app
    from paged.serving.front import Front
    from paged.serving.server import serve
    from paged.serving.settings import Settings
    from paged.serving.wire import Stepped

    sent: list[float] = []
    found: list[list[float]] = []

    def make(settings: Settings) -> tuple[Any, Any]:
        front = Front(settings)
        usual = front.metrics.stepped

        def note(step: Stepped) -> None:
            usual(step)
            if any(output.token_ids for output in step.outputs):
                sent.append(step.sent)

        front.metrics.stepped = note
        return front, build_app(front)

    def begin(_: Any, port: int) -> None:
        def drive() -> None:
            in_another_process("listen-once", port, 3)
            sent.clear()
            found.extend(in_another_process("listen-once", port, count))
            os.kill(os.getpid(), signal.SIGTERM)

        Thread(target=drive, daemon=True).start()

    serve(Settings(port=0, log="off"), begin, make)
    flat = [at for stream in found for at in stream]
    assert len(sent) == len(flat), (len(sent), len(flat))
    took = 1e3 * (np.array(flat) - np.array(sent))
    p50, p99 = np.percentile(took, [50, 99])
    keep("latency", {"tokens": len(took), "p50": float(p50), "p99": float(p99), "most": float(took.max())})


def memory_of(process_id: int) -> float:
    """MiB that a process has in memory."""
    for line in Path(f"/proc/{process_id}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise ValueError(process_id)


def engine_of(server: Served) -> int:
    return int(
        subprocess.run(
            ["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True, check=True
        ).stdout.split()[0]
    )


@app.command()
def streams(num: int = 5000, slow: int = 500, output: int = 40) -> None:
    """Open so many streams at once, of which some read a piece every half second."""
    with served(max_waiting=num + 1000, max_connections=num + 100, max_sequences=128, log="off") as server:
        asyncio.run(together(server.port, [body_of(f"The with {n}", 4) for n in range(64)]))
        idle = memory_of(server.process.pid), memory_of(engine_of(server))

        async def go() -> tuple[list[Heard], list[Heard], float, list[float]]:
            began = time.perf_counter()
            most = [0.0, 0.0]

            async def watch() -> None:
                while True:
                    most[0] = max(most[0], memory_of(server.process.pid))
                    most[1] = max(most[1], memory_of(engine_of(server)))
                    await asyncio.sleep(0.25)

            watching = asyncio.create_task(watch())
            quick = asyncio.create_task(
                together(server.port, [body_of(f"The with {n}", output) for n in range(num - slow)], keep_pieces=False)
            )
            slow_ones = asyncio.create_task(
                together(
                    server.port,
                    [body_of(f"A list {n}", output) for n in range(slow)],
                    keep_pieces=False,
                    read_every_s=0.5,
                )
            )
            found = await quick
            quick_s = time.perf_counter() - began
            late = await slow_ones
            watching.cancel()
            return found, late, quick_s, most

        found, late, quick_s, most = asyncio.run(go())
    keep(
        "streams",
        {
            "open": num,
            "slow": slow,
            "whole": sum(each.is_whole for each in [*found, *late]),
            "quick ones took": quick_s,
            "slow ones took": max(each.ended_s for each in late),
            "front MiB": [idle[0], most[0]],
            "engine MiB": [idle[1], most[1]],
        },
    )


@app.command(hidden=True)
def tenant_once(port: int, tenant: str, rate: float, seconds: float, seed: int, streams: int) -> None:
    """A tenant's requests at random times, at this rate: seconds to the first piece of each that was answered whole."""

    async def go() -> list[float | None]:
        random_, tasks = random.Random(seed), []

        async def one(number: int) -> float | None:
            body = body_of(f"{tenant} {seed} {number} asks what a list is", TENANTS_OUTPUT) | {"stream": bool(streams)}
            heard = await ask(port, PATH, body, headers={"x-tenant": tenant}, keep_pieces=bool(streams))
            return (heard.times[0] if streams else heard.ended_s) if heard.is_whole else None

        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            tasks.append(asyncio.create_task(one(len(tasks))))
            await asyncio.sleep(random_.expovariate(rate))
        return list(await asyncio.gather(*tasks))

    print(json.dumps(asyncio.run(go())))


TENANTS_OUTPUT = 64


@app.command()
def tenants(rounds: Rounds = 3, seconds: float = 20.0) -> None:
    """A small tenant's TTFT: alone on a server that has its half of everything, and beside one that has 50 × its load on the whole."""
    runs: dict[str, list[dict[str, float]]] = {
        "alone at its share": [],
        "beside the other, fair": [],
        "beside the other, in order": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "serve.toml"
        # Who asks for more than there is is refused from some point on: of a tenant, not of all.
        config.write_text('[[tenants]]\nname = "big"\nmax_waiting = 200\n[[tenants]]\nname = "small"\n')
        whole = {"config": config, "max_sequences": 32, "blocks": 192, "tenant_header": "x-tenant", "log": "off"}
        in_order = whole | {"config": None, "policy": "paged", "max_waiting": 200}
        half = whole | {"max_sequences": 16, "blocks": 96}
        # What the whole server takes, measured once: the large tenant asks for 1.5 × as much, the small one for a 50th of that.
        with served(**whole | {"max_waiting": 10_000, "config": None}) as server:
            bodies = [body_of(f"{n} asks what a list is", TENANTS_OUTPUT) | {"stream": False} for n in range(1000)]
            began = time.perf_counter()
            asyncio.run(together(server.port, bodies, keep_pieces=False))
            rate = 1000 / (time.perf_counter() - began)
        for number in range(rounds):
            for what in runs:
                is_alone = what == "alone at its share"
                options = half if is_alone else whole if "fair" in what else in_order
                with served(**options) as server, ThreadPoolExecutor() as both:
                    asked = [("small", 1.5 * rate / 50, 1)] + ([] if is_alone else [("big", 1.5 * rate, 0)])
                    found = [
                        both.submit(
                            in_another_process, "tenant-once", server.port, name, load, seconds, number, streams
                        )
                        for name, load, streams in asked
                    ]
                    answers = [each.result() for each in found]
                firsts = [first for first in answers[0] if first is not None]
                p50, p99 = np.percentile(firsts, [50, 99])
                whole_ones = [sum(first is not None for first in each) for each in answers]
                runs[what].append(
                    {
                        "requests": len(answers[0]),
                        "p50": float(p50),
                        "p99": float(p99),
                        "lost": len(answers[0]) - whole_ones[0],
                        "big": 0 if is_alone else len(answers[1]),
                        "big whole": 0 if is_alone else whole_ones[1],
                    }
                )
                print(what, runs[what][-1], flush=True)
    keep("tenants", {"rate": rate, "runs": runs})


async def patient(port: int, rate: float, seconds: float, seed: int) -> list[tuple[int, float, bool]]:
    """Clients at random times that wait for their time and come again: how often each got a time, how long it waited in all, and whether it
    was answered. Lengths differ, and are not known before."""
    random_, tasks = random.Random(seed), []

    async def one(name: int) -> tuple[int, float, bool]:
        body = body_of(f"{name} asks", random_.choice((8, 32, 48, 104)))
        waited, times = 0.0, 0
        while True:
            heard = await ask(port, PATH, body, keep_pieces=False)
            if heard.status != 429 or times == 20:
                return times, waited, heard.is_whole
            times += 1
            wait = float(heard.headers["retry-after-ms"]) / 1e3
            waited += wait
            await asyncio.sleep(wait)

    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        tasks.append(asyncio.create_task(one(len(tasks))))
        await asyncio.sleep(random_.expovariate(rate))
    return await asyncio.gather(*tasks)


@app.command()
def again(rounds: Rounds = 3, seconds: float = 30.0) -> None:
    """Clients that come at 1.4 and 3 × of what the server takes, wait for their time and come again."""
    options = {"max_sequences": 16, "blocks": 128, "log": "off"}
    with served(**options, max_waiting=10_000) as server:
        began = time.perf_counter()
        asyncio.run(together(server.port, [body_of(f"{n} asks", 48) for n in range(300)], keep_pieces=False))
        rate = 300 / (time.perf_counter() - began)
    runs: dict[str, list[dict[str, float]]] = {}
    for over, most in product((1.4, 3.0), (32, 256)):
        for number in range(rounds):
            with served(**options, max_waiting=most) as server:
                found = asyncio.run(patient(server.port, rate * over, seconds, number))
            again = [times for times, _, _ in found if times]
            waits = [waited for times, waited, _ in found if times]
            its = {
                "clients": len(found),
                "told": len(again),
                "in at the second try": sum(times == 1 for times in again) / max(1, len(again)),
                "whole": sum(whole for _, _, whole in found),
                "waited, median": float(np.median(waits or [0.0])),
                "waited, most": max(waits, default=0.0),
            }
            runs.setdefault(f"{over:g} ×, {most} may wait", []).append(its)
            print(over, most, its, flush=True)
    keep("again", {"rate": rate, "runs": runs})


@app.command()
def page() -> None:
    """Write results/serving.md from what was kept."""
    out = json.loads(RESULTS.read_text())
    its = out["latency"]["machine"]
    lines = [
        "# What the server costs, and what it promises",
        "",
        f"{its['processor']}, {its['cores']} cores, Python {its['python']}, torch {its['torch']}. Server, engine and clients are processes of their own on these",
        "cores. Medians and ranges over the runs.",
        "",
        "```",
        "python benchmarks/serving.py overhead DIR/135m --rounds 4; python benchmarks/serving.py latency; python benchmarks/serving.py streams",
        "python benchmarks/serving.py tenants --seconds 10; python benchmarks/serving.py again --seconds 8 --rounds 2",
        "python benchmarks/serving.py page",
        "```",
        "",
        f"## {STREAMS} streams, beside the engine alone",
        "",
        f"Prompts of {PROMPT} and outputs of {OUTPUT} tokens, all at once, the second time in a process; the engine alone takes the same requests in a loop of its own.",
        "",
        "| model | engine alone, tokens/s | served, tokens/s | a token takes longer by |",
        "|---|--:|--:|--:|",
    ]
    for name in [each for each in out if each.startswith("overhead")]:
        runs = out[name]["runs"]
        more = [100 * (alone / through - 1) for alone, through in zip(runs["alone"], runs["served"], strict=True)]
        model = name.removeprefix("overhead").strip() or "the one that ships"
        lines.append(
            f"| {model} | {spread(runs['alone'], ',.0f')} | {spread(runs['served'], ',.0f')} | {spread(more, '.1f')} % |"
        )
    its = out["latency"]
    lines += [
        "",
        "## From the engine's token to the client's socket",
        "",
        f"One stream at a time, {its['tokens']:,} tokens: median {its['p50']:.2f} ms, p99 {its['p99']:.2f} ms, most {its['most']:.2f} ms.",
    ]
    its = out["streams"]
    lines += [
        "",
        f"## {its['open']:,} open streams, {its['slow']} slow readers",
        "",
        f"{its['whole']:,} of {its['open']:,} answers came whole. The quick ones had theirs after {its['quick ones took']:.1f} s, the slow ones, which read a piece every half second, after "
        f"{its['slow ones took']:.1f} s. Memory, before and at most: front {its['front MiB'][0]:.0f} and {its['front MiB'][1]:.0f} MiB, engine {its['engine MiB'][0]:.0f} and {its['engine MiB'][1]:.0f} MiB.",
    ]
    its = out["tenants"]
    lines += [
        "",
        "## Two tenants, one with 50 × the load",
        "",
        f"Both of weight 1. The large one asks for 1.5 × of what the server takes ({its['rate']:.0f} requests/s), and 200 of its requests may wait (in order: 200 of both); the small one asks for a 50th of that. "
        "Alone at its share: a server with half of the seats and blocks.",
        "",
        "| the small tenant | requests | TTFT p50, ms | TTFT p99, ms | lost | answered of the large one's, % |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for what, runs in its["runs"].items():
        cells = [spread([1e3 * run[key] for run in runs], ".1f") for key in ("p50", "p99")]
        share = spread([100 * run["big whole"] / run["big"] for run in runs], ".0f") if runs[0]["big"] else "–"
        counts = [sum(run[key] for run in runs) for key in ("requests", "lost")]
        lines.append(f"| {what} | {counts[0]:,} | {' | '.join(cells)} | {counts[1]} | {share} |")
    its = out["again"]
    lines += [
        "",
        "## Clients that come again as they are told",
        "",
        f"Requests at random times at 1.4 and 3 × of what the server takes ({its['rate']:.0f} requests/s); outputs of 8 to 104 tokens. 32 requests are {1e3 * 32 / its['rate']:.0f} ms of its work, "
        "less than clients and server on the same cores are late by.",
        "",
        "| load | clients | told to come again | let in then | answered | they waited, median, s |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for what, runs in its["runs"].items():
        # A run in which no client got a time says nothing of it.
        share = spread([100 * run["in at the second try"] for run in runs if run["told"]], ".1f")
        cells = [spread([run[key] for run in runs], ",.0f") for key in ("clients", "told", "whole")]
        waited = spread([run["waited, median"] for run in runs], ".1f")
        lines.append(f"| {what} | {cells[0]} | {cells[1]} | {share} % | {cells[2]} | {waited} |")
    RESULTS.with_suffix(".md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    app()
