"""What a request says about how its tokens are chosen, and when to stop.

Knows numbers and their limits. Does not know logits, tensors or tokenizers.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from paged.block_manager import PagedError
from paged.block_manager.arguments import is_integer, is_real
from paged.door import shown


class InvalidSampling(PagedError, ValueError):
    """A sampling parameter outside its range, or two that contradict each other."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one request are chosen. Raises InvalidSampling for what no model could take; `check` says whether one can.

    temperature     logits are divided by it; 0 is greedy: the likeliest token, the lowest id of equals
    top_k           only so many of the likeliest tokens can be drawn (None: all)
    top_p           of these, only the fewest likeliest whose probability reaches this share (None: all)
    seed            the same seed draws the same tokens from the same logits (None: one is made of the request's id)
    max_tokens      output tokens at most
    min_tokens      EOS and stop ids do not count before so many output tokens
    stop_token_ids  ids that end a sequence, besides EOS
    ignore_eos      EOS does not end a sequence
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int = 64
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self.check(None)

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    def check(self, vocabulary_size: int | None) -> None:
        """Raise InvalidSampling unless all fields are in range and agree with each other.

        Stop ids have to be below `vocabulary_size` (None: int32 is the limit).
        """
        _check_draw(self)
        _check_lengths(self)
        _check_stops(self, vocabulary_size)


def _check_draw(params: SamplingParams) -> None:
    if not (is_real(params.temperature) and 0 <= params.temperature < math.inf):
        raise InvalidSampling(f"temperature has to be a finite number of at least 0; got {shown(params.temperature)}.")
    if params.top_k is not None and not (is_integer(params.top_k) and 1 <= params.top_k < 2**31):
        raise InvalidSampling(f"top_k has to be an integer from 1 to 2^31 - 1, or None; got {shown(params.top_k)}.")
    if params.top_p is not None and not (is_real(params.top_p) and 0 < params.top_p <= 1):
        raise InvalidSampling(f"top_p has to be a number above 0 and at most 1, or None; got {shown(params.top_p)}.")
    if params.seed is not None:
        check_seed("seed", params.seed)
    if params.is_greedy:
        for name in ("top_k", "top_p", "seed"):
            if (value := getattr(params, name)) is not None:
                raise InvalidSampling(
                    f"{name} {shown(value)} goes with a temperature above 0; temperature 0 is greedy and draws nothing."
                )


def check_seed(name: str, seed: Any) -> None:
    """Raise InvalidSampling, calling the seed `name`, unless it is an unsigned integer of 64 bits."""
    if not (is_integer(seed) and 0 <= seed < 2**64):
        raise InvalidSampling(f"{name} has to be an integer from 0 to 2^64 - 1; got {shown(seed)}.")


def _check_lengths(params: SamplingParams) -> None:
    if not (is_integer(params.max_tokens) and params.max_tokens >= 1):
        raise InvalidSampling(f"max_tokens has to be an integer of at least 1; got {shown(params.max_tokens)}.")
    if not (is_integer(params.min_tokens) and 0 <= params.min_tokens <= params.max_tokens):
        raise InvalidSampling(
            f"min_tokens has to be an integer from 0 to max_tokens ({params.max_tokens}); got {shown(params.min_tokens)}."
        )


def _check_stops(params: SamplingParams, vocabulary_size: int | None) -> None:
    if vocabulary_size is not None and not (is_integer(vocabulary_size) and vocabulary_size >= 1):
        raise InvalidSampling(
            f"vocabulary_size has to be an integer of at least 1, or None; got {shown(vocabulary_size)}."
        )
    if not isinstance(params.stop_token_ids, (tuple, list)):
        raise InvalidSampling(f"stop_token_ids has to be a tuple of token ids; got {shown(params.stop_token_ids)}.")
    limit = 2**31 if vocabulary_size is None else vocabulary_size
    for token in params.stop_token_ids:
        if not (is_integer(token) and 0 <= token < limit):
            raise InvalidSampling(f"stop_token_ids have to be token ids from 0 to {limit - 1:,}; got {shown(token)}.")
    if not isinstance(params.ignore_eos, bool):
        raise InvalidSampling(f"ignore_eos has to be True or False; got {shown(params.ignore_eos)}.")
