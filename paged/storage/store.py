"""The interface of a store of blocks: look up, read, write.

A block's key, 32 bytes, is the chained SHA-256 of its tokens and all before them, so a prompt's blocks are a list of
keys in order. A store belongs to one engine, and never returns what other models, dtypes or layouts wrote
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
"""Copies the blocks at these indices of a list of keys, uint8 [n, block bytes]; the store owns the copy."""


class BlockStore(Protocol):
    """Blocks of one engine by key. No call raises for a fault of the medium: content that cannot be read is not there."""

    def look_up(self, keys: Sequence[bytes]) -> int:
        """Return how many of these blocks are there, from the first one on without a gap. They count as used now, each a
        little later than those behind it. The step's thread calls it: it answers from memory, so `read` may find less."""

    def read(self, keys: Sequence[bytes], into: Blocks) -> int:
        """Fill rows of `into`, uint8 [n, block bytes], from the first one on; return how many are whole. It may wait: the
        step's thread does not call it."""

    def write(self, keys: Sequence[bytes], copy: Copy) -> int:
        """Keep the blocks that are not there. Return how many of the keys, from the first one on, are there or taken; the
        others are dropped, and may be offered again. The step's thread calls it: it copies the blocks that have room
        now, and waits for no medium."""

    def stats(self) -> StoreStats:
        """Return the totals so far."""

    def close(self) -> None:
        """Write what was taken, and stop. Calling it again does nothing."""


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of a store since it was opened, in blocks.

    written, read  to the medium and from it
    dropped        offered while the queue was full, counted each time
    failed         not written because of an error
    missed         found by a look-up and then not read whole
    corrupt        of those: truncated, changed, of another key, model or version
    evicted        removed for the limit
    queued         taken and not written yet
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
