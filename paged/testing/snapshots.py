"""The complete state of a memory manager in plain values: two are equal exactly when nothing that matters changed."""

from __future__ import annotations

from typing import Any


def snapshot(manager: Any) -> Any:
    """Rows, contents, both tiers in the order in which blocks will be taken, and figures: of ours, whose private state
    is read.

    Another manager has a `snapshot()` of its own.
    """
    memory = getattr(manager, "_memory", None)
    if memory is None:
        return manager.snapshot()
    return {
        "rows": {row: _row(manager, row) for row in memory.tables.live_rows.tolist()},
        "contents": [manager.cached_contents("device"), manager.cached_contents("host")],
        "tiers": [
            (
                pool.refs().tolist(),
                pool.free_pages().tolist(),
                [queue.blocks().tolist() for queue in pool.queues.values()],
            )
            for pool in (memory.device, memory.host)
        ],
        "figures": manager.stats(),
    }


def _row(manager: Any, row: int) -> tuple[object, ...]:
    tables, index = manager._memory.tables, manager._memory.index
    return (
        tables.tokens[row, : tables.num_tokens[row]].tolist(),
        manager.table(row).tolist(),
        [int(column[row]) for column in (tables.reserved, tables.num_computed, tables.num_launched, tables.uid)],
        [tail.tolist() for tail in manager._memory.tiers.tails.get(row, ())],
        index.paths[row].closed(index._pending_length).published,
        [manager.group_pages(group, row).tolist() for group in range(len(manager.layout.groups))],
    )
