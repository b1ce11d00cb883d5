"""The order of KV events at a reader: which batches to hand on, which to pass over, and from which number on to ask again.

    new         7 8 9 _ _ 12            a gap: ask from 9, the last one that is known
    answer      9 10 11 12              9 is the same as before, so 10 to 12 follow it
    answer      9* 10* 11*              another 9: the publisher has begun again, ask from 0
    answer      <everything, 14>        9 is not kept any more: a batch that clears and stores all, with the number of the latest

Two batches are the same if number and time are. Asking from one that is known shows a new publisher even where its
numbers are higher than the old one's were. A doubt is raised by a number that comes too early, by a known number at a
later time, by a connection that was made again, and by silence.
"""

from __future__ import annotations

from collections.abc import Sequence

from paged.errors import EventsLost
from paged.serving.kv_wire import AllBlocksCleared, EventBatch

Numbered = tuple[int, EventBatch]


class KvFollower:
    """One reader of one publisher. `wants` is the number to ask from, None while nothing is in doubt; at first everything is."""

    def __init__(self) -> None:
        self.wants: int | None = 0
        self._last: Numbered | None = None

    def doubt(self) -> None:
        """Note that something may have been missed."""
        if self.wants is None:
            self.wants = self._last[0] if self._last else 0

    def see(self, seq: int, batch: EventBatch) -> list[Numbered]:
        """A new batch has come, while nothing is in doubt. Returns what is to be applied: it, or nothing.

        One that raises a doubt is passed over, since it is in the answer.
        """
        assert self.wants is None, "the answer comes first"
        next_seq, ts = (self._last[0] + 1, self._last[1].ts) if self._last else (0, 0.0)
        if seq > next_seq or (seq < next_seq and batch.ts > ts):
            self.doubt()
        if seq != next_seq:
            return []
        self._last = seq, batch
        return [(seq, batch)]

    def hear(self, answer: Sequence[Numbered]) -> list[Numbered]:
        """The whole answer to a question from `wants` on has come. Returns what is to be applied; `wants` says whether to ask again.

        Raises EventsLost, from which on everything is wanted again.
        """
        asked, last = self.wants, self._last
        assert asked is not None, "there was a question"
        self.wants, self._last = 0, None
        if last is not None and not (answer and (_are_same(answer[0], last) or answer[0][1].begins_anew)):
            if answer and answer[0][0] > asked:
                raise EventsLost(answer[0][0], asked)
            return []  # A new publisher, which has not come so far or has another batch there.
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
    """The first batch of a publisher, whose like another one may have had: vLLM's does not clear first."""
    if batch.begins_anew:
        return batch
    return EventBatch(batch.ts, [AllBlocksCleared(), *batch.events], batch.data_parallel_rank)


def _are_same(one: Numbered, other: Numbered) -> bool:
    return one[0] == other[0] and one[1].ts == other[1].ts
