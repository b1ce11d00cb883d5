"""The past KV events of an engine: the latest batches as they were published, and an index of the sum of all.

    number   0 1 2 3 4 5 6 7 8 9
             └─ gone ──┘ └ kept ┘       the index: what all of 0 to 9 add up to

A reader that asks for number 7 gets 7 to 9. One that asks for number 2 gets one batch that is numbered 9: everything
is cleared, and what the index has is stored. The index is kept beside the memory layer's own, by applying what is
published, so that a summary has exactly the number of the batch that was applied last, and so that the engine's
thread never stops to make one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from paged.block_manager import Event
from paged.serving.kv_index import KvIndex
from paged.serving.kv_wire import (
    AllBlocksCleared,
    EventBatch,
    RestartPointStored,
    encoded,
    encoded_event,
    encoded_in_parts,
    int_hash,
    on_wire,
)

_BLOCKS_A_BREATH = 256


class Journal:
    """The last `buffer_steps` batches, numbered from 0 on, and the sum of all.

    `restart_points`: the events are of a model in which prompts begin behind these alone, also while there is none.

    `breathe` is called again and again while a summary is made, which takes about two microseconds a block.
    """

    def __init__(
        self,
        block_size: int,
        buffer_steps: int,
        rank: int = 0,
        *,
        use_int_block_hashes: bool = True,
        restart_points: bool = False,
        breathe: Callable[[], None] = lambda: None,
    ) -> None:
        self._block_size = block_size
        self._form = int_hash if use_int_block_hashes else bytes
        self._rank = rank
        self._restart_points = restart_points
        self._breathe = breathe
        self._index = KvIndex()
        self._kept: deque[bytes] = deque(maxlen=buffer_steps)
        self._ts = 0.0
        # Of all that was added so far; forgotten with the next batch.
        self._summary: bytes | None = None

    @property
    def next_seq(self) -> int:
        """The number of the batch that is added next."""
        return self._index.next_seq

    def add(self, ts: float, events: Sequence[Event]) -> tuple[int, bytes]:
        """One more batch: its number and its payload. The very first one begins with AllBlocksCleared."""
        seq = self.next_seq
        batch = EventBatch(ts, [on_wire(event, self._block_size, self._form) for event in events], self._rank)
        if seq == 0 and not batch.begins_anew:
            batch.events.insert(0, AllBlocksCleared())
        if self._restart_points and batch.begins_anew:
            batch.events.insert(1, RestartPointStored([]))
        payload = encoded(batch)
        is_applied = self._index.apply(seq, batch)
        assert is_applied, "the next one"
        self._kept.append(payload)
        self._ts, self._summary = ts, None
        return seq, payload

    def since(self, start: int) -> list[tuple[int, bytes]]:
        """Numbers and payloads that bring a reader up to date that has every batch before `start`."""
        stop = self.next_seq
        first = stop - len(self._kept)
        if start >= stop:
            return []
        if start >= first:
            return list(enumerate(islice(self._kept, start - first, None), start))
        if self._summary is None:
            self._summary = self._sum_up()
        return [(stop - 1, self._summary)]

    def _sum_up(self) -> bytes:
        events = [encoded_event(AllBlocksCleared())]
        blocks = 0
        for event in self._index.summary():
            events.append(encoded_event(event))
            blocks += len(event.block_hashes)
            if blocks >= _BLOCKS_A_BREATH:
                blocks = 0
                self._breathe()
        return encoded_in_parts(self._ts, events, self._rank)
