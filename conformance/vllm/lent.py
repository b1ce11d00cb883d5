"""A pytest plugin for vLLM's own scheduler tests: puts our schedulers in the place of theirs, and lends them names that the tests read.

`requests`, `running`, `waiting`, `kv_holding_waiting`, and what tests read of a `kv_cache_manager` are made anew at each look, and answer what
is so; they cannot be written to. `finished_recving_kv_req_ids` is the plug-in's own set. Knows the plug-in's insides. The product has none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NoReturn

import pytest

from paged.integrations.vllm import AsyncScheduler, Scheduler


class Seen(list[Any]):
    """A list to look at: what is put in or taken out would change nothing, so it fails."""

    def refuse(self, *given: Any) -> NoReturn:
        """Say so."""
        raise AttributeError("'Seen' object has no attribute that writes")

    append = remove = prepend_request = remove_requests = refuse


class TablesSeen(Mapping[str, Any]):
    """Of each request that holds blocks, `look` of its row."""

    def __init__(self, scheduler: Any, look: Callable[[int], Any]) -> None:
        self._decisions, self._look = scheduler.decisions, look

    def _rows(self) -> dict[str, int]:
        ids = [view.id for view in self._decisions.requests(2**31)]
        return {id: row for id in ids for row in self._decisions.rows_of(id)}

    def __getitem__(self, id: str) -> Any:
        return self._look(self._rows()[id])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows())

    def __len__(self) -> int:
        return len(self._rows())


class MemorySeen:
    """What tests read of vLLM's KVCacheManager: free blocks, tables, how many full blocks of each are content or will be, hits."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, manager = scheduler, scheduler.manager
        tables = TablesSeen(scheduler, lambda row: manager.table(row).tolist())
        full = TablesSeen(
            scheduler,
            lambda row: int(manager.rows.num_scheduled[row] + manager.rows.num_computed[row]) // manager.block_size,
        )
        kind = SimpleNamespace(req_to_blocks=tables, num_cached_block=full)
        self.block_pool = SimpleNamespace(
            get_num_free_blocks=lambda: manager.device.num_free + manager.device.num_cached
        )
        self.coordinator = SimpleNamespace(single_type_managers=(kind,))

    @property
    def prefix_cache_stats(self) -> Any:
        """Hits since the last statistics."""
        return self._scheduler._hits


class Lending:
    """What is lent."""

    num_made = 0
    _live: dict[str, Any]
    _transfers: Any
    _view: Any
    decisions: Any

    def __init__(self, *given: Any, **named: Any) -> None:
        # Before it is refused.
        Lending.num_made += 1
        super().__init__(*given, **named)

    @property
    def requests(self) -> MappingProxyType[str, Any]:
        """All that have come and have not ended."""
        live = {id: live.request for id, live in self._live.items()}
        return MappingProxyType(live | dict.fromkeys(self._transfers.ended if self._transfers else ()))

    @property
    def running(self) -> Seen:
        """Those that run, in their order."""
        return Seen(self._live[id].request for id in self.decisions.running_ids())

    @property
    def waiting(self) -> Seen:
        """Those that wait, in their order, and behind them those that our scheduler does not know yet."""
        away = [view.id for view in self.decisions.requests(2**31) if view.status in ("paused", "swapped")]
        held = [id for id, live in self._live.items() if not live.is_submitted]
        return Seen(self._live[id].request for id in [*away, *self.decisions.waiting_ids(), *held])

    @property
    def kv_holding_waiting(self) -> Seen:
        """Those that load."""
        return Seen(self._live[view.id].request for view in self.decisions.requests(2**31) if view.status == "loading")

    @property
    def kv_cache_manager(self) -> MemorySeen:
        """Memory, to look at."""
        return MemorySeen(self)

    @property
    def use_v2_model_runner(self) -> bool:
        """Which runner steps are told to; tests write it."""
        return bool(self._view._uses_v2_runner)

    @use_v2_model_runner.setter
    def use_v2_model_runner(self, uses: bool) -> None:
        self._view._uses_v2_runner = uses

    @property
    def finished_recving_kv_req_ids(self) -> set[str]:
        """Those whose load has ended since the last step."""
        return self._transfers.arrived

    @property
    def connector_prefix_cache_stats(self) -> Any:
        """What was found elsewhere since the last statistics."""
        return None if self._transfers is None else self._transfers.external


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
