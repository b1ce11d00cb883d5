"""What an engine keeps of a request that has not ended, and how each row is sampled.

Knows text, times and sampling values. Does not know blocks, batches or the model.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paged.results import Completion, EngineOutput, Timings
from paged.sampling.params import SamplingParams
from paged.scheduler import RequestUsage
from paged.text import TextStream

_NO_LIMIT = 2**62


class LiveRequest:
    """A request's prompt, its tokens and text so far, and when they came."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        seed: int,
        arrival: float,
        tokenizer: Any,
    ) -> None:
        self.id = request_id
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.params = params
        self.seed = seed
        self.arrival = arrival
        self.token_ids: list[int] = []
        self.text = ""
        # Its last output; None while it lives.
        self.last: EngineOutput | None = None
        self._stream = None if tokenizer is None else TextStream(tokenizer, prompt_ids)
        self._first: float | None = None
        self._last: float | None = None
        self._longest_gap = 0.0

    def grown(self, tokens: list[int], now: float) -> EngineOutput:
        """New tokens came at `now`."""
        return EngineOutput(self.id, tokens, self._add(tokens, now))

    def ended(
        self,
        tokens: list[int],
        reason: str,
        now: float,
        *,
        usage: RequestUsage | None = None,
        error: str | None = None,
    ) -> EngineOutput:
        """The last tokens came, or none will. What stops a sequence is a token of it, and no text."""
        text = self._add(tokens, now, num_silent=1 if reason == "stop" else 0)
        if self._stream is not None:
            rest = self._stream.finish()
            self.text += rest
            text += rest
        self.last = EngineOutput(self.id, tokens, text, reason, error, usage, self.timings(now))
        return self.last

    def completion(self) -> Completion:
        """The whole, once it has ended."""
        last = self.last
        assert last is not None, "it has ended"
        assert last.finish_reason is not None, "an end says why"
        assert last.timings is not None, "an end says when"
        return Completion(
            self.id,
            self.prompt,
            self.prompt_ids,
            self.token_ids,
            self.text,
            last.finish_reason,
            last.usage,
            last.timings,
            last.error,
        )

    def timings(self, now: float) -> Timings:
        """Its times if it ended now."""
        count, e2e = len(self.token_ids), now - self.arrival
        gap = longest = None
        if count > 1 and self._first is not None and self._last is not None:
            gap, longest = (self._last - self._first) / (count - 1), self._longest_gap
        return Timings(
            ttft_s=None if self._first is None else self._first - self.arrival,
            itl_s=gap,
            longest_gap_s=longest,
            e2e_s=e2e,
            tokens_per_s=count / e2e if e2e > 0 else 0.0,
        )

    def _add(self, tokens: list[int], now: float, num_silent: int = 0) -> str:
        if not tokens:
            return ""
        if self._last is not None:
            self._longest_gap = max(self._longest_gap, now - self._last)
        if self._first is None:
            self._first = now
        self._last = now
        self.token_ids += tokens
        if self._stream is None:
            return ""
        text = self._stream.push(tokens[: len(tokens) - num_silent])
        self.text += text
        return text


class RowSampling:
    """Sampling values by row, so that a step gathers them instead of asking each request."""

    def __init__(self) -> None:
        self.temperature = np.zeros(0, np.float64)
        self.top_k = np.zeros(0, np.int64)
        self.top_p = np.zeros(0, np.float64)
        self.seed = np.zeros(0, np.uint64)
        self.prompt_len = np.zeros(0, np.int64)

    def set(self, row: int, live: LiveRequest) -> None:
        """The row serves this request from now on."""
        if row >= len(self.temperature):
            for name in ("temperature", "top_k", "top_p", "seed", "prompt_len"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros(row + 1, column.dtype)]))
        params = live.params
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k if params.top_k is not None else _NO_LIMIT
        self.top_p[row] = params.top_p if params.top_p is not None else 1.0
        self.seed[row] = live.seed
        self.prompt_len[row] = len(live.prompt_ids)
