"""A decided step as the arrays that a model runner needs. Knows layouts. Decides nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from block_manager import joined
from scheduler.batch import Batch
from scheduler.composition import ones
from scheduler.rows import Rows
from scheduler.state import State, Step

_NO_LOADS: NDArray[np.int32] = np.empty((0, 3), np.int32)


class Packer:
    """Builds batches; remembers whose rows the last one had, because in a steady stretch they stay the same."""

    def __init__(self) -> None:
        self._rows: Rows = np.empty(0, np.int64)
        self._ids: NDArray[np.object_] = np.empty(0, object)
        self._sequences: NDArray[np.int64] = np.empty(0, np.int64)
        self._starts: NDArray[np.int64] = np.arange(2, dtype=np.int64)

    def pack(self, state: State, step: Step, owner: object) -> Batch:
        """The batch of this step; its rows are placed already."""
        manager, size = state.manager, state.manager.block_size
        rows = step.decodes
        if step.chunks:
            rows = np.concatenate([rows, np.array([row for row, _ in step.chunks], np.int64)])
            counts = np.concatenate([ones(len(step.decodes)), np.array([count for _, count in step.chunks], np.int64)])
            computed = manager.num_computed[rows]
            starts = np.zeros(len(rows) + 1, np.int64)
            np.cumsum(counts, out=starts[1:])
            token_rows = np.repeat(rows, counts)
            positions = np.arange(starts[-1]) + np.repeat(computed - starts[:-1], counts)
            context_lens = computed + counts
            samples = context_lens == manager.num_tokens[rows]
            all_sample = bool(samples.all())
        else:
            counts = ones(len(rows))
            computed = counts[:0] if step.decode_computed is None else step.decode_computed
            if len(rows) >= len(self._starts):
                self._starts = np.arange(2 * len(rows) + 1, dtype=np.int64)
            starts = self._starts[: len(rows) + 1]
            token_rows, positions = rows, computed
            context_lens = computed + 1
            samples = np.ones(len(rows), np.bool_)
            all_sample = True
        columns = positions // size
        blocks = manager.block_tables[token_rows, columns]
        slot_mapping = blocks * np.int64(size) + (positions - columns * size)
        if rows is not self._rows:
            self._rows = rows
            self._ids = state.columns.id[rows]
            self._sequences = state.columns.sequence[rows]
        changes = manager.take_changes()
        loads = np.array(step.loads, np.int32).reshape(-1, 3) if step.loads else _NO_LOADS
        return Batch(
            number=manager.batch,
            rows=rows,
            num_tokens=counts,
            starts=starts,
            token_ids=manager.tokens[token_rows, positions],
            positions=positions,
            slot_mapping=slot_mapping,
            context_lens=context_lens,
            samples=samples,
            ids=self._ids,
            sequences=self._sequences,
            block_tables=manager.block_tables,
            table_rows=changes.rows,
            table_columns=changes.columns,
            table_blocks=changes.blocks,
            moves=joined(step.moves),
            loads=loads,
            all_sample=all_sample,
            owner=owner,
            preempted=tuple(step.preempted),
            admitted=tuple(step.admitted),
        )
