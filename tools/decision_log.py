"""A digest of every decision of the scheduler, on real traces and in random worlds, and the first step in which two commits differ.

    python tools/decision_log.py write decisions.txt --traces DIR    # this tree; a line per source, policy and 100 steps
    python tools/decision_log.py differ COMMIT COMMIT                # both, each with its own code; "." is this tree as it lies
    python tools/decision_log.py show world-17 paged                 # each step of one run, a line of JSON each

Sources are Azure's hour, Mooncake's chat service and lengths like ShareGPT's, through the simulator, and random worlds, which
`decision_worlds.py` draws. A refactoring that keeps what the product decides keeps every line.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice, zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from decision_worlds import batch_record, decisions
from rich.console import Console
from rich.progress import track
from rich.table import Table

from paged import POLICIES

HERE = Path(__file__).resolve().parent
STEPS = 100
TRACES = ("azure", "mooncake", "sharegpt")
WORLD = "world-"
SHOWN = 10
CORES = os.cpu_count() or 1

Traces = Annotated[
    Path | None, typer.Option(help="Folder with both services' whole traces.", show_default="the excerpts that ship")
]
Worlds = Annotated[int, typer.Option(min=0, help="Random worlds, each under every policy.")]
Only = Annotated[str, typer.Option(help="Sources whose name begins with this.")]
Jobs = Annotated[int, typer.Option(min=1, help="Processes.")]

app = typer.Typer(add_completion=False, no_args_is_help=True)


def steps_of(source: str, policy: str, traces: Path | None) -> Iterator[Any]:
    """What each step of a run decided, as plain data."""
    if source.startswith(WORLD):
        return decisions(int(source.removeprefix(WORLD)), policy)
    return _simulated(source, policy, traces)


def _simulated(source: str, policy: str, traces: Path | None) -> Iterator[Any]:
    from paged.study.simulator import Device, Load, Scenario

    whole = {"azure": "azure_llm_2023_conv.csv", "mooncake": "mooncake_conversation.jsonl"}
    if source == "sharegpt":
        load = Load(trace="synthetic:poisson,rate=8,requests=3000,lengths=sharegpt", context=4096, over_long="clip")
    else:
        trace = source if traces is None else str(traces / whole[source])
        load = Load(trace=trace, context=4096, over_long="clip", prompts=1 / 8 if source == "mooncake" else 1.0)
    device = Device(model="llama-2-13b", device="a100-40g")
    scenario = Scenario(load=load, device=device, max_tokens_per_step=512, policy=policy)
    for step in scenario.simulation().steps():
        yield [step.skipped, batch_record(step.batch), step.ended]


def digests(run: tuple[str, str, Path | None]) -> list[str]:
    """A line for each 100 steps of a run."""
    source, policy, traces = run
    steps, lines = steps_of(source, policy, traces), []
    encoder = msgspec.msgpack.Encoder()
    while some := list(islice(steps, STEPS)):
        digest = hashlib.sha256()
        for step in some:
            digest.update(encoder.encode(step))
        lines.append(f"{source} {policy} {len(lines) * STEPS} {digest.hexdigest()[:16]}")
    return lines


@app.command()
def write(
    out: Path,
    traces: Traces = None,
    worlds: Worlds = 2000,
    only: Only = "",
    jobs: Jobs = CORES,
) -> None:
    """Write the digests of this tree to OUT, and print one of each policy's."""
    sources = [*TRACES, *(f"{WORLD}{number}" for number in range(worlds))]
    runs = [(source, policy, traces) for source in sources if source.startswith(only) for policy in POLICIES]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool, out.open("w", encoding="utf-8") as file:
        found = pool.map(digests, runs, chunksize=1 if len(runs) < 100 else 8)
        for lines in track(found, total=len(runs), console=Console(stderr=True)):
            file.write("\n".join([*lines, ""]))
    Console().print(summary(out))


def summary(out: Path) -> Table:
    """One digest per policy of each trace and of all worlds."""
    found: dict[str, dict[str, Any]] = {}
    for line in out.read_text(encoding="utf-8").splitlines():
        source, policy, _, digest = line.split()
        kind = "worlds" if source.startswith(WORLD) else source
        found.setdefault(policy, {}).setdefault(kind, hashlib.sha256()).update(digest.encode())
    kinds = [kind for kind in (*TRACES, "worlds") if any(kind in each for each in found.values())]
    table = Table("policy", *kinds)
    for policy, each in found.items():
        table.add_row(policy, *(each[kind].hexdigest()[:16] if kind in each else "" for kind in kinds))
    return table


@app.command()
def show(source: str, policy: str, traces: Traces = None) -> None:
    """Print each step of one run as a line of JSON."""
    for step in steps_of(source, policy, traces):
        print(msgspec.json.encode(step).decode())


@app.command()
def differ(
    before: str,
    after: str,
    traces: Traces = None,
    worlds: Worlds = 2000,
    only: Only = "",
    jobs: Jobs = CORES,
) -> None:
    """Print which runs differ between two commits, and of the first ones the first step that does. Status 1 where any do."""
    options = [] if traces is None else ["--traces", str(traces.resolve())]
    console = Console(soft_wrap=True)
    with tempfile.TemporaryDirectory() as folder, _tree(before) as one, _tree(after) as other:
        found = []
        for place, tree in enumerate((one, other)):
            out = Path(folder) / f"{place}.txt"
            asked = ["write", str(out), "--worlds", str(worlds), "--only", only, "--jobs", str(jobs), *options]
            _run(tree, asked, quiet=True)
            found.append(dict(line.rsplit(" ", 1) for line in out.read_text(encoding="utf-8").splitlines()))
        places = dict.fromkeys([*found[0], *found[1]])
        changed = [place for place in places if found[0].get(place) != found[1].get(place)]
        runs = list(dict.fromkeys(tuple(place.split()[:2]) for place in changed))
        total = len({tuple(place.split()[:2]) for place in places})
        console.print(f"{len(runs):,} of {total:,} runs differ.")
        for source, policy in runs[:SHOWN]:
            shown = [_run(tree, ["show", source, policy, *options]).splitlines() for tree in (one, other)]
            for number, (left, right) in enumerate(zip_longest(*shown)):
                if left != right:
                    console.print(
                        f"{source} {policy}, step {number}:\n  {before}: {left}\n  {after}: {right}", markup=False
                    )
                    break
        for source, policy in runs[SHOWN:]:
            console.print(f"{source} {policy}")
    raise typer.Exit(1 if runs else 0)


def _run(tree: Path, asked: list[str], quiet: bool = False) -> str:
    """What a tree's own tool prints."""
    command = [sys.executable, str(tree / "tools" / Path(__file__).name), *asked]
    env = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, cwd=tree)
    return "" if quiet else done.stdout


@contextmanager
def _tree(commit: str) -> Iterator[Path]:
    """A folder with a commit's files; this one for "."."""
    if commit == ".":
        yield HERE.parent
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], check=True, cwd=HERE.parent
        )
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], check=True, cwd=HERE.parent)


if __name__ == "__main__":
    app()
