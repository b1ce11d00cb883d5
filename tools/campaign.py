"""Run the kit's state machines for many examples, drawn anew: `make campaign`.

In rounds, each in a process of its own: Hypothesis remembers all that it has drawn in one, and gets slower by it. The
machines get the same CPU time each until they have run so many examples together; one that finds something stops; the
short program is printed, and saved in `failures/`.

    python tools/campaign.py                                  # 100,000 examples
    python tools/campaign.py --examples 2000 manager engine   # these two, for some minutes
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

ROUND = 500
MACHINES = ("scheduler", "layers", "engine", "manager", "stand-in engine")
"""The slowest first, as long as none has used any time."""


def run_round(name: str, examples: int) -> tuple[str, int, float, str]:
    """(machine, examples, CPU seconds, what was found) of one round; runs in a process of its own."""
    os.environ.update(PAGED_EXAMPLES=str(examples), OMP_NUM_THREADS="1")
    os.environ.setdefault("PAGED_FAILURES", "failures")
    from paged.testing import Violation
    from paged.testing.machines import EngineMachine, LayerMachine, ManagerMachine, SchedulerMachine, run_machine
    from paged.testing.stand_in_engine import StandInEngine

    class StandInMachine(EngineMachine):
        build = StandInEngine

    machine, steps = {
        "manager": (ManagerMachine, 15),
        "scheduler": (SchedulerMachine, 15),
        "layers": (LayerMachine, 15),
        "engine": (EngineMachine, 15),
        "stand-in engine": (StandInMachine, 20),
    }[name]
    started = time.process_time()
    try:
        run_machine(machine, few=examples, steps=steps)
    except Violation as violation:
        return name, examples, time.process_time() - started, str(violation)
    return name, examples, time.process_time() - started, ""


def main(
    machines: Annotated[
        list[str] | None, typer.Argument(help=f"Which of {', '.join(MACHINES)}; all by default.")
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="Of all machines together.")] = 100_000,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """Run state machines until they have run so many examples, or each has found something."""
    chosen = machines or list(MACHINES)
    unknown = [name for name in chosen if name not in MACHINES]
    if unknown:
        raise typer.BadParameter(f'unknown machine "{unknown[0]}"; known are {", ".join(MACHINES)}')
    out = Console()
    left = examples
    done: Counter[str] = Counter()
    seconds = dict.fromkeys(chosen, 0.0)
    running = dict.fromkeys(chosen, 0)
    found: dict[str, str] = {}
    started = time.monotonic()
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        pending: set[Future[tuple[str, int, float, str]]] = set()
        while True:
            open_ones = [name for name in chosen if name not in found]
            while len(pending) < jobs and left and open_ones:
                name = min(open_ones, key=lambda each: (running[each], seconds[each]))
                count = min(ROUND, left)
                left -= count
                running[name] += 1
                pending.add(pool.submit(run_round, name, count))
            if not pending:
                break
            ended, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in ended:
                name, count, cpu, what = future.result()
                seconds[name] += cpu
                running[name] -= 1
                if what:
                    found.setdefault(name, what)
                    out.print(f"{name}: FOUND\n{what}", markup=False, highlight=False)
                else:
                    done[name] += count
                    minutes = (time.monotonic() - started) / 60
                    out.print(f"{minutes:6.1f} min  {name}: {done[name]:,} clean", highlight=False)
    table = Table("machine", "clean examples", "ms each", "found")
    for name in chosen:
        each = f"{seconds[name] / done[name] * 1e3:.0f}" if done[name] else "-"
        table.add_row(name, f"{done[name]:,}", each, "a violation" if name in found else "nothing")
    table.add_section()
    table.add_row("all", f"{sum(done.values()):,}", "", f"{len(found)} violations" if found else "nothing")
    out.print(table)
    out.print(f"{(time.monotonic() - started) / 60:.0f} minutes, {jobs} processes, Python {platform.python_version()}")
    if found:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
