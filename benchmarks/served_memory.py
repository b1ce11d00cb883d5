"""Resident memory of `paged serve` beside its weights and KV: at rest, after requests, and at its highest while it loads.

    python benchmarks/served_memory.py DIR/05b                 # writes results/served-memory.md

Each server is a fresh one. What Linux says in smaps_rollup of it and the processes that it started is added up: Rss counts a page that two of
them share twice, Pss once. Weights are the bytes of all parameters as they lie in memory: codes, scales, embeddings, head. The floor is a server
of the small model that ships with 1 MiB of KV, less both: what Python, PyTorch and transformers take before a weight is read.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from paged.model.machine import machine

RESULTS = Path(__file__).resolve().parent / "results" / "served-memory.md"
MIB = 2**20
CASES = (
    ("auto", None),
    ("auto", "int8"),
    ("auto", "int4"),
    ("bfloat16", None),
    ("bfloat16", "int8"),
    ("bfloat16", "int4"),
)
COUNT = """
import sys
from paged.model.loading import load_model
module = load_model(sys.argv[1], dtype=sys.argv[2], quantization=sys.argv[3] or None).module
print(sum(each.nbytes for each in {id(each): each for each in module.parameters()}.values()))
"""


@dataclass(frozen=True)
class Memory:
    """Bytes of a server and its processes, and the most Rss that was seen while it loaded."""

    rss: int
    pss: int
    dirty: int
    highest: int


def tree(pid: int) -> list[int]:
    """The process and all that it started."""
    found = [pid]
    for each in found:
        with suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def summed(pid: int) -> dict[str, int]:
    """Bytes by name, of smaps_rollup."""
    total: dict[str, int] = {"Rss": 0, "Pss": 0, "Private_Dirty": 0}
    for each in tree(pid):
        with suppress(OSError):
            for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()[1:]:
                name, size = line.split()[:2]
                if name[:-1] in total:
                    total[name[:-1]] += int(size) * 1024
    return total


def served(model: str, dtype: str, quantization: str | None, kv: int) -> Memory:
    """Start a server, ask it four times, and stop it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "paged", "serve", model, "--port", str(port), "--dtype", dtype]
    command += ["--kv-cache-bytes", str(kv), "--served-model-name", "it"]
    command += ["--quantization", quantization] if quantization else []
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    at, highest = f"http://127.0.0.1:{port}", 0
    try:
        while not is_ready(at):
            if server.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with {server.returncode}")
            highest = max(highest, summed(server.pid)["Rss"])
            time.sleep(0.1)
        for words in (20, 60, 200, 400):
            asked = {"model": "it", "prompt": list(range(5, 5 + words)), "max_tokens": 16}
            body, kind = json.dumps(asked).encode(), {"Content-Type": "application/json"}
            urllib.request.urlopen(urllib.request.Request(f"{at}/v1/completions", body, kind), timeout=300).read()
        time.sleep(2)
        found = summed(server.pid)
    finally:
        server.terminate()
        server.wait()
    return Memory(found["Rss"], found["Pss"], found["Private_Dirty"], max(highest, found["Rss"]))


def is_ready(at: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{at}/health", timeout=2) as answer:
        return bool(answer.status == 200)
    return False


def weights(model: str, dtype: str, quantization: str | None) -> int:
    """Bytes of all parameters, counted in a process of its own."""
    command = [sys.executable, "-c", COUNT, model, dtype, quantization or ""]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main(
    model: Annotated[str, typer.Argument(help="A checkpoint folder.")],
    kv: Annotated[str, typer.Option(help="MiB of KV, with commas.")] = "256,1024,2048",
    out: Path = RESULTS,
) -> None:
    """Measure, and write the page."""
    small = served("embedded", "auto", None, MIB)
    floor = {
        name: each - MIB - weights("embedded", "auto", None) for name, each in (("Rss", small.rss), ("Pss", small.pss))
    }
    lines = [PAGE, f"{machine()['processor']}. `{Path(model).name}`.", ""]
    lines += [f"Floor: {floor['Rss'] / MIB:,.0f} MiB of Rss, {floor['Pss'] / MIB:,.0f} of Pss.", ""]
    lines += [
        "| dtype | weights | MiB of weights | of KV | Rss | Pss | written | highest while loading | Rss ÷ both | less the floor |"
    ]
    lines += ["|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for dtype, quantization in CASES:
        of_weights = weights(model, dtype, quantization)
        for size in map(int, kv.split(",")):
            found, both = served(model, dtype, quantization, size * MIB), of_weights + size * MIB
            figures = " | ".join(f"{each / MIB:,.0f}" for each in (found.rss, found.pss, found.dirty, found.highest))
            lines.append(
                f"| {dtype} | {quantization or 'floats'} | {of_weights / MIB:,.0f} | {size:,} | {figures} | {found.rss / both:.2f} × | "
                f"{(found.rss - floor['Rss']) / both:.2f} × |"
            )
            print(lines[-1], flush=True)
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


PAGE = """# Memory of a server

`python benchmarks/served_memory.py DIR/05b` wrote this page: the server's process and the engine's, after four requests, MiB. "Written" is Private_Dirty.
"Both" are weights and KV; the aim for int8 is 1.25 × of both. The floor is a server without a model to speak of: Python, PyTorch and
transformers. Of the highest no more than a tenth of a second is missed.
"""


if __name__ == "__main__":
    typer.run(main)
