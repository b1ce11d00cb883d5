"""Prompts as ragged columns: request i's segments are `starts[i]` to `starts[i + 1]` − 1 of two flat arrays."""

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]


def starts_of(counts: Column) -> Column:
    """Where each request's segments start, and where the last one's end: int64 [n + 1]."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))


def ranges(firsts: Column, counts: Column) -> Column:
    """firsts[i], firsts[i] + 1, … (counts[i] numbers) for every i, in a row: int64 [sum of counts]."""
    ends = np.cumsum(counts)
    return np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(firsts - (ends - counts), counts)


def picked(starts: Column, requests: Column) -> tuple[Column, Column]:
    """The segments of some requests: their new starts, and the index of each segment in the old columns."""
    counts = starts[requests + 1] - starts[requests]
    return starts_of(counts), ranges(starts[requests], counts)


def cut(starts: Column, lengths: Column, limits: Column) -> tuple[Column, Column, Column]:
    """Prompts cut to `limits` tokens each (int64 [n], at least 1), at their end, so that what they share stays at their beginning.

    New starts, the indices of the segments that are left, and their lengths.
    """
    counts = np.diff(starts)
    before = np.cumsum(lengths) - lengths
    before_in_prompt = before - np.repeat(before[starts[:-1]], counts)
    left = np.minimum(lengths, np.repeat(limits, counts) - before_in_prompt)
    is_left = left > 0
    return starts_of(np.add.reduceat(is_left.astype(np.int64), starts[:-1])), np.flatnonzero(is_left), left[is_left]
