"""The tokens of a trace's prompts and outputs.

Traces of real services do not hold what people wrote; at most they say which pieces of prompts were equal. So a prompt is a
row of *segments*: a segment with an id has the same tokens wherever the id occurs, and a segment without one is like no
other. An output is a further segment.

Prompts are ragged columns: request i's segments are `starts[i]` to `starts[i + 1]` − 1 of two flat arrays.
"""

import numpy as np
from numpy.typing import NDArray

from paged.errors import InvalidConfig
from paged.study.limits import MAX_SHARED_IDS

Ids = NDArray[np.int64]

UNSHARED = -1
"""The id of a segment whose tokens no other segment has."""

MAX_REQUESTS = 2**28
"""The contents of so many requests have ids below 2**31: each may have two shared ones and two of its own."""


def content_ids(segment_ids: Ids, request: int) -> Ids:
    """Return the content id of each segment: its own id, or one by the request's number if it is unshared. int64 [segments], < 2**31.

    Outputs count as segments of request `MAX_REQUESTS` + its number, so that an unshared one differs from its own prompt, too.
    """
    return np.where(segment_ids == UNSHARED, MAX_SHARED_IDS + request, segment_ids)


def segment_tokens(contents: Ids, lengths: Ids, seed: int) -> NDArray[np.int32]:
    """Return the tokens of consecutive segments, int32 [sum of lengths].

    A token is a function of its segment's content id, its place in the segment and `seed`, so a short segment is a prefix of a long one with the
    same id. The first token *is* the content id, so segments that differ do so in their first block, whatever its size.
    """
    starts = np.cumsum(lengths) - lengths
    places = np.arange(int(lengths.sum()), dtype=np.uint32) - np.repeat(starts.astype(np.uint32), lengths)
    bases = (contents + (seed % 2**31) * 40503).astype(np.uint32) * np.uint32(0x9E3779B1)
    # Multiply, fold the high bits down, multiply: random enough, in a few array operations for a prompt of any length.
    mixed = np.repeat(bases, lengths) + places * np.uint32(0x85EBCA77)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(0x2C1B3C6D)
    mixed ^= mixed >> np.uint32(12)
    tokens = (mixed >> np.uint32(1)).astype(np.int32)
    tokens[starts] = contents
    return tokens


def contents_apart(segment_ids: Ids, output_ids: Ids, starts: Ids, originals: Ids) -> tuple[Ids, Ids]:
    """Return new ids of segments [k] and outputs [n], so that copies of one request share nothing with each other.

    First copies share contents with first copies, second ones with second ones. Request i is a copy of request `originals[i]`, and its segments
    begin at `starts[i]`. Raises InvalidConfig for more contents than there are ids.
    """
    copy = _copy_numbers(originals)
    copies = np.concatenate((np.repeat(copy, np.diff(starts)), copy))
    ids = np.concatenate((segment_ids, output_ids))
    is_shared = ids != UNSHARED
    _, places = np.unique(ids[is_shared] * (copies.max() + 1) + copies[is_shared], return_inverse=True)
    if len(places) and places.max() >= MAX_SHARED_IDS:
        raise InvalidConfig(f"{places.max() + 1:,} shared contents; at most {MAX_SHARED_IDS:,} have ids")
    new = np.full(len(ids), UNSHARED, np.int64)
    new[is_shared] = places
    return new[: len(segment_ids)], new[len(segment_ids) :]


def _copy_numbers(originals: Ids) -> Ids:
    """Return how many copies of the same original come before each request, int64 [n]."""
    order = np.argsort(originals, kind="stable")
    ranked = originals[order]
    is_first = np.append(True, ranked[1:] != ranked[:-1])
    places = np.arange(len(ranked))
    numbers = np.empty(len(ranked), np.int64)
    numbers[order] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return numbers


def starts_of(counts: Ids) -> Ids:
    """Return the first segment of each request, and the end of the last request's: int64 [n + 1]."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))


def ranges(firsts: Ids, counts: Ids) -> Ids:
    """Return firsts[i], firsts[i] + 1, … (counts[i] numbers) for every i, one after another: int64 [sum of counts]."""
    ends = np.cumsum(counts)
    return np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(firsts - (ends - counts), counts)


def picked(starts: Ids, requests: Ids) -> tuple[Ids, Ids]:
    """Return the segments of some requests: their new starts, and the index of each segment in the old columns."""
    counts = starts[requests + 1] - starts[requests]
    return starts_of(counts), ranges(starts[requests], counts)


def cut(starts: Ids, lengths: Ids, limits: Ids) -> tuple[Ids, Ids, Ids]:
    """Cut prompts at their end to `limits` tokens each (int64 [n], at least 1), so that shared beginnings stay.

    Return new starts, the indices of the segments that are left, and their lengths.
    """
    counts = np.diff(starts)
    before = np.cumsum(lengths) - lengths
    before_in_prompt = before - np.repeat(before[starts[:-1]], counts)
    left = np.minimum(lengths, np.repeat(limits, counts) - before_in_prompt)
    is_left = left > 0
    return starts_of(np.add.reduceat(is_left.astype(np.int64), starts[:-1])), np.flatnonzero(is_left), left[is_left]
