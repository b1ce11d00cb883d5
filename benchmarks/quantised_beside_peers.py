"""Weights, K and V in fewer bits beside llama.cpp and OpenVINO GenAI on a CPU: a prompt of 512, and 1, 8 and 32 sequences that decode, in turns.

    python benchmarks/quantised_beside_peers.py MODELS 135m --few 05b --peers DIR --llama-python VENV/bin/python --openvino-python VENV/bin/python

MODELS has for each shape a checkpoint, SHAPE, and what the peers make of it: SHAPE-gguf, SHAPE-ov and SHAPE-ov8. DIR is the folder with
`peer_llamacpp.py`, which runs as a program; it is not part of this repository. Each run is a process of its own, and engines take turns, the other way
round each second time. Writes results/quantised-beside-peers.json, one line a run, into which a later call adds its runs, and a page, as `--page` does
alone. Runs of other machines or numbers of threads have a table of their own. `--llama-note` says where llama.cpp's library is not as published.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import typer
from spread import spread

from paged.model.machine import machine

RESULTS = Path(__file__).resolve().parent / "results" / "quantised-beside-peers.json"
CELLS = ("prefill", "1", "8", "32")
# Tokens of a prompt alone; those that stand before sequences that decode, and what each of them decodes.
PROMPT, BEFORE, DECODED = 512, 128, 32
ROWS = [int(cell) for cell in CELLS[1:]]


class Way(NamedTuple):
    """An engine, how it keeps weights, and K and V."""

    engine: str
    weights: str
    kv: str


OURS, LLAMA, OPENVINO = "paged", "llama.cpp", "OpenVINO GenAI"
WAYS = (
    *(Way(OURS, weights, "as computed") for weights in ("float32", "bfloat16", "int8", "int8, head too", "int4", "int4, head too")),
    Way(OURS, "int8, head too", "int8"),
    *(Way(LLAMA, weights, "F16") for weights in ("F32", "BF16", "Q8_0", "Q4_0", "Q4_K_M")),
    Way(LLAMA, "Q8_0", "Q8_0"),
    *(Way(OPENVINO, weights, "as computed") for weights in ("16 bit", "int8")),
)  # fmt: skip
# What goals speak of.
FEW = [way for way in WAYS if way.weights not in ("F32", "BF16", "Q4_K_M") and way.kv in ("as computed", "F16")]

TIMED = f"""
import json, sys, time
from importlib.metadata import version
import numpy as np
folder, *its = sys.argv[1:]
vocabulary, drawn = json.load(open(folder + "/config.json"))["vocab_size"], np.random.default_rng(0)

def tell(package, begin, step, wait_for):
    # The first round pays for what is made once.
    for is_timed in (False, True):
        for rows, length, count in [(1, {PROMPT}, 0), *((rows, {BEFORE}, {DECODED}) for rows in {ROWS})]:
            begin([drawn.integers(300, vocabulary, length).tolist() for _ in range(rows)], count + 1)
            began = time.perf_counter()
            wait_for(step, rows)
            first = time.perf_counter()
            if count:
                wait_for(step, rows * count)
            rate = rows * count / (time.perf_counter() - first) if count else length / (first - began)
            if is_timed:
                print(json.dumps([str(rows) if count else "prefill", rate]))
    print(json.dumps(["version", version(package)]))
"""
OUR_PROGRAM = (
    TIMED
    + f"""
from paged import Engine, SamplingParams, load_model
dtype, quantization, quantize_head, kv = its
model = load_model(folder, dtype=dtype, quantization=quantization or None, quantize_head=quantize_head == "yes")
most = {max(ROWS) * BEFORE}
engine = Engine(model, num_blocks=most // 8, max_sequences={max(ROWS)}, max_tokens_per_step=most, kv_cache_dtype=kv)

def begin(prompts, count):
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=count, ignore_eos=True, temperature=0))

def step():
    return sum(len(output.token_ids) for output in engine.step())

def wait_for(step, tokens):
    while tokens > 0:
        tokens -= step()
    assert not tokens

tell("paged", begin, step, wait_for)
"""
)
OPENVINO_PROGRAM = (
    TIMED
    + f"""
import openvino, openvino_genai
made, threads = its
settings = openvino_genai.SchedulerConfig()
settings.enable_prefix_caching, settings.cache_size = False, 2
settings.max_num_batched_tokens, settings.max_num_seqs = {max(ROWS) * BEFORE}, {max(ROWS)}
options = {{"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16", "INFERENCE_NUM_THREADS": int(threads)}}
pipe = openvino_genai.ContinuousBatchingPipeline(made, settings, "CPU", options)
running, number, kept = 0, 0, []

def begin(prompts, count):
    global running, number
    assert not pipe.has_non_finished_requests()
    kept.clear()
    running = len(prompts)
    for prompt in prompts:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample, config.eos_token_id = count, True, False, 2
        number += 1
        # One whose handle is gone is cancelled.
        kept.append(pipe.add_request(number, openvino.Tensor(np.array([prompt], np.int64)), config))

