"""What a request says about a beam search. Knows numbers and their limits. Does not know how a search goes."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from paged.block_manager.arguments import is_integer, is_real
from paged.door import shown
from paged.sampling.params import InvalidSampling, check_flag, check_max_tokens, check_stop_ids


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """The likeliest answers of one request. Raises InvalidSampling for what makes no sense. Names are vLLM's, and transformers' for the rest.

    beam_width      sequences that go on at a time
    n               answers, the best first
    max_tokens      tokens of an answer at most
    length_penalty  an answer's log-probability is divided by its length to this power: above 0 favours long ones, below 0 short ones
    early_stopping  True: it is over with beam_width answers; False: when no sequence is likely to become a better one; "never": when none can
    stop_token_ids  ids that end a sequence, besides EOS
    ignore_eos      EOS does not end a sequence
    """

    beam_width: int
    n: int = 1
    max_tokens: int = 64
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self.check(None)

    def check(self, vocabulary_size: int | None) -> None:
        """Raise InvalidSampling unless all fields are in range. Stop ids have to be below `vocabulary_size` (None: int32 is the limit)."""
        if not (is_integer(self.beam_width) and self.beam_width >= 2):
            raise InvalidSampling(f"beam_width has to be an integer of at least 2; got {shown(self.beam_width)}.")
        if not (is_integer(self.n) and 1 <= self.n <= self.beam_width):
            raise InvalidSampling(
                f"n has to be an integer from 1 to beam_width ({self.beam_width}); got {shown(self.n)}."
            )
        check_max_tokens(self.max_tokens)
        if not (is_real(self.length_penalty) and math.isfinite(self.length_penalty)):
            raise InvalidSampling(f"length_penalty has to be a finite number; got {shown(self.length_penalty)}.")
        if self.early_stopping is not True and self.early_stopping is not False and self.early_stopping != "never":
            raise InvalidSampling(f'early_stopping has to be True, False or "never"; got {shown(self.early_stopping)}.')
        check_stop_ids(self.stop_token_ids, 2**31 if vocabulary_size is None else vocabulary_size)
        check_flag("ignore_eos", self.ignore_eos)
