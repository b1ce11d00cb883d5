"""`paged serve` with K and V in bfloat16 and in int8, in the same bytes, overloaded: requests that clients got in time.

    python benchmarks/serve_at_equal_bytes.py --python VENV/bin/python --model DIR/135m --traces DIR

As serve_beside_vllm.py's overload, with ours on both sides: the pool holds in bfloat16 what 35 % of the sequences fill, and in int8 as many blocks as
fit in its bytes. The first requests of a recorded service come at once, to know the rate that bfloat16 takes; then the recorded ones come as they
came, at multiples of that rate, the same for both. Each run is a server of its own; who begins alternates. Writes results/serve-at-equal-bytes.json
and the page beside it.
"""

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from open_loop import BLOCK_SIZE, BUDGET, Load, trace_of, write_for_vllm
from serve_beside_vllm import (
    CONTEXT,
    LONGEST_GAP,
    LONGEST_TTFT,
    OVERLOADS,
    SEQUENCES,
    SHARE,
    asked,
    latencies,
    recorded,
    serving,
)
from spread import spread

from paged.attention.kv_dtypes import block_bytes
from paged.model.machine import machine

RESULTS = Path(__file__).resolve().parent / "results" / "serve-at-equal-bytes.json"
DTYPES = ("auto", "int8")
WARM = 100
GOAL = 1.3
app = typer.Typer(add_completion=False)


def blocks_of(model: Path, blocks: int) -> dict[str, int]:
    """By KV dtype, the blocks that fit in the bytes of so many in bfloat16."""
    its = json.loads((model / "config.json").read_text())
    size = its.get("head_dim") or its["hidden_size"] // its["num_attention_heads"]
    heads = its.get("num_key_value_heads") or its["num_attention_heads"]
    whole, *others = (block_bytes(each, BLOCK_SIZE, heads, size, 2) for each in DTYPES)
    return dict(zip(DTYPES, [blocks, *(blocks * whole // each for each in others)], strict=True))


@app.command()
def main(
    python: Annotated[Path, typer.Option(help="An interpreter that has vLLM, whose client asks.")],
    model: Annotated[Path, typer.Option(help="A checkpoint folder.")],
    traces: Annotated[Path, typer.Option(help="The folder of the traces.")],
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    count: Annotated[int, typer.Option(min=1, help="Requests of a run.")] = 500,
) -> None:
    """Ask both, in turns, keep what clients saw, a line a run, and write the page."""
    trace = trace_of(Load("azure_llm_2023_conv.csv", 1.0, 0, CONTEXT), traces, count)
    needed = -(-(trace.prompt_tokens + trace.output_tokens) // BLOCK_SIZE)
    blocks = blocks_of(model, max(round(SHARE * SEQUENCES * float(np.mean(needed))), int(needed.max()) + 1))
    out: dict[str, Any] = {"machine": machine(), "model": model.name, "count": count, "blocks": blocks, "runs": []}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_for_vllm(trace, folder / "at-once.jsonl", at_once=True)
        for number in range(rounds):
            for kv_dtype in DTYPES[:: -1 if number and number % 2 else 1]:
                more = ("--kv-cache-dtype", kv_dtype)
                with serving("paged", python, model, "bfloat16", blocks[kv_dtype], folder / "log", *more) as address:
                    before = asked(python, model, address, *recorded(folder / "at-once.jsonl", min(WARM, count)))
                    rate = out.setdefault("rate", before["completed"] / before["duration"])
                    for over in OVERLOADS:
                        span = count / (over * rate)
                        its = trace.scaled(rate=float(trace.arrival_s[-1]) / span)
                        write_for_vllm(its, folder / "over.jsonl", at_once=False)
                        found = latencies(asked(python, model, address, *recorded(folder / "over.jsonl", count)))
                        out["runs"].append({"kv_dtype": kv_dtype, "over": over, "span": span, **found})
                        RESULTS.write_text(json.dumps(out, indent=1) + "\n")
                        print(kv_dtype, over, json.dumps(found), flush=True)
    RESULTS.with_suffix(".md").write_text(page_of(out), encoding="utf-8")


FIGURES = (
    ("goodput: good requests/s, until the last answer", lambda run: run["good"] / run["seconds"], ",.2f"),
    ("good requests", lambda run: run["good"], ",.0f"),
    ("answered", lambda run: run["answered"], ",.0f"),
    ("refused with 429", lambda run: run["refused"], ",.0f"),
    ("output tokens/s", lambda run: run["tokens/s"], ",.0f"),
    ("TTFT, p50, s", lambda run: run["TTFT, p50"], ".2f"),
    ("TPOT, p50, ms", lambda run: 1e3 * run["TPOT, p50"], ".1f"),
)


def page_of(out: dict[str, Any]) -> str:
    """Markdown: a table for each overload."""
    its, blocks, lines = out["machine"], out["blocks"], []
    for over in OVERLOADS:
        sides = [[run for run in out["runs"] if (run["kv_dtype"], run["over"]) == (each, over)] for each in DTYPES]
        if not all(sides):
            continue
        lines += [
            f"## {over:g} ×",
            "",
            f"| {len(sides[0])} and {len(sides[1])} runs | bfloat16 | int8 | times |",
            "|---|--:|--:|--:|",
        ]
        for title, figure, form in FIGURES:
            values = [[figure(run) for run in runs] for runs in sides]
            before, now = map(median, values)
            ratio = f"{now / before:.2f} ×" if before else ""
            lines.append(f"| {title} | {' | '.join(spread(each, form) for each in values)} | {ratio} |")
        lines.append("")
    return PAGE.format(
        model=out["model"],
        machine=f"{its['processor']}, {its['cores']} cores, Python {its['python']}, torch {its['torch']}",
        count=out["count"],
        rate=out["rate"],
        blocks=" and ".join(f"{each:,}" for each in blocks.values()),
        lines="\n".join(lines),
    )


PAGE = f"""# K and V in int8, served in the bytes of bfloat16

`vllm bench serve` against `paged serve` with `--kv-cache-dtype` auto and int8, in turns: model {{model}}, computed in bfloat16, blocks of {BLOCK_SIZE} tokens,
{SEQUENCES} sequences, {BUDGET:,} tokens a step, `--max-queue-s {0.8 * LONGEST_TTFT:g}`. {{machine}}; clients and servers share the cores. Medians and ranges. {{blocks}} blocks: in bfloat16 they hold
{SHARE:.0%} of what {SEQUENCES} sequences fill. The first {{count}} requests of Azure's conversation trace, lengths ÷ 8, at multiples of {{rate:.2f}} requests/s, which
bfloat16 did when they came at once. Good: a first token within {LONGEST_TTFT:g} s, and no gap over {LONGEST_GAP:g} s. Goal: {GOAL:g} × the goodput of bfloat16.

```
python benchmarks/serve_at_equal_bytes.py --python VENV/bin/python --model DIR/135m --traces DIR
```

{{lines}}"""

if __name__ == "__main__":
    app()
