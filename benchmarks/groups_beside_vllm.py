"""What a window beside full layers costs the schedulers of vLLM and of this project: one decode step of the same 1,024 rows, in one harness.

    python benchmarks/groups_beside_vllm.py --vllm-python VENV/bin/python --peers DIR --model DIR/tiny     # writes results/groups-beside-vllm.md

The harness is `compare.py`'s, which is not part of this repository; its vLLM gets a second group, of a sliding window of 128 tokens. Prompts of
256 tokens, prefix caching on, ample memory. Both sides run in vLLM's environment, each run in a process of its own, in turns.
"""

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from spread import spread

from paged.model.machine import machine

RESULTS = Path(__file__).resolve().parent / "results" / "groups-beside-vllm.md"
REPOSITORY = Path(__file__).resolve().parents[1]
ROWS, SIZE, PROMPT, REACH = 1_024, 16, 256, 128
WARM_STEPS, STEPS = 160, 64
# Outputs that no request reaches here, and for which there is room: a policy that looks ahead admits all rows.
MOST = 800
CELLS = ("full", "full, window 128")
SIDES = ("vllm", "paged")
app = typer.Typer(add_completion=False)


def peer(has_window: bool, options: dict[str, Any]) -> Any:
    """The harness' vLLM, with a second group if there `has_window`."""
    sys.path.insert(0, os.environ["PEERS"])
    import vllm.v1.kv_cache_interface as interface
    import vllm_sched

    plain = interface.KVCacheConfig

    def config(*, num_blocks: int, kv_cache_tensors: list[Any], kv_cache_groups: list[Any]) -> Any:
        if has_window:
            full = kv_cache_groups[0].kv_cache_spec
            window = interface.SlidingWindowSpec(
                block_size=SIZE,
                num_kv_heads=full.num_kv_heads,
                head_size=full.head_size,
                dtype=full.dtype,
                sliding_window=REACH,
            )
            kv_cache_groups = [*kv_cache_groups, interface.KVCacheGroupSpec(["window"], window)]
        return plain(num_blocks=num_blocks, kv_cache_tensors=kv_cache_tensors, kv_cache_groups=kv_cache_groups)

    interface.KVCacheConfig = config
    return vllm_sched.VllmEngine(**options)


def ours(has_window: bool, options: dict[str, Any]) -> Any:
    from vllm_adapter import Engine

    import paged

    engine = Engine(**options)
    groups = [paged.LayerGroup("full"), *([paged.LayerGroup("window", REACH)] if has_window else [])]
    engine.manager = paged.BlockManager(options["num_blocks"], SIZE, groups=groups)
    engine.scheduler = paged.Scheduler(engine.manager, max_tokens_per_step=8_192, max_sequences=ROWS)
    return engine


def measured(side: str, cell: str) -> list[float]:
    """CPU microseconds of a step, the mean of each window of 16."""
    blocks = ROWS * 2 * -(-(PROMPT + MOST + 16) // SIZE) + 64
    engine = (peer if side == "vllm" else ours)(
        cell != CELLS[0], {"num_blocks": blocks, "max_seqs": ROWS, "caching": True}
    )
    rng = np.random.default_rng(0)
    for number in range(ROWS):
        engine.add(engine.make_request(f"r{number}", rng.integers(10, 32_000, PROMPT).tolist(), MOST))
    times: list[float] = []
    is_decoding = 0
    while len(times) < STEPS:
        started = time.thread_time()
        batch = engine.schedule()
        scheduled = time.thread_time()
        num_tokens, num_rows, _ = engine.scheduled(batch)
        sampled = engine.fabricate(batch)
        began = time.thread_time()
        engine.update(batch, sampled)
        ended = time.thread_time()
        is_decoding += num_tokens == num_rows == ROWS
        if is_decoding == WARM_STEPS:
            gc.collect()
        if is_decoding > WARM_STEPS:
            times.append((ended - began + scheduled - started) * 1e6)
    return np.array(times).reshape(-1, SIZE).mean(axis=1).tolist()


@app.command()
def main(
    vllm_python: Annotated[Path, typer.Option(help="Python of an environment with vLLM.")] = Path("python"),
    peers: Annotated[Path, typer.Option(help="Folder of the harness.")] = Path(),
    model: Annotated[Path, typer.Option(help="A tiny model's folder, for vLLM's configuration.")] = Path(),
    rounds: int = 3,
    cell: Annotated[str, typer.Option(hidden=True)] = "",
    side: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Time both sides, and write the page."""
    if cell:
        # The harness and vLLM may print.
        print("\n" + json.dumps(measured(side, cell)))
        return
    folders = {"PEERS": str(peers), "PEER_MODEL": str(model), "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{peers}"}
    runs: dict[str, dict[str, list[float]]] = {each: {name: [] for name in CELLS} for each in SIDES}
    for number in range(rounds):
        for name in CELLS[:: -1 if number % 2 else 1]:
            for each in SIDES:
                command = [str(vllm_python), __file__, "--cell", name, "--side", each]
                environment = {**os.environ, **folders, "OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                runs[each][name].append(float(np.median(json.loads(done.stdout.splitlines()[-1]))))
    lines = []
    for name in CELLS:
        ratios = np.divide(runs["vllm"][name], runs["paged"][name])
        lines.append(
            f"| {name} | {spread(runs['vllm'][name], ',.0f')} | {spread(runs['paged'][name], ',.0f')} | {spread(ratios, ',.0f')} × |"
        )
    its = machine()
    ask = "import importlib.metadata as names, platform; print(names.version('vllm'), 'Python', platform.python_version())"
    version = subprocess.run([vllm_python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    text = [
        "# A window beside full layers, in vLLM's scheduler and in ours",
        "",
        f"{its['processor']}, {its['cores']} cores; vLLM {version}. CPU time of the thread.",
        "",
        "µs of CPU a step (`schedule` and `update`) of 1,024 rows that decode, blocks of 16 tokens, prompts of 256, prefix caching on, windows have",
        f"passed the prompts. Medians of {rounds} runs, each of the mean steps of windows of 16; both sides in one environment, in turns, beside other work.",
        "",
        "```",
        f"python benchmarks/groups_beside_vllm.py --vllm-python VENV/bin/python --peers DIR --model DIR/tiny --rounds {rounds}",
        "```",
        "",
        "| groups | vLLM | paged | ratio |",
        "|---|--:|--:|--:|",
        *lines,
        "",
        "Goal with a window: at least 50 ×.",
    ]
    RESULTS.write_text("\n".join(text) + "\n")
    print(RESULTS.read_text())


if __name__ == "__main__":
    app()
