"""Contrastive search: of the likeliest next tokens, the one whose hidden state is least like any before it goes on.

    branches    … a x      p 0.6, like an earlier state by 0.9     0.4 · 0.6 − 0.6 · 0.9 = −0.30
                … a y      p 0.2, like an earlier state by 0.3     0.4 · 0.2 − 0.6 · 0.3 = −0.10    goes on: its likeliest are the next ones

By Y. Su et al., "A contrastive framework for neural text generation", 2022. Each candidate is computed before one is
chosen, as a branch of its own. The rules are those of transformers' `generate` with `penalty_alpha` and `top_k`,
which its core had up to version 4.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from paged.decoding.search import Ahead, Hypothesis

if TYPE_CHECKING:
    from torch import Tensor


class ContrastiveSearch:
    """The search of one request, from a prompt of so many tokens.

    penalty_alpha  the weight of likeness, from 0, where the likeliest token goes on, to 1
    top_k          candidates for each token
    """

    wants_states = True

    def __init__(
        self, penalty_alpha: float, top_k: int, *, stops: Collection[int], max_tokens: int, num_prompt: int
    ) -> None:
        self.is_over = False
        self._alpha, self._top_k = penalty_alpha, top_k
        self._stops, self._max_tokens, self._num_prompt = frozenset(stops), max_tokens, num_prompt
        self._tokens: tuple[int, ...] = ()
        self._logprob = 0.0
        # Directions of the hidden states so far, and the candidates: tokens, how likely each is.
        self._directions: list[Tensor] = []
        self._candidates: list[tuple[int, float]] = []

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """The answer so far."""
        return [Hypothesis(self._tokens, self._logprob, None)] if self._tokens else []

    @property
    def num_candidates(self) -> int:
        """As Search."""
        return self._top_k

    def advance(self, ahead: Sequence[Ahead]) -> list[tuple[int, int]]:
        """As Search. The first branch is the prompt, later ones are candidates for one token."""
        place = 0
        if not self._directions:
            self._directions = [_direction(ahead[0].states, position) for position in range(self._num_prompt)]
        else:
            place, direction = self._best(ahead)
            token, logprob = self._candidates[place]
            self._directions.append(direction)
            self._tokens, self._logprob = (*self._tokens, token), self._logprob + logprob
            if token in self._stops or len(self._tokens) >= self._max_tokens:
                self.is_over = True
                return []
        its = ahead[place]
        self._candidates = list(zip(its.ids, its.logprobs, strict=True))[: self._top_k]
        return [(place, token) for token, _ in self._candidates]

    def _best(self, ahead: Sequence[Ahead]) -> tuple[int, Tensor]:
        """Return the place of the candidate that goes on, and its direction."""
        import torch

        position = self._num_prompt + len(self._tokens)
        directions = torch.stack([_direction(each.states, position) for each in ahead])
        # Each number is a product of two vectors of one length, so its sum has one order.
        likeness = (directions @ torch.stack(self._directions).T).amax(1).tolist()
        scores = [
            (1 - self._alpha) * math.exp(logprob) - self._alpha * like
            for (_, logprob), like in zip(self._candidates, likeness, strict=True)
        ]
        place = max(range(len(scores)), key=lambda each: (scores[each], -each))
        return place, directions[place]


def _direction(states: Mapping[int, Tensor], position: int) -> Tensor:
    state = states[position]
    return state / state.norm()
