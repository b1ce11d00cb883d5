"""Bytes that a sequence holds by our plan of a model's layers and by vLLM's, over the bytes that its layers need: `results/plans.md`.

    python benchmarks/plans.py --vllm-python .venv-vllm/bin/python --out benchmarks/results/plans

vLLM's plan comes from its own functions, run by the Python that has it: the specification of each layer, the attention block made so large
that a state fits a page (as its `Platform` does for hybrid models), and `get_kv_cache_groups`, at each length in the better of its two
layouts. A window holds the blocks that its next token sees, a state one block, as in our plan; each block of a group takes one block of
vLLM's pool.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from paged.model.layer_plan import LENGTHS, Layers, blocks_held, plan_layers
from paged.study.hardware import layers_named, published_layers

NAMES = ("llama-3-8b", "qwen3-8b", "deepseek-v2", *sorted(published_layers()))
BLOCK_SIZE = 16
ODD_LENGTHS = tuple(1_000 + 997 * place for place in range(64))
"""Lengths of which few are a multiple of a block."""
ALL_LENGTHS = (*LENGTHS, *ODD_LENGTHS)


def main() -> None:
    """Plan all models on both sides, and write the page and its data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", default=sys.executable, help="the Python that has vLLM")
    parser.add_argument("--out", type=Path, default=None, help="write NAME.md and NAME.json")
    parser.add_argument("--theirs", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.theirs:
        print(json.dumps({"version": _vllm().__version__, "plans": {name: _theirs(name) for name in NAMES}}))
        return
    command = [arguments.vllm_python, __file__, "--theirs"]
    # That Python may have another paged than this one.
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    theirs = json.loads(ran.stdout.splitlines()[-1])
    rows = [_row(name, theirs["plans"][name]) for name in NAMES]
    text = _page(rows, theirs["version"])
    print(text)
    if arguments.out is not None:
        arguments.out.with_suffix(".md").write_text(text, encoding="utf-8")
        lines = ",\n".join(json.dumps(row) for row in rows)
        arguments.out.with_suffix(".json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _row(name: str, theirs: dict[str, Any]) -> dict[str, Any]:
    kept = layers_named(name)
    plan = plan_layers(kept.layers)
    needed = {length: plan.kept_bytes(length) for length in ALL_LENGTHS}
    held = theirs.pop("held", None)
    return {
        "model": name,
        "doubt": kept.doubt,
        "block_size": plan.block_size,
        "page_bytes": plan.page_bytes,
        "groups": [[group.name, group.pages] for group in plan.groups],
        "waste": {length: round(plan.held_bytes(length) / needed[length], 5) for length in needed},
        "vllm": theirs,
        "vllm_waste": held and {length: round(held[str(length)] / needed[length], 5) for length in needed},
    }


def _page(rows: list[dict[str, Any]], version: str) -> str:
    lines = [
        "# Plans of models with layers of several kinds",
        "",
        "Bytes that a sequence holds over the bytes that its layers need: least to most at 1k, 2k, 4k, ... 128k tokens, and the mean of",
        f"{len(ODD_LENGTHS)} lengths from {ODD_LENGTHS[0]:,} tokens to {ODD_LENGTHS[-1]:,}, {ODD_LENGTHS[1] - ODD_LENGTHS[0]} apart; bf16.",
        f"Ours by `plan_layers`; vLLM {version}'s by its own functions, what its attention block became in brackets; Python "
        f"{platform.python_version()}. A model marked * has sizes that were not seen in a source.",
        "",
        "```",
        f"python benchmarks/plans.py {' '.join(sys.argv[1:])}",
        "```",
        "",
        "| model | tokens a block | page, bytes | pages of each group | held ÷ needed | mean | vLLM's | mean |",
        "|---|--:|--:|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        groups = "; ".join(f"{name}: {pages}" for name, pages in row["groups"])
        mark = " *" if row["doubt"] else ""
        theirs = f"{row['vllm'].get('refused')} |"
        if row["vllm_waste"]:
            theirs = f"{_span(row['vllm_waste'])} ({row['vllm']['block_size']:,}) | {_mean(row['vllm_waste']):.3f}"
        ours = f"{groups} | {_span(row['waste'])} | {_mean(row['waste']):.3f}"
        lines.append(f"| {row['model']}{mark} | {row['block_size']} | {row['page_bytes']:,} | {ours} | {theirs} |")
    both = [row for row in rows if row["vllm_waste"]]
    for where, lengths in (("At 1k, 2k, 4k, ... 128k tokens", LENGTHS), ("At the other lengths", ODD_LENGTHS)):
        ratios = [row["waste"][n] / row["vllm_waste"][n] for row in both for n in lengths]
        worst = max(row["waste"][n] for row in rows for n in lengths)
        lines += [
            "",
            f"{where}: at most {worst:.3f} × of what is needed; ours ÷ vLLM's {min(ratios):.3f} to {max(ratios):.3f}.",
        ]
    return "\n".join([*lines, ""])


def _span(values: dict[int, float]) -> str:
    return f"{min(values[n] for n in LENGTHS):.3f} to {max(values[n] for n in LENGTHS):.3f}"


def _mean(values: dict[int, float]) -> float:
    return sum(values[n] for n in ODD_LENGTHS) / len(ODD_LENGTHS)


# In vLLM's Python.


def _vllm() -> Any:
    import vllm

    return vllm


def _theirs(name: str) -> dict[str, Any]:
    """Return vLLM's block size and the bytes that a sequence of each length holds, or why it has no plan."""
    from vllm.config import VllmConfig
    from vllm.v1.core import kv_cache_utils as utils

    layers = layers_named(name).layers
    if any(each.stride > 1 for each in layers):
        return {"refused": "its own kinds of cache, not compared"}
    states = [each for each in layers if each.kind == "state"]
    attention = [each for each in layers if each.kind != "state"]
    block_size = BLOCK_SIZE
    padded = None
    if states and attention:
        state_bytes, token_bytes = states[0].state_bytes, max(sum(each.entry) for each in attention)
        aligned = max(BLOCK_SIZE, 128) if len(attention[0].entry) == 1 else BLOCK_SIZE
        block_size = aligned * math.ceil(state_bytes / (aligned * token_bytes))
        padded = block_size * token_bytes
    specs: dict[str, Any] = {}
    for place, each in enumerate(layers):
        for number in range(each.count):
            specs[f"layers.{place}.{number}"] = _spec(each, block_size, padded)
    plans = []
    for layout in ("LBNHC", "BLNHC"):
        config = VllmConfig()
        config.cache_config.kv_cache_layout = layout
        try:
            groups = utils.get_kv_cache_groups(config, dict(specs))
            block_bytes = utils._get_kv_cache_bytes_per_block(
                groups, config.cache_config.get_resolved_kv_cache_layout()
            )
        except (NotImplementedError, AssertionError) as error:
            refused = f"{type(error).__name__}"
            continue
        held = {length: block_bytes * sum(_blocks(group, layers, length) for group in groups) for length in ALL_LENGTHS}
        largest = max(group.kv_cache_spec.block_size for group in groups)
        plans.append({"layout": layout, "block_size": largest, "groups": len(groups), "held": held})
    if not plans:
        return {"refused": refused}
    # A server has one layout for all lengths: this is what vLLM's reach at best.
    least = {length: min(plan["held"][length] for plan in plans) for length in ALL_LENGTHS}
    return {**min(plans, key=lambda plan: plan["held"][LENGTHS[0]]), "held": least}


def _spec(layers: Layers, block_size: int, padded: int | None) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as specs

    half = torch.bfloat16
    if layers.kind == "state":
        # What a state is made of matters to no plan: only its bytes do.
        return specs.MambaSpec(
            block_size=block_size, shapes=((layers.state_bytes // 2,),), dtypes=(half,), page_size_padded=padded
        )
    if len(layers.entry) == 1:
        return specs.MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=layers.entry[0] // 2, dtype=half)
    sizes = {"block_size": block_size, "num_kv_heads": 1, "dtype": half}
    sizes |= {"head_size": layers.entry[0] // 2, "head_size_v": layers.entry[1] // 2}
    if layers.kind == "window":
        return specs.SlidingWindowSpec(**sizes, sliding_window=layers.reach)
    if layers.kind == "chunk":
        return specs.ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=layers.reach)
    return specs.FullAttentionSpec(**sizes)


def _blocks(group: Any, layers: tuple[Layers, ...], num_tokens: int) -> int:
    """Return the blocks that a sequence holds of a group of vLLM's."""
    each = layers[int(group.layer_names[0].split(".")[1])]
    if each.kind == "state":
        return 1
    return blocks_held(each.kind, each.reach, num_tokens, group.kv_cache_spec.block_size)


if __name__ == "__main__":
    main()
