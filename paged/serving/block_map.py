"""The owner of each block of a pool, as a number: a cell of the dashboard's and the demo's map.

a request's number (0 and more) | SHARED | CACHED | RETAINED | FREE | HELD
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged.block_manager import BlockManager, GroupStats

FREE = -1
"""No content, and in no table."""
CACHED = -2
"""Content that a request may find, in no table."""
SHARED = -3
"""In the tables of several sequences."""
RETAINED = -4
"""Cached, and evicted after what is merely cached."""
HELD = -5
"""Used, and in no table: by a load that has not ended."""


def groups_of(manager: BlockManager) -> tuple[GroupStats, ...]:
    """Return the figures of each layer group if layers are of several kinds; else none."""
    return () if manager.layout.is_plain else manager.stats().groups


def tables_of(manager: BlockManager) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return what each live row holds, as `tables` and `table_lengths` of `block_cells`: its blocks, or the pages of all its layer groups."""
    rows = manager.rows.live
    if manager.layout.is_plain:
        lengths = manager.rows.num_blocks[rows]
        return manager.rows.block_tables[rows, : int(lengths.max(initial=0))], lengths
    groups = range(len(manager.layout.groups))
    pages = [np.concatenate([manager.group_pages(group, row).ravel() for group in groups]) for row in rows.tolist()]
    pages = [its[its >= 0] for its in pages]
    lengths = np.array(list(map(len, pages)), np.int64)
    tables = np.zeros((len(rows), int(lengths.max(initial=0))), np.int32)
    for table, its in zip(tables, pages, strict=True):
        table[: len(its)] = its
    return tables, lengths


def block_cells(
    tables: NDArray[np.int32],
    table_lengths: NDArray[np.int64],
    owners: NDArray[np.int64],
    states: NDArray[np.int8],
    levels: NDArray[np.int8] | None = None,
) -> NDArray[np.int64]:
    """Return the owner of each block, int64 [blocks].

    tables         int32 [rows, columns]: what live rows hold (`tables_of`)
    table_lengths  int64 [rows]
    owners         int64 [rows]: the number of each row's request
    states         int8 [blocks]: 0 free, 1 cached, 2 used
    levels         int8 [blocks]: above 0 for retained content; None: no content is retained
    """
    cells = np.array([FREE, CACHED, HELD], np.int64)[states]
    if levels is not None:
        cells[(states == 1) & (levels > 0)] = RETAINED
    in_table = np.arange(tables.shape[1]) < table_lengths[:, None]
    blocks = tables[in_table]
    cells[blocks] = np.repeat(owners, table_lengths)
    references = np.bincount(blocks, minlength=len(cells))
    cells[references > 1] = SHARED
    return cells


def merged(cells: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return one cell for every `size`, int64 [⌈n ÷ size⌉]: the majority's, or one of them if there is none."""
    if size == 1:
        return cells
    num = -(-len(cells) // size)
    padded = np.concatenate([cells, np.repeat(cells[-1:], num * size - len(cells))]).reshape(num, size)
    # The middle one of a sorted group is the majority's, if there is one.
    return np.partition(padded, size // 2, axis=1)[:, size // 2]


def runs_of(cells: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return equal neighbours as (cell, how many)."""
    starts = np.concatenate([[0], (cells[1:] != cells[:-1]).nonzero()[0] + 1])
    lengths = np.diff(np.append(starts, len(cells)))
    return list(zip(cells[starts].tolist(), lengths.tolist(), strict=True))