def wait_for(step, tokens):
    # Prompts fit in one step, and each step has a token of each sequence.
    for _ in range(tokens // running):
        step()

tell("openvino-genai", begin, pipe.step, wait_for)
"""
)


def ours(model: Path, way: Way, threads: int) -> dict[str, float | str]:
    """Tokens a second by cell, and our version."""
    is_float = way.weights in ("float32", "bfloat16")
    quantization, _, head = way.weights.partition(", ")
    its = [way.weights, "", "no"] if is_float else ["bfloat16", quantization, "yes" if head else "no"]
    command = [sys.executable, "-c", OUR_PROGRAM, str(model), *its, "int8" if way.kv == "int8" else "auto"]
    return dict(lines_of(command, OMP_NUM_THREADS=str(threads)))


def openvino(python: Path, model: Path, way: Way, threads: int) -> dict[str, float | str]:
    """As `ours`."""
    made = model.with_name(f"{model.name}-ov{'8' if way.weights == 'int8' else ''}")
    return dict(lines_of([str(python), "-c", OPENVINO_PROGRAM, str(model), str(made), str(threads)]))


def llama(python: Path, peers: Path, model: Path, way: Way, threads: int) -> dict[str, float | str]:
    """As `ours`."""
    command = [str(python), str(peers / "peer_llamacpp.py"), str(model), f"{model}-gguf", "--bench", "--quiet", "0"]
    command += ["--formats", way.weights.lower(), "--kv", way.kv.lower(), "--threads", str(threads), "--repeat", "1"]
    command += ["--batches", ",".join(CELLS[1:]), "--gen", str(DECODED)]
    # The script would measure the machine's limits, too, which are not shown here.
    (found,) = lines_of(command, PEER_BW="1", PEER_PEAK="1")
    asked = subprocess.run(
        [str(python), "-c", "import llama_cpp; print(llama_cpp.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    rates = {cell: found[f"batch{cell}" if cell.isdigit() else f"pp{PROMPT}"] for cell in CELLS}
    return {**rates, "version": f"llama-cpp-python {asked.stdout.strip()}"}


def lines_of(command: list[str], **more: str) -> list:
    """What a process says in lines of JSON."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **more})
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]


app = typer.Typer(add_completion=False)


