"""How many sequences run at once on equal bytes: layers of several kinds by their plan, and as if all layers kept all tokens. `results/in-flight.md`.

    python benchmarks/in_flight.py --out benchmarks/results/in-flight

Requests of the hour of Azure's conversations, lengths 8 times as long, all of them waiting from the start: so many run as memory lets in. A step has 8,192
tokens. Both sides get the bytes of 64 sequences of 8,192 tokens of which all layers keep all. What a step takes is not simulated: the mean is over steps.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

import msgspec
import numpy as np

from paged import BlockManager, LayerGroup, Request, Scheduler
from paged.model.layer_plan import LayerPlan, plan_layers
from paged.study.hardware import layers_named
from paged.study.traces import open_trace

NAMES = ("gpt-oss-120b", "gemma-3-27b", "olmo-3-32b", "llama-4-scout")
FACTOR, SEQUENCES, LENGTH, BUDGET = 8, 64, 8_192, 8_192
SKIPPED, MEASURED = 2_000, 4_000


def main() -> None:
    """Measure each model both ways, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=NAMES)
    parser.add_argument("--out", type=Path, default=None, help="write NAME.md")
    arguments = parser.parse_args()
    rows = [_row(name) for name in arguments.only]
    text = _page(rows)
    print(text)
    if arguments.out is not None:
        arguments.out.with_suffix(".md").write_text(text, encoding="utf-8")


def _row(name: str) -> tuple[str, float, float, float, float]:
    """Name; sequences at once with all tokens kept and by plan; the ratio of both, and that of the bytes of sequences of 8,192 tokens."""
    layers = layers_named(name).layers
    planned = plan_layers(layers)
    whole = plan_layers([msgspec.structs.replace(each, kind="full", reach=0) for each in layers])
    num_bytes = SEQUENCES * whole.held_bytes(LENGTH)
    before, after = _mean_running(whole, num_bytes), _mean_running(planned, num_bytes)
    return name, before, after, after / before, whole.held_bytes(LENGTH) / planned.held_bytes(LENGTH)


def _mean_running(plan: LayerPlan, num_bytes: int) -> float:
    """Rows that decode or compute their prompt in a step, in the mean."""
    groups = tuple(LayerGroup(each.kind, each.reach, each.pages) for each in plan.groups)
    manager = BlockManager(num_bytes // plan.page_bytes, plan.block_size, groups=groups, prefix_caching=False)
    scheduler = Scheduler(manager, max_tokens_per_step=BUDGET, max_sequences=4 * SEQUENCES * 8)
    trace = open_trace("azure")
    random, num_added, running = np.random.default_rng(0), 0, []
    prompts, outputs = trace.prompt_tokens * FACTOR, trace.output_tokens * FACTOR
    for step in range(SKIPPED + MEASURED):
        while scheduler.counts()["waiting"] < 64:
            place = num_added % len(prompts)
            prompt = random.integers(0, 50_000, int(prompts[place]), np.int32)
            scheduler.add(Request(id=str(num_added), prompt=prompt, max_tokens=int(outputs[place])))
            num_added += 1
        batch = scheduler.schedule()
        scheduler.update(batch, np.zeros(int(np.count_nonzero(batch.samples)), np.int32))
        if step >= SKIPPED:
            running.append(len(batch.rows))
    return float(np.mean(running))


def _page(rows: list[tuple[str, float, float, float, float]]) -> str:
    lines = [
        "# Sequences at once on equal bytes",
        "",
        f"Python {platform.python_version()}, numpy {np.__version__}; a count, so that no machine changes it.",
        "",
        "```",
        "python benchmarks/in_flight.py --out benchmarks/results/in-flight",
        "```",
        "",
        f"Rows in a step, in the mean of {MEASURED:,} steps after {SKIPPED:,}, default policy, no prefix cache, {BUDGET:,} tokens a step. Requests are those of",
        f"Azure's conversations (the excerpt that ships), {FACTOR} times as long, and always some wait. Memory: {SEQUENCES} sequences of {LENGTH:,} tokens of which all layers",
        "keep all. `bytes`: what a sequence of that length holds with all kept, over what it holds by plan.",
        "Llama 4's chunks end at that very length, where they hold nothing; a little before it they hold all.",
        "",
        "| model | all kept | by plan | ratio | bytes |",
        "|---|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {name} | {before:.1f} | {after:.1f} | {ratio:.2f} × | {of_bytes:.2f} × |"
        for name, before, after, ratio, of_bytes in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
