"""Bytes that a sequence holds by our plan of a model's layers and by vLLM's, over the bytes that its layers need: `results/plans.md`.

    python benchmarks/plans.py --vllm-python .venv-vllm/bin/python --out benchmarks/results/plans

vLLM's plan comes from its own functions, run by the Python that has it: the specification of each layer, the attention block made so large
that a state fits a page (as its `Platform` does for hybrid models), and `get_kv_cache_groups`, in the better of its two layouts. A window
holds the blocks that its next token sees, a state one block, as in our plan; each block of a group takes one block of vLLM's pool.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from paged.model.layer_plan import LENGTHS, Layers, front, plan_layers
from paged.study.hardware import layers_named, published_layers

NAMES = ("llama-3-8b", "qwen3-8b", "deepseek-v2", *sorted(published_layers()))
BLOCK_SIZE = 16


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
    theirs = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    rows = [_row(name, theirs["plans"][name]) for name in NAMES]
    text = _page(rows, theirs["version"])
    print(text)
    if arguments.out is not None:
        arguments.out.with_suffix(".md").write_text(text, encoding="utf-8")
        arguments.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _row(name: str, theirs: dict[str, Any]) -> dict[str, Any]:
    plan = plan_layers(layers_named(name).layers)
    held = theirs.get("held")
    return {
        "model": name,
        "is_sure": name not in published_layers() or published_layers()[name].is_sure,
        "block_size": plan.block_size,
        "page_bytes": plan.page_bytes,
        "groups": {group.name: group.pages for group in plan.groups},
        "waste": {length: plan.held_bytes(length) / plan.kept_bytes(length) for length in LENGTHS},
        "vllm": theirs,
        "vllm_waste": held and {length: held[str(length)] / plan.kept_bytes(length) for length in LENGTHS},
    }


def _page(rows: list[dict[str, Any]], version: str) -> str:
    lines = [
        "# Plans of models with layers of several kinds",
        "",
        "Bytes that a sequence holds over the bytes that its layers need, least to most over 1k, 2k, ... 128k tokens; bf16.",
        f"Ours by `plan_layers`; vLLM {version}'s by its own functions, what its attention block became in brackets; Python "
        f"{platform.python_version()}. A model marked * has sizes that were not seen in a source.",
        "",
        "```",
        f"python benchmarks/plans.py {' '.join(sys.argv[1:])}",
        "```",
        "",
        "| model | tokens a block | page, bytes | pages of each group | held ÷ needed | vLLM's |",
        "|---|--:|--:|---|--:|--:|",
    ]
    for row in rows:
        groups = ", ".join(f"{name}: {pages}" for name, pages in row["groups"].items())
        mark = "" if row["is_sure"] else " *"
        theirs = row["vllm"].get("refused", "")
        if row["vllm_waste"]:
            theirs = f"{_span(row['vllm_waste'])} ({row['vllm']['block_size']:,})"
        lines.append(
            f"| {row['model']}{mark} | {row['block_size']} | {row['page_bytes']:,} | {groups} | {_span(row['waste'])} | {theirs} |"
        )
    ratios = [row["waste"][n] / row["vllm_waste"][n] for row in rows if row["vllm_waste"] for n in LENGTHS]
    worst = max(max(row["waste"].values()) for row in rows)
    lines += [
        "",
        f"Most that ours holds beyond what is needed: {worst:.3f} ×. Ours ÷ vLLM's: {min(ratios):.3f} to {max(ratios):.3f}.",
        "",
    ]
    return "\n".join(lines)


def _span(values: dict[int, float]) -> str:
    return f"{min(values.values()):.3f} to {max(values.values()):.3f}"


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
        state_bytes, token_bytes = _state_bytes(states[0]), max(sum(each.entry) for each in attention)
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
        held = {length: block_bytes * sum(_blocks(group, layers, length) for group in groups) for length in LENGTHS}
        sizes = max(spec.block_size for group in groups for spec in [group.kv_cache_spec])
        plans.append({"layout": layout, "block_size": sizes, "groups": len(groups), "held": held})
    return min(plans, key=lambda plan: plan["held"][LENGTHS[0]]) if plans else {"refused": refused}


def _spec(layers: Layers, block_size: int, padded: int | None) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as specs

    half = torch.bfloat16
    if layers.kind == "state":
        # What a state is made of matters to no plan: only its bytes do.
        return specs.MambaSpec(
            block_size=block_size, shapes=((_state_bytes(layers) // 2,),), dtypes=(half,), page_size_padded=padded
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


def _state_bytes(layers: Layers) -> int:
    return sum(part.units * part.unit_bytes for part in layers.parts)


def _blocks(group: Any, layers: tuple[Layers, ...], num_tokens: int) -> int:
    """Return the blocks that a sequence holds of a group of vLLM's."""
    each = layers[int(group.layer_names[0].split(".")[1])]
    if each.kind == "state":
        return 1
    size = group.kv_cache_spec.block_size
    first = front(each.kind, each.reach, num_tokens) // size
    return max(0, math.ceil(num_tokens / size) - first)


if __name__ == "__main__":
    main()
