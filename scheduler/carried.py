"""Copies that a batch listed and that have not run: those of a cancelled batch, and of forks. The next batches take them, a group each.

Groups are never mixed: an engine runs the pairs of a group at once, so none may read what another one of it writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paged.block_manager.moves import NO_MOVES, Moves, pairs_of
from paged.errors import BatchError

from .batch import NO_LOADS, Batch
from .rows import RowColumns

# What is carried for no batch.
_FORKS = 0


@dataclass(slots=True)
class Carried:
    """Moves, and loads of batch `number`, int32 [k, 3], as a batch has them."""

    moves: Moves
    loads: NDArray[np.int32]
    number: int


class CarriedCopies:
    """What is carried, in the order in which it runs."""

    def __init__(self, columns: RowColumns) -> None:
        self._columns = columns
        self.groups: list[Carried] = []
        # The latest batch that was cancelled after its moves had run: those before it have run theirs, too.
        self._last_moved = 0

    @property
    def are_of_forks(self) -> bool:
        """Whether all that is carried are copies of forks, if anything is."""
        return all(group.number == _FORKS for group in self.groups)

    def check_cancel(self, batch: Batch, moved: bool) -> None:
        """Raise BatchError for a cancelled batch whose moves, it is said, did not run though a later one's did."""
        if not moved and len(batch.moves) and batch.number < self._last_moved:
            raise BatchError(
                batch.number,
                f"runs before batch {self._last_moved}, which was cancelled after its moves had run; cancel it with moved=True.",
            )

    def keep(self, batch: Batch, moved: bool) -> None:
        """The batch, the latest, is cancelled: carry its copies unless they have `moved`. Cancels come latest first, so they run first."""
        if moved:
            self._last_moved = max(self._last_moved, batch.number)
            return
        loads = self._wanted(batch.loads, batch.number)
        if len(batch.moves) or len(loads):
            self.groups.insert(0, Carried(batch.moves, loads, batch.number))

    def add_copy(self, source: int, copy: int) -> None:
        """Carry the copy of a fork's partial block, by their blocks."""
        group = self.groups[-1] if self.groups and self.groups[-1].number == _FORKS else None
        pairs: dict[int, int] = {} if group is None else dict(group.moves.device_to_device[:, ::-1].tolist())
        # What is still to be copied itself is read where it comes from. A copy whose fork is gone gives way.
        pairs[copy] = pairs.get(source, source)
        if group is None or pairs.keys() & set(pairs.values()):
            pairs, group = {copy: source}, Carried(NO_MOVES, NO_LOADS, _FORKS)
            self.groups.append(group)
        group.moves = Moves(device_to_device=pairs_of([(read, written) for written, read in pairs.items()]))

    def forget_stale(self) -> None:
        """Forget loads for which no request waits any more: an empty remainder must not hold a step up."""
        self.groups = [
            group for group in self.groups if len(group.moves) or len(self._wanted(group.loads, group.number))
        ]

    def take(self) -> Carried:
        """The first group, which the batch that is made runs, with the loads that are still wanted."""
        group = self.groups.pop(0)
        return Carried(group.moves, self._wanted(group.loads, group.number), group.number)

    def _wanted(self, loads: NDArray[np.int32], number: int) -> NDArray[np.int32]:
        """Those of batch `number`'s loads whose request still waits for them."""
        owners = [self._columns.owner[row] for row in loads[:, 0].tolist()]
        is_wanted = [owner is not None and owner.num_asked > 0 and owner.load_batch == number for owner in owners]
        return loads[np.array(is_wanted, np.bool_)]
