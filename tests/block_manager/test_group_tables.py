"""What a batch says of its rows' pages in each layer group."""

from __future__ import annotations

import numpy as np
import pytest

from paged.block_manager import BlockManager, GroupTables, LayerGroup
from paged.block_manager.flights import Flight

GROUPS = (LayerGroup("window", 3), LayerGroup("state", pages=2), LayerGroup("full", pages=2))


@pytest.fixture
def manager():
    """Two tokens a block. Row 0 has 6 tokens computed and 2 more in flight, row 1 has 1 computed, row 2 none."""
    manager = BlockManager(40, 2, groups=GROUPS, prefix_caching=False)
    for length in (8, 1, 4):
        manager.add(range(length))
    manager.allocate([0, 1], [6, 1])
    manager.confirm()
    manager.allocate([0], [2])
    return manager


def tables_of(manager, group, rows, starts=()):
    memory = manager._memory
    flight = Flight(1)
    starts = np.array(starts or [0] * len(rows))
    flight.place(np.array(rows), starts, starts + 1)
    return GroupTables(memory.tables, memory.device, memory.layout, group, flight.rows, flight)


def test_columns_end_with_the_longest_row_and_what_is_not_there_is_minus_one(manager):
    window, full = tables_of(manager, 0, [1, 0, 2]).tables, tables_of(manager, 2, [1, 0, 2]).tables
    assert (window.shape, full.shape) == ((3, 4, 1), (3, 4, 2))
    assert (window.dtype, full.dtype) == (np.int32, np.int32)
    assert (window[:, :, 0] >= 0).tolist() == [[True, False, False, False], [False, False, True, True], [False] * 4]
    assert ((full >= 0).all(axis=2) == [[True, False, False, False], [True] * 4, [False] * 4]).all()
    assert (full[2] == -1).all() and (full[0, 1:] == -1).all()


def test_single_blocks_are_those_of_the_tables(manager):
    rows, columns = np.array([0, 0, 1, 1, 2]), np.array([0, 3, 0, 1, 0])
    for group in (0, 2):
        tables = tables_of(manager, group, [0, 1, 2])
        assert tables.at(rows, columns).tolist() == tables.tables[rows, columns].tolist()
    assert tables.at(rows, columns).dtype == np.int32 and tables.at(rows[:0], columns[:0]).shape == (0, 2)


def test_a_state_is_one_column_and_is_read_where_it_was_written(manager):
    state = tables_of(manager, 1, [1, 0], [1, 6])
    assert state.tables.shape == (2, 1, 2)
    assert state.write.tolist() == state.read.tolist() == state.tables[:, 0].tolist()
    assert (state.write >= 0).all()


def test_a_state_before_the_first_token_is_read_from_nowhere(manager):
    state = tables_of(manager, 1, [1, 0], [0, 6])
    assert state.read.tolist() == [[-1, -1], state.write[1].tolist()]


def test_tables_are_read_when_they_are_asked_for(manager):
    window = tables_of(manager, 0, [0])
    assert (window.tables[0, :, 0] >= 0).sum() == 2
    manager.confirm()
    assert (window.tables[0, :, 0] >= 0).sum() == 1


def test_no_page_is_in_two_tables(manager):
    found = [
        page for group in range(3) for page in tables_of(manager, group, [0, 1, 2]).tables.reshape(-1) if page >= 0
    ]
    assert len(set(found)) == len(found) == manager.device.num_used