@app.command()
def main(
    models: Annotated[Path, typer.Argument(help="The folder of checkpoints.")],
    shapes: Annotated[list[str] | None, typer.Argument(help="Checkpoints that all engines run in all ways.")] = None,
    few: Annotated[list[str] | None, typer.Option(help="A checkpoint that runs in the ways that goals name.")] = None,
    peers: Annotated[Path | None, typer.Option(help="The folder with the peer's script.")] = None,
    llama_python: Annotated[Path | None, typer.Option(help="A Python with llama-cpp-python and its tools.")] = None,
    openvino_python: Annotated[Path | None, typer.Option(help="A Python with OpenVINO GenAI.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 2,
    threads: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
    llama_note: Annotated[
        str, typer.Option(help="What is not as published in llama.cpp's library; kept in runs.")
    ] = "",
    page: Annotated[bool, typer.Option(help="Write the page of what was measured before.")] = False,
) -> None:
    """Time all, add the runs, write the page."""
    runs = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    by_engine: dict[str, Callable[[Path, Way], dict]] = {OURS: lambda model, way: ours(model, way, threads)}
    if llama_python and peers:
        by_engine[LLAMA] = lambda model, way: llama(llama_python, peers, model, way, threads)
    if openvino_python:
        by_engine[OPENVINO] = lambda model, way: openvino(openvino_python, model, way, threads)
    work = [(shape, way) for shape in shapes or [] for way in WAYS] + [
        (shape, way) for shape in few or [] for way in FEW
    ]
    work = [(shape, way) for shape, way in work if way.engine in by_engine]
    if not runs and (page or not work):
        raise typer.BadParameter(f"{RESULTS} has no runs, and none is asked for; name a checkpoint")
    its = machine()
    machine_name = f"{its['processor']}, Python {its['python']}, torch {its['torch']}"
    for number in range(0 if page else rounds):
        for shape, way in work[:: -1 if number % 2 else 1]:
            found = by_engine[way.engine](models / shape, way)
            on = {"machine": machine_name, "threads": threads}
            note = {"note": llama_note} if way.engine == LLAMA and llama_note else {}
            runs.append({"shape": shape, **way._asdict(), **on, **note, **found})
            print(runs[-1], file=sys.stderr, flush=True)
            RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
    RESULTS.with_suffix(".md").write_text(page_of(runs, llama_note), encoding="utf-8")


# A goal: its cells, our ways, and those of the peers, of which the faster one counts.
INT8, INT4 = [("int8", OURS), ("int8, head too", OURS)], [("int4", OURS), ("int4, head too", OURS)]
FLOATS = [("float32", OURS), ("bfloat16", OURS)]
GOALS = (
    ("1", INT8, [("Q8_0", LLAMA)]),
    ("8", INT8, [("Q8_0", LLAMA), ("int8", OPENVINO)]),
    ("32", INT8, [("Q8_0", LLAMA), ("int8", OPENVINO)]),
    ("prefill", INT8, [("int8", OPENVINO)]),
    ("1", INT4, [("Q4_0", LLAMA)]),
    ("prefill", FLOATS, [("16 bit", OPENVINO)]),
    ("32", FLOATS, [("16 bit", OPENVINO)]),
)


def page_of(runs: list[dict], llama_note: str = "") -> str:
    """Markdown: a part for each machine and number of threads. `llama_note` stands beside those of runs; at least one run."""
    parts: dict[tuple[str, int], list[dict]] = {}
    for run in runs:
        parts.setdefault((run["machine"], run["threads"]), []).append(run)
    notes = list(dict.fromkeys(filter(None, [*(run.get("note") for run in runs), llama_note])))
    said = "; ".join(notes) or "whether it is as published, or patched, was not recorded"
    lines = [line for (its, threads), of_part in parts.items() for line in part_lines(its, threads, of_part)]
    return PAGE.format(llama=f"llama.cpp's library may be patched: {said}.", lines="\n".join(lines))


def part_lines(its: str, threads: int, runs: list[dict]) -> list[str]:
    """Of runs on one machine with one number of threads: a row a way, and a row a goal."""
    rates: dict[tuple[str, Way], dict[str, list[float]]] = {}
    for run in runs:
        way = Way(run["engine"], run["weights"], run["kv"])
        of_way = rates.setdefault((run["shape"], way), {cell: [] for cell in CELLS})
        for cell in CELLS:
            of_way[cell].append(run[cell])
    versions = dict.fromkeys(f"{run['engine']} {run['version']}" for run in runs)
    lines = [
        f"## {its}, {threads} thread{'' if threads == 1 else 's'}",
        "",
        f"{', '.join(versions)}.",
        "",
        "| shape | engine | weights | K and V | prefill | one sequence | 8 | 32 |",
        "|---|---|---|---|--:|--:|--:|--:|",
    ]
    for (shape, way), of_way in rates.items():
        cells = " | ".join(spread(of_way[cell], ",.0f") for cell in CELLS)
        lines.append(f"| {shape} | {' | '.join(way)} | {cells} |")
    lines += ["", "### Goals", "", "Ours, of the faster peer's; at least 1.00 × is wanted.", ""]
    lines += ["| shape | step | ours | the peer | times | |", "|---|---|---|---|--:|---|"]
    for shape in dict.fromkeys(run["shape"] for run in runs):
        lines += [row for goal in GOALS for row in goal_rows(shape, rates, *goal)]
    return [*lines, ""]


def goal_rows(shape: str, rates: dict, cell: str, own: list, others: list) -> list[str]:
    """Rows of one goal."""
    found = {
        (way.weights, way.engine): median(its[cell])
        for (its_shape, way), its in rates.items()
        if its_shape == shape and way.kv in ("as computed", "F16")
    }
    theirs = max((each for each in others if each in found), key=lambda each: found[each], default=None)
    rows = []
    for each in own:
        if each in found and theirs:
            times, step = found[each] / found[theirs], cell if cell == "prefill" else f"decode, {cell}"
            verdict = "" if times >= 1 else "**missed**"
            rows.append(
                f"| {shape} | {step} | {each[0]}: {found[each]:,.0f} | {theirs[1]} {theirs[0]}: {found[theirs]:,.0f} | {times:.2f} × | {verdict} |"
            )
    return rows


PAGE = f"""# Fewer bits, beside llama.cpp and OpenVINO GenAI

Tokens a second: the median of the runs and their range. Prefill: a prompt of {PROMPT} tokens, nothing before it. Decode: 1, 8 and 32 sequences at
once, {DECODED} tokens of each behind {BEFORE}; the time of the {BEFORE} does not count. The same for all engines. Each run is a process of its own; ours and OpenVINO GenAI
have run the same once before, llama.cpp's tools warm up. Models: random weights in a real model's shape. Ours computes quantised weights in
bfloat16, OpenVINO GenAI all in bfloat16; llama.cpp with flash attention and llama-bench and llama-batched-bench.
"Head too": the output projection as int8, as the peers' files of 8 bits have it. {{llama}}

```
python benchmarks/quantised_beside_peers.py MODELS 135m --few 05b --peers DIR --llama-python VENV/bin/python --openvino-python VENV/bin/python
```

{{lines}}
"""

if __name__ == "__main__":
    app()
