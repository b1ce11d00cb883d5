"""What running a model costs beside the model: a tile of 32 against one token, packed mode against the bare forward, the host's share.

    python benchmarks/model_cost.py --large DIR --out benchmarks/results

`--large` is a checkpoint of the size that is asked about (135 million parameters); without it only the embedded model is measured.
All cells of a question take turns in one process, so that a machine that slows down slows them all; a run's figure is the median
of its calls, and the page gives the median of the runs and their range. The JSON keeps every run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from paged.attention import LayerOptions, StepTokens
from paged.engine.engine import Engine
from paged.model.capacity import pool_for
from paged.model.checkpoint import checkpoint_path
from paged.model.hook import under_way
from paged.model.loading import LoadedModel, load_model
from paged.model.machine import processor_name
from paged.model.runner import TILE, runner_for
from paged.sampling.params import SamplingParams

BLOCK_SIZE = 16
# Of a cell in a run; a large model takes a tenth of a second for each.
CALLS = {"embedded": 30, "135m": 6}
ROWS = 64
Cell = Callable[[], object]


def decode_step(num_rows: int, context: int) -> StepTokens:
    """One token of each of `num_rows` sequences, the last of `context`; their blocks lie scattered over the pool."""
    columns = -(-context // BLOCK_SIZE)
    blocks = np.random.default_rng(0).permutation(num_rows * columns).astype(np.int32).reshape(num_rows, columns)
    slots = blocks[:, -1].astype(np.int64) * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
    lengths = np.full(num_rows, context)
    return StepTokens(lengths - 1, slots, np.arange(num_rows + 1), lengths, blocks, BLOCK_SIZE)


def chunk_step(count: int, context: int) -> StepTokens:
    """The last `count` of the `context` tokens of one sequence."""
    blocks = np.random.default_rng(0).permutation(-(-context // BLOCK_SIZE)).astype(np.int32)
    positions = np.arange(context - count, context)
    slots = blocks[positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    return StepTokens(positions, slots, np.array([0, count]), np.array([context]), blocks[None], BLOCK_SIZE)


def forward(model: LoadedModel, step: StepTokens, *, tile: int | None) -> Cell:
    """The runner on this step, which samples everywhere."""
    runner = runner_for(
        model, pool_for(model, num_blocks=1024, block_size=BLOCK_SIZE), batch_invariant=tile is not None
    )
    if tile is not None and runner.tile != TILE:
        raise RuntimeError(f"places of a tile disagree on this machine, so that tiles have {runner.tile} tokens here")
    runner.tile = tile
    ids = np.arange(step.num_tokens, dtype=np.int32) % model.vocabulary_size
    is_sampled = np.ones(step.num_tokens, np.bool_)
    return lambda: runner.forward(step, ids, is_sampled)


class NoAttention:
    """Hands the queries back: what is left is the forward pass of the library."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, options: LayerOptions) -> Tensor:
        return queries

    def refuse(self, what: str, *, can_itself: bool = False) -> None:
        raise RuntimeError(what)


def bare_forward(model: LoadedModel, count: int) -> Cell:
    """transformers' forward over `count` packed tokens, without attention, logits of all."""
    ids = torch.arange(count)[None] % model.vocabulary_size
    positions = torch.zeros_like(ids)

    def call() -> None:
        with torch.inference_mode(), under_way(NoAttention()):
            model.module(input_ids=ids, position_ids=positions, use_cache=False)

    return call


def attention_alone(model: LoadedModel, step: StepTokens) -> Cell:
    """Packed mode's attention in every layer, by itself, its plan made before."""
    pool = pool_for(model, num_blocks=1024, block_size=BLOCK_SIZE)
    backend = runner_for(model, pool, batch_invariant=False).backend
    plan = backend.prepare(step, pool)
    queries = torch.randn(step.num_tokens, model.num_heads, model.head_dim)
    options = LayerOptions(model.head_dim**-0.5)

    def call() -> None:
        # Windows and index tensors of a plan are made in its first layer, which belongs to the step's overhead.
        with torch.inference_mode():
            for layer in range(model.num_layers):
                backend.attend(queries, pool, layer, plan, options)

    return call


