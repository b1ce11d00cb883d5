"""The outputs of an engine: new tokens and text as they come, and a whole completion at the end."""

from __future__ import annotations

import msgspec

from paged.scheduler import RequestUsage


class Timings(msgspec.Struct, frozen=True):
    """The times of a request's tokens, in seconds; None if there was no such token or gap.

    ttft_s         from arrival to the first token
    itl_s          mean gap between two tokens of a sequence
    longest_gap_s  the longest gap
    e2e_s          from arrival to the end
    tokens_per_s   output tokens over e2e_s
    """

    ttft_s: float | None
    itl_s: float | None
    longest_gap_s: float | None
    e2e_s: float
    tokens_per_s: float


class Logprob(msgspec.Struct, frozen=True):
    """The likelihood of a token: the natural logarithm of its probability by the model's own logits, its rank (1 is the
    likeliest), and its text, None without a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None = None


Alternatives = dict[int, Logprob]
"""The token at one place and the likeliest ones, by token id."""


class EngineOutput(msgspec.Struct, frozen=True):
    """News of one sequence of a request.

    token_ids      new tokens
    text           new text; with all text before, it is whole characters and ends before a stop string
    finish_reason  "stop", "length", "abort", "rejected" or "error"; None while the sequence goes on
    error          the cause of "error"
    usage, timings with the request's last output
    sequence       the number of the answer, from 0 on
    finished       all sequences of the request have ended
    logprobs       of each new token, if the request asked for them
    stop_reason    the stop string or token id that ended the sequence, None for EOS
    """

    id: str
    token_ids: list[int]
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    usage: RequestUsage | None = None
    timings: Timings | None = None
    sequence: int = 0
    finished: bool = False
    logprobs: list[Alternatives] | None = None
    stop_reason: int | str | None = None


class CompletionOutput(msgspec.Struct, frozen=True):
    """One answer. `index` is its number among the request's sequences; `score` is a search's rank of it."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[Alternatives] | None = None
    score: float | None = None


class Completion(msgspec.Struct, frozen=True):
    """A finished request. `prompt` is its text, if it was given as text. `outputs` are its n answers, in order, or the
    likeliest first if more were made; `text` and others are the first one's. The prompt's first token has no
    Logprob."""

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: RequestUsage | None
    timings: Timings
    error: str | None = None
    prompt_logprobs: list[Alternatives | None] | None = None

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first answer's tokens."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first answer ended."""
        return self.outputs[0].finish_reason


class EngineStats(msgspec.Struct, frozen=True):
    """Totals of an engine; seconds of its clock.

    steps           forward passes that ended; failed_steps: those cancelled, for lack of memory or logits without
                    numbers
    output_tokens   sampled tokens
    drafted_tokens  guessed tokens; accepted_tokens: those that were right
    host_s          in schedule, inputs, sampling, update and text; model_s: in moves and forward passes, at the same
                    time if one step ahead
    """

    steps: int
    failed_steps: int
    output_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    host_s: float
    model_s: float
