"""One moment of a pool under load, as the live view draws it."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.block_manager import GroupStats


class Frame(msgspec.Struct, frozen=True):
    """The picture of one step. Counts of blocks unless the name says tokens, requests or seconds."""

    step: int
    now_s: float
    cells: NDArray[np.int64]
    """Whose each device block is, int64 [blocks]: a request's number where it alone holds it, else SHARED, CACHED or FREE."""
    block_size: int
    used: int
    cached: int
    free: int
    host_blocks: int
    host_used: int
    host_cached: int
    requests: int
    counts: dict[str, int]
    """Requests by state: waiting, running, paused, swapped, finished, rejected."""
    batch_tokens: int
    batch_sequences: int
    token_budget: int
    preemptions_recompute: int
    preemptions_swap: int
    hit_tokens: int
    prompt_tokens: int
    events: tuple[tuple[float, int, str], ...] = ()
    """The latest last: when (s), whose (request's number), what."""
    texts: tuple[tuple[int, str], ...] = ()
    """What a model is writing: whose (request's number), and all of it so far. Empty where no request writes."""
    groups: tuple[GroupStats, ...] = ()
    """Where layers are of several kinds: cells and counts are of pages then. Else empty."""
