"""The order of KV events at a reader: which batches to apply, which to skip, and from which number on to request a replay.

    new         7 8 9 _ _ 12            a gap: request from 9, the last known one
    replay      9 10 11 12              9 is the same as before, so 10 to 12 follow it
    replay      9* 10* 11*              another 9: the publisher has begun again, request from 0
    replay      <summary, 14>           9 is not kept any more: a batch that clears and stores everything, with the latest number

Two batches are the same if number and time are. A request from a known batch on shows a new publisher even if its
numbers are higher than the old one's. What raises a doubt: a number that comes too early, a known number with a
later time, a new connection, and silence.
"""

from __future__ import annotations

from collections.abc import Sequence

from paged.errors import EventsLost
from paged.serving.kv_wire import AllBlocksCleared, EventBatch

Numbered = tuple[int, EventBatch]


class KvFollower:
    """One reader of one publisher. `wants` is the number to request a replay from; None: nothing is in doubt. It begins with 0."""

    def __init__(self) -> None:
        self.wants: int | None = 0
        self._last: Numbered | None = None

    def doubt(self) -> None:
        """Note that something may have been missed."""
        if self.wants is None:
            self.wants = self._last[0] if self._last else 0

    def see(self, seq: int, batch: EventBatch) -> list[Numbered]:
        """Take a published batch while nothing is in doubt. Return what to apply: the batch, or nothing.

        A batch that raises a doubt is skipped, since the replay has it.
        """
        assert self.wants is None, "a replay comes first"
        next_seq, ts = (self._last[0] + 1, self._last[1].ts) if self._last else (0, 0.0)
        if seq > next_seq or (seq < next_seq and batch.ts > ts):
            self.doubt()
        if seq != next_seq:
            return []
        self._last = seq, batch
        return [(seq, batch)]

    def hear(self, answer: Sequence[Numbered]) -> list[Numbered]:
        """Take a whole replay from `wants` on. Return what to apply; `wants` says whether to request another.

        Raises EventsLost, after which `wants` is 0.
        """
        asked, last = self.wants, self._last
        assert asked is not None, "a replay was requested"
        self.wants, self._last = 0, None
        if last is not None and not (answer and (_are_same(answer[0], last) or answer[0][1].begins_anew)):
            if answer and answer[0][0] > asked:
                raise EventsLost(answer[0][0], asked)
            return []  # A new publisher: it has no such number yet, or another batch under it.
        follows = answer[0][0] if answer and last is not None else 0
        for seq, batch in answer:
            if seq != follows and not batch.begins_anew:
                raise EventsLost(seq, asked)
            follows = seq + 1
        self.wants, self._last = None, answer[-1] if answer else None
        if last is not None:
            return list(answer[1:] if _are_same(answer[0], last) else answer)
        return [(seq, batch if seq else _cleared(batch)) for seq, batch in answer]


def _cleared(batch: EventBatch) -> EventBatch:
    """Return a publisher's first batch with AllBlocksCleared at its beginning, which vLLM's lacks: there may have been another publisher."""
    if batch.begins_anew:
        return batch
    return EventBatch(batch.ts, [AllBlocksCleared(), *batch.events], batch.data_parallel_rank)


def _are_same(one: Numbered, other: Numbered) -> bool:
    return one[0] == other[0] and one[1].ts == other[1].ts
