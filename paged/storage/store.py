"""The seam of a store of blocks: look up, read, write.

A block's key, 32 bytes, is the chained SHA-256 of its tokens and all before them, so a prompt's blocks are a list of
keys in order. A store belongs to one engine, and keeps apart by itself what other models, dtypes and layouts wrote
(docs/tiers.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.uint8]
Copy = Callable[[list[int]], Blocks]
"""Copies the blocks at these places of a list of keys, uint8 [n, block bytes], which the store then owns."""


class BlockStore(Protocol):
    """Blocks of one engine by key. No call raises for what a medium does: content that cannot be had is not there."""

    def look_up(self, keys: Sequence[bytes]) -> int:
        """Return how many of these blocks are there, from the first one on without a gap. Found blocks count as used, the
        last block first. Called by the step's thread: answers from memory, so a `read` may still find less."""

    def read(self, keys: Sequence[bytes], into: Blocks) -> int:
        """Fill rows of `into`, uint8 [n, block bytes], from the first one on; return how many are whole. May wait;
        another thread than the step's calls it."""

    def write(self, keys: Sequence[bytes], copy: Copy) -> int:
        """Keep blocks that are not there. Called by the step's thread: copies those that there is room for now, and
        waits for no medium. Returns how many of the keys, from the first one on, are there or taken; what comes behind
        them is dropped, and may be offered again."""

    def stats(self) -> StoreStats:
        """Totals so far."""

    def close(self) -> None:
        """Write what was taken, and stop. Calling it again does nothing."""


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of a store since it was opened, in blocks.

    written, read  that arrived there, and here
    dropped        that were offered while the queue was full, each time that they were
    failed         that could not be written
    missed         that a look-up promised and a read did not find, or not whole
    corrupt        of those: truncated, changed, of another key, model or version
    evicted        for the limit
    queued         that are taken and not written yet
    held           of this model, as far as is known
    """

    written: int = 0
    read: int = 0
    dropped: int = 0
    failed: int = 0
    missed: int = 0
    corrupt: int = 0
    evicted: int = 0
    queued: int = 0
    held: int = 0
