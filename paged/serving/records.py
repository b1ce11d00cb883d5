"""The record of one request over HTTP, from its arrival to its end: for metrics, for the log and for traces.

It holds no word of a prompt or an answer, unless the log is to have them. Metrics, log and traces use these names:

arrived      submitted        begun             first               last     ended
   |             |── queue ─────|──── prefill ────|───── decode ──────|        |
   |────────── waited ──────────|──────────── inference ──────────────|        |
   |──────────────────── ttft ────────────────────|                            |
   |─────────────────────────────────── e2e ───────────────────────────────────|
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RequestRecord:
    """One call of a client, which may have several prompts. Times are of the monotonic clock; None: it did not get there.

    endpoint          the path
    arrived           the head of the request had come
    submitted         the engine got its requests
    begun             the engine admitted the first of its prompts
    first, last       its first and latest token went to the socket
    ended             all was written, or the client has gone
    status            of the HTTP answer; 499: the client went first
    finish_reason     of its first answer: "stop", "length", "abort", "error", "deadline", "queue_timeout"; "": it was refused
    error             the code of the error body; None: there was none
    prompt_tokens     of all prompts; cached_tokens of them came from the prefix cache
    answers           of all prompts; longest_answer: tokens of the longest
    longest_pause_s   longest gap between two tokens
    prompt, answer    the body and the text, for a log with prompts; else None
    """

    id: str
    endpoint: str
    arrived: float
    tenant: str | None = None
    streams: bool = False
    n: int = 1
    max_tokens: int = 0
    submitted: float | None = None
    begun: float | None = None
    first: float | None = None
    last: float | None = None
    ended: float | None = None
    status: int = 0
    finish_reason: str = ""
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    answers: int = 1
    longest_answer: int = 0
    recomputed_tokens: int = 0
    swapped_blocks: int = 0
    preemptions: int = 0
    longest_pause_s: float = 0.0
    prompt: str | None = None
    answer: str | None = None


_SPANS = {
    "waited": ("arrived", "begun"),
    "queue": ("submitted", "begun"),
    "prefill": ("begun", "first"),
    "decode": ("first", "last"),
    "inference": ("begun", "last"),
    "ttft": ("arrived", "first"),
    "e2e": ("arrived", "ended"),
}


def durations(record: RequestRecord) -> dict[str, float | None]:
    """Return the durations of a record by name, seconds, at least 0; None: the request did not get there."""
    moments = {name: (getattr(record, start), getattr(record, end)) for name, (start, end) in _SPANS.items()}
    return {name: None if None in between else max(0.0, between[1] - between[0]) for name, between in moments.items()}
