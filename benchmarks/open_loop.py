"""`vllm serve` under its own scheduler and under ours, asked by `vllm bench serve` when a service was asked: an open loop over recorded requests.

Each run is a server of its own, warmed up by some of the requests all at once, whose cache is then emptied; who begins alternates. The trace keeps
its order, its gaps and what prompts share; lengths are divided by eight, and time is stretched or pressed to a span. The pool is too small
for what comes, so that both sides have to decide who waits and who gives blocks up.

    python benchmarks/open_loop.py run azure --python VENV/bin/python --model DIR/135m --traces DIR
    python benchmarks/open_loop.py page

Decides nothing about a result.
"""

import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from spread import spread

from paged.model.machine import machine
from paged.study.traces import Trace, read_trace

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "open-loop.json"
SIDES = ("own", "paged")
DIVIDED_BY = 8
# Tokens of a shared piece of a prompt: Mooncake's 512, divided.
PIECE = 64
BLOCK_SIZE = 32
# Tokens of a step.
BUDGET = 1024

# Requests that a server answers first, all at once: libraries prepare a kernel for each number of rows.
WARM = 150
# Seconds to the first token, and the longest gap between two.
TARGETS = ((2.0, 0.5), (5.0, 0.5), (5.0, 1.0), (10.0, 2.0))


@dataclass(frozen=True)
class Load:
    """A trace's file, the seconds over which its requests come, the blocks of the pool, and the longest request."""

    file: str
    span: float
    blocks: int
    longest: int


LOADS = {
    "azure": Load("azure_llm_2023_conv.csv", 90.0, 96, 1024),
    "mooncake": Load("mooncake_conversation.jsonl", 30.0, 600, 8192),
}
app = typer.Typer(add_completion=False)


def trace_of(load: Load, folder: Path, count: int) -> Trace:
    """The first requests of a trace: shorter, clipped to the longest that the server takes, and within the span."""
    shorter = 1 / DIVIDED_BY
    trace = read_trace(folder / load.file).head(count).scaled(prompts=shorter, outputs=shorter).fitted(load.longest)
    return trace.scaled(rate=float(trace.arrival_s[-1]) / load.span)


def write_for_vllm(trace: Trace, path: Path, *, at_once: bool) -> None:
    """The lines that `vllm bench serve` replays: seconds, lengths, and an id for each piece of a prompt, equal where prompts are."""
    # Pieces that are not shared get ids that no trace has.
    fresh = 1 << 40
    lines = []
    for request in range(len(trace)):
        segments = slice(trace.segment_starts[request], trace.segment_starts[request + 1])
        ids: list[int] = []
        for id, length in zip(
            trace.segment_ids[segments].tolist(), trace.segment_lengths[segments].tolist(), strict=True
        ):
            num_pieces = -(-length // PIECE)
            if id >= 0 and num_pieces == 1:
                ids.append(id)
            else:
                ids.extend(range(fresh, fresh + num_pieces))
                fresh += num_pieces
        line = {
            "timestamp": 0.0 if at_once else float(trace.arrival_s[request]),
            "input_length": int(trace.prompt_tokens[request]),
            "output_length": int(trace.output_tokens[request]),
            "hash_ids": ids,
        }
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines) + "\n")


