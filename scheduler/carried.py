"""Copies that have not run yet, of cancelled batches and of forks. Each of the next batches takes one group. Groups
never mix: an engine runs all pairs of a group at once, so none may read what another one writes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paged.block_manager.moves import NO_MOVES, Moves, pairs_of
from paged.errors import BatchError

from .batch import NO_LOADS, Batch
from .rows import RowColumns

# The number of a group that belongs to no batch.
_FORKS = 0


@dataclass(slots=True)
class Carried:
    moves: Moves
    loads: NDArray[np.int32]
    number: int


class CarriedCopies:
    def __init__(self, columns: RowColumns) -> None:
        self._columns = columns
        self.groups: list[Carried] = []
        # The latest batch cancelled after its moves ran: the moves of all batches before it ran, too.
        self._last_moved = 0

    @property
    def are_of_forks(self) -> bool:
        return all(group.number == _FORKS for group in self.groups)

    def check_cancel(self, batch: Batch, moved: bool) -> None:
        """Raise BatchError if the batch's moves did not run though a later batch's moves did."""
        if not moved and len(batch.moves) and batch.number < self._last_moved:
            raise BatchError(
                batch.number,
                f"runs before batch {self._last_moved}, which was cancelled after its moves had run; cancel it with moved=True.",
            )

    def keep(self, batch: Batch, moved: bool) -> None:
        """Carry the copies of a cancelled batch unless they have `moved`; those of the oldest batch run first."""
        if moved:
            self._last_moved = max(self._last_moved, batch.number)
            return
        loads = self._wanted(batch.loads, batch.number)
        if len(batch.moves) or len(loads):
            self.groups.insert(0, Carried(batch.moves, loads, batch.number))

    def add_copy(self, source: int, copy: int) -> None:
        """Carry the copy of a fork's partial block, from block `source` to block `copy`."""
        group = self.groups[-1] if self.groups and self.groups[-1].number == _FORKS else None
        pairs: dict[int, int] = {} if group is None else dict(group.moves.device_to_device[:, ::-1].tolist())
        # A source that is itself still to be copied is read at its own source. A gone fork's copy gives way.
        pairs[copy] = pairs.get(source, source)
        if group is None or pairs.keys() & set(pairs.values()):
            pairs, group = {copy: source}, Carried(NO_MOVES, NO_LOADS, _FORKS)
            self.groups.append(group)
        group.moves = Moves(device_to_device=pairs_of([(read, written) for written, read in pairs.items()]))

    def forget_stale(self) -> None:
        """Forget loads for which no request waits any more, and groups left empty, which would delay a step."""
        for group in self.groups:
            group.loads = self._wanted(group.loads, group.number)
        self.groups = [group for group in self.groups if len(group.moves) or len(group.loads)]

    def take(self) -> Carried:
        """Remove and return the first group, for the batch being made, with the loads that are still waited for."""
        group = self.groups.pop(0)
        group.loads = self._wanted(group.loads, group.number)
        return group

    def _wanted(self, loads: NDArray[np.int32], number: int) -> NDArray[np.int32]:
        owners = [self._columns.owner[row] for row in loads[:, 0].tolist()]
        is_wanted = [owner is not None and bool(owner.num_loading) and owner.load_batch == number for owner in owners]
        return loads[np.array(is_wanted, np.bool_)]
