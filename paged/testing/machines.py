"""The state machines, and how many examples they run: PAGED_EXAMPLES, or few enough for every test run.

The only module of the kit that needs Hypothesis to be imported, with the machines that it collects.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.errors import HypothesisException
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from paged.base.arguments import checked_integer
from paged.errors import InvalidConfig
from paged.testing.adapter import ManagerAdapter
from paged.testing.engine_machine import EngineMachine
from paged.testing.manager_machine import ManagerMachine
from paged.testing.saved import kept
from paged.testing.scheduler_machine import LayerMachine, SchedulerMachine
from paged.testing.shrinking import replay, shrink
from paged.testing.violation import Violation, sentence_of

__all__ = [
    "AdapterMachine",
    "EngineMachine",
    "LayerMachine",
    "ManagerMachine",
    "SchedulerMachine",
    "first_violation",
    "num_examples",
    "run_machine",
    "settings_for",
]

PROGRAMS = 5000
"""At most as many are run to make one short."""


class AdapterMachine(ManagerMachine):
    """The manager's machine for a `ManagerAdapter`. `build` may be the class, whose `capabilities` are taken then."""

    capabilities = ManagerAdapter.capabilities

    def __init_subclass__(cls) -> None:
        if "build" in vars(cls) and "capabilities" not in vars(cls):
            cls.capabilities = getattr(cls.build, "capabilities", cls.capabilities)


def num_examples(few: int) -> int:
    """PAGED_EXAMPLES from the environment, else `few`. Raises InvalidConfig for what is no number of at least 1."""
    number, asked = checked_integer("few", few, 1), os.environ.get("PAGED_EXAMPLES")
    if asked is None:
        return number
    if not (asked.isascii() and asked.isdigit() and int(asked)):
        raise InvalidConfig(f"PAGED_EXAMPLES has to be a number of examples, at least 1; got {asked!r}.")
    return int(asked)


def settings_for(few: int, *, steps: int = 50) -> settings:
    """Reproducible settings: without PAGED_EXAMPLES the same examples every time, with it new ones each run."""
    return settings(
        max_examples=num_examples(few),
        stateful_step_count=checked_integer("steps", steps, 1),
        derandomize="PAGED_EXAMPLES" not in os.environ,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        verbosity=Verbosity.normal,
        suppress_health_check=list(HealthCheck),
    )


def run_machine(machine: type[Any], few: int, *, steps: int = 50) -> None:
    """Run a state machine; raises `Violation`, with a short program that breaks the rule, when one is broken.

    The kit makes the program short, which is faster than Hypothesis; Hypothesis does where a rule of yours does what no
    rig replays. With PAGED_FAILURES in the environment the program is saved in that folder; `paged check replay FILE`
    runs it again.
    `few` examples of at most `steps` rules each. Raises InvalidConfig for less than 1, and for what is no machine.
    """
    is_machine = isinstance(machine, type) and issubclass(machine, RuleBasedStateMachine)
    if not is_machine or not callable(getattr(machine, "build", None)):
        name = getattr(machine, "__name__", repr(machine))
        wanted = "a `build` that makes the subject from a world. Subclass AdapterMachine, say, and set it"
        raise InvalidConfig(f"{name} is no machine with {wanted}.")
    how = settings_for(few, steps=steps)
    with kept(machine.build):
        violation, _ = first_violation(machine, how)
        if violation is None:
            return
        shorter = _made_short(violation, machine.build)
        if shorter is None:
            run_state_machine_as_test(machine, settings=how)
        raise shorter or violation


def first_violation(machine: type[Any], how: settings) -> tuple[Violation | None, int]:
    """Run a state machine until a rule is broken: (the violation, if any, and the examples that it took).

    The program is not made short. What a subject raises where its rig expects nothing is a violation, too.
    """
    num_begun, last = 0, None

    class Watched(machine):  # type: ignore[misc]
        def __init__(self) -> None:
            nonlocal num_begun, last
            super().__init__()
            num_begun += 1
            last = self

    try:
        run_state_machine_as_test(Watched, settings=settings(how, phases=[Phase.generate]))
    except Violation as violation:
        # Hypothesis runs the failing example once more, for its report.
        return violation, num_begun - 1
    except HypothesisException:
        # A subject that does something else each time.
        raise
    except Exception as error:
        rig = getattr(last, "rig", None)
        if rig is None:
            raise
        return Violation([sentence_of(error)], rig.program), num_begun - 1
    return None, num_begun


def _made_short(violation: Violation, build: Any) -> Violation | None:
    """The violation of a shorter program; None if the program by itself breaks no rule."""
    program = violation.program
    try:
        shorter = shrink(program.world, program.calls, build, programs=PROGRAMS, **program.options)
        replay(shorter.world, shorter.calls, build, drain=True, **program.options)
    except Violation as of_the_shorter:
        return of_the_shorter
    return None
