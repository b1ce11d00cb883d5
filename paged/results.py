"""What an engine hands back: new tokens and text as they come, and a whole completion at the end.

Knows figures and units. Does not know how they came about.
"""

from __future__ import annotations

import msgspec

from paged.scheduler import RequestUsage


class Timings(msgspec.Struct, frozen=True):
    """When a request's tokens came. Seconds, from its arrival; None where there was no such token or gap.

    ttft_s         until its first token
    itl_s          mean gap between two tokens
    longest_gap_s  the longest one
    e2e_s          until its end
    tokens_per_s   output tokens over e2e_s
    """

    ttft_s: float | None
    itl_s: float | None
    longest_gap_s: float | None
    e2e_s: float
    tokens_per_s: float


class EngineOutput(msgspec.Struct, frozen=True):
    """News of one request.

    token_ids      new ones
    text           new text; together with what came before it is whole characters
    finish_reason  "stop", "length", "abort", "rejected" or "error"; None while it goes on
    error          why, for "error"
    usage, timings with the last one
    """

    id: str
    token_ids: list[int]
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    usage: RequestUsage | None = None
    timings: Timings | None = None


class Completion(msgspec.Struct, frozen=True):
    """A finished request. `prompt` is its text where it was given as text."""

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    usage: RequestUsage | None
    timings: Timings
    error: str | None = None


class EngineStats(msgspec.Struct, frozen=True):
    """Totals of an engine. Seconds of its clock.

    steps           forward passes that came to an end; failed_steps those that were cancelled for want of memory, or of logits
                    that are numbers
    output_tokens   sampled
    host_s          in schedule, inputs, sampling, update and text; model_s in moves and forward passes
    """

    steps: int
    failed_steps: int
    output_tokens: int
    host_s: float
    model_s: float
