"""The protocol of a search on forks: it gets what may follow each of its branches, and says which go on, each with its next token.

branches           given for each            the next ones
| ... a |   ──>   x −0.2, y −1.6, …   ──>   | ... a x |
| ... b |         z −0.9, …                 | ... a y |      b does not go on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Ahead(NamedTuple):
    """What may follow a branch: tokens and their natural log-probabilities, the likeliest first; and hidden states after its tokens, float32
    [hidden size] by position, all that are known, where the search wants them."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    states: Mapping[int, Tensor]


class Hypothesis(NamedTuple):
    """An answer: its tokens, the sum of their log-probabilities, and what it is ranked by."""

    tokens: tuple[int, ...]
    logprob: float
    score: float | None


class Search(Protocol):
    """One request's search. It begins with one branch, which has no tokens."""

    @property
    def hypotheses(self) -> Sequence[Hypothesis]:
        """Answers so far, the best first."""

    @property
    def is_over(self) -> bool:
        """Whether nothing goes on."""

    @property
    def num_candidates(self) -> int:
        """So many tokens have to be known that may follow each branch, the likeliest."""

    @property
    def wants_states(self) -> bool:
        """Whether it gets hidden states, of the prompt's tokens, too."""

    def advance(self, ahead: Sequence[Ahead]) -> list[tuple[int, int]]:
        """What may follow each branch, which are in this order. Returns the next ones, each as the place of the branch that it continues and
        its token; none when the search is over."""
