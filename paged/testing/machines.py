"""The three state machines, and how many examples they run: PAGED_EXAMPLES, or few enough for every test run.

The only module of the kit that needs Hypothesis to be imported, with the machines that it collects.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, Verbosity, settings
from hypothesis.stateful import run_state_machine_as_test

from paged.testing.engine_machine import EngineMachine
from paged.testing.manager_machine import ManagerMachine
from paged.testing.saved import kept
from paged.testing.scheduler_machine import SchedulerMachine

__all__ = ["EngineMachine", "ManagerMachine", "SchedulerMachine", "num_examples", "run_machine", "settings_for"]


def num_examples(few: int) -> int:
    """PAGED_EXAMPLES from the environment, else `few`."""
    return int(os.environ.get("PAGED_EXAMPLES", few))


def settings_for(few: int, *, steps: int = 50) -> settings:
    """Reproducible settings: without PAGED_EXAMPLES the same examples every time, with it new ones each run."""
    return settings(
        max_examples=num_examples(few),
        stateful_step_count=steps,
        derandomize="PAGED_EXAMPLES" not in os.environ,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        verbosity=Verbosity.normal,
        suppress_health_check=list(HealthCheck),
    )


def run_machine(machine: type[Any], few: int, *, steps: int = 50) -> None:
    """Run a state machine; raises `Violation`, with the shortest program found, when a rule is broken.

    With PAGED_FAILURES in the environment the program is saved in that folder; `paged check replay FILE` runs it again.
    """
    with kept(machine.build):
        run_state_machine_as_test(machine, settings=settings_for(few, steps=steps))
