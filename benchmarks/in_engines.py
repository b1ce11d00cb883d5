"""Whole engines on one model, under their own scheduler and under ours, taking turns: tokens a second, what was computed, answers.

Each run is a process of its own that loads the model once, runs each cell once to warm up, and then times it. The two sides get the same
requests as token ids, greedy and without an end, the same number of blocks, cores and dtype; who begins alternates. A cell's memory is
a share of the blocks that its requests want when all of them run.

    python benchmarks/in_engines.py run vllm --python VENV/bin/python --model DIR/135m --rounds 3
    python benchmarks/in_engines.py run transformers --model DIR/135m --rounds 3 --limit 16
    python benchmarks/in_engines.py page

`DIR/135m` is a checkpoint with random weights in the shape of SmolLM2-135M; any Llama will do. Decides nothing about
a result.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from spread import spread

from paged.model.machine import machine

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
SIDES = ("own", "paged")
BLOCK_SIZE = 32
# Timed runs of a cell in a process.
REPEATS = 2
Requests = list[tuple[list[int], int]]
INTRODUCTION = f"""The same model, requests, blocks of {BLOCK_SIZE} tokens, cores and dtype under an engine's own scheduler and under ours; the sides are
processes that take turns, and so does who begins. Medians and ranges over the runs. Random weights in the shape of SmolLM2-135M; greedy, without an end.
`offline`: log-normal lengths, all present at the start. `shared_prefix`: four families that share 512 tokens. `alone`: six requests of
`offline`, one after the other. Ample memory holds every request at its full length; a share of the blocks is of those that are wanted at
most when all of them run. Answers are compared with those of the engine's own scheduler at the first size of a step; where there is no other side, with its own at that size: what another batch changes by itself.

```
python benchmarks/in_engines.py run vllm --python VENV/bin/python --model DIR/135m --rounds 2 --limit 32
python benchmarks/in_engines.py run transformers --model DIR/135m --rounds 2 --limit 8
python benchmarks/in_engines.py page
```
"""
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Cell:
    """A workload, its share of the blocks that it wants, and the tokens of a step; who runs it."""

    workload: str
    memory: float = 1.0
    budget: int = 2048
    sides: tuple[str, ...] = SIDES

    @property
    def name(self) -> str:
        memory = "" if self.memory == 1 else f", {self.memory:.0%} of the blocks"
        return f"{self.workload}{memory}" + ("" if self.budget == 2048 else f", {self.budget:,} tokens a step")


CELLS = {
    "vllm": (
        Cell("offline"),
        Cell("shared_prefix"),
        Cell("single"),
        Cell("alone"),
        Cell("offline", 0.35),
        Cell("offline", budget=512, sides=("own",)),
    ),
    "transformers": (
        Cell("offline", budget=512),
        Cell("shared_prefix", budget=512),
        Cell("alone", budget=512),
        Cell("offline", 0.35, budget=512),
        Cell("offline", budget=256, sides=("own",)),
    ),
}


def requests_of(workload: str, limit: int) -> list[Requests]:
    """Batches of (prompt, output tokens), one after the other. The distributions are those of the comparisons in the docs: log-normal lengths;
    families that share 512 tokens."""
    top = 49_152
    if workload in ("offline", "alone"):
        chance = np.random.default_rng(0)
        ins = np.clip(chance.lognormal(np.log(160), 0.7, 64), 8, 512).astype(int)
        outs = np.clip(chance.lognormal(np.log(96), 0.6, 64), 8, 256).astype(int)
        found = [(chance.integers(300, top, int(i)).tolist(), int(o)) for i, o in zip(ins, outs, strict=True)][:limit]
        return [found] if workload == "offline" else [[each] for each in found[:6]]
    chance = np.random.default_rng(1)
    if workload == "single":
        return [[(chance.integers(300, top, 128).tolist(), 128)]]
    heads = [chance.integers(300, top, 512).tolist() for _ in range(4)]
    return [[(heads[i % 4] + chance.integers(300, top, 32).tolist(), 64) for i in range(min(limit, 64))]]


def blocks_wanted(requests: Requests) -> int:
    """The most blocks in use at once if every request begins at once and nothing is shared."""
    longest = max(outputs for _, outputs in requests)
    return max(
        sum(-(-(len(prompt) + step) // BLOCK_SIZE) for prompt, outputs in requests if step < outputs)
        for step in range(longest)
    )


def vllm_runner(
    model: str, side: str, cell: Cell, num_blocks: int, dtype: str
) -> tuple[Callable[[Requests], Any], Callable[[], dict[str, int]]]:
    """vLLM in this process: what runs requests, and what counts."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        # Left to itself vLLM keeps a core free.
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    ours: dict[str, Any] = {"scheduler_cls": "paged.integrations.vllm.Scheduler", "enable_prefix_caching": False}
    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=1024,
        max_num_seqs=128,
        max_num_batched_tokens=cell.budget,
        block_size=BLOCK_SIZE,
        # The first is vLLM's null block.
        num_gpu_blocks_override=num_blocks + 1,
        disable_log_stats=False,
        skip_tokenizer_init=True,
        **(ours if side == "paged" else {"enable_prefix_caching": True}),
    )
    counted = {"tokens computed": 0, "preempted": 0}
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def counting(*given: Any, **more: Any) -> Any:
        output = schedule(*given, **more)
        counted["tokens computed"] += output.total_num_scheduled_tokens
        return output

    scheduler.schedule = counting

    def preempted() -> int:
        return sum(int(m.value) for m in llm.get_metrics() if m.name == "vllm:num_preemptions")

    def run(requests: Requests) -> list[list[int]]:
        before = preempted()
        found = llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in requests],
            [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in requests],
            use_tqdm=False,
        )
        counted["preempted"] += preempted() - before
        return [list(output.outputs[0].token_ids) for output in found]

    def taken() -> dict[str, int]:
        # Nothing of the run before is found.
        llm.reset_prefix_cache()
        now = dict(counted)
        counted.update(dict.fromkeys(counted, 0))
        return now

    return run, taken


