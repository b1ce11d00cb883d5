"""Our native attention beside the kernel of vLLM's CPU build: one layer of a decode step, of prompts, and of both in one call.

    python benchmarks/cpu_attention.py --vllm-python VENV/bin/python        # writes results/cpu-attention.md

Each run is a process of its own; the two take turns. Blocks lie in random order in a pool that no cache holds. Ours has blocks of 16, its default,
and vLLM's those of 128 that it takes by itself.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from spread import spread

from paged.model.machine import machine

RESULTS = Path(__file__).resolve().parent / "results" / "cpu-attention.md"
app = typer.Typer(add_completion=False)
SHAPES = [(9, 3, 64), (14, 2, 64), (32, 8, 128)]
# Context, and new tokens, of each sequence.
STEPS = {
    "decode": ([512] * 64, [1] * 64),
    "prefill": ([512] * 4, [256] * 4),
    "mixed": ([512] * 66, [1] * 64 + [256] * 2),
}
SCENE = f"""
import json, time
import numpy as np
import torch
SHAPES, STEPS, CALLS = {SHAPES}, {STEPS}, 9

def table_of(contexts, size):
    counts = [-(-context // size) for context in contexts]
    order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    table, first = np.zeros((len(contexts), max(counts)), np.int32), 0
    for row, count in enumerate(counts):
        table[row, :count] = order[first : first + count]
        first += count
    return table, sum(counts)

def tell(shape, dtype, step, call):
    call()
    seconds = []
    for _ in range(CALLS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    print(json.dumps([list(shape), dtype, step, float(np.median(seconds))]))
"""
OURS = (
    SCENE
    + """
from paged.attention import KVPool, LayerOptions, StepTokens, get_backend
backend = get_backend("native")
for dtype in ("float32", "bfloat16"):
    for heads, kv_heads, size in SHAPES:
        for step, (contexts, new) in STEPS.items():
            table, count = table_of(contexts, 16)
            pool = KVPool(
                num_layers=1, num_blocks=count, block_size=16, num_kv_heads=kv_heads, head_dim=size, dtype=getattr(torch, dtype)
            )
            for each in (pool.keys(0), pool.values(0)):
                each.normal_()
            positions = [np.arange(context - its, context) for context, its in zip(contexts, new)]
            slots = [table[row][at // 16].astype(np.int64) * 16 + at % 16 for row, at in enumerate(positions)]
            tokens = StepTokens(
                np.concatenate(positions), np.concatenate(slots), np.concatenate([[0], np.cumsum(new)]), np.array(contexts), table, 16
            )
            queries = torch.randn(sum(new), heads, size).to(pool.dtype)
            plan, options = backend.prepare(tokens, pool), LayerOptions(size**-0.5)
            tell((heads, kv_heads, size), dtype, step, lambda: backend.attend(queries, pool, 0, plan, options))
"""
)
THEIRS = (
    SCENE
    + """
import vllm._C
from vllm import _custom_ops as ops
for dtype in ("float32", "bfloat16"):
    for heads, kv_heads, size in SHAPES:
        for step, (contexts, new) in STEPS.items():
            table, count = table_of(contexts, 128)
            kind = getattr(torch, dtype)
            keys, values = (torch.randn(count, kv_heads, 128, size).to(kind) for _ in range(2))
            queries = torch.randn(sum(new), heads, size).to(kind)
            out, lengths = torch.empty_like(queries), torch.tensor(contexts, dtype=torch.int32)
            starts = torch.tensor([0, *np.cumsum(new)], dtype=torch.int32)
            isa = "amx" if kind is torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"
            plan = ops.cpu_attn_get_scheduler_metadata(
                len(contexts), heads, kv_heads, size, lengths, kind, starts, True, -1, isa, True
            )
            blocks = torch.from_numpy(table)
            tell((heads, kv_heads, size), dtype, step, lambda: ops.cpu_attention_with_kv_cache(
                queries, keys, values, out, starts, lengths, size**-0.5, True, None, -1, blocks, 0.0, plan, None
            ))
"""
)


def timed(python: str, program: str) -> dict[tuple, float]:
    """Milliseconds of each cell of one process."""
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    return {(tuple(shape), dtype, step): seconds * 1e3 for shape, dtype, step, seconds in lines}


@app.command()
def main(vllm_python: Annotated[Path, typer.Option(help="A Python with vLLM's CPU build.")], rounds: int = 5) -> None:
    """Time all, and write the page."""
    sides = {"paged": (sys.executable, OURS), "vllm": (str(vllm_python), THEIRS)}
    found: dict[str, list[dict[tuple, float]]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            found[name].append(timed(*sides[name]))
    lines = []
    for cell in found["paged"][0]:
        shape, dtype, step = cell
        own, theirs = ([each[cell] for each in found[name]] for name in sides)
        lines.append(
            f"| {'/'.join(map(str, shape))} | {dtype} | {step} | {spread(own, ',.2f')} | {spread(theirs, ',.2f')} | {median(own) / median(theirs):.2f} × |"
        )
    its = machine()
    page = [
        "# Attention on a CPU",
        "",
        f"{its['processor']}, {its['cores']} cores, Python {its['python']}, torch {its['torch']}; vLLM 0.32's CPU build. Milliseconds a layer: the median of 9 calls in a process, and of {rounds} processes each, in turns, with their range. Decode: 64 sequences of 512 tokens, one each. Prefill: 4 sequences, the last 256 of 512. Mixed: the decode and two of the prompts in one call. Ours in blocks of 16, and every result is the same to the last bit whatever else is in the call; vLLM's in blocks of 128.",
        "",
        "```",
        "python benchmarks/cpu_attention.py --vllm-python VENV/bin/python",
        "```",
        "",
        "| heads | dtype | step | paged | vLLM | time, of vLLM's |",
        "|---|---|---|--:|--:|--:|",
        *lines,
        "",
    ]
    RESULTS.write_text("\n".join(page))
    print("\n".join(page))


if __name__ == "__main__":
    app()
