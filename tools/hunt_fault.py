"""Run the test kit on the memory layer and scheduler that come first on the path, until a rule is broken; then make the program short.

    PYTHONPATH=COPY python tools/hunt_fault.py RESULT.json --examples 300

`try_faults.py` calls it for each fault, in a process of its own and on a copy with the fault in it. Every seed is
fixed, so a hunt ends the same way every time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import find, settings
from hypothesis.errors import NoSuchExample

from paged import block_manager
from paged.testing import SCENARIOS, Violation, random_program, replay, run_scenario, shrink
from paged.testing.machines import LayerMachine, ManagerMachine, SchedulerMachine, first_violation, settings_for

MANAGER, SCHEDULER, PROGRAMS, READY = "manager machine", "scheduler machine", "random programs", "a scenario"
LAYERS, SESSIONS = "layer machine", "naive sessions"
# The model of sessions is a test's own.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "properties"))
CALLS = 60
T = TypeVar("T")


class Caught(Exception):
    """A rule was broken in example number `examples`."""

    def __init__(self, violation: Violation, examples: int) -> None:
        super().__init__(str(violation))
        self.violation = violation
        self.examples = examples


def run_machine(machine: type[Any], most: int) -> int:
    """Up to `most` examples of a state machine; returns how many there were. Raises Caught."""
    how = settings(settings_for(most, steps=15 if machine is LayerMachine else 40), max_examples=most, derandomize=True)
    violation, examples = first_violation(machine, how)
    if violation is not None:
        raise Caught(violation, examples) from violation
    return examples


def run_each(run: Callable[[T], object], things: Sequence[T]) -> int:
    """`run` each of these, one after another; returns how many there are. Raises Caught."""
    for number, thing in enumerate(things, 1):
        try:
            run(thing)
        except Violation as violation:
            raise Caught(violation, number) from violation
    return len(things)


def run_programs(most: int) -> int:
    """Up to `most` random programs, each to its end; returns how many there were. Raises Caught."""
    return run_each(lambda seed: random_program(seed, CALLS).drain(), range(most))


def run_sessions(most: int) -> dict[str, Any]:
    """What the naive model of sessions finds in up to `most` programs, the shortest one."""
    from test_naive_sessions import is_clean, programs

    begun, num = time.monotonic(), 0

    def is_wrong(program: Any) -> bool:
        nonlocal num
        num += 1
        return not is_clean(program)

    how = settings(settings_for(most), max_examples=most, derandomize=True)
    try:
        program = find(programs, is_wrong, settings=how)
    except NoSuchExample:
        return {"by": None, "examples": num, "seconds": time.monotonic() - begun}
    told = {"by": SESSIONS, "examples": num, "seconds": time.monotonic() - begun, "calls": len(program)}
    return told | {
        "shrunk_calls": len(program),
        "shrink_seconds": 0.0,
        "found": ["18: other content"],
        "program": [repr(program)],
    }


def run_scenarios() -> int:
    """Each failure of the field once; returns how many there are. Raises Caught."""
    return run_each(run_scenario, list(SCENARIOS))


def hunt(examples: int, programs: int, *, manager: bool, layers: bool, sessions: bool) -> dict[str, Any]:
    """What was found, if anything. `manager`: the memory layer by itself, too; without, only what runs the scheduler. `layers`: only worlds with
    layers of several kinds. `sessions`: only what has sessions and hints."""
    alone = [(MANAGER, lambda: run_machine(ManagerMachine, examples))] if manager else []
    longer = [(MANAGER, lambda: run_machine(ManagerMachine, 4 * examples))] if manager else []
    # Each of them for a while, and only then longer: most faults are found soon by one that looks where they are.
    ways = [
        *alone,
        (PROGRAMS, lambda: run_programs(examples)),
        (READY, run_scenarios),
        (SCHEDULER, lambda: run_machine(SchedulerMachine, examples)),
        *longer,
        (PROGRAMS, lambda: run_programs(4 * examples)),
    ]
    if layers:
        ways = [(LAYERS, partial(run_machine, LayerMachine, most)) for most in (examples, 4 * examples)]
    if sessions:
        if (result := run_sessions(examples))["by"] is not None:
            return result
        ways = [(SCHEDULER, partial(run_machine, SchedulerMachine, most)) for most in (examples, 4 * examples)]
    begun, tried = time.monotonic(), 0
    for way, run in ways:
        try:
            tried += run()
        except Caught as caught:
            seconds = time.monotonic() - begun
            return {"by": way, "examples": tried + caught.examples, "seconds": seconds} | shortened(
                caught.violation, programs
            )
    return {"by": None, "examples": tried, "seconds": time.monotonic() - begun}


def shortened(violation: Violation, programs: int) -> dict[str, Any]:
    """The program before and after it was made short, and what the short one breaks."""
    world, calls = violation.program.world, violation.program.calls
    begun = time.monotonic()
    short = shrink(world, calls, programs=programs)
    shrink_seconds = time.monotonic() - begun
    found, lines = violation.found, short.lines
    try:
        replay(short.world, short.calls)
        # Nothing is wrong yet, so it comes out when all that was begun is brought to its end.
        lines.append("rig.drain()")
        replay(short.world, short.calls, drain=True)
    except Violation as shorter:
        found = shorter.found
    return {
        "calls": len(calls),
        "shrunk_calls": len(lines) - 1,
        "shrink_seconds": shrink_seconds,
        "found": found,
        "program": lines,
    }


def main() -> None:
    """Hunt, and write the result where the first argument says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="the JSON file to write")
    parser.add_argument("--examples", type=int, default=300, help="examples of each machine")
    parser.add_argument("--programs", type=int, default=5000, help="programs that may be run to make one short")
    parser.add_argument("--no-manager", action="store_true", help="leave the manager machine out")
    parser.add_argument("--layers", action="store_true", help="run the layer machine, and nothing else")
    parser.add_argument("--sessions", action="store_true", help="run what has sessions and hints, and nothing else")
    options = parser.parse_args()
    what = {"manager": not options.no_manager, "layers": options.layers, "sessions": options.sessions}
    result = hunt(options.examples, options.programs, **what)
    result["block_manager"] = block_manager.__file__
    options.result.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
