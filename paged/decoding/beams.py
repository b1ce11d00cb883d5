"""Beam search: the likeliest continuations of several sequences at once, of which the best go on.

    beams        a −1.0 ─┬─ x −1.2        the likeliest of all that may come next: a x, b y, a z, …
                 b −1.1 ─┼─ y −1.3        one that ends is kept as a hypothesis; of the others the best go on as beams
                         └─ z −1.9

The rules, those of ends and of scores among them, are those of transformers' `generate` with `num_beams`. Knows log-probabilities, and tokens by
beam. Does not know who computes them, nor where a beam's memory is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

EarlyStopping = bool | Literal["never"]
Candidates = tuple[Sequence[int], Sequence[float]]
"""Tokens that may come next, and their log-probabilities."""


class Hypothesis(NamedTuple):
    """An answer: its tokens, the sum of their log-probabilities, and that over its length to the power of the length penalty."""

    tokens: tuple[int, ...]
    logprob: float
    score: float


class Beam(NamedTuple):
    """A sequence that goes on."""

    tokens: tuple[int, ...]
    logprob: float


class BeamSearch:
    """The search of one request. It begins with one beam without tokens.

    width           beams that go on, and hypotheses that are kept
    stops           token ids that end a beam
    max_tokens      tokens of a beam at most
    length_penalty  above 0 favours long answers, below 0 short ones
    early_stopping  True: it is over with `width` hypotheses; False: when no beam is likely to become a better one; "never": when none can
    """

    def __init__(
        self,
        width: int,
        *,
        stops: Collection[int],
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        self.beams = [Beam((), 0.0)]
        # The best first.
        self.hypotheses: list[Hypothesis] = []
        self.is_over = False
        self._width, self._stops, self._max_tokens = width, frozenset(stops), max_tokens
        self._penalty, self._early = length_penalty, early_stopping
        self._length = 0

    @property
    def num_candidates(self) -> int:
        """So many of each beam's next tokens have to be known, the likeliest: enough go on even if all that can end do."""
        return max(2, 1 + len(self._stops)) * self._width

    def advance(self, candidates: Sequence[Candidates]) -> list[tuple[int, int]]:
        """What may follow each beam, which are in this order. Returns the next ones, each as the place of the beam that it continues and
        its token; none when the search is over."""
        ranked = sorted(
            (-(beam.logprob + value), place, token)
            for place, (beam, (tokens, values)) in enumerate(zip(self.beams, candidates, strict=True))
            for token, value in zip(tokens, values, strict=True)
        )[: self.num_candidates]
        self._length += 1
        is_last = self._length >= self._max_tokens
        is_full = len(self.hypotheses) == self._width and self._early is True
        going = []
        for rank, (minus, place, token) in enumerate(ranked):
            ends = is_last or token in self._stops
            if not ends:
                going.append((place, token, -minus))
            elif rank < self._width and not is_full:
                # The others are there so that enough go on.
                score = -minus / self._length**self._penalty
                self.hypotheses.append(Hypothesis((*self.beams[place].tokens, token), -minus, score))
        self.hypotheses = sorted(self.hypotheses, key=lambda each: -each.score)[: self._width]
        going = going[: self._width]
        if not going or self._is_decided(going[0][2]):
            self.is_over, self.beams = True, []
            return []
        self.beams = [Beam((*self.beams[place].tokens, token), value) for place, token, value in going]
        return [(place, token) for place, token, _ in going]

    def _is_decided(self, best: float) -> bool:
        """Whether no beam is going to replace a hypothesis, the best one having this log-probability."""
        if len(self.hypotheses) < self._width:
            return False
        if self._early is True:
            return True
        reaches = self._early == "never" and self._penalty > 0
        length = self._max_tokens if reaches else self._length
        return best / length**self._penalty <= self.hypotheses[-1].score
