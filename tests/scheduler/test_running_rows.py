"""The array of running rows, against the list that one would write down."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from paged.block_manager import BlockManager
from paged.scheduler import Scheduler
from paged.scheduler.request import Request, RequestState, state_of
from paged.scheduler.rows import RowColumns, RunningRows
from paged.testing.snapshots import snapshot


def running(number: int, rows: list[int]) -> RequestState:
    request = Request(id=str(number), prompt=[1], num_sequences=len(rows))
    state = state_of(request, np.array([1], np.int32), b"", (0, 0.0, number), 9)
    state.rows = rows
    return state


def bind(columns: RowColumns, row: int, **options) -> None:
    request = Request(id=str(row), prompt=[1], **options)
    columns.bind(row, state_of(request, np.array([1], np.int32), b"", (0, 0.0, row), 9), 0)


def test_a_row_whose_place_is_known_is_put_there_and_no_request_is_asked():
    rows = RunningRows()
    rows.join([3, 1, 2], at_end=True)
    before = rows.array([])
    rows.join([4], at_end=True)
    rows.leave([1])
    rows.join([9], at_end=False, place=2)
    assert rows.array([]).tolist() == [3, 2, 9, 4]
    assert (rows.count(), before.tolist()) == (4, [3, 1, 2])


def test_a_sequence_that_has_ended_has_no_row():
    rows, state = RunningRows(), running(0, [-1, 5])
    rows.join([5], at_end=False)
    assert rows.array([state]).tolist() == [5]


def test_an_array_that_was_given_away_does_not_change():
    rows = RunningRows()
    rows.join([3, 1], at_end=True)
    before = rows.array([])
    rows.leave([3])
    rows.join([2], at_end=True)
    rows.array([])
    assert before.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("asked", "holds"),
    [
        ([], True),
        ([3, 1, 5], True),
        ([5, 3], True),
        ([1], True),
        ([1, 1], False),
        ([2], False),
        ([6], False),
        ([-1], False),
    ],
)
def test_it_holds_rows_that_run_and_are_listed_once(asked, holds):
    rows = RunningRows()
    rows.join([3, 1, 5], at_end=True)
    assert rows.holds(np.array(asked, np.int64), []) is holds


def test_the_array_of_a_batch_that_had_all_rows_is_kept():
    rows = RunningRows()
    rows.join([3, 1], at_end=True)
    decodes = rows.array([])
    rows.join([2], at_end=True)
    batch = np.array([3, 1, 2])
    assert not rows.keep(decodes, [9], batch)
    assert rows.keep(decodes, [2], batch)
    assert rows.array([]) is batch
    assert rows.replace(batch, batch[1:])
    assert rows.array([]).tolist() == [1, 2]
    assert (rows.count(), rows.replace(batch, batch)) == (2, False)


CALLS = st.sampled_from(["come", "come", "come", "leave", "leave", "come back"])


@settings(max_examples=100, derandomize=True)
@given(st.lists(st.tuples(CALLS, st.integers(0, 9), st.integers(1, 3), st.booleans()), max_size=60))
def test_it_is_the_rows_of_the_running_requests_in_order(calls):
    rows, states = RunningRows(), {}
    gone: list[int] = []
    expected: list[int] = []
    # The highest ones first, so that the marks have to grow; who left last is reused first.
    free = list(range(200))
    for number, (call, pick, num_rows, is_asked) in enumerate(calls):
        if call == "come" or (call == "come back" and gone):
            mine = [free.pop() for _ in range(num_rows)]
            comes = number if call == "come" else gone.pop(pick % len(gone))
            is_single = all(len(each) == 1 for each in (mine, *(state.rows for state in states.values())))
            place = sum(other < comes for other in states) if is_single else None
            rows.join(mine, at_end=all(comes > other for other in states), place=place)
            states[comes] = running(comes, mine)
        elif call == "leave" and states:
            leaves = sorted(states)[pick % len(states)]
            gone.append(leaves)
            mine = states.pop(leaves).rows
            rows.leave(mine)
            free += mine
        in_order = [states[each] for each in sorted(states)]
        expected = [row for state in in_order for row in state.rows]
        assert rows.count() >= len(expected)
        if is_asked:
            assert rows.array(in_order).tolist() == expected
            assert rows.count() == len(expected)
    assert rows.array([states[each] for each in sorted(states)]).tolist() == expected


@pytest.fixture
def state():
    """A request of two sequences, at most 9 and 8 tokens long, whose EOS is 7."""
    request = Request(id="a", prompt=[1, 2, 3], min_tokens=2, eos_token_id=7, num_sequences=2)
    state = state_of(request, np.array([1, 2, 3], np.int32), b"", (0, 0.0, 0), 9)
    state.max_total = (9, 8)
    return state


def test_a_bound_row_knows_its_sequence_and_its_limits(state):
    columns = RowColumns()
    columns.bind(5, state, 1)
    assert (columns.owner[5], columns.id[5], columns.sequence[5]) == (state, "a", 1)
    assert (columns.max_total[5], columns.min_total[5], columns.stops[5].tolist()) == (8, 5, [7])


def test_the_full_lengths_of_bound_rows_are_added_up(state):
    columns = RowColumns()
    columns.bind(5, state, 0)
    columns.bind(2, state, 1)
    assert (columns.num_bound, columns.sum_max_total) == (2, 9 + 8)
    columns.prolong(5, 0, 12)
    assert (columns.max_total[5], columns.sum_max_total) == (12, 12 + 8)
    columns.release(5, 0)
    assert (columns.num_bound, columns.sum_max_total) == (1, 8)


def test_a_released_row_keeps_neither_owner_nor_stop_ids(state):
    columns = RowColumns()
    columns.bind(5, state, 0)
    columns.release(5, 0)
    assert (columns.owner[5], columns.id[5], columns.stops[5].tolist(), columns.num_with_stops) == (None, None, [-1], 0)


def test_columns_grow_and_keep_what_they_hold(state):
    columns = RowColumns(num_rows=2)
    columns.bind(1, state, 0)
    columns.bind(100, state, 1)
    assert [columns.max_total[row] for row in (1, 100)] == [9, 8]
    assert [columns.stops[row].tolist() for row in (1, 2, 100)] == [[7], [-1], [7]]
    assert [columns.owner[row] for row in (1, 2, 100)] == [state, None, state]


def test_a_request_with_more_stop_ids_widens_the_column(state):
    columns = RowColumns()
    columns.bind(0, state, 0)
    request = Request(id="b", prompt=[1], stop_token_ids=(4, 5))
    columns.bind(1, state_of(request, np.array([1], np.int32), b"", (0, 0.0, 1), 9), 0)
    assert columns.stops[:2].tolist() == [[7, -1], [4, 5]]


def test_the_column_of_stop_ids_is_as_wide_as_the_rows_need():
    columns = RowColumns()
    bind(columns, 0, eos_token_id=7)
    bind(columns, 1, stop_token_ids=(4, 5, 6))
    bind(columns, 2, stop_token_ids=tuple(range(20_000)))
    assert columns.stops.shape == (64, 3)
    columns.release(1, 0)
    assert columns.stops.shape == (64, 1)
    assert len(columns.many_stops) == 20_000
    columns.release(2, 0)
    columns.release(0, 0)
    assert (columns.stops.shape, len(columns.many_stops), columns.num_with_stops) == ((64, 1), 0, 0)
    assert (columns.stops == -1).all()


@pytest.mark.parametrize("name", ["zeros", "empty", "full"])
def test_columns_that_find_no_memory_to_grow_stay_as_they_were(monkeypatch, name):
    columns = RowColumns(num_rows=2)
    bind(columns, 1, eos_token_id=7)

    def short(*args, **kwargs):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(np, name, short)
        with pytest.raises(MemoryError):
            columns.ensure(3)
    lengths = {len(getattr(columns, each)) for each in ("max_total", "owner", "id", "sequence", "has_stops", "stops")}
    assert lengths == {2}
    bind(columns, 2, eos_token_id=8)
    assert [columns.stops[row].tolist() for row in (1, 2)] == [[7], [8]]


def test_a_step_that_finds_no_memory_for_its_columns_changes_nothing(monkeypatch):
    scheduler = Scheduler(BlockManager(200, 4), max_sequences=200)
    for number in range(100):
        scheduler.add(Request(id=str(number), prompt=[number], max_tokens=1))

    def short(*args, **kwargs):
        raise MemoryError

    before = snapshot(scheduler.manager), scheduler.counts()
    with monkeypatch.context() as patch:
        patch.setattr(np, "full", short)
        with pytest.raises(MemoryError):
            scheduler.schedule()
    assert (snapshot(scheduler.manager), scheduler.counts()) == before
    assert len(scheduler.schedule().rows) == 100
    assert scheduler.check() == []
