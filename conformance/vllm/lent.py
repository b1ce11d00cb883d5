"""A pytest plugin for vLLM's own scheduler tests: puts our schedulers in the place of theirs, and lends them three names that the tests read.

`requests`, `running` and `waiting` are made anew at each look, and answer what is so; they cannot be written to. Knows the plug-in's
insides. The product has none of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, NoReturn

import pytest

from paged.integrations.vllm import AsyncScheduler, Scheduler


class Seen(list[Any]):
    """A list to look at: what is put in or taken out would change nothing, so it fails."""

    def refuse(self, *given: Any) -> NoReturn:
        """Say so."""
        raise AttributeError("'Seen' object has no attribute that writes")

    append = remove = prepend_request = remove_requests = refuse


class Lending:
    """What is lent."""

    num_made = 0
    _live: dict[str, Any]
    decisions: Any

    def __init__(self, *given: Any, **named: Any) -> None:
        # Before it is refused.
        Lending.num_made += 1
        super().__init__(*given, **named)

    @property
    def requests(self) -> MappingProxyType[str, Any]:
        """All that have come and have not ended."""
        return MappingProxyType({id: live.request for id, live in self._live.items()})

    @property
    def running(self) -> Seen:
        """Those that run, in their order."""
        return Seen(self._live[id].request for id in self.decisions.running_ids())

    @property
    def waiting(self) -> Seen:
        """Those that wait, in their order, and behind them those that our scheduler does not know yet."""
        held = [id for id, live in self._live.items() if not live.is_submitted]
        return Seen(self._live[id].request for id in [*self.decisions.waiting_ids(), *held])


class LentScheduler(Lending, Scheduler):
    """Ours, with what is lent."""


class LentAsyncScheduler(Lending, AsyncScheduler):
    """Ours for asynchronous scheduling, with what is lent."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[None]:
    """Note whether the test made a scheduler of ours."""
    before = Lending.num_made
    try:
        return (yield)
    finally:
        item.user_properties.append(("made", Lending.num_made - before))


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """The tests' modules have been imported."""
    from tests.v1.core import test_scheduler, utils  # type: ignore[import-not-found]

    utils.Scheduler = test_scheduler.Scheduler = LentScheduler
    utils.AsyncScheduler = LentAsyncScheduler