def own_cache(path: Path, num_rows: int, context: int) -> Cell:
    """transformers' own decode step: `num_rows` rows of equal length, its cache, torch's attention; the token is taken out of the cache again."""
    transformers.utils.logging.disable_progress_bar()
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    module = load(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    cache = transformers.DynamicCache(config=module.config)
    with torch.inference_mode():
        module(input_ids=torch.ones(num_rows, context - 1, dtype=torch.int64), past_key_values=cache, logits_to_keep=1)
    ids = torch.ones(num_rows, 1, dtype=torch.int64)

    def call() -> None:
        with torch.inference_mode():
            module(input_ids=ids, past_key_values=cache)
            cache.crop(-1)

    return call


def runs_of(cells: dict[str, Cell], rounds: int, calls: int) -> dict[str, list[float]]:
    """Milliseconds: for each cell the medians of its rounds, the cells taking turns call by call."""
    for cell in cells.values():
        cell()
        cell()
    found: dict[str, list[float]] = {name: [] for name in cells}
    for _ in range(rounds):
        times: dict[str, list[float]] = {name: [] for name in cells}
        for _, (name, cell) in itertools.product(range(calls), cells.items()):
            cell()
            began = time.perf_counter()
            cell()
            times[name].append(time.perf_counter() - began)
        for name, measured in times.items():
            found[name].append(statistics.median(measured) * 1e3)
    return found


def tile_cells(model: LoadedModel) -> list[tuple[str, dict[str, Cell]]]:
    """For each context: 32 tokens in a tile, against one token in a forward pass of its own."""
    found = []
    for context in (16, 64, 192):
        one = decode_step(1, context)
        cells = {
            "one": forward(model, one, tile=1),
            "a tile with one": forward(model, one, tile=TILE),
            "a tile of 32 sequences": forward(model, decode_step(TILE, context), tile=TILE),
        }
        if context >= TILE:
            cells["a tile of one prompt"] = forward(model, chunk_step(TILE, context), tile=TILE)
        found.append((f"context {context}", cells))
    return found


def packed_cells(model: LoadedModel) -> list[tuple[str, dict[str, Cell]]]:
    """For each context: a packed step of 64 rows, the bare forward, the attention alone, and transformers' own decode."""
    return [
        (
            f"context {context}",
            {
                "packed": forward(model, decode_step(ROWS, context), tile=None),
                "bare forward": bare_forward(model, ROWS),
                "attention": attention_alone(model, decode_step(ROWS, context)),
                "own cache": own_cache(model.path, ROWS, context),
            },
        )
        for context in (64, 192)
    ]


def host_shares(model: LoadedModel, rounds: int) -> dict[str, list[float]]:
    """The host's part of decode steps at 64 rows, for each way to run and to sample; one figure a round."""
    greedy, drawn = {"temperature": 0.0}, {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
    found: dict[str, list[float]] = {}
    for _, (is_invariant, (name, params)) in itertools.product(
        range(rounds), itertools.product((True, False), (("greedy", greedy), ("top-k and top-p", drawn)))
    ):
        engine = Engine(
            model, num_blocks=1024, max_sequences=ROWS, max_tokens_per_step=2048, batch_invariant=is_invariant
        )
        rng = np.random.default_rng(0)
        for _ in range(ROWS):
            prompt = rng.integers(3, 500, 24).tolist()
            engine.add_request(prompt, SamplingParams(max_tokens=64, ignore_eos=True, **params))
        while engine.scheduler.counts()["waiting"]:
            engine.step()
        for _ in range(4):
            engine.step()
        before = engine.stats()
        for _ in range(12):
            engine.step()
        after = engine.stats()
        host, model_s = after.host_s - before.host_s, after.model_s - before.model_s
        key = f"{'batch-invariant' if is_invariant else 'packed'}, {name}"
        found.setdefault(key, []).append(host / (host + model_s))
    return found


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Everything, as the JSON keeps it."""
    small = load_model(checkpoint_path())
    large = load_model(args.large) if args.large else None
    tiles, packed = [], []
    most = torch.get_num_threads()
    for num_threads in sorted({1, most}):
        torch.set_num_threads(num_threads)
        if num_threads == 1:
            # A model this small runs on one thread, whatever is set.
            for where, cells in tile_cells(small):
                tiles.append({"threads": 1, "case": where, "ms": runs_of(cells, args.rounds, CALLS["embedded"])})
        for name, model in {"embedded": small if num_threads == 1 else None, "135m": large}.items():
            for where, cells in packed_cells(model) if model else ():
                runs = runs_of(cells, args.rounds, CALLS[name])
                packed.append({"threads": num_threads, "model": name, "case": where, "ms": runs})
    return {
        "machine": {
            "processor": processor_name(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "rounds": args.rounds,
        "calls_a_round": CALLS,
        "tile": tiles,
        "packed": packed,
        "host_share": host_shares(large, args.rounds) if large else {},
    }


def _figure(runs: list[float], digits: int = 2) -> str:
    return f"{statistics.median(runs):.{digits}f} ({min(runs):.{digits}f} to {max(runs):.{digits}f})"


def page(document: dict[str, Any]) -> str:
    """The tables."""
    machine = document["machine"]
    lines = [
        "# A model's steps",
        "",
        f"`python benchmarks/model_cost.py`: {document['rounds']} runs, each the median of {document['calls_a_round']['embedded']} calls ({document['calls_a_round']['135m']} of the large model), the cells of a line taking turns;",
        f"median of the runs and their range, wall time. {machine['processor']}, Python {machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}, float32.",
        "",
        "## A tile of 32 tokens on the embedded model, ms (goal: at most 1.5 × one token)",
        "",
        "| threads | case | one token alone | a tile with one token | a tile of 32 sequences | against one token, alone and in a tile | a tile of one prompt |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for each in document["tile"]:
        ms = each["ms"]
        full, one, padded = (
            statistics.median(ms[name]) for name in ("a tile of 32 sequences", "one", "a tile with one")
        )
        prompt = _figure(ms["a tile of one prompt"]) if "a tile of one prompt" in ms else ""
        lines.append(
            f"| {each['threads']} | {each['case']} | {_figure(ms['one'])} | {_figure(ms['a tile with one'])} | "
            f"{_figure(ms['a tile of 32 sequences'])} | {full / one:.2f} ×, {full / padded:.2f} × | {prompt} |"
        )
    lines += [
        "",
        "## Packed mode at 64 rows, ms (goal: at most 1.3 × bare forward and attention)",
        "",
        "| model | threads | case | packed step | bare forward | attention alone | ratio | transformers' own cache |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for each in document["packed"]:
        ms = each["ms"]
        whole, bare, alone = (statistics.median(ms[name]) for name in ("packed", "bare forward", "attention"))
        lines.append(
            f"| {each['model']} | {each['threads']} | {each['case']} | {_figure(ms['packed'])} | {_figure(ms['bare forward'])} | "
            f"{_figure(ms['attention'])} | {whole / (bare + alone):.2f} × | {_figure(ms['own cache'])} |"
        )
    if document["host_share"]:
        lines += [
            "",
            "## The host's share of a step at 64 rows of the 135m shape (goal: below 10 %)",
            "",
            "Of 12 decode steps each run, one run after the other.",
            "",
            "| mode | share, % |",
            "|---|--:|",
        ]
        lines += [
            f"| {name} | {_figure([100 * run for run in runs])} |" for name, runs in document["host_share"].items()
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", type=Path, help="folder of a checkpoint of 135 million parameters")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each cell (default 5)")
    parser.add_argument(
        "--out", type=Path, help="folder for model-cost.json and model-cost.md; default: print the page"
    )
    args = parser.parse_args()
    document = measured(args)
    text = page(document)
    if args.out:
        (args.out / "model-cost.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        (args.out / "model-cost.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    sys.exit(main())