def transformers_runner(
    model: str, side: str, cell: Cell, num_blocks: int, dtype: str
) -> tuple[Callable[[Requests], Any], Callable[[], dict[str, int]]]:
    """transformers' continuous batching in this process: what runs requests, and what counts."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    from paged.integrations.transformers import install

    net = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = ContinuousBatchingConfig(
        page_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_batch_tokens=cell.budget,
        max_requests_per_batch=128,
        auto_switch_to_flash=False,
    )
    counted = {"tokens computed": 0, "preempted": 0}

    def run(requests: Requests) -> list[list[int]]:
        manager = net.init_continuous_batching(generation_config=greedy, continuous_batching_config=sizes)
        installed = install(manager) if side == "paged" else None
        make = manager._create_batch_processor

        def counting() -> Any:
            processor = make()
            schedule, offload = processor.scheduler.schedule_batch, processor.offloading_manager.offload_requests

            def scheduled(*given: Any) -> Any:
                rows, is_fast, num_tokens, num_read = schedule(*given)
                counted["tokens computed"] += num_tokens
                return rows, is_fast, num_tokens, num_read

            def offloaded() -> bool:
                before = len(processor.scheduler.waiting_requests)
                done = offload()
                counted["preempted"] += len(processor.scheduler.waiting_requests) - before
                return bool(done)

            processor.scheduler.schedule_batch, processor.offloading_manager.offload_requests = scheduled, offloaded
            return processor

        manager._create_batch_processor = counting
        manager.start()
        ids = [manager.add_request(prompt, max_new_tokens=n) for prompt, n in requests]
        found: dict[str, list[int]] = {}
        while len(found) < len(ids):
            output = manager.get_result(timeout=1)
            if output is not None and output.is_finished():
                if output.error:
                    raise SystemExit(f"{side}: {output.error}")
                found[output.request_id] = output.generated_tokens
            elif output is None and not manager.is_running():
                raise SystemExit(f"{side}: {manager.background_thread_status.fatal_error!r}")
        if installed is not None:
            stats = installed.decisions.stats()
            counted["preempted"] += stats.preemptions_recompute + stats.preemptions_swap
        manager.stop(block=True)
        net.destroy_cached_continuous_batching_manager()
        return [found[id] for id in ids]

    def taken() -> dict[str, int]:
        now = dict(counted)
        counted.update(dict.fromkeys(counted, 0))
        return now

    return run, taken


RUNNERS = {"vllm": vllm_runner, "transformers": transformers_runner}


@app.command(hidden=True)
def one(engine: str, side: str, places: str, model: str, dtype: str, limit: int, out: Path) -> None:
    """Cells of one side that share memory and budget, here: each warmed up by a run, then timed."""
    import torch

    cells = [CELLS[engine][int(place)] for place in places.split(",")]
    asked = [requests_of(cell.workload, limit) for cell in cells]
    every = [batch for batches in asked for batch in batches]
    if cells[0].memory == 1:
        num_blocks = max(sum(-(-(len(prompt) + n) // BLOCK_SIZE) for prompt, n in batch) for batch in every) + 4
    else:
        num_blocks = int(cells[0].memory * max(map(blocks_wanted, every)))
    torch.set_num_threads(os.cpu_count() or 1)
    run, taken = RUNNERS[engine](model, side, cells[0], num_blocks, dtype)
    found = []
    for batches in asked:
        # The same first, untimed: libraries prepare a kernel for each number of rows that they meet.
        for batch in batches:
            run(batch)
        figures = []
        for _ in range(REPEATS):
            taken()
            seconds, answers = 0.0, []
            for batch in batches:
                started = time.perf_counter()
                answers += run(batch)
                seconds += time.perf_counter() - started
            num_outputs = sum(map(len, answers))
            assert num_outputs == sum(n for batch in batches for _, n in batch), "every request has its length"
            figures.append({"seconds": seconds, "tokens/s": num_outputs / seconds, "blocks": num_blocks, **taken()})
        found.append({"figures": figures, "answers": answers})
    out.write_text(json.dumps({"machine": machine(), "cells": found}))


@app.command()
def run(
    engine: str,
    model: Annotated[Path, typer.Option(help="A checkpoint folder.")],
    python: Annotated[str, typer.Option(help="An interpreter that has the engine.")] = sys.executable,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    limit: Annotated[int, typer.Option(help="Requests of a batch, at most.")] = 64,
    dtype: str = "bfloat16",
) -> None:
    """Run the cells of an engine, both sides in turns, and keep every run in results/in-engines.json."""
    kept: dict[str, Any] = {}
    ran_on: dict[str, str] = {}
    groups: dict[Any, list[int]] = {}
    for place, cell in enumerate(CELLS[engine]):
        groups.setdefault((cell.memory, cell.budget, cell.sides), []).append(place)
    for number in range(rounds):
        for (_, _, sides), places in groups.items():
            # What one side does by itself is only there for its answers.
            if len(sides) == 1 and number:
                continue
            for side in sides if number % 2 == 0 else sides[::-1]:
                with tempfile.TemporaryDirectory() as folder:
                    out = Path(folder) / "run.json"
                    given = (engine, side, ",".join(map(str, places)), str(model), dtype, str(limit), str(out))
                    subprocess.run(
                        [python, __file__, "one", *given],
                        check=True,
                        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
                    )
                    found = json.loads(out.read_text())
                ran_on = found["machine"]
                for place, each in zip(places, found["cells"], strict=True):
                    cell, rates = CELLS[engine][place], [run["tokens/s"] for run in each["figures"]]
                    entry = kept.setdefault(cell.name, {"cell": asdict(cell), "runs": {}, "answers": {}})
                    entry["runs"].setdefault(side, []).extend(each["figures"])
                    # Greedy: those of the last round stand for all.
                    entry["answers"][side] = each["answers"]
                    print(f"round {number + 1}, {cell.name}, {side}: {spread(rates)} tokens/s", flush=True)
    _keep(
        engine,
        {
            **ran_on,
            "dtype": dtype,
            "requests": f"at most {limit} requests a workload; {rounds} processes a side, {REPEATS} timed runs each",
            "cells": _compared(kept),
        },
    )


def _compared(kept: dict[str, Any]) -> dict[str, Any]:
    """Answers become the share that differs: from the other side's, and between the engine's own with two sizes of a step."""
    own = {
        (e["cell"]["workload"], e["cell"]["memory"]): e["answers"].get("own")
        for e in kept.values()
        if "paged" in e["answers"]
    }
    for entry in kept.values():
        answers = entry.pop("answers")
        mine = answers.get("paged", answers.get("own"))
        theirs = own.get((entry["cell"]["workload"], entry["cell"]["memory"]))
        if theirs and mine:
            entry["differ"] = [sum(a != b for a, b in zip(mine, theirs, strict=True)), len(theirs)]
    return kept


def _keep(engine: str, found: dict[str, Any]) -> None:
    path = RESULTS / "in-engines.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    cells = {**known.get(engine, {}).get("cells", {}), **found["cells"]}
    path.write_text(json.dumps({**known, engine: {**found, "cells": cells}}, indent=1) + "\n")


@app.command()
def page() -> None:
    """Write results/in-engines.md from what was kept."""
    known = json.loads((RESULTS / "in-engines.json").read_text())
    lines = ["# Inside other people's engines", "", INTRODUCTION]
    for engine, found in known.items():
        lines += [
            f"## {engine}",
            "",
            f"{found['processor']}, {found['cores']} cores; torch {found['torch']}, transformers {found['transformers']}, {found['dtype']}; "
            f"{found['requests']}.",
            "",
            "| requests | blocks | own: tokens/s | ours: tokens/s | ratio | tokens computed: own, ours | preempted: own, ours | answers that differ |",
            "|---|--:|--:|--:|--:|--:|--:|--:|",
            *(_row(name, entry) for name, entry in found["cells"].items()),
            "",
            *_kept_shares(found["cells"]),
        ]
    (RESULTS / "in-engines.md").write_text("\n".join(lines))


def _kept_shares(cells: dict[str, Any]) -> list[str]:
    """What short memory leaves of the engine's own speed with ample memory."""

    def rate(entry: dict[str, Any], side: str) -> float:
        return median(run["tokens/s"] for run in entry["runs"][side])

    lines = []
    for name, entry in cells.items():
        cell = entry["cell"]
        ample = [
            other
            for other in cells.values()
            if other["cell"] == {**cell, "memory": 1.0} and cell["memory"] < 1 and "own" in other["runs"]
        ]
        if ample:
            own, paged = (rate(entry, side) / rate(ample[0], "own") for side in SIDES)
            lines += [
                f"{name}: of its own tokens a second with ample memory its own keeps {own:.0%}, ours {paged:.0%}.",
                "",
            ]
    return lines


def _row(name: str, entry: dict[str, Any]) -> str:
    runs = {side: entry["runs"].get(side, []) for side in SIDES}
    rates = {side: [run["tokens/s"] for run in runs[side]] for side in SIDES}
    ratio = f"{median(rates['paged']) / median(rates['own']):.2f} ×" if rates["paged"] and rates["own"] else ""

    def both(figure: str) -> str:
        return ", ".join(f"{int(median(run[figure] for run in runs[side])):,}" for side in SIDES if runs[side])

    different = entry.get("differ")
    cells = (
        name,
        f"{(runs['own'] or runs['paged'])[0]['blocks']:,}",
        *(spread(rates[side]) if rates[side] else "" for side in SIDES),
        ratio,
        both("tokens computed"),
        both("preempted"),
        "" if different is None else f"{different[0]} of {different[1]}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    app()
