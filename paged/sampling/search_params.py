"""The parameters of searches: for the likeliest answers, or for an answer without repetition."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import msgspec

from paged.base.arguments import is_integer, is_real
from paged.base.words import shown
from paged.errors import InvalidSampling
from paged.sampling.checks import check_flag, check_max_tokens, check_stop_ids, must_be


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """A beam search for the likeliest answers to one prompt. Raises InvalidSampling for invalid values. Names are vLLM's, or else transformers'.

    beam_width      beams: sequences that go on at a time
    n               answers, the best first
    max_tokens      most tokens of an answer
    length_penalty  an answer's log-probability is divided by its length to this power: above 0 favours long answers, below 0 short ones
    early_stopping  True: the search ends with beam_width answers; False: when no beam is likely to become a better one; "never": when no beam can
    num_beam_groups, diversity_penalty
                    groups of beams, and how much the log-probability of a token falls for each time that earlier groups chose it in the same step
    stop_token_ids  ids that end a sequence, besides EOS
    ignore_eos      EOS does not end a sequence
    """

    beam_width: int
    n: int = 1
    max_tokens: int = 64
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def num_branches(self) -> int:
        """Most sequences at a time."""
        return self.beam_width

    def __post_init__(self) -> None:
        self.check(None)

    def check(self, vocabulary_size: int | None) -> None:
        """Raise InvalidSampling unless all fields are in range. Stop ids have to be below `vocabulary_size` (None: int32 is the limit)."""
        width, n, penalty, early = self.beam_width, self.n, self.length_penalty, self.early_stopping
        groups, diversity = self.num_beam_groups, self.diversity_penalty
        must_be(is_integer(width) and width >= 2, "beam_width", "an integer of at least 2", width)
        must_be(is_integer(n) and 1 <= n <= width, "n", f"an integer from 1 to beam_width ({width})", n)
        check_max_tokens(self.max_tokens)
        must_be(is_real(penalty) and -10 <= penalty <= 10, "length_penalty", "a number from -10 to 10", penalty)
        must_be(isinstance(early, bool) or early == "never", "early_stopping", 'True, False or "never"', early)
        divides = is_integer(groups) and groups >= 1 and width % groups == 0
        must_be(divides, "num_beam_groups", f"an integer that divides beam_width ({width})", groups)
        is_penalty = is_real(diversity) and 0 <= diversity < math.inf
        must_be(is_penalty, "diversity_penalty", "a finite number of at least 0", diversity)
        if (groups > 1) != (diversity > 0):
            raise InvalidSampling(
                f"num_beam_groups {groups} and diversity_penalty {shown(diversity)}: groups above 1 and a penalty above 0 go together."
            )
        check_stop_ids(self.stop_token_ids, 2**31 if vocabulary_size is None else vocabulary_size)
        check_flag("ignore_eos", self.ignore_eos)


class ContrastiveSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """A contrastive search for one answer without repetition. Raises InvalidSampling for invalid values. Names are transformers'.

    penalty_alpha   weight of the likeness to earlier tokens, above 0 and at most 1; the probability of a token has the rest of the weight
    top_k           likeliest tokens that are computed before one of them is chosen
    max_tokens      most tokens of the answer
    stop_token_ids  ids that end it, besides EOS
    ignore_eos      EOS does not end it
    """

    penalty_alpha: float = 0.6
    top_k: int = 4
    max_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: ClassVar[int] = 1

    @property
    def num_branches(self) -> int:
        """Most sequences at a time."""
        return self.top_k

    def __post_init__(self) -> None:
        self.check(None)

    def check(self, vocabulary_size: int | None) -> None:
        """Raise InvalidSampling unless all fields are in range. Token ids have to be below `vocabulary_size` (None: int32 is the limit)."""
        limit = 2**31 if vocabulary_size is None else vocabulary_size
        alpha, top_k = self.penalty_alpha, self.top_k
        must_be(is_real(alpha) and 0 < alpha <= 1, "penalty_alpha", "a number above 0 and at most 1", alpha)
        must_be(is_integer(top_k) and 2 <= top_k <= limit, "top_k", f"an integer from 2 to {limit:,}", top_k)
        check_max_tokens(self.max_tokens)
        check_stop_ids(self.stop_token_ids, limit)
        check_flag("ignore_eos", self.ignore_eos)


SearchParams = BeamSearchParams | ContrastiveSearchParams
"""The parameters of any search."""
