"""The pytest plugin of the kit: rigs as fixtures that end in a check, and two options for the state machines.

pytest loads it wherever paged is installed, so it imports nothing before it is used.

    --paged-examples N         of each state machine that `run_machine` runs; drawn anew every time
    --paged-failures FOLDER    where what was found is saved, for `paged check replay`
    paged_manager_rig, paged_scheduler_rig, paged_engine_rig
                               make a rig, which is drained at the end: all have to finish, every block to come back
    paged_checked              at the end of the test, `check()` of whatever was handed to it has to find nothing
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

_VARIABLES = {"paged_examples": "PAGED_EXAMPLES", "paged_failures": "PAGED_FAILURES"}
_before = pytest.StashKey[dict[str, "str | None"]]()
Subject = TypeVar("Subject")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("paged", "paged: memory managers, schedulers and engines under test")
    group.addoption("--paged-examples", type=_count, metavar="N", help="examples of each state machine, drawn anew")
    group.addoption("--paged-failures", metavar="FOLDER", help="save what is found there, for `paged check replay`")


def _count(text: str) -> str:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of examples; at least 1 is needed")
    return text


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Set the kit's environment variables by the options, before any conftest.py reads them; workers inherit them."""
    values = {name: getattr(early_config.known_args_namespace, name, None) for name in _VARIABLES}
    chosen = {_VARIABLES[name]: value for name, value in values.items() if value is not None}
    early_config.stash[_before] = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Set the environment back."""
    for name, value in config.stash.get(_before, {}).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _rig_fixture(name: str, rig: str, usual_world: str) -> Any:
    """The fixture that makes rigs of a kind. All that have not failed, which raised a violation at once, are drained at
    the end of the test."""

    def fixture() -> Iterator[Callable[..., Any]]:
        from paged import testing
        from paged.testing.saved import kept

        rigs: list[tuple[Any, Callable[..., Any] | None]] = []

        def make(world: Any = None, build: Callable[..., Any] | None = None) -> Any:
            sizes = getattr(testing, usual_world)() if world is None else world
            rigs.append((getattr(testing, rig)(*([sizes] if build is None else [sizes, build])), build))
            return rigs[-1][0]

        yield make
        for made, builder in rigs:
            if not made.has_failed:
                with kept(builder):
                    made.drain()

    fixture.__doc__ = f"{name}(world={usual_world}(), build=ours): {rig}, drained at the end."
    return pytest.fixture(fixture, name=name)


paged_manager_rig = _rig_fixture("paged_manager_rig", "ManagerRig", "ManagerWorld")
paged_scheduler_rig = _rig_fixture("paged_scheduler_rig", "SchedulerRig", "World")
paged_engine_rig = _rig_fixture("paged_engine_rig", "EngineRig", "EngineWorld")


@pytest.fixture
def paged_checked() -> Iterator[Callable[[Subject], Subject]]:
    """paged_checked(subject): the subject itself, whose `check()` has to return nothing at the end."""
    subjects: list[Any] = []

    def watched(subject: Subject) -> Subject:
        subjects.append(subject)
        return subject

    yield watched
    found = [f"{type(subject).__name__}: {sentence}" for subject in subjects for sentence in subject.check()]
    if found:
        pytest.fail("\n".join(found), pytrace=False)
