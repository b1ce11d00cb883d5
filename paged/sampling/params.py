"""The sampling parameters of a request: how its tokens are chosen, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from paged.base.arguments import is_integer, is_real
from paged.base.words import shown
from paged.errors import InvalidSampling
from paged.sampling.checks import check_flag, check_ids, check_max_tokens, check_seed, check_stop_ids, must_be
from paged.sampling.structured import StructuredOutputsParams


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters of one request. Raises InvalidSampling for values that no model can take; `check` tests them for one model.

    Names and meanings are vLLM's, and transformers' for typical_p and no_repeat_ngram_size; temperature 0 is the default.

    n               answers to one prompt
    best_of         answers that are generated; the n likeliest, by the sum of their log-probabilities, are returned (None: n)
    temperature     logits are divided by it; 0 is greedy: the likeliest token, the lowest id of equal ones
    top_k           only this many of the likeliest tokens can be drawn (None: all)
    top_p           of these, only the fewest likeliest whose probabilities add up to this share (None: all)
    min_p           of these, only tokens with at least this share of the likeliest token's probability (None: all)
    typical_p       of these, only the fewest whose probabilities add up to this share, nearest to the expected information first (None: all)
    seed            the same seed draws the same tokens from the same logits (None: it is made from the request's id)
    repetition_penalty
                    logits of tokens in prompt or output are divided by it, or multiplied if they are negative (1: off)
    presence_penalty, frequency_penalty
                    subtracted from the logit of each token in the output, once, or as often as it came (0: off)
    no_repeat_ngram_size
                    no sequence of this many tokens comes twice, prompt included (0: off)
    logit_bias      by token id, added to its logit
    allowed_token_ids
                    only these can be chosen (None: all)
    bad_words       texts, or token ids, that the output does not contain
    max_tokens      most output tokens
    min_tokens      output tokens before which EOS, stop ids and stop strings do not come
    stop            strings that end a sequence; its text ends before them
    stop_token_ids  ids that end a sequence, besides EOS
    include_stop_str_in_output
                    its text ends after the stop string
    ignore_eos      EOS does not end a sequence
    logprobs        return log-probabilities of output tokens, and of this many of the likeliest at each place (None: none)
    prompt_logprobs the same for prompt tokens, which are then computed instead of found in the cache (None: none)
    echo            the text begins with that of the prompt
    structured_outputs
                    the form of the answer (None: any); the answer ends, by EOS, when it has the form
    logits_processors
                    functions of token ids, int64 [1, tokens], and logits, float32 [1, vocabulary], as in transformers
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
        """Whether the likeliest token is always chosen."""
        return self.temperature == 0

    @property
    def num_sequences(self) -> int:
        """Answers that are generated."""
        return self.n if self.best_of is None else self.best_of

    @property
    def reads_logprobs(self) -> bool:
        """Whether log-probabilities of the outputs are read."""
        return self.logprobs is not None or self.num_sequences > self.n

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
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
        if vocabulary_size is not None:
            is_size = is_integer(vocabulary_size) and vocabulary_size >= 1
            must_be(is_size, "vocabulary_size", "an integer of at least 1, or None", vocabulary_size)
        limit = 2**31 if vocabulary_size is None else vocabulary_size
        _check_draw(self)
        _check_lengths_and_penalties(self)
        _check_counts(self, limit)
        _check_tokens(self, limit)
        _check_words(self, limit)


def _check_draw(params: SamplingParams) -> None:
    temperature, top_k = params.temperature, params.top_k
    must_be(
        is_real(temperature) and 0 <= temperature < math.inf,
        "temperature",
        "a finite number of at least 0",
        temperature,
    )
    if top_k is not None:
        is_count = is_integer(top_k) and 1 <= top_k < 2**31
        must_be(is_count, "top_k", "an integer from 1 to 2^31 - 1, or None", top_k)
    for name in ("top_p", "min_p", "typical_p"):
        if (share := getattr(params, name)) is not None:
            must_be(is_real(share) and 0 < share <= 1, name, "a number above 0 and at most 1, or None", share)
    if params.seed is not None:
        check_seed("seed", params.seed)
    if params.is_greedy:
        for name in ("top_k", "top_p", "min_p", "typical_p", "seed"):
            if (value := getattr(params, name)) is not None:
                raise InvalidSampling(
                    f"{name} {shown(value)} goes with a temperature above 0; temperature 0 is greedy and draws nothing."
                )


def _check_lengths_and_penalties(params: SamplingParams) -> None:
    most, least, penalty, size = (
        params.max_tokens, params.min_tokens, params.repetition_penalty, params.no_repeat_ngram_size,
    )  # fmt: skip
    check_max_tokens(most)
    is_least = is_integer(least) and 0 <= least <= most
    must_be(is_least, "min_tokens", f"an integer from 0 to max_tokens ({most})", least)
    # Beyond these a float32 logit may overflow.
    must_be(is_real(penalty) and 1e-6 <= penalty <= 1e6, "repetition_penalty", "a number from 1e-6 to 1e6", penalty)
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(params, name)
        must_be(is_real(penalty) and -2 <= penalty <= 2, name, "a number from -2 to 2", penalty)
    must_be(is_integer(size) and 0 <= size < 2**31, "no_repeat_ngram_size", "an integer of at least 0", size)


def _check_counts(params: SamplingParams, limit: int) -> None:
    n, best = params.n, params.best_of
    must_be(is_integer(n) and n >= 1, "n", "an integer of at least 1", n)
    if best is not None:
        must_be(is_integer(best) and best >= n, "best_of", f"an integer of at least n ({n}), or None", best)
    if params.is_greedy and params.num_sequences > 1:
        name = "n" if best is None else "best_of"
        raise InvalidSampling(
            f"{name} {params.num_sequences} goes with a temperature above 0; temperature 0 gives the same answer each time."
        )
    for name in ("logprobs", "prompt_logprobs"):
        if (count := getattr(params, name)) is not None:
            must_be(is_integer(count) and 0 <= count <= limit, name, f"an integer from 0 to {limit:,}, or None", count)


def _check_tokens(params: SamplingParams, limit: int) -> None:
    check_stop_ids(params.stop_token_ids, limit)
    if (allowed := params.allowed_token_ids) is not None:
        is_some = isinstance(allowed, (tuple, list)) and bool(allowed)
        must_be(is_some, "allowed_token_ids", "a tuple of token ids, or None", allowed)
        check_ids("allowed_token_ids", allowed, limit)
    if (bias := params.logit_bias) is not None:
        must_be(isinstance(bias, Mapping), "logit_bias", "a mapping from token ids to numbers, or None", bias)
        check_ids("keys of logit_bias", bias, limit)
        for value in bias.values():
            must_be(is_real(value) and -100 <= value <= 100, "logit_bias", "from -100 to 100", value)


def _check_words(params: SamplingParams, limit: int) -> None:
    for name in ("ignore_eos", "include_stop_str_in_output", "echo"):
        check_flag(name, getattr(params, name))
    must_be(isinstance(params.stop, (str, tuple, list)), "stop", "a string, or a tuple of strings", params.stop)
    for string in params.stop_strings:
        must_be(isinstance(string, str) and bool(string), "stop", "of strings that are not empty", string)
    words = params.bad_words
    must_be(isinstance(words, (tuple, list)), "bad_words", "a tuple of strings or of token ids", words)
    for word in words:
        if not isinstance(word, (str, tuple, list)) or not word:
            raise InvalidSampling(f"bad_words have to be strings or token ids, not empty; got {shown(word)}.")
        if not isinstance(word, str):
            check_ids("bad_words", word, limit)
    form, processors = params.structured_outputs, params.logits_processors
    if form is not None:
        is_form = isinstance(form, StructuredOutputsParams)
        must_be(is_form, "structured_outputs", "StructuredOutputsParams, or None", form)
        if params.ignore_eos:
            raise InvalidSampling(
                "structured_outputs does not go with ignore_eos: EOS ends an answer that has its form."
            )
    are_called = isinstance(processors, (tuple, list)) and all(map(callable, processors))
    must_be(are_called, "logits_processors", "a tuple of callables", processors)
