"""The page of host costs beside the goals, from the document that `compare.py` writes.

python benchmarks/host_cost_table.py results/host-cost.json > results/host-cost.md
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spread import spread

# vLLM's figure over ours, prefix caching on; other cells are shown without a goal.
GOALS = {
    "decode 1024, caching on": 300.0,
    "decode 4096, caching on": 500.0,
    "churn, caching on": 25.0,
    "pressure, caching on": 12.0,
    "prefix, caching on": 12.0,
}
# The same of our scheduler inside vLLM, where it has vLLM's objects to make.
GOALS_IN_VLLM = {"decode 256, caching on": 4.0, "decode 1024, caching on": 6.0, "pressure, caching on": 4.0}
POOL_GOALS = {"allocate_ns": 5.0, "free_ns": 5.0, "insert_ns": 3.0, "evict_and_allocate_ns": 3.0}
POOL_NAMES = {
    "allocate_ns": "allocate",
    "free_ns": "free",
    "insert_ns": "insert content",
    "evict_and_allocate_ns": "evict and allocate",
}
BUILD_GOAL_MS, AT_REST_GOAL, FULL_GOAL = 20.0, 40.0, 320.0
UNITS = {"us_total": "µs a step", "us_per_output_token": "µs per output token"}


def page(document: dict[str, Any]) -> str:
    """The whole page, Markdown."""
    return "\n".join([*_head(document), *_sched(document), *_pool(document), *_long_rows(document)]).rstrip() + "\n"


def _head(document: dict[str, Any]) -> Iterable[str]:
    hardware, versions, settings = document["hardware"], document["versions"], document["settings"]
    yield "# Host cost inside vLLM" if _is_in_vllm(document) else "# Host cost beside vLLM"
    yield ""
    yield (
        f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB, {hardware['system']}; "
        f"Python {versions['python']}, numpy {versions['numpy']}, msgspec {versions['msgspec']}, vLLM {versions['vllm']} "
        "(both sides under the same interpreter)."
    )
    yield (
        f"CPU time of the thread, {settings['rounds']} runs a side in turns, each in a process of its own; a figure is the "
        f"median of its runs, the range is over the runs. `{_name(document)}.json` holds every run."
    )
    yield ""
    yield "```"
    if _is_in_vllm(document):
        yield "python benchmarks/compare.py --vllm-python VENV/bin/python --peers DIR --model DIR/tiny \\"
        yield '    --engine vllm_plugged.py:Plugged --name host-cost-in-vllm --rows 256,1024 --only "caching on"'
    else:
        yield "python benchmarks/compare.py --vllm-python VENV/bin/python --peers DIR --model DIR/tiny"
    yield "```"
    yield ""


def _name(document: dict[str, Any]) -> str:
    return "host-cost-in-vllm" if _is_in_vllm(document) else "host-cost"


def _decode_policy(document: dict[str, Any]) -> str:
    policy = document["settings"].get("decode_policy")
    return f", and `{policy}` for rows that decode, which all have to run" if policy else ""


def _is_in_vllm(document: dict[str, Any]) -> bool:
    return bool(document["settings"]["engine"].startswith("vllm_plugged"))


def _sched(document: dict[str, Any]) -> Iterable[str]:
    if not document["cells"]:
        return
    yield "## Scheduler and manager"
    yield ""
    yield f"Block size 16, 8,192 tokens a step, chunked prefill. Ours: policy `paged`{_decode_policy(document)}. A step is schedule + update; a stream's"
    yield "time is that and building and adding the requests. Caching is prefix caching."
    if _is_in_vllm(document):
        yield ""
        yield "Ours is `paged.integrations.vllm.Scheduler`: it takes vLLM's requests and makes vLLM's `SchedulerOutput` and `EngineCoreOutputs`,"
        yield "all under the clock. vLLM's own hashes each prompt while its request is built; ours is run with that switched off, as it needs none."
    yield ""
    yield "| | unit | vLLM | ours | ratio | goal | |"
    yield "|---|---|--:|--:|--:|--:|---|"
    for cell in document["cells"]:
        metric = cell["metric"]
        vllm, ours = ([run[metric] for run in cell[side]] for side in ("vllm", "ours"))
        ratio = statistics.median(vllm) / statistics.median(ours)
        goal = (GOALS_IN_VLLM if _is_in_vllm(document) else GOALS).get(cell["cell"])
        verdict = f"{goal:.0f} × | {_met(ratio >= goal)}" if goal else " | "
        yield f"| {cell['cell']} | {UNITS[metric]} | {_spread(vllm)} | {_spread(ours)} | {ratio:.1f} × | {verdict} |"
    yield ""
    yield "What the two did with the same requests, so that a cheap step is not bought with a worse one (medians):"
    yield ""
    yield "| | side | steps | tokens computed | preemptions | recomputed, of useful | rows in flight | hit rate |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|"
    for cell in document["cells"]:
        if cell["metric"] != "us_per_output_token":
            continue
        for side in ("vllm", "ours"):
            runs = cell[side]

            def median(key: str, runs: list[dict[str, Any]] = runs) -> float:
                return float(statistics.median(run[key] for run in runs))

            # Prefix hits make computed tokens fewer than useful ones, so waste says nothing there.
            waste = "" if "hit_rate" in runs[0] else f"{median('recompute_waste'):.1%}"
            hits = f"{median('hit_rate'):.2%}" if "hit_rate" in runs[0] else ""
            yield (
                f"| {cell['cell']} | {side} | {median('steps'):,.0f} | {median('tokens_scheduled'):,.0f} "
                f"| {median('preemptions'):,.0f} | {waste} | {median('occupancy_mean'):.0f} | {hits} |"
            )
    yield ""


def _pool(document: dict[str, Any]) -> Iterable[str]:
    pool = document.get("pool")
    if not pool:
        return
    yield "## Block pool"
    yield ""
    yield "In calls of 64 blocks that are one run each, ns a block, `pool.py`. vLLM's own scenario handles the whole pool in one"
    yield "call a phase and makes a digest of eight bytes as it inserts; its figures stand in brackets."
    yield ""
    yield "| | vLLM | ours | ratio | goal | |"
    yield "|---|--:|--:|--:|--:|---|"
    whole = [run["rss"] for run in pool["vllm_whole"]]
    own = {
        "allocate_ns": "alloc_ns_per_block",
        "insert_ns": "insert_ns_per_block_incl_sha",
        "free_ns": "free_ns_per_block",
        "evict_and_allocate_ns": "alloc_with_evict_ns_per_block",
    }
    for key, goal in POOL_GOALS.items():
        vllm, ours = ([run[key] for run in pool[side]] for side in ("vllm", "ours"))
        ratio = statistics.median(vllm) / statistics.median(ours)
        bracket = statistics.median(run[own[key]] for run in whole)
        yield (
            f"| {POOL_NAMES[key]} | {_spread(vllm)} [{bracket:,.0f}] | {_spread(ours)} | {ratio:.1f} × | {goal:.0f} × "
            f"| {_met(ratio >= goal)} |"
        )
    yield ""
    yield "| | vLLM | ours | goal | |"
    yield "|---|--:|--:|--:|---|"
    vllm_build, build = ([run["build_ms"] for run in pool[side]] for side in ("vllm", "ours"))
    met = _met(statistics.median(build) < BUILD_GOAL_MS)
    yield f"| build, ms | {_spread(vllm_build)} | {_spread(build)} | < {BUILD_GOAL_MS:.0f} | {met} |"
    vllm, ours = pool["vllm"][0], pool["ours"][0]
    met = _met(ours["at_rest_bytes"] <= AT_REST_GOAL)
    yield f"| bytes a block at rest | {vllm['at_rest_bytes']:.0f} | {ours['at_rest_bytes']:.0f} | ≤ {AT_REST_GOAL:.0f} | {met} |"
    for length, size in ours["full_bytes"].items():
        goal_text = f"≤ {FULL_GOAL:.0f} | {_met(size <= FULL_GOAL)}" if length == "4" else " | "
        vllm_size = f"{next(iter(vllm['full_bytes'].values())):.0f}"
        yield f"| bytes a block, all with content in runs of {length} | {vllm_size} | {size:.0f} | {goal_text} |"
    yield ""


def _long_rows(document: dict[str, Any]) -> Iterable[str]:
    rows = document.get("long_rows")
    if not rows:
        return
    goal = rows["goal_ratio"]
    yield "## Long rows, and holes among the rows"
    yield ""
    yield "A decode step of 1,024 rows, caching on, `long_rows.py`: 256 or 131,072 tokens a row, dense or scattered among as many"
    yield "rows that were aborted."
    yield ""
    yield "| | µs a step | ratio | goal | |"
    yield "|---|--:|--:|--:|---|"
    for shape in rows["shapes"]:
        figures = [run["us_per_step"] for run in shape["runs"]]
        is_base = shape["shape"] == "short, dense"
        verdict = " | " if is_base else f"≤ {goal} × | {_met(shape['ratio'] <= goal)}"
        yield f"| {shape['shape']} | {_spread(figures)} | {shape['ratio']:.2f} × | {verdict} |"
    yield ""


def _spread(figures: list[float]) -> str:
    """The median and the range, to about three figures."""
    middle = statistics.median(figures)
    return spread(figures, f",.{0 if middle >= 100 else 1 if middle >= 10 else 2}f")


def _met(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


if __name__ == "__main__":
    measured = json.loads(Path(sys.argv[1]).read_text())
    print(page(measured), end="")
