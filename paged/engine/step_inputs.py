"""Steps as they are sent, made of a scheduler's batches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged.block_manager import GroupTables
from paged.model.step_input import StepInput, TableChanges
from paged.scheduler import Batch

NO_SOURCES: NDArray[np.int64] = np.empty((0, 3), np.int64)
# No page, and no sign of one: nothing was told of this entry.
_UNTOLD = -2


class StepInputs:
    """Makes a StepInput of each batch of one scheduler, in order. Where layers are of several kinds it remembers what it told of their
    tables, so that each step has what is new alone."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # By group, int32 [rows, columns, pages].
        self._told: list[NDArray[np.int32]] = []

    def of(self, batch: Batch, oldest: int | None = None) -> StepInput:
        """The step of a batch that was just scheduled, while its tables are as it left them. `oldest`: number of the oldest batch that is out;
        None: this one is alone."""
        reads: NDArray[np.int32] | None = None
        if batch.groups is None:
            tables: tuple[TableChanges, ...] = (
                TableChanges(batch.table_rows, batch.table_columns, batch.table_blocks),
            )
        else:
            tables = tuple(self._news(number, each, batch) for number, each in enumerate(batch.groups))
            reads = next((each.read for each in batch.groups if each.is_of_states), None)
        return StepInput(
            number=batch.number,
            oldest=batch.number if oldest is None else oldest,
            rows=batch.rows,
            num_tokens=batch.num_tokens,
            seq_lens=batch.seq_lens,
            num_drafts=batch.num_drafts,
            samples=batch.samples,
            token_ids=batch.token_ids,
            sources=_sources_of(batch),
            tables=tables,
            moves=batch.moves,
            reads=reads,
        )

    def take_back(self, step: StepInput) -> None:
        """The step did not begin, and will not: what it told is told again."""
        if self._told:
            for told, its in zip(self._told, step.tables, strict=True):
                told[its.rows, its.columns] = _UNTOLD

    def _news(self, number: int, group: GroupTables, batch: Batch) -> TableChanges:
        now, rows = group.tables, batch.rows
        if number == len(self._told):
            self._told.append(np.full((0, 0, now.shape[2]), _UNTOLD, np.int32))
        told = self._told[number]
        shape = max(told.shape[0], int(rows.max(initial=-1)) + 1), max(told.shape[1], now.shape[1])
        if shape != told.shape[:2]:
            grown = np.full((*shape, now.shape[2]), _UNTOLD, np.int32)
            grown[: told.shape[0], : told.shape[1]] = told
            told = self._told[number] = grown
        # Behind a row's last token a table may say anything.
        ends = np.ones_like(batch.seq_lens) if group.is_of_states else -(-batch.seq_lens // self._block_size)
        is_new = (now != told[rows, : now.shape[1]]).any(-1) & (np.arange(now.shape[1]) < ends[:, None])
        places, columns = is_new.nonzero()
        told[rows[places], columns] = now[places, columns]
        return TableChanges(rows[places], columns, now[places, columns])


def _sources_of(batch: Batch) -> NDArray[np.int64]:
    places = (batch.source_batches >= 0).nonzero()[0]
    if not len(places):
        return NO_SOURCES
    return np.stack([places, batch.source_batches[places], batch.source_places[places]], axis=1)
