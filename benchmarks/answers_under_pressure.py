"""The share of requests that get other tokens when memory is short: ours, ours in packed mode under torch, and vLLM's CPU build.

    python benchmarks/answers_under_pressure.py models/135m --peers DIR --vllm-python VENV/bin/python --dtype bfloat16

The same 64 requests, greedy, once with ample memory and once with 35 % of the blocks that they want; an answer differs if any of its tokens does.
Options as those of cpu_engines.py. Writes results/answers-under-pressure.md.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from cpu_engines import BUDGET, SEQUENCES, blocks_for

from paged.model.machine import machine

RESULTS = Path(__file__).resolve().parent / "results" / "answers-under-pressure.md"
app = typer.Typer(add_completion=False)
SHARE = 0.35
OURS = f"""
import json, sys
peers, folder, dtype, backend, blocks, file = sys.argv[1:]
sys.path.insert(0, peers)
import peer_common
from paged import Engine, SamplingParams, load_model
engine = Engine(
    load_model(folder, dtype=dtype), backend=backend, batch_invariant=backend == "native", num_blocks=int(blocks), block_size=32,
    max_sequences={SEQUENCES}, max_tokens_per_step={BUDGET},
)
tokens = {{}}
for prompt, count in peer_common.get_requests("offline", folder):
    tokens[engine.add_request(prompt, SamplingParams(max_tokens=count, ignore_eos=True))] = []
while engine.has_unfinished:
    for output in engine.step():
        tokens[output.id] += output.token_ids
json.dump(list(tokens.values()), open(file, "w"))
"""


def ours(peers: Path, model: Path, dtype: str, backend: str, blocks: int) -> list[list[int]]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-c", OURS, str(peers), str(model), dtype, backend, str(blocks), file.name]
        subprocess.run(command, check=True, capture_output=True)
        return json.loads(Path(file.name).read_text())


def vllm(python: Path, peers: Path, model: Path, dtype: str, blocks: int) -> list[list[int]]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [str(python), str(peers / "peer_vllm.py"), str(model), "offline", "--dtype", dtype, "--repeat", "0"]
        command += ["--block-size", "32", "--kv-blocks", str(blocks), "--dump", file.name]
        # It has dumped its answers when it finds no run to tell the time of.
        subprocess.run(command, check=False, capture_output=True)
        return json.loads(Path(file.name).read_text())


@app.command()
def main(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    peers: Annotated[Path, typer.Option(help="The folder with the peers' scripts.")],
    vllm_python: Annotated[Path | None, typer.Option(help="A Python with vLLM's CPU build.")] = None,
    dtype: str = "bfloat16",
) -> None:
    """Compare all, and write the page."""
    ample = blocks_for(peers, model, "offline", 1.0, 0, 32)
    short = round(ample * SHARE)
    ways = {
        "paged, the default": lambda blocks: ours(peers, model, dtype, "native", blocks),
        "paged, packed, `torch_gather`": lambda blocks: ours(peers, model, dtype, "torch_gather", blocks),
    }
    if vllm_python:
        ways["vLLM 0.32, CPU build"] = lambda blocks: vllm(vllm_python, peers, model, dtype, blocks)
    lines = []
    for name, run in ways.items():
        first, second, again = run(ample), run(short), run(ample)
        differ, noise = (sum(a != b for a, b in zip(first, other, strict=True)) for other in (second, again))
        lines.append(f"| {name} | {differ} of {len(first)}, {differ / len(first):.0%} | {noise} |")
        print(lines[-1], flush=True)
    its = machine()
    page = [
        "# Answers under pressure",
        "",
        f"{its['processor']}, {its['cores']} cores, torch {its['torch']}, {dtype}. {model.name}: random weights, whose greedy text wanders; 64 requests of 12,897 prompt tokens and 7,378 answered. Requests any of whose tokens differ between {ample} blocks of 32 tokens and {short}, which is 35 % of what they want; and between two runs with {ample}.",
        "",
        "```",
        f"python benchmarks/answers_under_pressure.py models/{model.name} --peers DIR --vllm-python VENV/bin/python --dtype {dtype}",
        "```",
        "",
        "| engine | with 35 % of the memory | the same again |",
        "|---|--:|--:|",
        *lines,
        "",
    ]
    RESULTS.write_text("\n".join(page))
    print("\n".join(page))


if __name__ == "__main__":
    app()
