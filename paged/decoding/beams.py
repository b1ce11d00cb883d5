"""Beam search: the likeliest continuations of several sequences at once, of which the best go on.

    beams        a −1.0 ─┬─ x −1.2        the likeliest of all that may come next: a x, b y, a z, …
                 b −1.1 ─┼─ y −1.3        one that ends is kept as a hypothesis; of the others the best go on as beams
                         └─ z −1.9

The rules, those of ends and of scores among them, are those of transformers' `generate` with `num_beams`.

Diverse beam search: groups of beams, each of which avoids what those before it say in the same step.

    group 0    a x, a y          its likeliest
    group 1    b x − 2 λ …       x was said twice, so it is less likely here by twice the penalty, and the sum keeps that

By A. Vijayakumar et al., "Diverse beam search", 2016. The rules are those of transformers' `generate` with
`num_beam_groups`, which its core had up to version 4: a group ends by itself, and what its beams had become by then
is no answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from paged.decoding.search import Ahead, Hypothesis

EarlyStopping = bool | Literal["never"]


class Beam(NamedTuple):
    """A sequence that goes on."""

    tokens: tuple[int, ...]
    logprob: float


class Ends(NamedTuple):
    """When sequences and searches end, and how an answer is scored: its log-probability over its length to the power of the penalty.

    stops           token ids that end a beam
    max_tokens      tokens of a beam at most
    length_penalty  above 0 favours long answers, below 0 short ones
    early_stopping  True: it is over with all hypotheses; False: when no beam is likely to become a better one; "never": when none can
    """

    stops: frozenset[int]
    max_tokens: int
    length_penalty: float
    early_stopping: EarlyStopping

    def hypothesis(self, tokens: tuple[int, ...], logprob: float) -> Hypothesis:
        """Return an answer with its score."""
        return Hypothesis(tokens, logprob, logprob / len(tokens) ** self.length_penalty)

    def are_decided(self, hypotheses: Sequence[Hypothesis], width: int, best: float, length: int) -> bool:
        """Whether none of these hypotheses, the best first, will be replaced; `best` and `length` are of the best beam that goes on."""
        if len(hypotheses) < width:
            return False
        if self.early_stopping is True:
            return True
        reaches = self.early_stopping == "never" and self.length_penalty > 0
        worst = hypotheses[-1].score
        assert worst is not None, "beams have scores"
        return best / (self.max_tokens if reaches else length) ** self.length_penalty <= worst


def candidates(beams: Sequence[Beam], ahead: Sequence[Ahead]) -> list[tuple[float, int, int]]:
    """Return what may follow beams, the likeliest first: log-probability of the whole, negated; place of the beam; token."""
    return sorted(
        (-(beam.logprob + value), place, token)
        for place, (beam, its) in enumerate(zip(beams, ahead, strict=True))
        for token, value in zip(its.ids, its.logprobs, strict=True)
    )


def num_looked_at(stops: Collection[int], width: int) -> int:
    """Return how many next tokens have `width` among them that go on, however many of them are stops."""
    return max(2, 1 + len(stops)) * width


def best_of(hypotheses: Sequence[Hypothesis], most: int) -> list[Hypothesis]:
    """Return the best `most` hypotheses, the best first."""
    return sorted(hypotheses, key=lambda each: -(each.score or 0.0))[:most]


class BeamSearch:
    """The search of one request; `width` beams go on, and hypotheses are kept. It begins with one beam without tokens."""

    wants_states = False

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
        self._width = width
        self._ends = Ends(frozenset(stops), max_tokens, length_penalty, early_stopping)
        self._length = 0

    @property
    def num_candidates(self) -> int:
        """As Search."""
        return num_looked_at(self._ends.stops, self._width)

    def advance(self, ahead: Sequence[Ahead]) -> list[tuple[int, int]]:
        """As Search."""
        ends = self._ends
        self._length += 1
        is_last = self._length >= ends.max_tokens
        is_full = len(self.hypotheses) == self._width and ends.early_stopping is True
        going = []
        for rank, (minus, place, token) in enumerate(candidates(self.beams, ahead)[: self.num_candidates]):
            if not is_last and token not in ends.stops:
                going.append((place, token, -minus))
            elif rank < self._width and not is_full:
                # Tokens of lower ranks are looked at only so that enough go on.
                self.hypotheses.append(ends.hypothesis((*self.beams[place].tokens, token), -minus))
        self.hypotheses = best_of(self.hypotheses, self._width)
        going = going[: self._width]
        if not going or ends.are_decided(self.hypotheses, self._width, going[0][2], self._length):
            self.is_over, self.beams = True, []
            return []
        self.beams = [Beam((*self.beams[place].tokens, token), value) for place, token, value in going]
        return [(place, token) for place, token, _ in going]


class _Group:
    """Beams that go on, hypotheses, the best first, and whether it has ended."""

    def __init__(self) -> None:
        self.beams = [Beam((), 0.0)]
        self.hypotheses: list[Hypothesis] = []
        self.is_over = False


class BeamGroups:
    """The search of one request; `width` beams in `num_groups` groups, which choose one after the other in each step."""

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
        """Whether all groups have ended."""
        return all(group.is_over for group in self._groups)

    @property
    def num_candidates(self) -> int:
        """As Search. The penalty puts back as many tokens as other groups have beams, at most."""
        return num_looked_at(self._ends.stops, self._size) + self._width - self._size

    def advance(self, ahead: Sequence[Ahead]) -> list[tuple[int, int]]:
        """As Search. The branches of groups that go on follow each other."""
        is_first = not self._length
        self._length += 1
        chosen: Counter[int] = Counter()
        following, begin = [], 0
        for group in self._groups:
            if group.is_over:
                continue
            its = ahead[begin : begin + len(group.beams)]
            going = self._step(group, [self._penalised(each, chosen) for each in its])
            # A group that ends in this step counts, too.
            chosen.update(token for _, token in going)
            if not group.is_over:
                following += [(begin + place, token) for place, token in going]
            # All groups begin with the same branch.
            begin += 0 if is_first else len(its)
        return [] if self.is_over else following

    def _penalised(self, ahead: Ahead, chosen: Counter[int]) -> Ahead:
        values = [
            value - self._diversity * chosen[token] for token, value in zip(ahead.ids, ahead.logprobs, strict=True)
        ]
        return ahead._replace(logprobs=values)

    def _step(self, group: _Group, ahead: Sequence[Ahead]) -> list[tuple[int, int]]:
        """Advance a group, or end it. Return its next beams, as Search; those that it would have had, if it has ended."""
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
