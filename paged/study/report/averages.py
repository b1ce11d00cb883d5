"""A long timeline as a few thousand points whose time-weighted averages are those of the whole."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def edges_of(end_s: Floats, seconds: Floats, num_points: int) -> Floats:
    """The bounds of at most `num_points` intervals that cover all entries, float64 [intervals + 1], rising.

    Where the entries' own bounds are few enough it is these, and nothing is averaged; otherwise all intervals are equally long. Without entries it is
    the first second, in which nothing ran.
    """
    if not len(end_s):
        return np.array([0.0, 1.0])
    starts = _starts(end_s, seconds)
    even = np.linspace(starts[0], end_s[-1], num_points + 1)
    if len(end_s) > num_points:
        return even
    bounds = np.unique(np.concatenate([starts, end_s]))
    return bounds if len(bounds) <= num_points + 1 else even


def averaged(edges: Floats, end_s: Floats, seconds: Floats, values: Floats, *, keeps: bool = False) -> Floats:
    """The average of `values` over each interval between `edges`, weighted by time, float64 [len(edges) - 1].

    Entry i has values[i] from end_s[i] − seconds[i] until end_s[i], all float64 [entries]. Between two entries nothing runs: the value is 0 there,
    or with `keeps` still that of the entry before.
    """
    if not len(end_s):
        return np.zeros(len(edges) - 1)
    starts = _starts(end_s, seconds)
    # The integral over time at every bound: between two bounds it is a straight line, so any interval's share can be read off exactly.
    idle = np.concatenate([[0.0], starts[1:] - end_s[:-1]])
    before = np.concatenate([[0.0], values[:-1]]) if keeps else np.zeros_like(values)
    pieces = np.stack([idle * before, (end_s - starts) * values], axis=1).ravel()
    times = np.stack([starts, end_s], axis=1).ravel()
    integral = np.interp(edges, times, pieces.cumsum())
    return np.diff(integral) / np.diff(edges)


def _starts(end_s: Floats, seconds: Floats) -> Floats:
    """When each entry began. What is less than 1 ns from the end of the entry before is rounding, and began there."""
    starts = end_s - seconds
    starts[1:] = np.where(starts[1:] < end_s[:-1] + 1e-9, end_s[:-1], starts[1:])
    return starts
