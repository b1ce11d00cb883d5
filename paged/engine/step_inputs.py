"""Makes the input of a worker's step from a scheduler's batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged.base.growing import with_room
from paged.block_manager import GroupTables
from paged.model.step_input import PageChanges, StepInput
from paged.scheduler import Batch

NO_SOURCES: NDArray[np.int64] = np.empty((0, 3), np.int64)
# Marks an entry that no step has sent.
_UNSENT = -2


class StepInputs:
    """Makes a StepInput of each batch of one scheduler, in order. For layers of several kinds it remembers what it sent
    of their tables, so that a step has only what is new."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # By group, int32 [rows, columns, pages].
        self._sent: list[NDArray[np.int32]] = []

    def of(self, batch: Batch, oldest: int | None = None) -> StepInput:
        """Make the step of a batch that was just scheduled, while its tables have not changed. `oldest`: number of the
        oldest outstanding batch; None: this one is alone."""
        reads: NDArray[np.int32] | None = None
        written_from: NDArray[np.int64] | None = None
        if batch.groups is None:
            tables: tuple[PageChanges, ...] = (PageChanges(batch.table_rows, batch.table_columns, batch.table_blocks),)
        else:
            tables = tuple(self._changes(number, each, batch) for number, each in enumerate(batch.groups))
            reads = next((each.read for each in batch.groups if each.is_of_states), None)
            written_from = np.stack([each.written_from for each in batch.groups])
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
            written_from=written_from if written_from is not None and written_from.any() else None,
        )

    def take_back(self, step: StepInput) -> None:
        """Note that the step will not begin: the next one sends its changes again."""
        if self._sent:
            for sent, its in zip(self._sent, step.tables, strict=True):
                sent[its.rows, its.columns] = _UNSENT

    def _changes(self, number: int, group: GroupTables, batch: Batch) -> PageChanges:
        now, rows = group.tables, batch.rows
        if number == len(self._sent):
            self._sent.append(np.full((0, 0, now.shape[2]), _UNSENT, np.int32))
        sent = with_room(self._sent[number], int(rows.max(initial=-1)) + 1, now.shape[1], _UNSENT)
        self._sent[number] = sent
        # Behind a row's last token a table's entries are arbitrary.
        ends = np.ones_like(batch.seq_lens) if group.is_of_states else -(-batch.seq_lens // self._block_size)
        is_new = (now != sent[rows, : now.shape[1]]).any(-1) & (np.arange(now.shape[1]) < ends[:, None])
        places, columns = is_new.nonzero()
        sent[rows[places], columns] = now[places, columns]
        return PageChanges(rows[places], columns, now[places, columns])


def _sources_of(batch: Batch) -> NDArray[np.int64]:
    places = (batch.source_batches >= 0).nonzero()[0]
    if not len(places):
        return NO_SOURCES
    return np.stack([places, batch.source_batches[places], batch.source_places[places]], axis=1)
