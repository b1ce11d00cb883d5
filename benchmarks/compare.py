"""vLLM's scheduler and ours in the same loop, taking turns: one command that writes the table of host costs.

Every cell is one process of `vllm_sched.py`, a harness that drives vLLM's scheduler and block pool without a model and takes
a competitor by `--engine file.py:Class`; it is not part of this repository, `--peers` names the folder that holds it. vLLM
runs, then ours, then vLLM again, so that a machine that slows down slows both; both sides run under vLLM's Python and
numpy, and the same statistic of the same number of runs is taken of both. Nothing is thrown away: every run is in the JSON.

    python benchmarks/compare.py --vllm-python VENV/bin/python --peers DIR --model DIR/tiny --rounds 3

`host_cost_table.py` knows the goals and the page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import host_cost_table

from paged.model.machine import processor_name

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
Run = dict[str, Any]
DECODE_POLICY = "vllm"


@dataclass(frozen=True)
class Cell:
    """One measurement of both sides: a scenario of the harness and the exact parameters that select it there."""

    scenario: str
    params: dict[str, Any]
    metric: str
    # Shorter runs while something is being tried; the committed figures are taken with the harness' own defaults.
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        rows = f" {self.params['n']}" if "n" in self.params else ""
        return f"{self.scenario}{rows}, caching {'on' if self.params['caching'] else 'off'}"


def sched_cells(rows: list[int], requests: int) -> Iterator[Cell]:
    """The harness' cells that the goals name, prefix caching on and off."""
    for caching in (True, False):
        for num_rows in rows:
            steps = min(max(2**18 // num_rows, 160), 2048)
            yield Cell(
                "decode",
                {"n": num_rows, "caching": caching, "steps": steps},
                "us_total",
                ("--n", str(num_rows), "--steps", str(steps)),
            )
        counted = ("--requests", str(requests))
        yield Cell("churn", {"requests": requests, "caching": caching, "share": None}, "us_per_output_token", counted)
        yield Cell(
            "pressure",
            {"requests": requests, "caching": caching, "share": 0.4, "engine_args": {}},
            "us_per_output_token",
            ("--watermarks", "0", *counted),
        )
        yield Cell("prefix", {"requests": 2000, "caching": caching}, "us_per_output_token")


class Bench:
    """Where the two sides live, and how to run one cell of either in a process of its own."""

    def __init__(self, python: str, peers: Path, model: Path, engine: str) -> None:
        self.python = python
        self.harness = peers / "vllm_sched.py"
        self.engine = engine
        self.environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PEER_MODEL": str(model), "PEERS": str(peers)}

    def sched(self, side: str, cell: Cell) -> Run:
        """One run of a harness cell, as the harness reports it."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            command = [str(self.harness), cell.scenario, "--repeat", "1", "--out", str(out), *cell.options]
            # The text of the parameters in full, so that exactly one cell contains it.
            command += ["--only", json.dumps(cell.params)]
            if side == "ours":
                command += ["--engine", f"{HERE / self.engine}"]
            # The harness' pool holds the steps that rows decode here, not what they declare: a policy that looks ahead would not admit all of them.
            self._run(command, {"PAGED_POLICY": DECODE_POLICY} if cell.scenario == "decode" else {})
            cells = json.loads(out.read_text())["cells"]
        if len(cells) != 1:
            raise RuntimeError(f"{cell.name}: the harness ran {len(cells)} cells, 1 wanted; did its parameters change?")
        result: Run = cells[0]["result"]
        if "error" in result:
            raise RuntimeError(f"{cell.name}, {side}: {result['error']}")
        return result

    def harness_pool(self) -> Run:
        """The harness' own pool scenario, vLLM only: times of the run without tracemalloc, bytes of the one with it."""
        # The harness knows two sizes; this is the one that the goals name.
        num_blocks = 1_000_000
        runs = {}
        for mode in ("rss", "trace"):
            params = {"blocks": num_blocks, "mode": mode}
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "out.json"
                self._run([str(self.harness), "pool", "--out", str(out), "--only", json.dumps(params)])
                runs[mode] = json.loads(out.read_text())["cells"][0]["result"]
        return runs

    def pool(self, side: str, num_blocks: int) -> Run:
        """One run of our pool script on either side's pool."""
        result: Run = json.loads(self._run([str(HERE / "pool.py"), "--side", side, "--blocks", str(num_blocks)]))
        return result

    def long_rows(self, rounds: int) -> Run:
        """Long rows and holes among the rows, ours alone."""
        result: Run = json.loads(self._run([str(HERE / "long_rows.py"), "--rounds", str(rounds), "--json"]))
        return result

    def versions(self) -> dict[str, str]:
        """What the measured interpreter holds."""
        # The CPU build of vLLM is a distribution of another name, so ask the package itself.
        code = (
            "import json, platform, importlib.metadata as m, vllm;"
            "print(json.dumps({'python': platform.python_version(), 'numpy': m.version('numpy'),"
            " 'msgspec': m.version('msgspec'), 'vllm': vllm.__version__}))"
        )
        found: dict[str, str] = json.loads(self._run(["-c", code]).strip().splitlines()[-1])
        return found

    def _run(self, arguments: list[str], more: dict[str, str] | None = None) -> str:
        environment = self.environment | (more or {})
        run = subprocess.run([self.python, *arguments], capture_output=True, text=True, env=environment)
        if run.returncode:
            raise RuntimeError(f"{' '.join(arguments[:2])} failed:\n{run.stderr[-3000:]}")
        return run.stdout


def hardware() -> dict[str, Any]:
    """The machine, as a reader of the table wants it: no name and no path of it."""
    gib = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    return {"cpu": processor_name(), "cores": os.cpu_count(), "memory_gib": gib, "system": platform.system()}


def in_turns(what: str, measure: Callable[[str], Run], rounds: int) -> dict[str, list[Run]]:
    """`rounds` runs of each side, vLLM first and ours first by turns."""
    runs: dict[str, list[Run]] = {"vllm": [], "ours": []}
    for number in range(rounds):
        for side in ("vllm", "ours") if number % 2 == 0 else ("ours", "vllm"):
            runs[side].append(measure(side))
        print(f"{what}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return runs


def measured(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Every cell of both sides, as one JSON document."""
    rows = [int(number) for number in args.rows.split(",")]
    cells = []
    for cell in sched_cells(rows, args.requests):
        if args.only not in cell.name:
            continue
        runs = in_turns(cell.name, partial(bench.sched, cell=cell), args.rounds)
        cells.append({"cell": cell.name, "metric": cell.metric, "params": cell.params, **runs})
    document: dict[str, Any] = {
        "hardware": hardware(),
        "versions": bench.versions(),
        "settings": {
            "rounds": args.rounds,
            "clock": "CPU time of the thread",
            "engine": args.engine,
            "decode_policy": DECODE_POLICY,
        },
        "cells": cells,
    }
    if args.only in "pool":
        document["pool"] = in_turns("pool", lambda side: bench.pool(side, args.blocks), args.rounds)
        document["pool"]["vllm_whole"] = [bench.harness_pool() for _ in range(args.rounds)]
    if args.only in "long rows":
        document["long_rows"] = bench.long_rows(args.rounds)
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="a Python with vLLM, numpy and msgspec; runs both sides")
    parser.add_argument("--peers", required=True, type=Path, help="the folder with vllm_sched.py")
    parser.add_argument(
        "--model", required=True, type=Path, help="a model folder for vLLM's config; no weights are read"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for host-cost.json and host-cost.md")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each cell and side (default 3)")
    parser.add_argument("--rows", default="1024,4096", help="rows that decode (default 1024,4096)")
    parser.add_argument("--requests", type=int, default=20_000, help="requests of churn and pressure (default 20000)")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks of the pool (default 1000000)")
    parser.add_argument(
        "--engine",
        default="vllm_adapter.py:Engine",
        help="ours: our scheduler (default vllm_adapter.py:Engine), or the same inside vLLM (vllm_plugged.py:Plugged)",
    )
    parser.add_argument("--name", default="host-cost", help="of the files that are written (default host-cost)")
    parser.add_argument("--only", default="", help="cells whose name contains this text; also 'pool' and 'long rows'")
    args = parser.parse_args()

    bench = Bench(args.vllm_python, args.peers, args.model.resolve(), args.engine)
    document = measured(bench, args)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.name}.json").write_text(json.dumps(document, indent=1) + "\n")
    page = host_cost_table.page(document)
    (args.out / f"{args.name}.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
