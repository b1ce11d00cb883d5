"""The rules for columns of a trace: their shapes, and the range of each number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged.errors import InvalidConfig
from paged.study.traces.content import MAX_REQUESTS, MAX_SHARED_IDS, UNSHARED
from paged.study.traces.limits import MAX_PRIORITY, MAX_TOKENS, at_least

if TYPE_CHECKING:
    from paged.study.traces.trace import Trace


def check_columns(trace: Trace) -> None:
    """Raises InvalidConfig, naming column, request or segment, value and limit, unless every promise of Trace's docstring holds."""
    num_requests = len(trace.arrival_s)
    at_least("the number of requests in a trace", num_requests, 1, MAX_REQUESTS)
    num_segments = len(trace.segment_ids)
    for what in ("output_tokens", "max_tokens", "priority", "tenant", "output_ids"):
        _check_size(what, getattr(trace, what), num_requests)
    _check_size("segment_starts", trace.segment_starts, num_requests + 1)
    _check_size("segment_lengths", trace.segment_lengths, num_segments)
    if num_segments == 0 or trace.segment_starts[0] != 0 or trace.segment_starts[-1] != num_segments:
        first, last = trace.segment_starts[[0, -1]].tolist()
        raise InvalidConfig(f"segment_starts go from {first} to {last}; they must go from 0 to {num_segments}")
    _check_range("segments of request", np.diff(trace.segment_starts), 1, num_segments)
    check_arrivals(trace.arrival_s)
    if trace.arrival_s[0] != 0:
        raise InvalidConfig(
            f"arrival_s of request 0 is {trace.arrival_s[0]:g}; times count from the first request, at 0"
        )
    _check_range("output_tokens of request", trace.output_tokens, 1, MAX_TOKENS)
    _check_range("segment_lengths of segment", trace.segment_lengths, 1, MAX_TOKENS)
    _check_range("prompt_tokens of request", trace.prompt_tokens, 1, MAX_TOKENS)
    _check_range("segment_ids of segment", trace.segment_ids, UNSHARED, MAX_SHARED_IDS - 1)
    _check_range("output_ids of request", trace.output_ids, UNSHARED, MAX_SHARED_IDS - 1)
    _check_range("max_tokens of request", trace.max_tokens, 0, MAX_TOKENS)
    _check_range("priority of request", trace.priority, -MAX_PRIORITY, MAX_PRIORITY)
    is_short = (trace.max_tokens > 0) & (trace.max_tokens < trace.output_tokens)
    if is_short.any():
        request = int(np.argmax(is_short))
        declared, output = int(trace.max_tokens[request]), int(trace.output_tokens[request])
        raise InvalidConfig(f"max_tokens of request {request:,} is {declared:,}, but its output has {output:,} tokens")


def check_arrivals(arrival_s: NDArray[np.float64]) -> None:
    """Raises InvalidConfig unless every time is finite, not negative, and not before the one above it."""
    if not np.isfinite(arrival_s).all():
        request = int(np.argmin(np.isfinite(arrival_s)))
        raise InvalidConfig(f"arrival_s of request {request:,} is {arrival_s[request]}; it must be finite")
    if (arrival_s < 0).any():
        request = int(np.argmax(arrival_s < 0))
        raise InvalidConfig(f"arrival_s of request {request:,} is {arrival_s[request]:g}; it must not be negative")
    falls = np.diff(arrival_s) < 0
    if falls.any():
        request = int(np.argmax(falls)) + 1
        before, after = arrival_s[request - 1 : request + 1].tolist()
        raise InvalidConfig(f"request {request:,} arrives at {after:g} s, after one at {before:g} s; a trace is sorted")


def whole_numbers(what: str, values: ArrayLike) -> NDArray[np.int64]:
    """`values` as int64. Raises InvalidConfig for what is not whole."""
    numbers = np.asarray(values)
    if not np.issubdtype(numbers.dtype, np.integer):
        raise InvalidConfig(f"{what} are {numbers.dtype}; they must be whole numbers")
    return numbers.astype(np.int64)


def scaled_lengths(what: str, tokens: NDArray[np.int64], scale: float) -> NDArray[np.int64]:
    """Lengths times a scale, to the nearest and at least 1. Raises InvalidConfig where one is over MAX_TOKENS."""
    with np.errstate(over="ignore"):
        scaled = np.maximum(np.rint(tokens * scale), 1)
    if scaled.max() > MAX_TOKENS:
        raise InvalidConfig(
            f"{what} scaled by {scale:g} have up to {scaled.max():,.0f} tokens; at most {MAX_TOKENS:,} are possible"
        )
    return scaled.astype(np.int64)


def _check_size(what: str, column: NDArray, wanted: int) -> None:
    if column.shape != (wanted,):
        raise InvalidConfig(f"{what} has the shape {column.shape}; ({wanted},) is needed")


def _check_range(what: str, column: NDArray[np.int64], least: int, most: int) -> None:
    is_wrong = (column < least) | (column > most)
    if is_wrong.any():
        place = int(np.argmax(is_wrong))
        raise InvalidConfig(f"{what} {place:,}: {int(column[place]):,}; it must be from {least:,} to {most:,}")
