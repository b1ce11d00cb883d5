"""The sampling parameters of a request: how its tokens are chosen, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from paged.base.arguments import is_integer, is_real
from paged.engine.door import shown
from paged.errors import InvalidSampling
from paged.sampling.structured import StructuredOutputsParams


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters of one request. Raises InvalidSampling for values that no model can take; `check` tests them for one model.

    Names and meanings are vLLM's, and transformers' for typical_p and no_repeat_ngram_size; temperature 0 is the default.

    n               answers to one prompt
    best_of         so many are made, and the n likeliest by the sum of their log-probabilities come back (None: n)
    temperature     logits are divided by it; 0 is greedy: the likeliest token, the lowest id of equals
    top_k           only so many of the likeliest tokens can be drawn (None: all)
    top_p           of these, only the fewest likeliest whose probability reaches this share (None: all)
    min_p           of these, only those at least so many times as likely as the likeliest (None: all)
    typical_p       of these, only the fewest whose probability reaches this share, nearest to the expected information first (None: all)
    seed            the same seed draws the same tokens from the same logits (None: one is made of the request's id)
    repetition_penalty
                    logits of tokens in prompt or output are divided by it, or multiplied where they are negative (1: off)
    presence_penalty, frequency_penalty
                    taken from the logits of tokens in the output, once, and as often as they came (0: off)
    no_repeat_ngram_size
                    no so many tokens in a row come twice, prompt included (0: off)
    logit_bias      by token id, added to its logit
    allowed_token_ids
                    no other can be chosen (None: any)
    bad_words       text, or token ids, that is not said
    max_tokens      output tokens at most
    min_tokens      neither EOS, stop ids nor stop strings come before so many output tokens
    stop            strings that end a sequence; its text ends before them
    stop_token_ids  ids that end a sequence, besides EOS
    include_stop_str_in_output
                    its text ends behind them
    ignore_eos      EOS does not end a sequence
    logprobs        log-probabilities of the output's tokens, and of so many of the likeliest beside each (None: none)
    prompt_logprobs the same of the prompt's tokens, which are then computed and not found in the cache (None: none)
    echo            the text begins with the prompt's
    structured_outputs
                    the form that the answer has to have (None: any); it ends when it has it, by EOS
    logits_processors
                    called with token ids, int64 [1, tokens], and logits, float32 [1, vocabulary], as transformers' are
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    max_tokens: int = 64
    min_tokens: int = 0
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    logits_processors: tuple[Callable[[Any, Any], Any], ...] = ()

    def __post_init__(self) -> None:
        self.check(None)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def num_sequences(self) -> int:
        """Answers that are made."""
        return self.n if self.best_of is None else self.best_of

    @property
    def reads_logprobs(self) -> bool:
        """Whether log-probabilities of the outputs are read."""
        return self.logprobs is not None or self.num_sequences > self.n

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, one or several."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before a draw."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.no_repeat_ngram_size
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.min_tokens
            or self.structured_outputs is not None
            or self.logits_processors
        )

    def check(self, vocabulary_size: int | None) -> None:
        """Raise InvalidSampling unless all fields are in range and agree with each other.

        Token ids have to be below `vocabulary_size` (None: int32 is the limit).
        """
        if vocabulary_size is not None and not (is_integer(vocabulary_size) and vocabulary_size >= 1):
            raise InvalidSampling(
                f"vocabulary_size has to be an integer of at least 1, or None; got {shown(vocabulary_size)}."
            )
        limit = 2**31 if vocabulary_size is None else vocabulary_size
        _check_draw(self)
        _check_lengths(self)
        _check_penalties(self)
        _check_counts(self, limit)
        _check_tokens(self, limit)
        _check_words(self, limit)


def _check_draw(params: SamplingParams) -> None:
    if not (is_real(params.temperature) and 0 <= params.temperature < math.inf):
        raise InvalidSampling(f"temperature has to be a finite number of at least 0; got {shown(params.temperature)}.")
    if params.top_k is not None and not (is_integer(params.top_k) and 1 <= params.top_k < 2**31):
        raise InvalidSampling(f"top_k has to be an integer from 1 to 2^31 - 1, or None; got {shown(params.top_k)}.")
    for name in ("top_p", "min_p", "typical_p"):
        share = getattr(params, name)
        if share is not None and not (is_real(share) and 0 < share <= 1):
            raise InvalidSampling(f"{name} has to be a number above 0 and at most 1, or None; got {shown(share)}.")
    if params.seed is not None:
        check_seed("seed", params.seed)
    if params.is_greedy:
        for name in ("top_k", "top_p", "min_p", "typical_p", "seed"):
            if (value := getattr(params, name)) is not None:
                raise InvalidSampling(
                    f"{name} {shown(value)} goes with a temperature above 0; temperature 0 is greedy and draws nothing."
                )


def check_seed(name: str, seed: Any) -> None:
    """Raise InvalidSampling, calling the seed `name`, unless it is an unsigned integer of 64 bits."""
    if not (is_integer(seed) and 0 <= seed < 2**64):
        raise InvalidSampling(f"{name} has to be an integer from 0 to 2^64 - 1; got {shown(seed)}.")


def check_max_tokens(max_tokens: Any) -> None:
    """Raise InvalidSampling unless it is an integer of at least 1."""
    if not (is_integer(max_tokens) and max_tokens >= 1):
        raise InvalidSampling(f"max_tokens has to be an integer of at least 1; got {shown(max_tokens)}.")


def _check_lengths(params: SamplingParams) -> None:
    check_max_tokens(params.max_tokens)
    if not (is_integer(params.min_tokens) and 0 <= params.min_tokens <= params.max_tokens):
        raise InvalidSampling(
            f"min_tokens has to be an integer from 0 to max_tokens ({params.max_tokens}); got {shown(params.min_tokens)}."
        )


def _check_penalties(params: SamplingParams) -> None:
    penalty = params.repetition_penalty
    # Beyond these a float32 logit may overflow.
    if not (is_real(penalty) and 1e-6 <= penalty <= 1e6):
        raise InvalidSampling(f"repetition_penalty has to be a number from 1e-6 to 1e6; got {shown(penalty)}.")
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(params, name)
        if not (is_real(penalty) and -2 <= penalty <= 2):
            raise InvalidSampling(f"{name} has to be a number from -2 to 2; got {shown(penalty)}.")
    if not (is_integer(params.no_repeat_ngram_size) and 0 <= params.no_repeat_ngram_size < 2**31):
        raise InvalidSampling(
            f"no_repeat_ngram_size has to be an integer of at least 0; got {shown(params.no_repeat_ngram_size)}."
        )


def _check_counts(params: SamplingParams, limit: int) -> None:
    if not (is_integer(params.n) and params.n >= 1):
        raise InvalidSampling(f"n has to be an integer of at least 1; got {shown(params.n)}.")
    if params.best_of is not None and not (is_integer(params.best_of) and params.best_of >= params.n):
        raise InvalidSampling(
            f"best_of has to be an integer of at least n ({params.n}), or None; got {shown(params.best_of)}."
        )
    if params.is_greedy and params.num_sequences > 1:
        name = "n" if params.best_of is None else "best_of"
        raise InvalidSampling(
            f"{name} {params.num_sequences} goes with a temperature above 0; temperature 0 gives the same answer each time."
        )
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and not (is_integer(count) and 0 <= count <= limit):
            raise InvalidSampling(f"{name} has to be an integer from 0 to {limit:,}, or None; got {shown(count)}.")


def check_stop_ids(stop_token_ids: Any, limit: int) -> None:
    """Raise InvalidSampling unless they are a tuple of token ids below the limit."""
    if not isinstance(stop_token_ids, (tuple, list)):
        raise InvalidSampling(f"stop_token_ids has to be a tuple of token ids; got {shown(stop_token_ids)}.")
    _check_ids("stop_token_ids", stop_token_ids, limit)


def check_flag(name: str, value: Any) -> None:
    """Raise InvalidSampling, calling it `name`, unless it is True or False."""
    if not isinstance(value, bool):
        raise InvalidSampling(f"{name} has to be True or False; got {shown(value)}.")


def _check_tokens(params: SamplingParams, limit: int) -> None:
    check_stop_ids(params.stop_token_ids, limit)
    if (allowed := params.allowed_token_ids) is not None:
        if not isinstance(allowed, (tuple, list)) or not allowed:
            raise InvalidSampling(f"allowed_token_ids has to be a tuple of token ids, or None; got {shown(allowed)}.")
        _check_ids("allowed_token_ids", allowed, limit)
    if (bias := params.logit_bias) is not None:
        if not isinstance(bias, Mapping):
            raise InvalidSampling(
                f"logit_bias has to be a mapping from token ids to numbers, or None; got {shown(bias)}."
            )
        _check_ids("keys of logit_bias", bias, limit)
        for value in bias.values():
            if not (is_real(value) and -100 <= value <= 100):
                raise InvalidSampling(f"logit_bias has to be from -100 to 100; got {shown(value)}.")


def _check_ids(name: str, tokens: Iterable[Any], limit: int) -> None:
    for token in tokens:
        if not (is_integer(token) and 0 <= token < limit):
            raise InvalidSampling(f"{name} have to be token ids from 0 to {limit - 1:,}; got {shown(token)}.")


def _check_words(params: SamplingParams, limit: int) -> None:
    for name in ("ignore_eos", "include_stop_str_in_output", "echo"):
        check_flag(name, getattr(params, name))
    if not isinstance(params.stop, (str, tuple, list)):
        raise InvalidSampling(f"stop has to be a string, or a tuple of strings; got {shown(params.stop)}.")
    for string in params.stop_strings:
        if not isinstance(string, str) or not string:
            raise InvalidSampling(f"stop has to be of strings that are not empty; got {shown(string)}.")
    if not isinstance(params.bad_words, (tuple, list)):
        raise InvalidSampling(f"bad_words has to be a tuple of strings or of token ids; got {shown(params.bad_words)}.")
    for word in params.bad_words:
        if not isinstance(word, (str, tuple, list)) or not word:
            raise InvalidSampling(f"bad_words have to be strings or token ids, not empty; got {shown(word)}.")
        if not isinstance(word, str):
            _check_ids("bad_words", word, limit)
    form = params.structured_outputs
    if form is not None and not isinstance(form, StructuredOutputsParams):
        raise InvalidSampling(f"structured_outputs has to be StructuredOutputsParams, or None; got {shown(form)}.")
    if form is not None and params.ignore_eos:
        raise InvalidSampling("structured_outputs does not go with ignore_eos: EOS ends an answer that has its form.")
    if not isinstance(params.logits_processors, (tuple, list)) or not all(map(callable, params.logits_processors)):
        raise InvalidSampling(
            f"logits_processors has to be a tuple of callables; got {shown(params.logits_processors)}."
        )
