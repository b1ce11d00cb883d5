"""Guesses of output lengths, and foresight: whether the pool holds all admitted requests at their peak. With outputs to
come r₁ ≥ r₂ ≥ … and held tokens cᵢ, the peak is maxᵢ (c₁ + … + cᵢ + i·rᵢ) (Past-Future, Gong et al., 2025)."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

from paged.base.growing import rising

from .batch import SchedulerStats
from .policies import Policy
from .request import RequestState
from .reservations import ROWS, Books
from .rows import Counts

WINDOW = 1000  # ended outputs that are remembered
# Arrays, because numpy would convert a number in each operation.
_ONE = np.array(1, np.int64)
_ANY_ROW = np.zeros(1, np.int64)
STRIDE = 16  # steps after which admission looks again for requests that fit, even if none ended and none came
PATIENCE = 64  # after a change, a look waits a step for each so many running rows: it costs as much as their step
MEMORY = 200_000  # computed tokens in which the weight of old waste falls to 1/e
GAIN = 0.1
"""Rise of the quantile where the waste is twice its target, and its fall where there is none. The waste is not summed
over time: it follows thousands of tokens after the admission that causes it, so a sum would swing."""
RISE = 0.02
"""Rise of the quantile's base when a sequence ends that stood still for too long. Every other end lowers the base, by
so little that it stays where the target is met (Robbins and Monro's quantile tracking, 1951)."""
MIDDLE = 0.25
"""With n rows, the quantile's distance from this is √(ROWS ÷ n) times the stated one."""


def peak(held: Counts, remaining: Counts) -> int:
    """Return the most tokens that are in memory at one time. `held`, `remaining`: of each sequence, int64 [n]."""
    # The order of equals has no effect: the last of them has the largest sum.
    order = remaining.argsort()[::-1]
    most = remaining[order]
    most *= rising(len(held) + 1)[1:]
    most += np.add.accumulate(held[order])
    # `max` costs more.
    return most.item(most.argmax())


def outputs_left(guessed: Counts, expected: Counts | None, known: Counts, most: Counts) -> Counts:
    """Return the outputs to come of each sequence, int64 [n]: up to `expected` tokens in all if these are more than its
    `known` ones, else as many as `guessed`. At least one, and at most up to `most` tokens in all."""
    if expected is not None:
        guessed = np.where(expected > known, expected - known, guessed)
    left: Counts = np.maximum(_ONE, np.minimum(guessed, most - known))
    return left


class OutputLengths:
    """The last WINDOW output lengths, and one at the cap, for lengths that were never seen. The guess for a sequence
    that has written g tokens is a length above g; the share `quantile` of all lengths above g is at most as long."""

    def __init__(self, cap: int, assumed: int = 0) -> None:
        """`cap`: most tokens of an output. `assumed`: so many log-uniform lengths stand in for the first outputs."""
        # How many lengths were noted, and the sum of the last WINDOW of them.
        self.num_noted = self._sum = 0
        # 0 stands for no length: it is below any other.
        self._ring = [0] * WINDOW
        assumed = min(assumed, WINDOW)
        self._ring[:assumed] = [round(cap ** ((place + 0.5) / assumed)) for place in range(assumed)]
        # The cap, the ring's lengths and a 0, negated: they rise, so the longest comes first. An array takes inserts.
        self._rising = array("q", sorted(-length for length in (cap, *self._ring, 0)))

    def note(self, length: int) -> None:
        place, rising = self.num_noted % WINDOW, self._rising
        before, self._ring[place] = self._ring[place], length
        self._sum += length - (before if self.num_noted >= WINDOW else 0)
        rising.pop(bisect_left(rising, -before))
        insort(rising, -length)
        self.num_noted += 1

    @property
    def mean(self) -> float | None:
        """Mean length of the last ended outputs, without assumed ones; None before the first has ended."""
        return self._sum / min(self.num_noted, WINDOW) if self.num_noted else None

    def mean_remaining(self, written: Counts, going: Counts) -> NDArray[np.float64]:
        """Return the mean of tokens to come after `written` ones, float64 [n], without assumed lengths; NaN before any
        output ended. Sequences with `going` tokens, int64 [k], go on and count as longer, because short outputs end
        first (Kaplan and Meier, 1958). Beyond the longest ended output, outputs end at a constant rate."""
        ended = np.sort(np.array(self._ring[: min(self.num_noted, WINDOW)], np.int64))
        if not len(ended):
            return np.full(len(written), np.nan)
        # How many outputs reached the length of each ended one: one of them ended there.
        reached = np.arange(len(ended), 0, -1) + len(going) - np.sort(going).searchsorted(ended)
        lasting = np.concatenate([[1.0], np.multiply.accumulate(1.0 - 1.0 / reached)])
        tail = (ended.sum() + going.sum()) / len(ended) * lasting[-1]
        # Tokens after each length, a mean over all outputs that ever began. No length is after the longest one.
        widths = np.diff(ended) * lasting[1:-1]
        after = np.concatenate([widths[::-1].cumsum()[::-1], [0.0, 0.0]]) + tail
        place = ended.searchsorted(written, "right")
        to_next = np.maximum(np.append(ended, 0)[place] - written, 0)
        with np.errstate(invalid="ignore"):
            means: NDArray[np.float64] = (after[place] + to_next * lasting[place]) / lasting[place]
        return means

    def remaining(self, written: Counts, quantile: float) -> Counts:
        """Return a guess of the tokens to come after `written` ones, int64 [n]; below 1: an immediate end."""
        unwritten = -written
        rising = np.frombuffer(self._rising, np.int64)
        # At most the share 1 - quantile of the lengths above `written` are longer than the chosen one.
        longer = rising.searchsorted(unwritten)
        unwritten -= rising[((1.0 - quantile) * longer).astype(np.int64)]
        return unwritten


class Foresight:
    def __init__(self, policy: Policy, books: Books, lengths: OutputLengths, stats: SchedulerStats) -> None:
        self._policy, self._books, self._lengths, self._stats = policy, books, lengths, stats
        self._knows = policy.foresight == "expected"
        # The quantile if the waste is at its target; and how far the waste is above that, as a share of the target.
        self._base, self._excess = policy.quantile, 0.0
        # The first step that looks again for requests that fit.
        self.next_look = 0
        # The last result of `_those_in`, by numbers of requests that run, are away and are bounded.
        self._in: dict[tuple[int, int, int], tuple[Counts, Counts, float, int]] = {}
        self._seen = (0, 0)  # total of computed tokens, and of wasted ones, when the last sequence ended
        self._computed = self._wasted = 0.0  # such tokens, older ones with less weight
        # So many requests enter unchecked: without expected_tokens, nothing is known of the first outputs.
        self._num_unseen = 0 if self._knows else min(ROWS, policy.known_outputs)
        manager = books.manager
        # On average, half of a row's last block is empty.
        self._slack = np.array(manager.block_size // 2, np.int64)
        self._full_pages = max(manager.layout.full_pages, 1)
        # Slots that the full group would have if all pages were its own.
        self._num_slots = manager.capacity * manager.block_size // self._full_pages

    def finished(self, *, pause: int) -> None:
        """Adapt the quantile: a sequence has ended. `pause`: its longest stop for lack of blocks, in steps."""
        policy, stats, (was_computed, was_wasted) = self._policy, self._stats, self._seen
        if (share := policy.stall_target) is not None:
            change = RISE if pause > policy.stall_limit else -RISE * share / (1.0 - share)
            self._base = self._within(self._base + change)
        swapped = stats.swapped_in_blocks * self._books.manager.block_size // self._full_pages
        computed, wasted = stats.computed_tokens, stats.recomputed_tokens + 2 * swapped
        # Older waste loses weight.
        kept = math.exp((was_computed - computed) / MEMORY)
        self._computed = self._computed * kept + (computed - was_computed)
        self._wasted = self._wasted * kept + (wasted - was_wasted)
        self._seen = computed, wasted
        if (target := policy.waste_target) is not None:
            self._excess = self._wasted / max(1.0, self._computed) / target - 1.0

    @property
    def quantile(self) -> float:
        """The policy's quantile, adapted to waste and pauses so far."""
        return self._within(self._base + GAIN * self._excess)

    def _within(self, quantile: float) -> float:
        least, most = self._policy.quantile_range
        return min(most, max(least, quantile))

    def looks_now(self, num_placed: int, was_shut: bool) -> bool:
        """Forget old counts. Return whether to look who fits: no row placed, a change came, or STRIDE steps passed."""
        self.forget()
        steps, num_running = self._stats.steps, self._books.queues.running.num_rows
        if not num_placed or steps >= self.next_look:
            return True
        return not was_shut and steps >= self.next_look - STRIDE + num_running // PATIENCE

    def forget(self) -> None:
        """Forget what was counted of admitted sequences: they may know other tokens now."""
        self._in.clear()

    def note_none_fits(self) -> None:
        self.next_look = self._stats.steps + STRIDE

    def fits(self, request: RequestState) -> bool:
        """Whether the pool holds the request and all admitted ones at their peak; True for the first few requests."""
        manager, columns, num_in = self._books.manager, self._books.columns, self._books.queues.num_in
        if not num_in or self._lengths.num_noted + num_in < self._num_unseen:
            return True
        slots = self._num_slots
        worst = columns.sum_max_total + sum(request.max_total)
        if manager.layout.sides:
            longest = np.concatenate([columns.max_total[self._books.rows_in()], request.max_total])
            worst = int(self._as_slots(longest, 0 * longest)[0].sum())
        if worst + (columns.num_bound + request.num_live) * manager.block_size <= slots:
            # All fit at their full length: the usual case where memory is ample.
            return True
        most = self.peak_with(request)
        # Shared blocks can only add slots, so they are counted only if needed.
        if most <= slots:
            return True
        # The request may share blocks promised in this step.
        manager.growth.draw_promised()
        return most <= self.capacity_with(request)

    def capacity_with(self, request: RequestState) -> int:
        """Return the slots of the pool for tokens. A shared block counts once for each row that shares it."""
        manager = self._books.manager
        if manager.layout.sides:
            return self._num_slots
        tables = int(manager.rows.num_blocks[self._books.rows_in()].sum())
        shared = tables - manager.device.num_used
        if request.request.reads_cache:
            shared += manager.content.held_prefix(request.first_tokens, request.root)
        return (manager.capacity + shared) * manager.block_size

    def peak_with(self, request: RequestState) -> int:
        """Return the peak, in slots, if the waiting request is admitted now."""
        held, remaining, quantile, guess_of_new = self._those_in()
        wish, slack, more_held, more_left = request.request.expected_tokens, self._books.manager.block_size // 2, [], []
        for i, tokens in enumerate(request.tokens):
            if tokens is None:
                continue
            written, left = len(tokens) - request.prompt_len - request.appended[i], guess_of_new
            if self._knows and wish is not None and wish > written:
                left = wish - written
            elif written:
                left = self._lengths.remaining(np.array([written]), quantile).item()
            more_held.append(len(tokens) + slack)
            more_left.append(max(1, min(left, request.max_total[i] - len(tokens))))
        if self._books.manager.layout.sides:
            slots = self._as_slots(np.array(more_held), np.array(more_left))
            more_held, more_left = slots[0].tolist(), slots[1].tolist()
        held[-1], remaining[-1] = more_held[0], more_left[0]
        if len(more_held) > 1:
            held, remaining = np.concatenate([held, more_held[1:]]), np.concatenate([remaining, more_left[1:]])
        return peak(held, remaining)

    def _those_in(self) -> tuple[Counts, Counts, float, int]:
        """Return the held slots, and those to come, of admitted sequences, int64 [n + 1] each, with a last place for a
        newcomer; the quantile of the guesses; and the guess for a sequence without outputs."""
        books, columns, tables = self._books, self._books.columns, self._books.manager.rows
        moment = books.queues.running.num, books.queues.away.num, len(books.bounded)
        if moment not in self._in:
            # Any row can stand in the newcomer's place.
            rows = np.concatenate([books.rows_in(), _ANY_ROW])
            known, most, quantile = tables.num_tokens[rows], columns.max_total[rows], self._quantile_now()
            written = known - columns.prompt_total[rows]
            written[-1] = 0
            expected = columns.expected_total[rows] if self._knows else None
            if books.bounded:
                # For bounded requests, everything up to the full length is reserved.
                is_theirs = np.isin(rows, [row for other in books.bounded for row in other.live_rows])
                expected = np.where(is_theirs, most, 0 if expected is None else expected)
            guessed = self._lengths.remaining(written, quantile)
            slots = self._as_slots(known + self._slack, outputs_left(guessed, expected, known, most))
            self._in = {moment: (*slots, quantile, guessed.item(-1))}
        return self._in[moment]

    def _as_slots(self, held: Counts, remaining: Counts) -> tuple[Counts, Counts]:
        """Return these tokens, int64 [n] each, as slots. What sides hold in the end counts as held from the start."""
        layout = self._books.manager.layout
        if not layout.sides:
            return held, remaining
        beside = layout.side_slots(held + remaining)
        return (held + beside, remaining) if layout.full_pages else (beside, 0 * remaining)

    def _quantile_now(self) -> float:
        """Return the adapted quantile for the number of admitted rows; higher while few outputs have ended."""
        policy, careful = self._policy, math.sqrt(ROWS / max(1, self._books.queues.num_in))
        quantile, most = self._within(MIDDLE + (self.quantile - MIDDLE) * careful), policy.quantile_range[1]
        num, enough = self._lengths.num_noted, policy.known_outputs
        return quantile if num >= enough else most - (most - quantile) * num / enough
