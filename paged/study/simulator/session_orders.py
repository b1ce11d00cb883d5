"""Hits of a memory on sessions' prompts, for comparison: with everything kept, and with an offline order of eviction.

Both take one prompt after another, in order; memory for decoding and scheduling is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Prompts = Sequence[tuple[int, NDArray[np.int64]]]
"""In order of arrival: the session, and block ids, int64 [n]; equal ids are equal content."""


def blocks_if_all_kept(prompts: Prompts, num_ids: int) -> int:
    """Return the blocks of prompts that hit if nothing is ever evicted; ids are below `num_ids`."""
    seen, hits = np.zeros(num_ids, np.bool_), 0
    for _, blocks in prompts:
        hits += _first(~seen[blocks])
        seen[blocks] = True
    return hits


def blocks_offline(prompts: Prompts, capacity: int) -> int:
    """Return the blocks that hit if eviction takes the end of the session whose next turn is last. Turns are known beforehand.

    The order is not proven to be the best. Only the last prompt of a session is kept, so it is no bound if sub-agents' prompts come between.
    """
    following: dict[int, int] = {}
    after = [0] * len(prompts)
    for place in range(len(prompts) - 1, -1, -1):
        session = prompts[place][0]
        after[place] = following.get(session, len(prompts))
        following[session] = place
    held: dict[int, int] = {}
    next_turn: dict[int, int] = {}
    latest: dict[int, NDArray[np.int64]] = {}
    size = hits = 0
    for place, (session, blocks) in enumerate(prompts):
        have = latest.get(session, blocks[:0])[: held.get(session, 0)]
        common = min(len(have), len(blocks))
        hits += _first(have[:common] != blocks[:common])
        size += len(blocks) - len(have)
        held[session], latest[session], next_turn[session] = len(blocks), blocks, after[place]
        for other in sorted(held, key=lambda each: (next_turn[each], each != session), reverse=True):
            cut = min(max(0, size - capacity), held[other])
            held[other], size = held[other] - cut, size - cut
            if size <= capacity:
                break
    return hits


def _first(is_missing: NDArray[np.bool_]) -> int:
    """Return how many entries come before the first True."""
    return int(is_missing.argmax()) if is_missing.any() else len(is_missing)
