"""What the scheduler keeps of each row: no more than the rows need, whole or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from paged.block_manager import BlockManager
from paged.scheduler import Request, Scheduler
from paged.scheduler.request import state_of
from paged.scheduler.rows import RowColumns
from paged.testing.snapshots import snapshot


def bind(columns: RowColumns, row: int, **options) -> None:
    request = Request(id=str(row), prompt=[1], **options)
    columns.bind(row, state_of(request, np.array([1], np.int32), b"", (0, 0.0, row), 9), 0)


def test_the_column_of_stop_ids_is_as_wide_as_the_rows_need():
    columns = RowColumns()
    bind(columns, 0, eos_token_id=7)
    bind(columns, 1, stop_token_ids=(4, 5, 6))
    bind(columns, 2, stop_token_ids=tuple(range(20_000)))
    assert columns.stops.shape == (64, 3)
    columns.release(1)
    assert columns.stops.shape == (64, 1)
    assert len(columns.many_stops) == 20_000
    columns.release(2)
    columns.release(0)
    assert (columns.stops.shape, len(columns.many_stops), columns.num_with_stops) == ((64, 1), 0, 0)
    assert (columns.stops == -1).all()


def ample_scheduler():
    return Scheduler(BlockManager(400, 4), policy="fastgen", max_sequences=200)


def add_all(scheduler, numbers):
    for number in numbers:
        scheduler.add(Request(id=str(number), prompt=[number], max_tokens=9, eos_token_id=1000 + number))


def test_rows_keep_their_stop_ids_when_the_columns_grow():
    scheduler = ample_scheduler()
    add_all(scheduler, range(60))
    scheduler.update(scheduler.schedule(), [7] * 60)
    add_all(scheduler, range(60, 100))
    # Each second one samples its own, and those behind them their neighbours'.
    outputs = scheduler.update(scheduler.schedule(), [1000 + number // 2 * 2 for number in range(100)])
    assert [output.finish_reason for output in outputs] == ["stop", None] * 50
    assert scheduler.check() == []


@pytest.mark.parametrize("name", ["zeros", "empty", "full"])
def test_a_step_that_finds_no_memory_for_its_columns_changes_nothing(monkeypatch, name):
    scheduler = ample_scheduler()
    add_all(scheduler, range(100))

    def short(*args, **kwargs):
        raise MemoryError

    before = snapshot(scheduler.manager), scheduler.counts()
    with monkeypatch.context() as patch:
        patch.setattr(np, name, short)
        with pytest.raises(MemoryError):
            scheduler.schedule()
    assert (snapshot(scheduler.manager), scheduler.counts()) == before
    assert len(scheduler.schedule().rows) == 100
    assert scheduler.check() == []
