"""The kit on vLLM: its KV cache manager and its whole scheduler under the state machines, a soak, planted faults, and short programs.

    PYTHONPATH=. VENV/bin/python -m conformance.vllm.run --examples 1000 --soak 10000

VENV is a Python with vLLM 0.32 (the CPU build will do), Hypothesis and msgspec; no model, no weights, no accelerator. Prints lines of
a table; what is found is printed with its shortest program. Examples are the same in every run. Knows how to run; the adapters know
vLLM.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PARTS = ("manager", "scheduler", "priority", "soak", "planted", "programs")


@dataclass
class Found:
    """What a run of a machine came to: examples, seconds, in how many examples each event occurred, what was found."""

    num_examples: int = 0
    seconds: float = 0.0
    events: Counter[str] = field(default_factory=Counter)
    violation: str = ""


def examine(machine: type[Any], num_examples: int, *, shrinks: bool = True) -> Found:
    """Run a machine for so many examples, or up to what it finds."""
    from hypothesis import Phase, settings
    from hypothesis.stateful import run_state_machine_as_test

    from paged.testing.machines import settings_for

    found = Found()

    class Counting(machine):
        def teardown(self) -> None:
            super().teardown()
            found.num_examples += 1
            found.events.update(name for name, times in self.rig.events.items() if times)

    # Explaining a failure traces every line of vLLM, which takes minutes.
    phases = [Phase.generate, Phase.shrink] if shrinks else [Phase.generate]
    begin = time.monotonic()
    try:
        run_state_machine_as_test(Counting, settings=settings(settings_for(num_examples), phases=phases))
    except Exception as error:
        found.violation = f"{type(error).__name__}: {error}"
    found.seconds = time.monotonic() - begin
    return found


def line(name: str, found: Found) -> str:
    """One row of the page's table."""
    shares = ", ".join(f"{name} {times}" for name, times in sorted(found.events.items()) if times)
    verdict = "nothing found" if not found.violation else "FOUND"
    return f"| {name} | {found.num_examples:,} | {found.seconds:.0f} | {verdict} | {shares} |"


def machines() -> dict[str, type[Any]]:
    """By the part's name."""
    from conformance.vllm.manager_rig import VllmManagerMachine
    from conformance.vllm.whole_machine import VllmPriorityMachine, VllmSchedulerMachine

    return {"manager": VllmManagerMachine, "scheduler": VllmSchedulerMachine, "priority": VllmPriorityMachine}


def run_soak(num_requests: int) -> str:
    """Random requests with aborts on 12 blocks, in one row of the table."""
    from conformance.vllm.whole_machine import soak
    from paged.testing.violation import Violation
    from paged.testing.world import World

    world = World(num_blocks=12, block_size=2, max_tokens_per_step=16, max_sequences=6, policy="vllm")
    found, begin = Found(num_requests), time.monotonic()
    try:
        found.events = soak(num_requests, 0, world).events
    except Violation as violation:
        found.violation = str(violation)
    found.seconds = time.monotonic() - begin
    return line("soak (requests)", found) + ("\n" + found.violation if found.violation else "")


def run_planted(num_examples: int) -> None:
    """Each planted fault under its machine, until it is found or the examples are through."""
    from conformance.vllm.planted import planted

    for sentence, (which, plant) in planted().items():
        with plant():
            found = examine(machines()[which], num_examples, shrinks=False)
        verdict = found.violation.split("\n")[0][:110] or "NOT FOUND"
        print(f"| {sentence} | {which} | {found.num_examples} | {verdict} |", flush=True)


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--examples", type=int, default=1000, help="of each machine")
    parser.add_argument("--soak", type=int, default=10_000, help="requests")
    asked = parser.parse_args()
    from conformance.vllm.manager import VllmMissing, vllm_names

    try:
        names = vllm_names()
    except VllmMissing as error:
        sys.exit(str(error))
    print(
        f"vLLM {names.version}, torch {names.torch.__version__}, Python {platform.python_version()}",
        flush=True,
    )
    parts = asked.parts or PARTS
    for name, machine in machines().items():
        if name in parts:
            found = examine(machine, asked.examples)
            print(line(name, found), flush=True)
            if found.violation:
                print(found.violation)
    if "soak" in parts:
        print(run_soak(asked.soak), flush=True)
    if "planted" in parts:
        run_planted(min(asked.examples, 300))
    if "programs" in parts:
        from conformance.vllm.programs import PROGRAMS

        for program in PROGRAMS:
            show(program)


def show(program: Callable[[], str]) -> None:
    """What a short program does, and what it saw."""
    print(f"* {program.__name__}: {program.__doc__}\n  {program()}.", flush=True)


if __name__ == "__main__":
    main()