@contextmanager
def serving(python: Path, model: Path, side: str, load: Load, log: Path) -> Iterator[str]:
    """A server that answers, under one of the two schedulers: its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours = ("--scheduler-cls", "paged.integrations.vllm.Scheduler", "--no-enable-prefix-caching")
    command = [
        *(str(python.parent / "vllm"), "serve", str(model), "--served-model-name", "it", "--port", str(port)),
        *(
            "--dtype",
            "bfloat16",
            "--max-model-len",
            str(load.longest),
            "--no-async-scheduling",
            "--uvicorn-log-level",
            "error",
        ),
        # What a server compiles when it starts would take longer than the run.
        *(
            "--enforce-eager",
            "--max-num-seqs",
            "256",
            "--max-num-batched-tokens",
            str(BUDGET),
            "--block-size",
            str(BLOCK_SIZE),
        ),
        # The first is vLLM's null block.
        *("--num-gpu-blocks-override", str(load.blocks + 1)),
        *(ours if side == "paged" else ("--enable-prefix-caching",)),
    ]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment())
    address = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 300
        while not answers(address):
            if time.monotonic() > until or process.poll() is not None:
                raise SystemExit(f"{side}: the server does not answer\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(HERE.parent),
        # Prompts are made from hashes of words: the same in every process.
        "PYTHONHASHSEED": "0",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        # Left to itself vLLM keeps a core free.
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def answers(address: str) -> bool:
    try:
        urllib.request.urlopen(f"{address}/health", timeout=2)
    except OSError:
        return False
    return True


def counted(address: str) -> dict[str, int]:
    """What the server counts of itself."""
    page = urllib.request.urlopen(f"{address}/metrics", timeout=30).read().decode()
    names = {"preempted": "vllm:num_preemptions_total{", "hit tokens": "vllm:prefix_cache_hits_total{"}
    lines = page.splitlines()
    return {
        name: int(sum(float(line.split()[-1]) for line in lines if line.startswith(start)))
        for name, start in names.items()
    }


def replayed(python: Path, model: Path, address: str, requests: Path, count: int) -> dict[str, Any]:
    """What a client saw of requests that were sent as they are written down: `vllm bench serve`'s own record."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(str(python.parent / "vllm"), "bench", "serve", "--base-url", address, "--model", "it"),
                *("--tokenizer", str(model), "--dataset-name", "timed_trace", "--dataset-path", str(requests)),
                *("--timed-trace-chunk-hash-size", str(PIECE), "--num-prompts", str(count), "--temperature", "0"),
                *("--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"),
                *("--result-dir", folder, "--result-filename", "found.json"),
            ],
            capture_output=True,
            text=True,
            env=environment(),
        )
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    if found["failed"]:
        raise SystemExit(f"{found['failed']} requests failed: {next(filter(None, found['errors']))}")
    return found


def figures_of(found: dict[str, Any]) -> dict[str, Any]:
    firsts = np.array(found["ttfts"])
    gaps = np.array([max(each, default=0.0) for each in found["itls"]])
    return {
        "seconds": found["duration"],
        "tokens/s": found["output_throughput"],
        "TTFT, median": float(np.median(firsts)),
        "TTFT, p99": float(np.percentile(firsts, 99)),
        "longest gap, median": float(np.median(gaps)),
        "longest gap, p99": float(np.percentile(gaps, 99)),
        "within": [float(np.mean((firsts <= first) & (gaps <= gap))) for first, gap in TARGETS],
    }


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="azure or mooncake")],
    python: Annotated[Path, typer.Option(help="An interpreter that has vLLM.")],
    model: Annotated[Path, typer.Option(help="A checkpoint folder.")],
    traces: Annotated[Path, typer.Option(help="The folder of the traces.")],
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    count: Annotated[int, typer.Option(min=1, help="Requests of the trace.")] = 500,
    span: Annotated[float | None, typer.Option(help="Seconds over which they come.")] = None,
    blocks: Annotated[int | None, typer.Option(help="Blocks of the pool.")] = None,
    keep: Annotated[bool, typer.Option(help="Write results/open-loop.json.")] = True,
) -> None:
    """Replay a trace through both, in turns, and keep what clients saw."""
    load = LOADS[name]
    load = Load(load.file, span or load.span, blocks or load.blocks, load.longest)
    trace = trace_of(load, traces, count)
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_for_vllm(trace, folder / "as-they-came.jsonl", at_once=False)
        write_for_vllm(trace, folder / "at-once.jsonl", at_once=True)
        for number in range(rounds):
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                with serving(python, model, side, load, folder / "log") as address:
                    replayed(python, model, address, folder / "at-once.jsonl", min(WARM, count))
                    urllib.request.urlopen(
                        urllib.request.Request(f"{address}/reset_prefix_cache", method="POST"), timeout=30
                    )
                    before = counted(address)
                    found = figures_of(replayed(python, model, address, folder / "as-they-came.jsonl", count))
                    found |= {what: now - before[what] for what, now in counted(address).items()}
                runs[side].append(found)
                print(f"round {number + 1}, {name}, {side}: {json.dumps(found)}", flush=True)
    if keep:
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        known[name] = {
            "machine": machine(),
            "model": model.name,
            "load": asdict(load),
            "requests": len(trace),
            "tokens": [int(trace.prompt_tokens.sum()), int(trace.output_tokens.sum())],
            "runs": runs,
        }
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")


