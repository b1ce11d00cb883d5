"""Batches between their placement and their end: which rows each computes, from which token to which.

batch 7 | row 0: 16 to 17 | row 3: 0 to 24 |   oldest: ends first, by `confirm`
batch 8 | row 0: 17 to 18 |                    latest: the only one that `cancel` may take back
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .tables import Rows, Tables


class Share(NamedTuple):
    """What a batch computes of one row: tokens `start` to `end` - 1. It is empty once the row gave up its blocks from `start` on."""

    row: int
    start: int
    end: int

    @property
    def is_empty(self) -> bool:
        """Whether nothing of it is left."""
        return self.start >= self.end


class Flight:
    """The shares of one batch. A row has one at most, and a fork that was made meanwhile inherits its parent's."""

    def __init__(self, number: int) -> None:
        self.number = number
        # (rows, starts, ends): arrays int64 [n], or an int each.
        self.parts: list[tuple[Any, Any, Any]] = []
        # Rows whose sequence has ended or was dropped since; another one may hold the row by now.
        self.gone: set[int] = set()
        # Whether a row was placed and forgotten: the batch computes its nodes all the same.
        self.has_forgotten = False
        # Rows that gave up their blocks from a token on, with that token.
        self._limits: dict[int, int] = {}
        # Shares of forks, with the uid of each.
        self._inherited: list[tuple[Share, int]] = []
        self.has_drafts = False

    @property
    def is_whole(self) -> bool:
        """Whether all shares are what they were when they were placed."""
        return not (self.gone or self._limits or self._inherited)

    @property
    def is_used(self) -> bool:
        """Whether any row was ever placed."""
        return bool(self.parts) or self.has_forgotten

    def place(self, rows: Any, starts: Any, ends: Any) -> None:
        """These rows, arrays int64 [n] or one row, compute from `starts` to `ends`. The arrays are not copied."""
        self.parts.append((rows, starts, ends))

    def shares(self, tables: Tables) -> Iterator[Share]:
        """The shares of rows that are still held by their sequences, in the order of placement, inherited ones last; no empty ones."""
        for rows, starts, ends in self.parts:
            triples = zip(*(np.atleast_1d(column).tolist() for column in (rows, starts, ends)), strict=True)
            for row, start, end in triples:
                if row not in self.gone and start < (end := min(end, self._limits.get(row, end))):
                    yield Share(row, start, end)
        for (row, start, end), uid in self._inherited:
            if tables.uid[row] == uid and start < (end := min(end, self._limits.get(row, end))):
                yield Share(row, start, end)

    def share_of(self, row: int, uid: int) -> Share | None:
        """The row's share, clipped to what the row still holds; None if it has none in this batch."""
        found: Share | None = None
        if row not in self.gone:
            for rows, starts, ends in self.parts:
                if isinstance(rows, int):
                    if rows == row:
                        found = Share(row, starts, ends)
                elif len(place := (rows == row).nonzero()[0]):
                    found = Share(row, starts.item(place[0]), ends.item(place[0]))
        for share, of in self._inherited:
            if share.row == row and of == uid:
                found = share if found is None else Share(row, min(share.start, found.start), max(share.end, found.end))
        if found is None or row not in self._limits:
            return found
        return Share(row, found.start, min(found.end, self._limits[row]))

    def clip(self, row: int, limit: int) -> None:
        """The row gave up its blocks from token `limit` on."""
        self._limits[row] = min(limit, self._limits.get(row, limit))

    def has_clipped(self, row: int) -> bool:
        """Whether the row gave up blocks that the batch computes."""
        return row in self._limits

    def lengthen(self, rows: Rows, ends: Any) -> None:
        """These rows, which were placed in one call, compute up to `ends` instead; what lies beyond their tokens may be rejected."""
        for i, (placed, starts, _) in enumerate(self.parts):
            if placed is rows:
                self.parts[i] = (placed, starts, ends)
                self.has_drafts = True

    def forget(self, row: int) -> None:
        """The row has no share."""
        self.has_forgotten = True
        parts, self.parts = self.parts, []
        for rows, starts, ends in parts:
            if not isinstance(rows, int):
                stays = rows != row
                if stays.any():
                    self.parts.append((rows[stays], starts[stays], ends[stays]))
            elif rows != row:
                self.parts.append((rows, starts, ends))
        self._limits.pop(row, None)

    def inherit(self, row: int, uid: int, share: Share, limit: int) -> None:
        """The row is a fork, of `limit` tokens, of the one whose share this is."""
        if share.start < min(share.end, limit):
            self._inherited.append((Share(row, share.start, min(share.end, limit)), uid))


class Flights:
    """All batches that have not ended, oldest first, and the one that is being composed."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.outstanding: list[Flight] = []
        self.composed = Flight(1)

    def begin(self, number: int) -> None:
        """What is placed from now on belongs to batch `number`."""
        if self.composed.is_used:
            self.outstanding.append(self.composed)
        self.composed = Flight(number)

    @property
    def all(self) -> list[Flight]:
        """Outstanding batches, and the one that is being composed if it has rows."""
        return [*self.outstanding, self.composed] if self.composed.is_used else self.outstanding

    def end(self, flight: Flight) -> None:
        """The batch has ended; it is the oldest or the latest one."""
        self.outstanding.remove(flight)

    def may_have(self, row: int) -> bool:
        """Whether a batch that has not ended may have a share of the row."""
        if not (self.outstanding or self.composed.parts):
            return False
        return bool(self._tables.num_launched[row] != self._tables.num_computed[row]) or any(
            flight.has_clipped(row) for flight in self.all
        )

    def seal(self) -> Flight:
        """The batch that was being composed is out from now on."""
        flight, self.composed = self.composed, Flight(self.composed.number)
        self.outstanding.append(flight)
        return flight

    def shares_of(self, row: int) -> list[tuple[int, Share]]:
        """(batch, share) of the row in each batch that has one that is not empty, oldest first."""
        uid = int(self._tables.uid[row])
        found = [(flight.number, flight.share_of(row, uid)) for flight in self.all]
        return [(number, share) for number, share in found if share is not None and not share.is_empty]

    def clip(self, row: int, limit: int) -> None:
        """The row gave up its blocks from token `limit` on: what batches compute beyond it is lost."""
        if self._tables.num_launched[row] > limit:
            uid = int(self._tables.uid[row])
            for flight in self.all:
                share = flight.share_of(row, uid)
                if share is not None and share.end > limit:
                    flight.clip(row, limit)

    def leave(self, row: int) -> None:
        """The row is given back while batches may compute it."""
        uid = int(self._tables.uid[row])
        for flight in self.outstanding:
            if flight.share_of(row, uid) is not None:
                flight.gone.add(row)
        if self.composed.share_of(row, uid) is not None:
            # Another sequence may hold the row in the same batch.
            self.composed.forget(row)

    def inherit(self, row: int, child: int, limit: int) -> None:
        """The child is a fork of the row's first `limit` tokens, those in flight among them."""
        uid, ours = int(self._tables.uid[child]), int(self._tables.uid[row])
        for flight in self.all:
            share = flight.share_of(row, ours)
            if share is not None:
                flight.inherit(child, uid, share, limit)
