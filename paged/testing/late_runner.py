"""A runner behind a queue: batches wait there, and run in order, when the scheduler has long gone on.

    scheduler   batch 4 | batch 5 |         update 4 | batch 6 |         update 5
    device                         4 runs                       5 runs

A batch that runs: its table changes, its copies, its forward pass. Reads nothing that changes after it: it keeps
block tables from the batches' changes alone, finds a token that was unknown where the batch says that it comes from,
and reports arrays that were written while their batch waited.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from paged.model.runner import Runner
from paged.scheduler import Batch

Blocks = NDArray[np.int64]
NO_BLOCKS: Blocks = np.empty(0, np.int64)


@dataclass
class _Waiting:
    """A batch that has not run, its arrays as they were when it came, and blocks that held nothing then."""

    batch: Batch
    arrays: list[tuple[str, NDArray[Any]]]
    free: Blocks
    has_moved: bool = False


class LateRunner:
    """Batches that wait for a runner. `violations` grows by a sentence for each array that did not stay as it was."""

    def __init__(self, runner: Runner) -> None:
        self.violations: list[str] = []
        self._runner = runner
        self._waiting: list[_Waiting] = []
        self._tables: NDArray[np.int32] = np.zeros((0, 0), np.int32)
        # What batches that ran sampled, int32 [rows] each, by their numbers.
        self._sampled: dict[int, NDArray[np.int32]] = {}
        # Cancelled batches whose copies are still to be made, by a later one.
        self._num_carried = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, batch: Batch, free: Blocks) -> None:
        """Queue a batch. `free`: device blocks, int64 [k], without content or holder before it was scheduled; they are filled with NaN
        before it runs."""
        # Copies of a cancelled batch still read blocks that are free.
        self._waiting.append(
            _Waiting(
                batch,
                [(name, array.copy()) for name, array in _arrays(batch)],
                NO_BLOCKS if self._num_carried else free,
            )
        )
        if self._num_carried and len(batch.moves):
            self._num_carried -= 1

    def take(self) -> Batch:
        """The oldest batch, for its forward pass, once its copies are made: with tables and tokens as the device knows them."""
        self.move()
        return self._seen_here(self._waiting.pop(0))

    def keep(self, batch: Batch, tokens: NDArray[np.int32]) -> None:
        """What the batch sampled, int32 [rows]: the first token of each row that samples."""
        self._sampled[batch.number] = tokens

    def move(self) -> None:
        """Make the copies of the oldest batch."""
        oldest = self._waiting[0]
        if not oldest.has_moved:
            oldest.has_moved = True
            self._runner.pool.poison(torch.from_numpy(oldest.free))
            self._runner.move(oldest.batch)

    def spoil(self) -> None:
        """The oldest batch fails in its forward pass: what it has written is not what it should be. It has to be dropped."""
        self.move()
        batch = self._seen_here(self._waiting[0])
        wrong = (batch.token_ids + 1) % self._runner.model.vocabulary_size
        self._runner.logits(msgspec.structs.replace(batch, token_ids=wrong))

    def drop(self, batch: Batch) -> bool:
        """The batch, the latest one, is cancelled; whether its copies are made."""
        if not self._waiting or self._waiting[-1].batch is not batch:
            return True
        has_moved = self._waiting.pop().has_moved
        self._num_carried += not has_moved and len(batch.moves) > 0
        return has_moved

    def _seen_here(self, waiting: _Waiting) -> Batch:
        batch = waiting.batch
        for (name, before), (_, now) in zip(waiting.arrays, _arrays(batch), strict=True):
            if not np.array_equal(before, now):
                self.violations.append(f"batch {batch.number}: {name} was written while the batch waited.")
        self._apply_changes(batch)
        token_ids = batch.token_ids.copy()
        for token in (batch.source_batches >= 0).nonzero()[0].tolist():
            token_ids[token] = self._sampled[int(batch.source_batches[token])][batch.source_places[token]]
        return msgspec.structs.replace(batch, token_ids=token_ids, block_tables=self._tables)

    def _apply_changes(self, batch: Batch) -> None:
        shape = (1 + int(batch.table_rows.max(initial=-1)), 1 + int(batch.table_columns.max(initial=-1)))
        grown: NDArray[np.int32] = np.zeros(np.maximum(self._tables.shape, shape), np.int32)
        grown[: self._tables.shape[0], : self._tables.shape[1]] = self._tables
        grown[batch.table_rows, batch.table_columns] = batch.table_blocks
        self._tables = grown


def _arrays(batch: Batch) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every array that a batch owns, by name: all but the view of the scheduler's tables."""
    for holder in (batch, batch.moves):
        for name in (
            ("device_to_host", "host_to_device", "device_to_device") if holder is not batch else batch.__struct_fields__
        ):
            value = getattr(holder, name)
            if isinstance(value, np.ndarray) and name != "block_tables":
                yield name, value
