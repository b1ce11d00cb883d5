"""Admission that looks ahead: whether the pool suffices at the moment at which those who are in will need most of it.

With remaining outputs r₁ ≥ r₂ ≥ … and the tokens c that they hold, memory peaks at maxᵢ (c₁ + … + cᵢ + i·rᵢ)
(Past-Future, Gong et al., 2025). Does not admit requests.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paged.base.growing import GrowingView

if TYPE_CHECKING:
    from .request import RequestState
    from .state import State, Step

Counts = NDArray[np.int64]

STRIDE = 16
"""Steps after which a request that did not fit is looked at again, though no request ended and none came."""
PATIENCE = 64
"""Of so many rows that run it is waited a step longer when a request ended: a look costs as much as a step of many rows."""
MEMORY = 200_000
"""Computed tokens over which waste is remembered."""
GAIN = 0.1
"""How far one goes above the quantile for each time that the waste is the target over it, and below it where there is none. No sum over
time: what an admission costs shows thousands of tokens later, and a sum would swing."""
RISE = 0.02
"""By how much the quantile itself rises when a request ends that stood still for too long. Those are few and far between, so it is a sum, and a
slow one: it falls with all others by so little that it rests where the target is met (Robbins and Monro's quantile tracking, 1951)."""
ROWS, MIDDLE = 16, 0.25
"""With so many rows the quantile is what was said. Errors of more guesses cancel, and those of fewer do not: with n rows it is √(ROWS ÷ n) times
as far from MIDDLE."""


_RISING = GrowingView(np.arange)


def peak(held: Counts, remaining: Counts) -> int:
    """Tokens in memory at the fullest moment, of sequences that hold so many and go on for so many more, int64 [n] each."""
    # Among equals the last one decides, whichever it is.
    order = remaining.argsort()[::-1]
    rising = remaining[order]
    rising *= _RISING.first(len(held) + 1)[1:]
    rising += np.add.accumulate(held[order])
    return int(np.maximum.reduce(rising))


class Foresight:
    """What a scheduler whose policy looks ahead remembers between steps."""

    def __init__(self, state: State) -> None:
        policy = state.policy
        self._state = state
        self._knows = policy.foresight == "expected"
        self._lengths = state.lengths
        self.quantile = self._base = policy.quantile
        self._next_look = 0
        # What `_those_in` found last, and when.
        self._moment: tuple[int, int, int, int, float] | None = None
        self._in: tuple[Counts, Counts] = (np.empty(0, np.int64), np.empty(0, np.int64))
        self._newcomer = 0
        # Totals at the last finish, and the decaying sums.
        self._seen = (0, 0)
        self._computed = self._wasted = 0.0

    def finished(self, *, pause: int) -> None:
        """A sequence has ended by itself, and stood still for so many steps at the longest because blocks were taken from it: the next ones
        are let in more or less boldly."""
        policy = self._state.policy
        if policy.waste_target is None and policy.stall_target is None:
            return
        stats = self._state.stats
        was_computed, was_wasted = self._seen
        computed = stats.computed_tokens
        wasted = stats.recomputed_tokens + 2 * stats.swapped_in_blocks * self._state.manager.block_size
        self._seen = computed, wasted
        if (share := policy.stall_target) is not None:
            self._base = self._within(
                self._base + (RISE if pause > policy.stall_limit else -RISE * share / (1.0 - share))
            )
        if computed != was_computed or wasted != was_wasted:
            # Else another sequence has ended in the same step.
            kept = math.exp((was_computed - computed) / MEMORY)
            self._computed = self._computed * kept + (computed - was_computed)
            self._wasted = self._wasted * kept + (wasted - was_wasted)
        excess = 0.0
        if policy.waste_target is not None:
            excess = self._wasted / max(1.0, self._computed) / policy.waste_target - 1.0
        self.quantile = self._within(self._base + GAIN * excess)

    def _within(self, quantile: float) -> float:
        """As much of it as the policy's range allows."""
        least, most = self._state.policy.quantile_range
        return min(most, max(least, quantile))

    def looks_now(self, step: Step, was_shut: bool) -> bool:
        """Whether to see who fits: something changed since it was found that none does, or that was some steps ago; always where
        nothing else is computed. With many rows one that ended is little room, and is waited for company."""
        # Who asked between two steps asked of another moment.
        self._moment = None
        steps = self._state.stats.steps
        if not step.num_rows or steps >= self._next_look:
            return True
        return not was_shut and steps >= self._next_look - STRIDE + min(
            STRIDE, self._state.running_rows.count() // PATIENCE
        )

    def note_none_fits(self) -> None:
        """It was looked."""
        self._next_look = self._state.stats.steps + STRIDE

    @property
    def steps_left(self) -> int:
        """Steps that may be taken before it is looked again."""
        return max(0, self._next_look - self._state.stats.steps)

    def fits(self, request: RequestState) -> bool:
        """Whether the pool holds a waiting request and all who were admitted at their fullest moment. Alone, and as one of the very first, a
        request that has room is let in."""
        state = self._state
        if not (state.running.num or state.away.num):
            return True
        num_before = self._lengths.num_noted + state.running_rows.count() + state.away.num
        if num_before < min(ROWS, state.policy.known_outputs) and not self._knows:
            return True
        manager, columns = state.manager, state.columns
        size = manager.block_size
        slots = manager.num_blocks * size
        worst = columns.sum_max_total + sum(request.max_total)
        if worst + (columns.num_bound + request.num_live) * size <= slots:
            # Even if all become as long as they may: most need not be looked at any closer where memory is ample.
            return True
        most = self.peak_with(request)
        # What rows share comes on top, so it need not always be counted.
        if most <= slots:
            return True
        # It may share what is promised to one who came in just now.
        manager.growth.draw_promised()
        return most <= self.capacity_with(request)

    def capacity_with(self, request: RequestState) -> int:
        """Tokens for which there are slots; what rows share counts as often as it is shared, since each of them is taken to hold it."""
        state = self._state
        manager = state.manager
        tables = int(manager.rows.num_blocks[self._rows()].sum())
        shared = tables - manager.device.num_used
        if manager.prefix_caching and request.request.reads_cache:
            tokens = next(tokens for tokens in request.tokens if tokens is not None)
            shared += manager.content.held_prefix(tokens, request.root)
        return (manager.num_blocks + shared) * manager.block_size

    def peak_with(self, request: RequestState) -> int:
        """Tokens in memory at the fullest moment, if the waiting request came in now."""
        held, remaining = self._those_in()
        more_held, more_remaining = [], []
        wish, slack = request.request.expected_tokens, self._state.manager.block_size // 2
        for i, tokens in enumerate(request.tokens):
            if tokens is None:
                continue
            known, before = len(tokens), request.prompt_len + request.appended[i]
            left = self._newcomer
            if known > before:
                left = int(self._lengths.remaining(np.array([known - before]), self._quantile_now())[0])
            if self._knows and wish is not None and before + wish > known:
                left = before + wish - known
            more_held.append(known + slack)
            more_remaining.append(max(1, min(left, request.max_total[i] - known)))
        held[-1], remaining[-1] = more_held[0], more_remaining[0]
        if len(more_held) > 1:
            held = np.concatenate([held, more_held[1:]])
            remaining = np.concatenate([remaining, more_remaining[1:]])
        return peak(held, remaining)

    def _those_in(self) -> tuple[Counts, Counts]:
        """Tokens that those who were admitted hold, and for how many more they are taken to go on, int64 [n + 1] each, with a place at the
        end for one who comes. Asked for several candidates in a row, of which none came in, it is the same."""
        state, columns, manager = self._state, self._state.columns, self._state.manager
        moment = manager.batch, state.running.num, state.away.num, len(state.books.bounded), self.quantile
        if moment == self._moment:
            return self._in
        rows = self._rows()
        # The last one is a newcomer, which has written nothing.
        held, written = np.zeros(len(rows) + 1, np.int64), np.zeros(len(rows) + 1, np.int64)
        held[:-1] = known = manager.rows.num_tokens[rows]
        np.subtract(known, columns.prompt_total[rows], out=written[:-1])
        remaining = self._lengths.remaining(written, self._quantile_now())
        self._newcomer = remaining.item(-1)
        most = columns.max_total[rows]
        most -= known
        theirs = remaining[:-1]
        if self._knows:
            expected = columns.expected_total[rows]
            theirs[:] = np.where(expected > known, expected - known, theirs)
        np.minimum(theirs, most, out=theirs)
        np.maximum(theirs, 1, out=theirs)
        for other in state.books.bounded:
            # All that they may need is reserved.
            is_theirs = np.isin(rows, other.live_rows)
            theirs[is_theirs] = most[is_theirs]
        # A last block is half empty in the mean.
        held += manager.block_size // 2
        self._moment, self._in = moment, (held, remaining)
        return self._in

    def _quantile_now(self) -> float:
        """The quantile for as many rows as there are, and careful as long as few outputs have ended."""
        policy, num_noted = self._state.policy, self._lengths.num_noted
        quantile = self._within(MIDDLE + (self.quantile - MIDDLE) * self._deviation())
        if num_noted >= policy.known_outputs:
            return quantile
        most = policy.quantile_range[1]
        return most - (most - quantile) * num_noted / policy.known_outputs

    def spread(self) -> float:
        """What is kept free of the watermark: the share by which errors of so many guesses cancel."""
        return min(1.0, self._deviation())

    def _deviation(self) -> float:
        """Of a guess for each row that is in, how far their mean is off, beside that of ROWS of them."""
        state = self._state
        return math.sqrt(ROWS / max(1, state.running_rows.count() + state.away.num))

    def _rows(self) -> Counts:
        state = self._state
        running = state.running_rows.array(state.running)
        if not state.away.num:
            return running
        return np.concatenate([running, np.array([row for other in state.away for row in other.live_rows], np.int64)])
