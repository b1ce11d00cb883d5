"""A trace: requests in order of arrival, as columns; and several traces at once.

Tokens of a prompt are made on demand: an hour of a chat service has 145 million prompt tokens, but its columns take 6 MB.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged.errors import InvalidConfig
from paged.study.limits import MAX_PRIORITY, MAX_SHARED_IDS, MAX_TOKENS, at_least, between, generators, positive
from paged.study.traces.content import (
    MAX_REQUESTS,
    UNSHARED,
    content_ids,
    contents_apart,
    cut,
    picked,
    segment_tokens,
    starts_of,
)

NOT_DECLARED = 0
"""In `max_tokens`: the request declared no maximum."""

RESAMPLED_BLOCKS = 20
"""Blocks of `resampled`: enough for resamples to differ, and each long enough for bursts and most turns of a conversation."""

DECLARED_CAP = 1024
"""The maximum that `declared` gives to a request without one."""

BY_REQUEST = ("output_tokens", "max_tokens", "priority", "tenant", "output_ids")
"""The columns beside arrivals with one element a request."""


class Applied(msgspec.Struct, frozen=True):
    """A transformation: its name, its arguments, the number of requests before and after, and the numbers that were `clipped` or `rejected`."""

    name: str
    arguments: dict[str, float | int | str]
    requests_before: int
    requests_after: int
    counts: dict[str, int] = {}

    def __str__(self) -> str:
        shown = (
            f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in self.arguments.items()
        )
        counts = "".join(f", {count:,} {what}" for what, count in self.counts.items())
        return f"{self.name}({', '.join(shown)}): {self.requests_after:,} of {self.requests_before:,} requests{counts}"


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests 0 to n−1, sorted by arrival. Raises InvalidConfig with request, value and limit for columns that are no trace.

    arrival_s       float64 [n]    seconds after the first request, never falling; the first is 0
    output_tokens   int64 [n]      tokens that the service generated, at least 1: exact, and unknown to a scheduler
    segment_starts  int64 [n + 1]  request i's prompt is segments segment_starts[i] to segment_starts[i + 1] − 1
    segment_ids     int64 [k]      equal for equal tokens; −1: no other request has them
    segment_lengths int64 [k]      tokens, at least 1
    max_tokens      int64 [n]      declared maximum of output tokens, at least `output_tokens`; 0: none declared
    priority        int64 [n]      smaller is sooner; 0 by default
    tenant          str [n]        the sender; "" by default
    output_ids      int64 [n]      content of the output, an id as in `segment_ids`, which a later prompt may repeat; −1: none does
    applied         the transformations since it was read or made up
    note            the source of an excerpt and its filter, for people; "": not known
    """

    name: str
    arrival_s: NDArray[np.float64]
    output_tokens: NDArray[np.int64]
    segment_starts: NDArray[np.int64]
    segment_ids: NDArray[np.int64]
    segment_lengths: NDArray[np.int64]
    max_tokens: NDArray[np.int64]
    priority: NDArray[np.int64]
    tenant: NDArray[np.str_]
    output_ids: NDArray[np.int64]
    seed: int = 0
    applied: tuple[Applied, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        _check_columns(self)

    @classmethod
    def from_lengths(
        cls,
        arrival_s: ArrayLike,
        prompt_tokens: ArrayLike,
        output_tokens: ArrayLike,
        *,
        name: str = "lengths",
        seed: int = 0,
    ) -> "Trace":
        """Make a trace of requests that share nothing and declare nothing; arrivals are at least 0 and never fall."""
        arrivals = np.asarray(arrival_s, np.float64)
        _check_arrivals(arrivals)
        prompts = _whole_numbers("prompt_tokens", prompt_tokens)
        return cls(
            name=name,
            arrival_s=arrivals - arrivals[:1].sum(),
            output_tokens=_whole_numbers("output_tokens", output_tokens),
            segment_starts=np.arange(len(prompts) + 1, dtype=np.int64),
            segment_ids=np.full(len(prompts), UNSHARED, np.int64),
            segment_lengths=prompts,
            **nothing_said(len(arrivals)),
            seed=seed,
        )

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def prompt_tokens(self) -> NDArray[np.int64]:
        """Each prompt's length in tokens, int64 [n]."""
        return np.add.reduceat(self.segment_lengths, self.segment_starts[:-1])

    def prompt(self, request: int) -> NDArray[np.int32]:
        """Return the prompt of one request, int32 [its length], the same at every call."""
        segments = slice(self.segment_starts[request], self.segment_starts[request + 1])
        contents = content_ids(self.segment_ids[segments], request)
        return segment_tokens(contents, self.segment_lengths[segments], self.seed)

    def output(self, request: int) -> NDArray[np.int32]:
        """Return the output of one request from a stand-in for the model, int32 [its length], the same at every call.

        They are the tokens of the segment with the output's id, so a later prompt that repeats the output has the same tokens.
        """
        contents = content_ids(self.output_ids[request : request + 1], MAX_REQUESTS + request)
        return segment_tokens(contents, self.output_tokens[request : request + 1], self.seed)

    @property
    def num_left_out(self) -> int:
        """Requests that `fitted` left out as longer than the context."""
        return sum(applied.counts.get("rejected", 0) for applied in self.applied)

    def head(self, count: int) -> "Trace":
        """Return the first `count` requests, or all if there are fewer. Raises InvalidConfig below 1."""
        at_least("the number of requests wanted", count, 1)
        count = min(count, len(self))
        return self._picked(np.arange(count), "head", {"requests": count})

    def window(self, start_s: float, stop_s: float = math.inf) -> "Trace":
        """Return the requests that arrive from `start_s` on and before `stop_s`; the first of them arrives at 0.

        Raises InvalidConfig for a time that is negative or NaN, for a window that ends before it begins, and for one without requests.
        """
        between("start_s", start_s, 0, math.inf)
        between("stop_s", stop_s, 0, math.inf)
        if stop_s <= start_s:
            raise InvalidConfig(f"the window from {start_s:g} s to {stop_s:g} s ends before it begins")
        first, last = np.searchsorted(self.arrival_s, [start_s, stop_s]).tolist()
        if first == last:
            problem = f"no request arrives from {start_s:g} s to {stop_s:g} s; the last one arrives at {self.arrival_s[-1]:g} s"
            raise InvalidConfig(problem)
        return self._picked(np.arange(first, last), "window", {"start_s": start_s, "stop_s": stop_s})

    def halves(self) -> tuple["Trace", "Trace"]:
        """Return the first and the second half of the requests by arrival: tune on one, report on the other. An odd one is in the second. Raises
        InvalidConfig for a trace of one request.
        """
        middle = at_least("the number of requests to halve", len(self), 2) // 2
        first, second = np.arange(middle), np.arange(middle, len(self))
        return self._picked(first, "half", {"half": 1}), self._picked(second, "half", {"half": 2})

    def dealt(self, replica: int, replicas: int) -> "Trace":
        """Return the requests of one of several replicas that get them in turn: those numbered replica, replica + replicas, and so on.

        The first of them arrives at 0. Raises InvalidConfig below one replica, for a replica outside of 0 to replicas − 1, and for more replicas than
        requests.
        """
        at_least("the number of replicas", replicas, 1, len(self))
        at_least("the replica", replica, 0, replicas - 1)
        return self._picked(
            np.arange(replica, len(self), replicas), "dealt", {"replica": replica, "replicas": replicas}
        )

    def thinned(self, share: float, *, seed: int) -> "Trace":
        """Return a random part of the requests, each kept with probability `share`: a lower rate, with the bursts where they were.

        With one seed, a larger share keeps all that a smaller one keeps. Raises InvalidConfig for a share not above 0 or over 1, and if no request
        is left.
        """
        if positive("share", share) > 1:
            raise InvalidConfig(f"share is {share:g}; it must be at most 1 (`superposed` raises the rate)")
        kept = np.flatnonzero(generators(seed, 1)[0].random(len(self)) < share)
        if not len(kept):
            raise InvalidConfig(f"none of {len(self):,} requests is left with a share of {share:g}")
        return self._picked(kept, "thinned", {"share": share, "seed": seed})

    def resampled(self, *, seed: int, blocks: int = RESAMPLED_BLOCKS, requests: int | None = None) -> "Trace":
        """Return as many requests (or `requests`), drawn with replacement in blocks of neighbours (a circular block bootstrap): another hour of the
        same service.

        Each of `blocks` equal blocks begins at a random request and keeps the gaps between arrivals, so bursts and most conversations stay as they
        were. After the last request comes the first, one mean gap later. Second copies share contents only with second copies, and so on, so no
        request hits its own copy in a cache. Raises InvalidConfig below one block or request, and for more shared contents than there are ids.
        """
        count = len(self)
        length = -(-count // min(at_least("the number of blocks", blocks, 1), count))
        wanted = count if requests is None else at_least("the number of requests wanted", requests, 1)
        starts = generators(seed, 1)[0].integers(0, count, -(-wanted // length))
        drawn = ((starts[:, None] + np.arange(length)) % count).ravel()[:wanted]
        mean_gap = float(self.arrival_s[-1]) / max(count - 1, 1)
        arrival_s = np.cumsum(np.diff(self.arrival_s, prepend=-mean_gap)[drawn])
        rest = self._picked(drawn, "resampled", {"seed": seed, "block": length}, arrival_s=arrival_s)
        segment_ids, output_ids = contents_apart(rest.segment_ids, rest.output_ids, rest.segment_starts, drawn)
        return replace(rest, segment_ids=segment_ids, output_ids=output_ids)

    def sampled(self, count: int, *, seed: int) -> "Trace":
        """Return `count` different requests at random, in their order. Raises InvalidConfig below 1, and for more than there are."""
        at_least("the number of requests wanted", count, 1, len(self))
        chosen = generators(seed, 1)[0].choice(len(self), count, replace=False)
        return self._picked(np.sort(chosen), "sampled", {"requests": count, "seed": seed})

    def scaled(self, *, rate: float = 1.0, prompts: float = 1.0, outputs: float = 1.0) -> "Trace":
        """Return the same requests, arriving `rate` times as fast (time is stretched), with prompts and outputs so many times as long.

        Every segment is scaled on its own and keeps at least one token, so shared content stays shared. An output scales as an output, and as a part
        of a later prompt as a prompt. Raises InvalidConfig for a scale that is not a positive, finite number, or that makes a request longer than
        MAX_TOKENS.
        """
        by: dict[str, dict[str, float | int | str]] = {"stretched": {}, "lengths": {}}
        for what, scale in (("rate", rate), ("prompts", prompts), ("outputs", outputs)):
            if positive(f"the scale of {what}", scale) != 1:
                by["stretched" if what == "rate" else "lengths"][what] = scale
        is_declared = self.max_tokens != NOT_DECLARED
        with np.errstate(over="ignore"):
            arrival_s = self.arrival_s / rate
        return replace(
            self,
            arrival_s=arrival_s,
            output_tokens=_scaled("outputs", self.output_tokens, outputs),
            segment_lengths=_scaled("prompts", self.segment_lengths, prompts),
            max_tokens=np.where(is_declared, _scaled("max_tokens", self.max_tokens, outputs), NOT_DECLARED),
            applied=self.applied + tuple(self._applied(name, scales) for name, scales in by.items() if scales),
        )

    def fitted(self, context: int, *, how: Literal["clip", "reject"] = "clip") -> "Trace":
        """Fit requests, prompt and output, into a context of so many tokens; the last of `applied` has the number of longer ones.

        `clip` cuts the end of the prompt until the request fits, but not below half the context; then the end of the output. `reject` leaves the
        request out. Both cut a declared maximum to what the prompt leaves. Raises InvalidConfig for a context below 2, another `how`, and if no
        request is left.
        """
        at_least("context", context, 2)
        prompts = self.prompt_tokens
        is_too_long = prompts + self.output_tokens > context
        num_too_long = int(is_too_long.sum())
        arguments: dict[str, float | int | str] = {"context": context, "how": how}
        if how == "reject":
            if num_too_long == len(self):
                raise InvalidConfig(f"none of {len(self):,} requests fits a context of {context:,} tokens")
            rest = self._picked(np.flatnonzero(~is_too_long), "fitted", arguments, {"rejected": num_too_long})
            return replace(rest, max_tokens=np.minimum(rest.max_tokens, context - rest.prompt_tokens))
        if how != "clip":
            raise InvalidConfig(f'over-long requests are to be treated by "{how}"; known are clip, reject')
        prompts = np.minimum(prompts, np.maximum(context - self.output_tokens, context // 2))
        starts, segments, lengths = cut(self.segment_starts, self.segment_lengths, prompts)
        return replace(
            self,
            output_tokens=np.minimum(self.output_tokens, context - prompts),
            segment_starts=starts,
            segment_ids=self.segment_ids[segments],
            segment_lengths=lengths,
            max_tokens=np.minimum(self.max_tokens, context - prompts),
            applied=(*self.applied, self._applied("fitted", arguments, {"clipped": num_too_long})),
        )

    def declared(self, context: int, cap: int = DECLARED_CAP) -> "Trace":
        """Let every request declare a `max_tokens`: its own, or `cap`, and no more than its prompt leaves of the context.

        Outputs longer than declared are clipped; the last of `applied` has their number. Raises InvalidConfig for a cap or a context below 1, and for
        a prompt that leaves no room: apply `fitted` first.
        """
        room = at_least("context", context, 1) - self.prompt_tokens
        _refuse(
            room < 1,
            lambda i: (
                f"the prompt of request {i:,} has {self.prompt_tokens[i]:,} tokens; a context of {context:,} leaves no output. "
                f"`fitted({context})` clips or rejects such requests"
            ),
        )
        wanted = np.where(self.max_tokens == NOT_DECLARED, at_least("cap", cap, 1), self.max_tokens)
        max_tokens = np.minimum(wanted, room)
        counts = {"clipped": int((self.output_tokens > max_tokens).sum())}
        return replace(
            self,
            output_tokens=np.minimum(self.output_tokens, max_tokens),
            max_tokens=max_tokens,
            applied=(*self.applied, self._applied("declared", {"context": context, "cap": cap}, counts)),
        )

    def _applied(self, name: str, arguments: dict[str, Any], counts: dict[str, int] | None = None) -> Applied:
        """Return a transformation that keeps all requests."""
        return Applied(name, arguments, len(self), len(self), counts or {})

    def _picked(
        self,
        requests: NDArray[np.int64],
        name: str,
        arguments: dict[str, Any],
        counts: dict[str, int] | None = None,
        *,
        arrival_s: NDArray[np.float64] | None = None,
    ) -> "Trace":
        """Return some requests, arriving at their own times or at `arrival_s`, less the time of the first."""
        starts, segments = picked(self.segment_starts, requests)
        if arrival_s is None:
            arrival_s = self.arrival_s[requests]
        return replace(
            self,
            arrival_s=arrival_s - arrival_s[0],
            segment_starts=starts,
            segment_ids=self.segment_ids[segments],
            segment_lengths=self.segment_lengths[segments],
            **{name: getattr(self, name)[requests] for name in BY_REQUEST},
            applied=(*self.applied, Applied(name, arguments, len(self), len(requests), counts or {})),
        )


def nothing_said(num_requests: int) -> dict[str, Any]:
    """Return the columns of so many requests that declare nothing, and whose outputs no prompt repeats."""
    return {
        "max_tokens": np.full(num_requests, NOT_DECLARED, np.int64),
        "priority": np.zeros(num_requests, np.int64),
        "tenant": np.zeros(num_requests, np.str_),
        "output_ids": np.full(num_requests, UNSHARED, np.int64),
    }


def _check_columns(trace: Trace) -> None:
    """Raise InvalidConfig with column, request or segment, value and limit unless every promise of Trace's docstring holds."""
    num_requests = len(trace.arrival_s)
    at_least("the number of requests in a trace", num_requests, 1, MAX_REQUESTS)
    num_segments = len(trace.segment_ids)
    for what in BY_REQUEST:
        _check_size(what, getattr(trace, what), num_requests)
    _check_size("segment_starts", trace.segment_starts, num_requests + 1)
    _check_size("segment_lengths", trace.segment_lengths, num_segments)
    if num_segments == 0 or trace.segment_starts[0] != 0 or trace.segment_starts[-1] != num_segments:
        first, last = trace.segment_starts[[0, -1]].tolist()
        raise InvalidConfig(f"segment_starts go from {first} to {last}; they must go from 0 to {num_segments}")
    _check_range("segments of request", np.diff(trace.segment_starts), 1, num_segments)
    _check_arrivals(trace.arrival_s)
    if trace.arrival_s[0] != 0:
        raise InvalidConfig(
            f"arrival_s of request 0 is {trace.arrival_s[0]:g}; times count from the first request, at 0"
        )
    for what, of, least, most in (
        ("output_tokens", "request", 1, MAX_TOKENS),
        ("segment_lengths", "segment", 1, MAX_TOKENS),
        ("prompt_tokens", "request", 1, MAX_TOKENS),
        ("segment_ids", "segment", UNSHARED, MAX_SHARED_IDS - 1),
        ("output_ids", "request", UNSHARED, MAX_SHARED_IDS - 1),
        ("max_tokens", "request", 0, MAX_TOKENS),
        ("priority", "request", -MAX_PRIORITY, MAX_PRIORITY),
    ):
        _check_range(f"{what} of {of}", getattr(trace, what), least, most)
    declared, outputs = trace.max_tokens, trace.output_tokens
    _refuse(
        (declared > 0) & (declared < outputs),
        lambda i: f"max_tokens of request {i:,} is {declared[i]:,}, but its output has {outputs[i]:,} tokens",
    )


def _check_arrivals(arrival_s: NDArray[np.float64]) -> None:
    """Raise InvalidConfig unless every time is finite, not negative, and not before the one above it."""
    is_wrong = ~np.isfinite(arrival_s) | (arrival_s < 0)
    _refuse(is_wrong, lambda i: f"arrival_s of request {i:,} is {arrival_s[i]:g}; it must be finite and not negative")
    _refuse(
        np.diff(arrival_s) < 0,
        lambda i: (
            f"request {i + 1:,} arrives at {arrival_s[i + 1]:g} s, after one at {arrival_s[i]:g} s; a trace is sorted"
        ),
    )


def _refuse(is_wrong: NDArray[np.bool_], problem: Callable[[int], str]) -> None:
    """Raise InvalidConfig for the first place that is wrong, if any."""
    if is_wrong.any():
        raise InvalidConfig(problem(int(np.argmax(is_wrong))))


def _whole_numbers(what: str, values: ArrayLike) -> NDArray[np.int64]:
    """Return `values` as int64. Raises InvalidConfig unless they are integers."""
    numbers = np.asarray(values)
    if not np.issubdtype(numbers.dtype, np.integer):
        raise InvalidConfig(f"{what} are {numbers.dtype}; they must be whole numbers")
    return numbers.astype(np.int64)


def _scaled(what: str, tokens: NDArray[np.int64], scale: float) -> NDArray[np.int64]:
    """Return lengths times a scale, rounded, at least 1. Raises InvalidConfig if one is over MAX_TOKENS."""
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
    _refuse(
        (column < least) | (column > most),
        lambda i: f"{what} {i:,}: {column[i]:,}; it must be from {least:,} to {most:,}",
    )


def superposed(traces: Sequence[Trace], *, seed: int | None = None) -> Trace:
    """The requests of all traces as one, by arrival. Name, `seed` of the tokens and what was applied before are the first one's.

    Contents stay shared within a trace and are never shared across traces. With a `seed` every trace but the first is turned by a random
    time, what goes over its end coming in at its beginning, so that `superposed([trace] * 3, seed=1)` is three times the rate and not
    three times each request at one moment; a conversation that goes over the end is then cut in two, the later part first. Raises
    InvalidConfig for no traces, and for more shared contents than there are ids.
    """
    at_least("the number of traces to superpose", len(traces), 1)
    arrivals = [trace.arrival_s for trace in traces]
    if seed is not None:
        offsets = generators(seed, 1)[0].random(len(traces))
        turned = zip(traces[1:], offsets[1:].tolist(), strict=True)
        arrivals = [arrivals[0], *(_turned(trace.arrival_s, offset) for trace, offset in turned)]
    arrival_s = np.concatenate(arrivals)
    order = np.argsort(arrival_s, kind="stable")
    starts, segments = picked(starts_of(np.concatenate([np.diff(trace.segment_starts) for trace in traces])), order)
    segment_ids, output_ids = _ids_apart(traces)
    arguments: dict[str, float | int | str] = {"traces": len(traces)}
    if seed is not None:
        arguments["seed"] = seed
    by_request: dict[str, Any] = {
        name: np.concatenate([getattr(trace, name) for trace in traces]) for name in BY_REQUEST
    }
    by_request["output_ids"] = output_ids
    return replace(
        traces[0],
        arrival_s=arrival_s[order],
        segment_starts=starts,
        segment_ids=segment_ids[segments],
        segment_lengths=np.concatenate([trace.segment_lengths for trace in traces])[segments],
        applied=(*traces[0].applied, Applied("superposed", arguments, len(traces[0]), len(order))),
        **{name: column[order] for name, column in by_request.items()},
    )


def _turned(arrival_s: NDArray[np.float64], offset: float) -> NDArray[np.float64]:
    """Arrivals turned by a share of the trace's span, which ends one mean gap after the last of them."""
    span = float(arrival_s[-1]) * len(arrival_s) / max(len(arrival_s) - 1, 1)
    later = arrival_s + offset * span
    return np.where(later >= span, later - span, later)


def _ids_apart(traces: Sequence[Trace]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Segment and output ids of all traces, in a row, each trace's own ids after those of the one before."""
    segment_ids, output_ids = [], []
    num_ids = 0
    for trace in traces:
        ids = np.concatenate((trace.segment_ids, trace.output_ids))
        known, places = np.unique(ids, return_inverse=True)
        # −1 comes first where it is there, and stays what it is.
        num_unshared = int(known[0] == UNSHARED)
        new = np.where(ids == UNSHARED, UNSHARED, places - num_unshared + num_ids)
        num_ids += len(known) - num_unshared
        segment_ids.append(new[: len(trace.segment_ids)])
        output_ids.append(new[len(trace.segment_ids) :])
    if num_ids > MAX_SHARED_IDS:
        raise InvalidConfig(
            f"the traces have {num_ids:,} shared contents together; at most {MAX_SHARED_IDS:,} have ids"
        )
    return np.concatenate(segment_ids), np.concatenate(output_ids)
