"""The batches that have not ended: which rows each computes, from which token to which.

batch 7 | row 0: 16 to 17 | row 3: 0 to 24 |   oldest: ends first, by `confirm`
batch 8 | row 0: 17 to 18 |                    latest: the only one that `cancel` may take back
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .tables import Rows

_NOTHING: NDArray[np.int64] = np.empty(0, np.int64)
# In `held`, in place of a token: the sequence gave its row back.
LEFT = -1


class Share(NamedTuple):
    """What a batch computes of one row: tokens `start` to `end` - 1."""

    row: int
    start: int
    end: int


class StateRead(NamedTuple):
    """States of the sequence `uid` after `start` tokens. `blocks`: where they lie, one for each state group."""

    uid: int
    start: int
    blocks: tuple[int, ...]


class Flight:
    """One batch: tokens `starts[i]` to `ends[i]` - 1 of `rows[i]`, int64 [n] each, in the order of their placement.

    A row has one share; a fork that is placed itself has two. A row that gave blocks back has a clipped or empty share.

    held     int64 [n]: the token before which each row still holds its blocks, -1 once its sequence gave the row back;
             None while no row has given anything back
    is_fork  bool [n]: shares that forks inherited; None if there are none
    """

    # On the class until a batch has its own.
    rows = starts = ends = _NOTHING
    held: NDArray[np.int64] | None = None
    is_fork: NDArray[np.bool_] | None = None
    has_drafts = False

    def __init__(self, number: int) -> None:
        self.number = number
        # By row, states that it reads from other blocks than it writes. Who takes an entry out releases its blocks.
        self.reads: dict[int, StateRead] = {}
        # By row, the first token of its share that it writes. Tokens before it are content already.
        self.written_from: dict[int, int] = {}
        # Shares placed one by one and not packed yet, by row.
        self._single: dict[int, tuple[int, int]] = {}

    @property
    def is_used(self) -> bool:
        return bool(self._single) or len(self.rows) > 0

    def place(self, rows: Rows, starts: NDArray[np.int64], ends: NDArray[np.int64], *, are_forks: bool = False) -> None:
        """Add shares of these rows. The first arrays are not copied, and precede rows that were placed one by one."""
        if not len(self.rows) and not are_forks:
            self.rows, self.starts, self.ends = rows, starts, ends
            return
        self.pack()
        if self.held is not None:
            self.held = np.concatenate([self.held, ends])
        if are_forks or self.is_fork is not None:
            before = np.zeros(len(self.rows), np.bool_) if self.is_fork is None else self.is_fork
            self.is_fork = np.concatenate([before, np.full(len(rows), are_forks)])
        self.rows = np.concatenate([self.rows, rows])
        self.starts = np.concatenate([self.starts, starts])
        self.ends = np.concatenate([self.ends, ends])

    def place_one(self, row: int, start: int, end: int) -> None:
        if row in self._single:
            self.pack()
        self._single[row] = start, end

    def pack(self) -> None:
        if self._single:
            rows, bounds = np.array(list(self._single)), np.array(list(self._single.values()))
            self._single = {}
            self.place(rows, bounds[:, 0], bounds[:, 1])

    def holds(self, place: int) -> bool:
        """Whether the share at this index is not a fork's, and its sequence still holds the row."""
        is_held = self.held is None or self.held.item(place) != LEFT
        return is_held and (self.is_fork is None or not self.is_fork.item(place))

    def lengthen(self, rows: Rows, ends: NDArray[np.int64]) -> None:
        """Extend the shares of these rows, which were placed in one call, to `ends`. Their drafts may be rejected."""
        first = int((self.rows == rows[0]).argmax())
        self.ends = self.ends.copy()
        self.ends[first : first + len(rows)] = ends
        self.has_drafts = True

    def has(self, row: int) -> bool:
        """Whether the batch has a share of the sequence that holds the row; the share may be empty."""
        return row in self._single or len(self._places(row)) > 0

    def shares(self) -> list[Share]:
        """The shares that are not empty."""
        return [Share(*share) for share in zip(*(column.tolist() for column in self.columns()), strict=True)]

    def columns(self) -> tuple[Rows, NDArray[np.int64], NDArray[np.int64]]:
        """Rows, starts and ends of the shares that are not empty, int64 [n] each."""
        self.pack()
        if self.held is None:
            return self.rows, self.starts, self.ends
        ends = np.minimum(self.ends, self.held)
        stays = self.starts < ends
        return self.rows[stays], self.starts[stays], ends[stays]

    def share_of(self, row: int) -> Share | None:
        """The row's share; None if it has none, or an empty one."""
        self.pack()
        places = self._places(row)
        if not len(places):
            return None
        ends = self.ends[places] if self.held is None else np.minimum(self.ends[places], self.held[places])
        start, end = int(self.starts[places].min()), int(ends.max())
        return Share(row, start, end) if start < end else None

    def clip(self, row: int, limit: int) -> None:
        """Void the row's share from token `limit` on, because the row gives up the blocks there."""
        self.pack()
        places = self._places(row)
        if not len(places) or limit >= int(self.ends[places].max()):
            return
        if self.held is None:
            self.held = self.ends.copy()
        self.held[places] = np.minimum(self.held[places], limit)

    def _places(self, row: int) -> NDArray[np.int64]:
        places: NDArray[np.int64] = (self.rows == row).nonzero()[0]
        return places if self.held is None else places[self.held[places] != LEFT]


class Flights:
    """All batches that have not ended, oldest first, and the one being composed."""

    def __init__(self) -> None:
        self.outstanding: list[Flight] = []
        self.composed = Flight(1)

    @property
    def all(self) -> list[Flight]:
        """The outstanding batches, and the composed one if it has rows."""
        return [*self.outstanding, self.composed] if self.composed.is_used else self.outstanding

    def begin(self, number: int) -> None:
        """Put out the composed batch if it has rows. Later placements belong to batch `number`."""
        if self.composed.is_used:
            self.seal()
        self.composed.number = number

    def seal(self) -> Flight:
        """Put out the composed batch."""
        flight, self.composed = self.composed, Flight(self.composed.number)
        flight.pack()
        self.outstanding.append(flight)
        return flight

    def shares_of(self, row: int) -> list[tuple[int, Share]]:
        """(batch, share) of each batch in which the row has a share that is not empty, oldest first."""
        found = [(flight.number, flight.share_of(row)) for flight in self.all]
        return [(number, share) for number, share in found if share is not None]

    def clip(self, row: int, limit: int) -> None:
        for flight in self.all:
            flight.clip(row, limit)

    def inherit(self, row: int, child: int, limit: int) -> None:
        """Give the child, a fork of the row's first `limit` tokens, the row's shares up to there."""
        for flight in self.all:
            share = flight.share_of(row)
            if share is not None and share.start < limit:
                bounds = np.array([[child], [share.start], [min(share.end, limit)]], np.int64)
                flight.place(*bounds, are_forks=True)