INTRODUCTION = f"""`vllm serve` under its own scheduler and under ours, asked by `vllm bench serve` as a service was asked: the first requests of a recorded
trace in an open loop, with their order, gaps and shared prefixes; lengths divided by {DIVIDED_BY}, longer ones clipped, and time pressed into a span that keeps the
pool full. Each run is a server of its own that has answered the first {WARM} of them, all at once, and whose cache was emptied then; the
sides take turns, and so does who begins. Seconds as a client saw them; medians and ranges over the runs. Blocks of {BLOCK_SIZE} tokens, {BUDGET:,} tokens
a step, bfloat16, greedy, no request ends before its length. Server and client share the cores.

```
python benchmarks/open_loop.py run azure --python VENV/bin/python --model DIR/135m --traces DIR
python benchmarks/open_loop.py run mooncake --python VENV/bin/python --model DIR/tiny --traces DIR
python benchmarks/open_loop.py page
```
"""
FIGURES = (
    ("output tokens/s", "tokens/s", ",.0f"),
    ("TTFT, median, s", "TTFT, median", ".2f"),
    ("TTFT, p99, s", "TTFT, p99", ".2f"),
    ("longest gap, median, s", "longest gap, median", ".2f"),
    ("longest gap, p99, s", "longest gap, p99", ".2f"),
    ("preempted", "preempted", ",.0f"),
    ("tokens found in the cache", "hit tokens", ",.0f"),
)


@app.command()
def page() -> None:
    """Write results/open-loop.md from what was kept."""
    known = json.loads(RESULTS.read_text())
    lines = ["# Recorded requests through vLLM's server", "", INTRODUCTION]
    for name, found in known.items():
        its, load, runs = found["machine"], found["load"], found["runs"]
        prompts, outputs = found["tokens"]
        lines += [
            f"## {name}",
            "",
            f"{its['processor']}, {its['cores']} cores; Python {its['python']}; model {found['model']}. {found['requests']} requests within "
            f"{load['span']:g} s, {prompts:,} prompt and {outputs:,} output tokens, none longer than {load['longest']:,}; {load['blocks']:,} blocks, which hold "
            f"{load['blocks'] * BLOCK_SIZE:,} tokens; {len(runs['own'])} runs a side.",
            "",
            "| | own | ours |",
            "|---|--:|--:|",
            *(
                f"| {title} | {' | '.join(spread([run[key] for run in runs[side]], form) for side in SIDES)} |"
                for title, key, form in FIGURES
            ),
            *(
                f"| requests a second with TTFT ≤ {first:g} s and no gap over {gap:g} s | "
                + " | ".join(
                    spread([run["within"][at] * found["requests"] / run["seconds"] for run in runs[side]], ".2f")
                    for side in SIDES
                )
                + " |"
                for at, (first, gap) in enumerate(TARGETS)
            ),
            "",
        ]
    RESULTS.with_suffix(".md").write_text("\n".join(lines))


if __name__ == "__main__":
    app()
