"""The tokens that a trace's prompts are made of.

Traces of real services do not hold what people wrote. At most they say which pieces of prompts were equal. So a prompt is put together
from *segments*: a segment with an id has the same tokens wherever that id occurs, and a segment without one is like no other. Knows
ids and lengths. Does not know formats.
"""

import numpy as np
from numpy.typing import NDArray

UNSHARED = -1
"""The id of a segment whose tokens no other segment has."""

MAX_SHARED_IDS = 2**30
"""Shared ids are below this number; from it on, content belongs to one request alone."""


def content_ids(segment_ids: NDArray[np.int64], request: int) -> NDArray[np.int64]:
    """What decides each segment's tokens: its own id, or the request's number where nobody shares it. int64 [segments], < 2**31."""
    return np.where(segment_ids == UNSHARED, MAX_SHARED_IDS + request, segment_ids)


def segment_tokens(contents: NDArray[np.int64], lengths: NDArray[np.int64], seed: int) -> NDArray[np.int32]:
    """The tokens of segments in a row, int32 [sum of lengths].

    A token is a function of its segment's content id, its place in the segment and `seed`, so a short segment is a prefix of a long
    one with the same id. The first token *is* the content id: two segments that differ do so in their first block, whatever its size.
    """
    starts = np.cumsum(lengths) - lengths
    places = np.arange(int(lengths.sum()), dtype=np.uint32) - np.repeat(starts.astype(np.uint32), lengths)
    # Multiply, fold the high bits down, multiply: enough to look random, and a few array operations for a prompt of any length.
    mixed = np.repeat((contents + (seed % 2**31) * 40503).astype(np.uint32) * np.uint32(0x9E3779B1), lengths)
    mixed += places * np.uint32(0x85EBCA77)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(0x2C1B3C6D)
    mixed ^= mixed >> np.uint32(12)
    tokens = (mixed >> np.uint32(1)).astype(np.int32)
    tokens[starts] = contents
    return tokens
