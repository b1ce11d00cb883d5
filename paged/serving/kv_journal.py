"""The past KV events of an engine: the latest batches as they were published, and an index of all.

    number   0 1 2 3 4 5 6 7 8 9
             └─ gone ──┘ └ kept ┘       the index: the sum of 0 to 9

A reader that requests number 7 gets 7 to 9. One that requests number 2 gets a summary, numbered 9: it clears everything,
and stores what the index has. The index is the journal's own, made by applying what is published. So a summary
has the number of the batch applied last, and the engine's thread never stops to make one.
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
    encoded_in_parts,
    int_hash,
    on_wire,
)

_BLOCKS_A_YIELD = 256


class Journal:
    """The last `buffer_steps` batches, numbered from 0 on, and the sum of all.

    restart_points  True: prompts can begin behind restart points alone, also while there are none
    yield_thread    called every _BLOCKS_A_YIELD blocks of a summary, each of which takes about 2 µs
    """

    def __init__(
        self,
        block_size: int,
        buffer_steps: int,
        rank: int = 0,
        *,
        use_int_block_hashes: bool = True,
        restart_points: bool = False,
        yield_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self._block_size = block_size
        self._form = int_hash if use_int_block_hashes else bytes
        self._rank = rank
        self._restart_points = restart_points
        self._yield_thread = yield_thread
        self._index = KvIndex()
        self._kept: deque[bytes] = deque(maxlen=buffer_steps)
        self._ts = 0.0
        # None: to be made for the batches so far.
        self._summary: bytes | None = None

    @property
    def next_seq(self) -> int:
        """The number of the next batch."""
        return self._index.next_seq

    def add(self, ts: float, events: Sequence[Event]) -> tuple[int, bytes]:
        """Add a batch; return its number and its payload. Number 0 begins with AllBlocksCleared."""
        seq = self.next_seq
        batch = EventBatch(ts, [on_wire(event, self._block_size, self._form) for event in events], self._rank)
        if seq == 0 and not batch.begins_anew:
            batch.events.insert(0, AllBlocksCleared())
        if self._restart_points and batch.begins_anew:
            batch.events.insert(1, RestartPointStored([]))
        payload = encoded(batch)
        is_applied = self._index.apply(seq, batch)
        assert is_applied, "numbers have no gaps"
        self._kept.append(payload)
        self._ts, self._summary = ts, None
        return seq, payload

    def since(self, start: int) -> list[tuple[int, bytes]]:
        """Return numbers and payloads for a reader that has every batch before `start`."""
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
        events = [encoded(AllBlocksCleared())]
        blocks = 0
        for event in self._index.summary():
            events.append(encoded(event))
            blocks += len(event.block_hashes)
            if blocks >= _BLOCKS_A_YIELD:
                blocks = 0
                self._yield_thread()
        return encoded_in_parts(self._ts, events, self._rank)
