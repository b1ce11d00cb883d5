"""What recurrences in C save models with states, held against an earlier commit that called their layers token by token.

    git worktree add /tmp/before 9412b8e
    python benchmarks/recurrences.py /tmp/before      # writes results/recurrences.md

Tokens a second of processor time, on one thread, batch-invariant: a busy machine slows both, and waits count for neither. Each run is a process of its own,
and the two take turns. The models of hidden size 512 have random weights, no experts (an expert's rows go one by one either way), and heads as their families
have them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from spread import spread

RESULTS = Path(__file__).resolve().parent / "results" / "recurrences.md"
REPOSITORY = Path(__file__).resolve().parents[1]
WORK = {"1 row": 1, "8 rows": 8, "32 rows": 32, "a prompt of 512": 0}
app = typer.Typer(add_completion=False)
COMMON = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "like Qwen3-Next": {
        **COMMON,
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "mlp_only_layers": [0, 1, 2, 3],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "like Bamba": {
        **COMMON,
        "model_type": "bamba",
        "attn_layer_indices": [3],
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
    },
}
WORDS = """`hybrid` is the model that ships, two short convolutions and two attention layers, in one call now. The others have hidden size 512 and four layers, three
of them with states, and random weights: `MODELS` in the script. They run in tiles of 32 places, padding included but for products,
so that one row costs more than its share.
"""
PROGRAM = """
import json, sys, time
from pathlib import Path
import numpy as np, torch
from paged import Engine, SamplingParams
torch.set_num_threads(1)
config, steps, works = json.loads(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
model = "hybrid"
if config:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from paged.model.hook import ATTENTION, register
    from paged.model.loading import as_loaded, silenced
    register()
    torch.manual_seed(0)
    with silenced():
        made = CONFIG_MAPPING[config.pop("model_type")](**config)
        module = AutoModelForCausalLM.from_config(made, attn_implementation=ATTENTION, dtype=torch.float32)
        model = as_loaded(module.eval(), Path("made"), None, torch.device("cpu"))
engine = Engine(model, kv_cache_bytes=768 << 20, max_sequences=32, max_tokens_per_step=512, max_model_len=1024)
random = np.random.default_rng(0)
def add(length, outputs):
    engine.add_request(random.integers(3, 1000, length).tolist(), SamplingParams(max_tokens=outputs, temperature=0, ignore_eos=True))
def timed(rows):
    if not rows:
        add(512, 1)
        begin = time.process_time()
        while engine.has_unfinished:
            engine.step()
        return 512 / (time.process_time() - begin)
    for _ in range(rows):
        add(8, steps + 8)
    for _ in range(4):
        engine.step()
    begin = time.process_time()
    for _ in range(steps):
        engine.step()
    seconds = time.process_time() - begin
    while engine.has_unfinished:
        engine.step()
    return rows * steps / seconds
found = {}
for work, rows in works.items():
    timed(rows)
    found[work] = timed(rows)
print(json.dumps(found))
"""


def tokens_a_second(tree: Path, config: dict[str, Any], steps: int) -> dict[str, float]:
    """Of each work, the second time, in a process of its own. No configuration: the model `hybrid`."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(config), str(steps), json.dumps(WORK)],
        env=environment,
        cwd=tree,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def commit(tree: Path) -> str:
    """Which one is checked out."""
    done = subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def write_page(
    to: Path, title: str, before: Path, rounds: int, models: dict[str, dict[str, Any]], command: list[str], words: str
) -> None:
    """Time all works of these models on both trees in turns, and write the page."""
    from paged.model.machine import machine

    lines = []
    for model, config in models.items():
        speeds: dict[Path, list[dict[str, float]]] = {before: [], REPOSITORY: []}
        for number in range(rounds):
            for tree in (before, REPOSITORY) if number % 2 else (REPOSITORY, before):
                speeds[tree].append(tokens_a_second(tree, config, 10 if config else 160))
        for work in WORK:
            then, now = ([each[work] for each in speeds[tree]] for tree in (before, REPOSITORY))
            ratio = [new / old for new, old in zip(now, then, strict=True)]
            lines.append(
                f"| {model} | {work} | {spread(then, ',.0f')} | {spread(now, ',.0f')} | {np.median(ratio):.1f} × ({min(ratio):.1f} to {max(ratio):.1f}) |"
            )
            print(lines[-1], flush=True)
    its = machine()
    page = [
        f"# {title}",
        "",
        f"{its['processor']}, one of {its['cores']} cores, Python {its['python']}, torch {its['torch']}. Tokens a second of processor time, batch-invariant, float32: {rounds} processes each, in turns. Before: {commit(before)}. Now: {commit(REPOSITORY)}.",
        "",
        "```",
        *command,
        "```",
        "",
        "| model | work | before | now | now over before |",
        "|---|---|--:|--:|--:|",
        *lines,
        "",
        words,
    ]
    to.write_text("\n".join(page))


@app.command()
def main(before: Annotated[Path, typer.Argument(help="A checkout of the earlier commit.")], rounds: int = 5) -> None:
    """Time both, and write the page."""
    command = ["git worktree add /tmp/before 9412b8e", "python benchmarks/recurrences.py /tmp/before"]
    write_page(RESULTS, "Recurrences in C", before, rounds, MODELS, command, WORDS)


if __name__ == "__main__":
    app()
