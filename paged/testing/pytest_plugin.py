"""The pytest plugin of the kit: rigs as fixtures that end in a check, and two options for the state machines.

pytest loads it wherever paged is installed, so it imports nothing before it is used.

    --paged-examples N         of each state machine that `run_machine` runs; drawn anew every time
    --paged-failures FOLDER    where what was found is saved, for `paged check replay`
    paged_manager_rig, paged_scheduler_rig, paged_engine_rig
                               make a rig; at the end of the test it is drained: all has to finish, and every block to come back
    paged_checked              at the end of the test, `check()` of whatever was handed to it has to find nothing
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from paged.testing.engine_rig import EngineRig
    from paged.testing.manager_rig import ManagerRig
    from paged.testing.scheduler_rig import SchedulerRig

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
    """Options become the kit's environment variables, before any conftest.py reads those; workers of xdist inherit them."""
    values = {name: getattr(early_config.known_args_namespace, name, None) for name in _VARIABLES}
    chosen = {_VARIABLES[name]: value for name, value in values.items() if value is not None}
    early_config.stash[_before] = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)


def pytest_unconfigure(config: pytest.Config) -> None:
    """The environment is as it was."""
    for name, value in config.stash.get(_before, {}).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def paged_manager_rig() -> Iterator[Callable[..., ManagerRig]]:
    """paged_manager_rig(world=ManagerWorld(), build=build_manager): a ManagerRig, drained at the end."""
    from paged.testing.manager_rig import ManagerRig, ManagerWorld, build_manager

    with _drained(ManagerRig, ManagerWorld, build_manager) as make:
        yield make


@pytest.fixture
def paged_scheduler_rig() -> Iterator[Callable[..., SchedulerRig]]:
    """paged_scheduler_rig(world=World(), build=build_scheduler): a SchedulerRig, drained at the end."""
    from paged.testing.scheduler_rig import SchedulerRig
    from paged.testing.world import World, build_scheduler

    with _drained(SchedulerRig, World, build_scheduler) as make:
        yield make


@pytest.fixture
def paged_engine_rig() -> Iterator[Callable[..., EngineRig]]:
    """paged_engine_rig(world=EngineWorld(), build=build_engine): an EngineRig, drained at the end."""
    from paged.testing.engine_rig import EngineRig
    from paged.testing.engine_world import EngineWorld, build_engine

    with _drained(EngineRig, EngineWorld, build_engine) as make:
        yield make


@pytest.fixture
def paged_checked() -> Iterator[Callable[[Subject], Subject]]:
    """paged_checked(subject): the same subject, a manager, a scheduler or an engine; its `check()` has to return nothing at the end."""
    subjects: list[Any] = []

    def watched(subject: Subject) -> Subject:
        subjects.append(subject)
        return subject

    yield watched
    found = [f"{type(subject).__name__}: {sentence}" for subject in subjects for sentence in subject.check()]
    if found:
        pytest.fail("\n".join(found), pytrace=False)


@contextmanager
def _drained(kind: Any, world_kind: Any, usual: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """What makes rigs of a kind; those that have not failed, which they have said themselves, are drained when it is left."""
    from paged.testing.saved import kept

    rigs: list[tuple[Any, Callable[..., Any]]] = []

    def make(world: Any = None, build: Callable[..., Any] = usual) -> Any:
        rigs.append((kind(world or world_kind(), build), build))
        return rigs[-1][0]

    yield make
    for rig, build in rigs:
        if not rig.has_failed:
            with kept(build):
                rig.drain()
