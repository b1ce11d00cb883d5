"""A device that does what it is asked in the order of the calls, and lags behind: moves, writes and reads of batches.

    asked:  move | write (batch 4) | poison | move | write (batch 5)
    done:                          ^ at the latest when batch 4 is confirmed, all before it is done

A batch that is cancelled writes garbage, if it had not run yet; its moves are done.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.testing.content import POISON
from paged.testing.shadow_kv import ShadowKV, Slots


class _Write(NamedTuple):
    """What a batch computes of one row: the last of `contents`, into `slots`; it reads all of them through `table`."""

    batch: int
    slots: Slots
    table: NDArray[Any]
    contents: Slots
    who: str


class _Poison(NamedTuple):
    """Blocks of either tier that nothing may be read from any more."""

    device: set[int]
    host: set[int]


class LateDevice:
    """A queue before a `ShadowKV`. Methods that do some of it return violations."""

    def __init__(self, shadow: ShadowKV, lag: int) -> None:
        """`lag`: moves and writes that may be waiting when a call returns."""
        self._shadow = shadow
        self._lag = lag
        self._queue: list[Any] = []
        self._poisoned = _Poison(set(), set())

    @property
    def is_idle(self) -> bool:
        """Whether all that it was asked has been done, but for poison."""
        return all(isinstance(each, _Poison) for each in self._queue)

    def move(self, moves: Any) -> list[str]:
        """The copies of one call. They are not copied here: an engine keeps the arrays that it was given, too."""
        return self._ask(moves) if len(moves) else []

    def write(self, batch: int, slots: Slots, table: NDArray[Any], contents: Slots, who: str) -> list[str]:
        """Write the last n of `contents` to int64 [n] slots, one row's share of a batch, and read all by its table."""
        return self._ask(_Write(batch, slots, table, contents, who))

    def poison(self, device: set[int], host: set[int]) -> list[str]:
        """Poison the blocks, all that hold nothing now: calls before this one may write them, and no call read them."""
        new = _Poison(device - self._poisoned.device, host - self._poisoned.host)
        self._poisoned = _Poison(device, host)
        if new.device or new.host:
            return self._ask(new)
        return []

    def run_through(self, batch: int) -> list[str]:
        """The batch has run: all that was asked up to its last write is done."""
        last = max((i for i, each in enumerate(self._queue) if getattr(each, "batch", None) == batch), default=-1)
        return self._do(last + 1)

    def cancel(self, batch: int) -> list[str]:
        """The batch, the latest one, did not run: all is done but for its writes, which are garbage."""
        for place, each in enumerate(self._queue):
            if isinstance(each, _Write) and each.batch == batch:
                self._queue[place] = each._replace(table=each.table[:0], contents=np.full(len(each.slots), POISON))
        return self.finish()

    def finish(self) -> list[str]:
        """Do all that was asked."""
        return self._do(len(self._queue))

    def _ask(self, what: Any) -> list[str]:
        self._queue.append(what)
        return self._do(len(self._queue) - self._lag)

    def _do(self, count: int) -> list[str]:
        found: list[str] = []
        for _ in range(count):
            found += self._done(self._queue.pop(0))
        return found

    def _done(self, what: Any) -> list[str]:
        shadow = self._shadow
        if isinstance(what, _Poison):
            shadow.poison(what.device)
            shadow.poison(what.host, "host")
            return []
        if not isinstance(what, _Write):
            return shadow.move(what)
        found = shadow.write(what.slots, what.contents[len(what.contents) - len(what.slots) :])
        if len(what.table) and not found:
            found = shadow.mismatches(what.table, what.contents, what.who)
        return found
