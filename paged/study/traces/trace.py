"""A trace: requests in order of arrival, as columns.

Makes a prompt's tokens only when asked for them: an hour of a chat service is 145 million prompt tokens, and its
columns are 6 MB.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged.errors import InvalidConfig
from paged.study.traces.applied import Applied
from paged.study.traces.columns import check_arrivals, check_columns, scaled_lengths, whole_numbers
from paged.study.traces.content import UNSHARED, content_ids, contents_apart, output_content_ids, segment_tokens
from paged.study.traces.limits import at_least, between, generators, not_negative, positive
from paged.study.traces.segments import cut, picked

NOT_DECLARED = 0
"""In `max_tokens`: the request did not say how many output tokens it wants at most."""

RESAMPLED_BLOCKS = 20
"""Blocks of `resampled`: enough of them that resamples differ, each long enough for bursts and for most turns of a conversation."""

DECLARED_CAP = 1024
"""What `declared` assumes where a request says nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests 0 to n−1, sorted by arrival. Raises InvalidConfig, naming request, value and limit, for columns that are no trace.

    arrival_s       float64 [n]    seconds after the first request, never falling; the first is 0
    output_tokens   int64 [n]      tokens that the service generated, at least 1: exact, and unknown to a scheduler
    segment_starts  int64 [n + 1]  request i's prompt is segments segment_starts[i] to segment_starts[i + 1] − 1
    segment_ids     int64 [k]      equal where tokens are equal; −1 where no other request has them
    segment_lengths int64 [k]      tokens, at least 1
    max_tokens      int64 [n]      output tokens that the request declared as its most, at least `output_tokens`; 0: it declared none
    priority        int64 [n]      smaller is sooner; 0 where nothing is said
    tenant          str [n]        who sent it; "" where nothing is said
    output_ids      int64 [n]      the output's content, an id as in `segment_ids`: a later prompt may repeat it; −1 where none does
    applied         what was done to the trace since it was read or made up
    note            what it is an excerpt of, and by what that was filtered, for people; "" where nothing is known
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
        check_columns(self)

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
        """A trace of requests that share nothing and declare nothing; arrivals of any starting point, never falling."""
        arrivals = np.asarray(arrival_s, np.float64)
        check_arrivals(arrivals)
        prompts = whole_numbers("prompt_tokens", prompt_tokens)
        num_requests = len(arrivals)
        return cls(
            name=name,
            arrival_s=arrivals - arrivals[:1].sum(),
            output_tokens=whole_numbers("output_tokens", output_tokens),
            segment_starts=np.arange(len(prompts) + 1, dtype=np.int64),
            segment_ids=np.full(len(prompts), UNSHARED, np.int64),
            segment_lengths=prompts,
            max_tokens=np.full(num_requests, NOT_DECLARED, np.int64),
            priority=np.zeros(num_requests, np.int64),
            tenant=np.zeros(num_requests, np.str_),
            output_ids=np.full(num_requests, UNSHARED, np.int64),
            seed=seed,
        )

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def prompt_tokens(self) -> NDArray[np.int64]:
        """Each prompt's length in tokens, int64 [n]."""
        return np.add.reduceat(self.segment_lengths, self.segment_starts[:-1])

    def prompt(self, request: int) -> NDArray[np.int32]:
        """The prompt of one request, int32 [its length], the same at every call."""
        segments = slice(self.segment_starts[request], self.segment_starts[request + 1])
        contents = content_ids(self.segment_ids[segments], request)
        return segment_tokens(contents, self.segment_lengths[segments], self.seed)

    def output(self, request: int) -> NDArray[np.int32]:
        """What a stand-in for the model says to one request, int32 [its length], the same at every call.

        The tokens of the segment with the output's id, so that a later prompt that repeats the output begins as prompt and output did.
        """
        contents = output_content_ids(self.output_ids[request : request + 1], request)
        return segment_tokens(contents, self.output_tokens[request : request + 1], self.seed)

    @property
    def num_left_out(self) -> int:
        """Requests that `fitted` left out because they were longer than the context."""
        return sum(applied.counts.get("rejected", 0) for applied in self.applied)

    def head(self, count: int) -> "Trace":
        """The first `count` requests, or all of them where there are fewer. Raises InvalidConfig below 1."""
        at_least("the number of requests wanted", count, 1)
        count = min(count, len(self))
        return self._picked(np.arange(count), "head", {"requests": count})

    def window(self, start_s: float, stop_s: float = math.inf) -> "Trace":
        """The requests that arrive from `start_s` on and before `stop_s`; the first of them arrives at 0.

        Raises InvalidConfig for times that are negative or no times, for a window that ends before it begins, and where no request arrives.
        """
        not_negative("start_s", start_s)
        between("stop_s", stop_s, 0, math.inf)
        if stop_s <= start_s:
            raise InvalidConfig(f"the window from {start_s:g} s to {stop_s:g} s ends before it begins")
        first, last = np.searchsorted(self.arrival_s, [start_s, stop_s]).tolist()
        if first == last:
            problem = f"no request arrives from {start_s:g} s to {stop_s:g} s; the last one arrives at {self.arrival_s[-1]:g} s"
            raise InvalidConfig(problem)
        return self._picked(np.arange(first, last), "window", {"start_s": start_s, "stop_s": stop_s})

    def halves(self) -> tuple["Trace", "Trace"]:
        """The first and the second half of the requests by arrival: tune on one, report on the other. An odd one is in the second.

        Raises InvalidConfig for a trace of one request.
        """
        middle = at_least("the number of requests to halve", len(self), 2) // 2
        first, second = np.arange(middle), np.arange(middle, len(self))
        return self._picked(first, "half", {"half": 1}), self._picked(second, "half", {"half": 2})

    def dealt(self, replica: int, replicas: int) -> "Trace":
        """What one of several replicas gets when requests are dealt in turn: those numbered replica, replica + replicas, and so on.

        The first of them arrives at 0. Raises InvalidConfig below one replica, for a replica that is not one of 0 to replicas − 1, and
        for more replicas than requests.
        """
        at_least("the number of replicas", replicas, 1, len(self))
        at_least("the replica", replica, 0, replicas - 1)
        return self._picked(
            np.arange(replica, len(self), replicas), "dealt", {"replica": replica, "replicas": replicas}
        )

    def thinned(self, share: float, *, seed: int) -> "Trace":
        """A random part of the requests, each kept with probability `share`: a lower rate, with the bursts where they were.

        With one seed, what a smaller share keeps a larger one keeps, too. Raises InvalidConfig for a share not above 0 or over 1, and
        where no request is left.
        """
        if positive("share", share) > 1:
            raise InvalidConfig(f"share is {share:g}; it must be at most 1 (`superposed` raises the rate)")
        kept = np.flatnonzero(generators(seed, 1)[0].random(len(self)) < share)
        if not len(kept):
            raise InvalidConfig(f"none of {len(self):,} requests is left with a share of {share:g}")
        return self._picked(kept, "thinned", {"share": share, "seed": seed})

    def resampled(self, *, seed: int, blocks: int = RESAMPLED_BLOCKS, requests: int | None = None) -> "Trace":
        """As many requests (or `requests`), drawn with replacement in blocks of neighbours (a circular block bootstrap): another hour of the same service.

        Each of `blocks` equal blocks begins at a random request and keeps the gaps between arrivals, so that bursts and most conversations
        stay as they were; behind the last request comes the first, one mean gap later. What is drawn again shares its contents with what
        is drawn as often, so that no request finds itself in a cache. Raises InvalidConfig below one block or request, and for more shared
        contents than there are ids.
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
        """`count` different requests at random, in their order. Raises InvalidConfig below 1, and for more than there are."""
        at_least("the number of requests wanted", count, 1, len(self))
        chosen = generators(seed, 1)[0].choice(len(self), count, replace=False)
        return self._picked(np.sort(chosen), "sampled", {"requests": count, "seed": seed})

    def scaled(self, *, rate: float = 1.0, prompts: float = 1.0, outputs: float = 1.0) -> "Trace":
        """The same requests, arriving `rate` times as fast (time is stretched), with prompts and outputs so many times as long.

        Every segment is scaled on its own and keeps at least one token, so what was shared stays shared; an output that a later prompt
        repeats is scaled as an output where it is one and as a prompt where it is repeated. Raises InvalidConfig for a scale that is
        not a positive, finite number, or that makes a request longer than MAX_TOKENS.
        """
        for what, scale in (("rate", rate), ("prompts", prompts), ("outputs", outputs)):
            positive(f"the scale of {what}", scale)
        applied: list[tuple[str, dict[str, float | int | str]]] = [("stretched", {"rate": rate})] if rate != 1 else []
        lengths: dict[str, float | int | str] = {
            what: scale for what, scale in (("prompts", prompts), ("outputs", outputs)) if scale != 1
        }
        applied += [("lengths", lengths)] if lengths else []
        is_declared = self.max_tokens != NOT_DECLARED
        with np.errstate(over="ignore"):
            arrival_s = self.arrival_s / rate
        return replace(
            self,
            arrival_s=arrival_s,
            output_tokens=scaled_lengths("outputs", self.output_tokens, outputs),
            segment_lengths=scaled_lengths("prompts", self.segment_lengths, prompts),
            max_tokens=np.where(is_declared, scaled_lengths("max_tokens", self.max_tokens, outputs), NOT_DECLARED),
            applied=self.applied + tuple(Applied(name, by, len(self), len(self)) for name, by in applied),
        )

    def fitted(self, context: int, *, how: Literal["clip", "reject"] = "clip") -> "Trace":
        """Only requests that a context of so many tokens can hold, prompt and output; the last of `applied` says how many were not.

        `clip`: the end of the prompt is cut off until the request fits, but not below half the context; then the end of the output.
        `reject`: the request is left out. A declared maximum is cut to what the prompt leaves in either case. Raises InvalidConfig
        for a context below 2, another `how`, and where no request is left.
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
            applied=(*self.applied, Applied("fitted", arguments, len(self), len(self), {"clipped": num_too_long})),
        )

    def declared(self, context: int, cap: int = DECLARED_CAP) -> "Trace":
        """Every request declares a `max_tokens`: its own, or `cap`, and no more than its prompt leaves of the context.

        `output_tokens` stay beside it, but no output is longer than declared: the last of `applied` says how many were clipped. Raises
        InvalidConfig for a cap or a context below 1, and for a prompt that leaves no room; `fitted` comes first.
        """
        room = at_least("context", context, 1) - self.prompt_tokens
        if (room < 1).any():
            request = int(np.argmax(room < 1))
            length = int(self.prompt_tokens[request])
            problem = (
                f"the prompt of request {request:,} has {length:,} tokens; a context of {context:,} leaves no output"
            )
            raise InvalidConfig(f"{problem}. `fitted({context})` clips or rejects such requests")
        wanted = np.where(self.max_tokens == NOT_DECLARED, at_least("cap", cap, 1), self.max_tokens)
        max_tokens = np.minimum(wanted, room)
        counts = {"clipped": int((self.output_tokens > max_tokens).sum())}
        return replace(
            self,
            output_tokens=np.minimum(self.output_tokens, max_tokens),
            max_tokens=max_tokens,
            applied=(
                *self.applied,
                Applied("declared", {"context": context, "cap": cap}, len(self), len(self), counts),
            ),
        )

    def _picked(
        self,
        requests: NDArray[np.int64],
        name: str,
        arguments: dict[str, Any],
        counts: dict[str, int] | None = None,
        *,
        arrival_s: NDArray[np.float64] | None = None,
    ) -> "Trace":
        """Some requests, of which the first arrives at 0: when they did, or at other times where these are given."""
        starts, segments = picked(self.segment_starts, requests)
        if arrival_s is None:
            arrival_s = self.arrival_s[requests]
        return replace(
            self,
            arrival_s=arrival_s - arrival_s[0],
            output_tokens=self.output_tokens[requests],
            segment_starts=starts,
            segment_ids=self.segment_ids[segments],
            segment_lengths=self.segment_lengths[segments],
            max_tokens=self.max_tokens[requests],
            priority=self.priority[requests],
            tenant=self.tenant[requests],
            output_ids=self.output_ids[requests],
            applied=(*self.applied, Applied(name, arguments, len(self), len(requests), counts or {})),
        )
