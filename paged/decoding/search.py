"""The protocol of a search on forks: from what may follow each branch it chooses which branches go on, each with its next token.

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
    """What may follow a branch: tokens and their natural log-probabilities, the likeliest first; and, if the search wants them, hidden
    states, float32 [hidden size], by position, of the tokens computed since the last step of the search."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    states: Mapping[int, Tensor]


class Hypothesis(NamedTuple):
    """An answer: its tokens, the sum of their log-probabilities, and the score that ranks it (None: no ranks)."""

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
        """Whether no branch goes on."""

    @property
    def num_candidates(self) -> int:
        """How many of the likeliest next tokens of each branch it needs."""

    @property
    def wants_states(self) -> bool:
        """Whether it needs hidden states, of the prompt's tokens, too."""

    def advance(self, ahead: Sequence[Ahead]) -> list[tuple[int, int]]:
        """Take what may follow each branch, in order. Return the next branches, each as the place of the branch that it continues and its
        token; [] when the search is over."""
