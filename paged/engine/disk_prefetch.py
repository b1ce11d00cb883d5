"""Prefetches from the disk: content that only the store has comes to free blocks of the device before it is asked for.

    hint ──> waits ──> a piece is read by the reader's thread ──> between two steps, with no batch out: free blocks are
             │                                                    drawn and filled, and are content ──> the next piece
             └ for the hint before, and for all requests that load

A prefetch holds no blocks while it is read, and no request waits for it. A read that fails or is late ends its
prefetch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from paged.attention import LayeredPool
from paged.block_manager.content_key import extend_chain, namespace_digest
from paged.scheduler import Hint, HintOutcome, Scheduler

MOST = 64
"""Prefetches that are read or wait, at most."""


class Prefetch:
    """The full blocks of a prompt, by key. The first `done` are, or were, on the device; `blocks` are the next
    `num_asked`, read. `ends` is None until their read has begun, `blocks` until it has ended."""

    def __init__(self, hint: Hint, keys: list[bytes], done: int) -> None:
        self.hint, self.keys, self.done = hint, keys, done
        self.num_asked = 0
        self.ends: float | None = None
        self.blocks: NDArray[np.uint8] | None = None


class Prefetches:
    """The prefetches of one engine, in order; they have brought `num_brought` blocks.

    look_up(keys)         as BlockStore.look_up
    read(prefetch, keys)  begins to read blocks in the reader's thread; `blocks` are set later, between two steps
    patience              seconds for a piece, which has `most_in_piece` blocks at most
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pool: LayeredPool,
        look_up: Callable[[list[bytes]], int],
        read: Callable[[Prefetch, list[bytes]], None],
        clock: Callable[[], float],
        *,
        patience: float,
        most_in_piece: int,
    ) -> None:
        self._scheduler, self._manager, self._pages = scheduler, scheduler.manager, pool.pages
        self._look_up, self._read, self._clock = look_up, read, clock
        self._patience, self._most_in_piece = patience, most_in_piece
        self._waiting: deque[Prefetch] = deque()
        self.num_brought = 0

    @property
    def is_busy(self) -> bool:
        """Whether a prefetch is read, or waits."""
        return bool(self._waiting)

    @property
    def has_read(self) -> bool:
        """Whether blocks were read that can be brought once no batch is out."""
        return bool(self._waiting) and self._waiting[0].blocks is not None

    def ask(self, hint: Hint, outcome: HintOutcome) -> HintOutcome:
        """Begin to bring what only the store has of a hint's tokens; `outcome` says what memory brings of them. Return
        the outcome of both together."""
        size, longest = self._manager.block_size, self._scheduler.limits.max_model_len
        tokens, wanted = np.asarray(hint.tokens, np.int32)[:longest], len(hint.tokens) // size
        tokens = tokens[: len(tokens) // size * size]
        keys: list[bytes] = []
        extend_chain(keys, namespace_digest(hint.root), tokens.tobytes(), 4 * size)
        apart = (hint.salt, hint.adapter, hint.extra_key)
        # With one token more, all full blocks can hit.
        found = self._manager.lookup(np.append(tokens, 0), None if apart == (None, None, None) else apart)
        coming = [len(each.keys) for each in self._waiting if each.keys == keys[: len(each.keys)]]
        have = max((found.num_tokens + found.host_tokens) // size, *coming, 0)
        below = self._look_up(keys) - have
        if below <= 0 and not coming:
            return outcome
        free = self._manager.device.num_free - found.host_tokens // size
        num = min(below, free - sum(len(each.keys) - each.done for each in self._waiting))
        if below > 0 and (num <= 0 or len(self._waiting) >= MOST):
            why = "no block of the device is free for them, and others are not evicted"
            if num > 0:
                why = f"{MOST} prefetches are read from it already"
            there = max(outcome.num_tokens, *(length * size for length in coming), 0)
            why = f"{below * size:,} tokens lie on the disk alone; {why}."
            return HintOutcome("clipped" if there else "rejected", why, there)
        stop = have + max(num, 0)
        if num > 0:
            named = msgspec.structs.replace(hint, tokens=tokens[: stop * size])
            self._waiting.append(Prefetch(named, keys[:stop], have))
        of_all = f" of {wanted:,}" if stop < wanted else ""
        why = f"{stop:,}{of_all} blocks are on the device, or will be once they are read from the disk."
        return HintOutcome("clipped" if of_all else "accepted", why, stop * size)

    def go_on(self, *, may_read: bool) -> None:
        """Bring blocks that were read, between two steps, and read on if `may_read`."""
        while self._waiting:
            first = self._waiting[0]
            if first.blocks is not None:
                if not self._bring(first, first.blocks):
                    return
            elif first.ends is None:
                if may_read:
                    keys = first.keys[first.done : first.done + self._most_in_piece]
                    first.num_asked, first.ends = len(keys), self._clock() + self._patience
                    self._read(first, keys)
                return
            elif self._clock() > first.ends:
                self._waiting.popleft()
            else:
                return

    def _bring(self, first: Prefetch, blocks: NDArray[np.uint8]) -> bool:
        """Bring the blocks read for the first prefetch. Return False if a batch is out or copies wait."""

        def write(start: int, into: NDArray[np.int64]) -> None:
            self._pages.write(torch.from_numpy(into), torch.from_numpy(blocks[start : start + len(into)]))

        # Before the call: a prefetch that raises is not tried again.
        self._waiting.popleft()
        tokens = first.hint.tokens[: (first.done + len(blocks)) * self._manager.block_size]
        num = self._scheduler.bring(msgspec.structs.replace(first.hint, tokens=tokens), first.done, write)
        if num is None:
            self._waiting.appendleft(first)
            return False
        self.num_brought += num
        first.done += num
        if num == first.num_asked and first.done < len(first.keys):
            first.ends = first.blocks = None
            self._waiting.appendleft(first)
        return True

    def clear(self) -> None:
        """Forget all prefetches."""
        self._waiting.clear()
