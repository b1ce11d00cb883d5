"""The memory layer looked at from outside: figures, contents, hashes and a comparable snapshot.

Reads everything and changes nothing; no step needs any of it.
"""

from __future__ import annotations

import numpy as np

from .pool import Pool
from .prefix_index import PrefixIndex
from .tables import Tables
from .tiers import Tiers


def num_filled_slots(tables: Tables, num_blocks: int) -> int:
    """Slots of used device blocks that hold a computed token; a shared block counts once."""
    size = tables.block_size
    filled = np.zeros(num_blocks, np.int64)
    for row in tables.live_rows.tolist():
        blocks = tables.blocks[0, row, : tables.num_blocks[row]]
        computed = np.clip(tables.num_computed[row] - np.arange(len(blocks)) * size, 0, size)
        filled[blocks] = np.maximum(filled[blocks], computed)
    return int(filled.sum())


def contents(index: PrefixIndex, block_size: int, tier: str) -> set[tuple[bytes, ...]]:
    """Every confirmed node in a tier, "device" or "host", as its path: encoded namespace, then the token bytes of each block."""
    size = 4 * block_size
    paths: dict[tuple[int, int], tuple[bytes, ...]] = {}
    found: set[tuple[bytes, ...]] = set()
    for run in sorted(index.runs.values(), key=lambda run: run.id):
        prefix = (run.key[:-size],) if run.parent is None else paths.get((run.parent.id, run.at))
        length = index.confirmed_length(run)
        data = index.run_tokens(run, 0, length)
        for at in range(length):
            assert prefix is not None, "a parent has a lower id than its child"
            prefix = (*prefix, data[at * size : (at + 1) * size])
            paths[run.id, at] = prefix
            if (index.device_block(run, at) if tier == "device" else run.host_block(at)) >= 0:
                found.add(prefix)
    return found


def hashes(index: PrefixIndex, row: int) -> list[bytes]:
    """Chained SHA-256 of the row's nodes, first to last."""
    path = index.paths[row]
    segments = path.segments(0)
    if path.open is not None and (length := index.confirmed_length(path.open)):
        segments.append((path.open, 0, length))
    found: list[bytes] = []
    for run, offset, count in segments:
        found.extend(index.digests(run, offset + count, offset))
    return found


def rows_as_values(tables: Tables, tiers: Tiers, index: PrefixIndex | None) -> dict[int, object]:
    """Everything about each row in plain, comparable values."""
    rows: dict[int, object] = {}
    for row in tables.live_rows.tolist():
        rows[row] = (
            tables.tokens[row, : tables.num_tokens[row]].tolist(),
            tables.blocks[0, row, : tables.num_blocks[row]].tolist(),
            [
                int(tables.reserved[row]),
                int(tables.num_computed[row]),
                int(tables.num_launched[row]),
                int(tables.uid[row]),
            ],
            tiers.tails[row].tolist() if row in tiers.tails else None,
            index.num_published(row) if index is not None else 0,
        )
    return rows


def tier_as_values(pool: Pool) -> tuple[list[int], list[int], list[int]]:
    """Ref counts, free blocks and cached blocks of a tier, the latter two in the order in which they will be taken."""
    return pool.ref_count.tolist(), pool.free_list.plain().tolist(), pool.free_list.cached().tolist()
