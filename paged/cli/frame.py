"""One moment of a pool under load, as the live view draws it.

Knows what the memory layer and the scheduler say about themselves in public. Does not know terminals.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

FREE = -1
CACHED = -2
SHARED = -3


class Frame(msgspec.Struct, frozen=True):
    """What one step looks like. Counts of blocks unless the name says tokens, requests or seconds."""

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
    """What a model is writing: whose (request's number), and all of it so far. Empty where nobody writes."""


def block_cells(
    tables: NDArray[np.int32], table_lengths: NDArray[np.int64], owners: NDArray[np.int64], states: NDArray[np.int8]
) -> NDArray[np.int64]:
    """Whose each block is, int64 [blocks].

    `tables` int32 [rows, columns] and `table_lengths` [rows] are the block tables of live rows, `owners` [rows] the number of the
    request that each row belongs to, `states` int8 [blocks] is 0 for free, 1 for cached, 2 for used.
    """
    cells = np.where(states == 1, CACHED, FREE).astype(np.int64)
    in_table = np.arange(tables.shape[1]) < table_lengths[:, None]
    blocks = tables[in_table]
    cells[blocks] = np.repeat(owners, table_lengths)
    references = np.bincount(blocks, minlength=len(cells))
    cells[references > 1] = SHARED
    return cells
