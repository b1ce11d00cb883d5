"""Diverse beam search: groups of beams, each of which avoids what those before it say in the same step.

    group 0    a x, a y          its likeliest
    group 1    b x − 2 λ …       x was said twice, so it is less likely here by twice the penalty, and the sum keeps that

By A. Vijayakumar et al., "Diverse beam search", 2016. The rules are those of transformers' `generate` with
`num_beam_groups`, which its core had up to version 4: a group ends by itself, and what its beams had become by then
is no answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from paged.decoding.beams import Beam, EarlyStopping, Ends, best_of, candidates, num_looked_at
from paged.decoding.search import Ahead, Hypothesis


class _Group:
    """Beams that go on, hypotheses, the best first, and whether it has ended."""

    def __init__(self) -> None:
        self.beams = [Beam((), 0.0)]
        self.hypotheses: list[Hypothesis] = []
        self.is_over = False


class BeamGroups:
    """The search of one request; `width` beams in so many groups, which take turns in each step."""

    wants_states = False

    def __init__(
        self,
        width: int,
        num_groups: int,
        diversity_penalty: float,
        *,
        stops: Collection[int],
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        self._groups = [_Group() for _ in range(num_groups)]
        self._width, self._size, self._diversity = width, width // num_groups, diversity_penalty
        self._ends = Ends(frozenset(stops), max_tokens, length_penalty, early_stopping)
        self._length = 0

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """Of all groups."""
        return best_of([each for group in self._groups for each in group.hypotheses], self._width)

    @property
    def is_over(self) -> bool:
        """Whether all groups are."""
        return all(group.is_over for group in self._groups)

    @property
    def num_candidates(self) -> int:
        """As Search: as many of them fall behind as other groups have beams, at most."""
        return num_looked_at(self._ends.stops, self._size) + self._width - self._size

    def advance(self, ahead: Sequence[Ahead]) -> list[tuple[int, int]]:
        """As Search. The branches of groups that go on follow each other."""
        is_first = not self._length
        self._length += 1
        said: Counter[int] = Counter()
        following, begin = [], 0
        for group in self._groups:
            if group.is_over:
                continue
            its = ahead[begin : begin + len(group.beams)]
            going = self._step(group, [self._penalised(each, said) for each in its])
            # Also those of a group that has ended with this step.
            said.update(token for _, token in going)
            if not group.is_over:
                following += [(begin + place, token) for place, token in going]
            # All begin with the same one.
            begin += 0 if is_first else len(its)
        return [] if self.is_over else following

    def _penalised(self, ahead: Ahead, said: Counter[int]) -> Ahead:
        values = [value - self._diversity * said[token] for token, value in zip(ahead.ids, ahead.logprobs, strict=True)]
        return ahead._replace(logprobs=values)

    def _step(self, group: _Group, ahead: Sequence[Ahead]) -> list[tuple[int, int]]:
        """One group goes on, or ends; returns what are, or would be, its next beams."""
        ends = self._ends
        ranked = candidates(group.beams, ahead)[: num_looked_at(ends.stops, self._size)]
        going = [(place, token, -minus) for minus, place, token in ranked if token not in ends.stops][: self._size]
        ended = [
            ends.hypothesis((*group.beams[place].tokens, token), -minus)
            for minus, place, token in ranked[: self._size]
            if token in ends.stops
        ]
        group.hypotheses = best_of([*group.hypotheses, *ended], self._size)
        group.is_over = ends.are_decided(group.hypotheses, self._size, -ranked[0][0], self._length)
        group.beams = [Beam((*group.beams[place].tokens, token), value) for place, token, value in going]
        if self._length >= ends.max_tokens and not group.is_over:
            open_ones = [ends.hypothesis(beam.tokens, beam.logprob) for beam in group.beams]
            group.hypotheses, group.is_over = best_of([*group.hypotheses, *open_ones], self._size), True
        return [(place, token) for place, token, _ in going]
