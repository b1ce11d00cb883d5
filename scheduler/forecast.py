"""When each waiting request will be let in, in steps and in computed tokens: the scheduler has no clock.

    row 0    ■■■■■■■■|                      ■ a decode    □ a prompt    | an end: a seat and blocks
    row 1    ■■■■■■■■■■■■■■|
    waiting           □□■■■■■■■■■|          enters at step 8, when row 0 has ended
    waiting                 □■■■■■■■■■■     enters at step 14

Requests enter in order, when seats, memory and budget suffice, and stay for as long as their outputs are taken to be. Knows who runs, who
waits, and how long outputs became. Does not know what comes: preemptions, prefix hits, requests that pass others, and ones that are still
to be added. Reads everything, changes nothing.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from .foresight import ROWS
from .request import RequestState
from .reservations import blocks_to_enter
from .rows import Rows
from .state import State

Counts = NDArray[np.int64]

MOMENTS = 8
"""So many times in the life of a mean output memory is looked at ahead, where admission looks ahead."""


class Forecast(msgspec.Struct, frozen=True):
    """What `Scheduler.forecast` found, for the waiting requests in their order, then for as many more as were asked for, int64 [n] each.

    steps   steps until the one in which the request is let in; 0: the next one
    tokens  tokens that are computed before that step
    """

    steps: Counts
    tokens: Counts


class _Wish(NamedTuple):
    """What a request that is not in needs: sequences, tokens to hold when it enters, tokens to compute before it decodes, outputs of each
    sequence, and whether all that it will need is held from the first step on."""

    num: int
    held: int
    todo: int
    outputs: int
    is_reserved: bool


class _Stay(NamedTuple):
    """Sequences that are in, until the step `end`: at step t they hold `base` + `growth` · t tokens."""

    end: int
    num: int
    base: float
    growth: int


def forecast(state: State, more: int, prompt_len: int, output_len: int | None) -> Forecast:
    """The forecast for all who wait, and for `more` requests behind them with prompts and outputs of such lengths (None: as outputs were)."""
    rows = state.running_rows.array(state.running)
    going = state.manager.num_tokens[rows] - state.columns.prompt_total[rows]
    wishes = [_returning(state, request, going) for request in state.away]
    num_away = len(wishes)
    wishes += _wishes(state, going)
    longest = max(1, state.max_total - prompt_len)
    left = output_len if output_len is not None else _guessed(state, going, longest)
    left = max(1, min(left, longest))
    reserves = state.reservation.reserves
    wishes += [_Wish(1, prompt_len + left if reserves else prompt_len, prompt_len, left, reserves)] * more
    future = _Future(state, rows, _outputs_left(state, rows, going), wishes)
    entered = np.array([future.enter(wish) for wish in wishes], np.int64)
    return Forecast(entered[num_away:], future.computed_before(entered)[num_away:])


def _wishes(state: State, going: Counts) -> list[_Wish]:
    """What each waiting request needs, in order; `going`: outputs of those who run."""
    guesses: dict[int, int] = {}
    reserves, shares, size = state.reservation.reserves, state.manager.prefix_caching, state.manager.block_size
    wishes = []
    for request in state.waiting:
        tokens, most = request.tokens[0], request.max_total[0]
        num = 1
        if tokens is None or len(request.tokens) > 1:
            live = [known for known in request.tokens if known is not None]
            tokens, num = live[0], len(live)
        known = len(tokens)
        before = request.prompt_len + request.appended[0]
        wish, written = request.request.expected_tokens, known - before
        if wish is not None and wish > written:
            outputs = wish - written
        else:
            longest = most - before
            if written or longest not in guesses:
                guesses[longest] = _guessed(state, going, longest, written)
            outputs = guesses[longest]
        outputs = max(1, min(outputs, most - known))
        # Sequences of a group share their prompt.
        todo = known if shares else num * known
        held = blocks_to_enter(state, request) * size if reserves else todo
        wishes.append(_Wish(num, held, todo, outputs, reserves))
    return wishes


def _returning(state: State, request: RequestState, going: Counts) -> _Wish:
    """What a paused, swapped or loading request needs; what it holds meanwhile is there for it alone."""
    rows = np.array(request.live_rows, np.int64)
    known, launched = state.manager.num_tokens[rows], state.manager.num_launched[rows]
    left = int(_outputs_left(state, rows, going).max())
    todo = np.maximum(known - launched, 1)
    return _Wish(len(rows), int(known.sum()), int(todo.sum()), left, False)


def _guessed(state: State, going: Counts, longest: int, written: int = 0) -> int:
    """Outputs to come of a sequence that has written so many of at most `longest`: the mean of those that were longer; where none is known,
    half of what is left."""
    mean = state.lengths.mean_remaining(np.array([written]), going)[0]
    return max(1, (longest - written) // 2 if math.isnan(mean) else min(round(mean), longest - written))


def _outputs_left(state: State, rows: Rows, going: Counts) -> Counts:
    """Outputs to come of each row, int64 [n]; at least 1."""
    manager, columns = state.manager, state.columns
    known, most = manager.num_tokens[rows], columns.max_total[rows]
    expected = columns.expected_total[rows]
    mean = state.lengths.mean_remaining(known - columns.prompt_total[rows], going)
    guessed = np.where(np.isnan(mean), (most - known) // 2, np.rint(mean)).astype(np.int64)
    left: Counts = np.where(expected > known, expected - known, guessed)
    left = np.maximum(1, np.minimum(left, most - known))
    return left


class _Future:
    """The coming steps, up to the one in which the last request entered.

    step, budget  the first step in which another may enter, and tokens that are left in it
    """

    def __init__(self, state: State, rows: Rows, left: Counts, wishes: list[_Wish]) -> None:
        manager, limits, foresight = state.manager, state.limits, state.foresight
        self._seats, self._most, self._max_chunk = limits.max_sequences, limits.max_tokens_per_step, limits.max_chunk
        self._chunked, self._joins = state.admission.chunked, state.admission.joins
        self._slack = (manager.block_size - 1) / 2
        self._size = manager.block_size
        self._watermark = state.watermark_blocks * manager.block_size
        # Blocks that several hold count as often, and those that away requests hold are theirs.
        others = [row for request in state.away for row in request.live_rows]
        held = int(manager.num_table_blocks[rows].sum()) + int(manager.num_table_blocks[others].sum())
        self._slots = (manager.num_available + held) * manager.block_size
        self._looks_ahead = foresight is not None
        # Before that so many have come in or ended, today's use decides.
        few = min(ROWS, state.policy.known_outputs) if state.policy.foresight == "predicted" else 0
        self._num_unasked = few - state.lengths.num_noted if foresight is not None else 0
        self._stays: list[_Stay] = []
        # Sequences that are in; of them those that decode in `step`; the tokens that all hold at step t: base + growth · t.
        self._num_in = self._num_decoding = self._growth = 0
        self._base = 0.0
        # (last step of the prompt, sequences) of those that do not decode yet.
        self._in_prompts: deque[tuple[int, int]] = deque()
        # Of everyone: the first step that decodes, the end, and how many sequences.
        self._lives: list[tuple[int, int, int]] = []
        # Of each prompt: its tokens, those in its last step, and that step.
        self._prompts: list[tuple[int, int, int]] = []
        # Where requests come in together or not at all: whether a batch is open, and the step in which it begins.
        self._is_open, self._batch_step = False, 0
        self._put_in(state, rows, left, wishes)

    def enter(self, wish: _Wish) -> int:
        """The step in which the next request enters."""
        if not self._joins:
            return self._enter_batch(wish)
        while self._num_in:
            has_room = self._has_room(wish)
            if has_room and self._suffices(self.budget, wish):
                break
            if has_room and self._suffices(self._most - self._num_in, wish):
                self._wait_until(self.step + 1)
            else:
                self._wait_until(self._stays[0].end)
        entered = self.step
        self._compute(wish)
        return entered

    def _enter_batch(self, wish: _Wish) -> int:
        if not (self._is_open and self._has_room(wish)):
            self._wait_until(max((stay.end for stay in self._stays), default=0))
            self._is_open, self._batch_step = True, self.step
        self._compute(wish)
        return self._batch_step

    def computed_before(self, steps: Counts) -> Counts:
        """Tokens that are computed before each of these steps, which rise, int64 [n]."""
        first, end, num = np.array(self._lives, np.int64).reshape(-1, 3).T
        tokens, in_last, last = np.array(self._prompts, np.int64).reshape(-1, 3).T
        whole = np.concatenate([[0], tokens.cumsum()])
        parts = np.concatenate([[0], (tokens - in_last).cumsum()])
        done, begun = last.searchsorted(steps, "left"), last.searchsorted(steps, "right")
        prompts: Counts = whole[done] + parts[begun] - parts[done]
        return prompts + _sum_since(first, num, steps) - _sum_since(end, num, steps)

    def _put_in(self, state: State, rows: Rows, left: Counts, wishes: list[_Wish]) -> None:
        """Those who run now, with so many outputs to come: rows that decode, and then the prompts that were begun."""
        manager = state.manager
        known, launched = manager.num_tokens[rows], manager.num_launched[rows]
        decodes = known - launched <= 1
        kept = np.maximum(state.reservation.kept(state, rows), manager.num_table_blocks[rows] * self._size)
        reserves = state.reservation.reserves
        # One that is in flight has one token less to go.
        ends = np.maximum(1, left - 1 + known - launched)
        bases = kept.astype(np.float64) if reserves else known + self._slack
        growth = 0 if reserves else 1
        lives = np.concatenate([left, [wish.outputs for wish in wishes]])
        self._stride = max(1.0, float(lives.mean()) / MOMENTS) if len(lives) else 1.0
        self._moments: list[float] = []
        now = decodes.nonzero()[0]
        self._stays = list(map(_Stay, ends[now].tolist(), [1] * len(now), bases[now].tolist(), [growth] * len(now)))
        heapq.heapify(self._stays)
        self._num_in = self._num_decoding = len(now)
        self._base, self._growth = float(bases[now].sum()), growth * len(now)
        self._lives = [(0, end, 1) for end in ends[now].tolist()]
        if self._looks_ahead and len(now):
            times = np.arange(1, int(ends[now].max() / self._stride) + 2) * self._stride
            is_in = times[:, None] <= ends[now]
            self._moments = [0.0, *(is_in @ bases[now] + is_in.sum(axis=1) * growth * times).tolist()]
        self.step, self.budget = 0, self._most - self._num_decoding
        for place in (~decodes).nonzero()[0].tolist():
            todo = int(known[place] - launched[place])
            self._compute(_Wish(1, int(kept[place] if reserves else known[place]), todo, int(left[place]), reserves))

    def _has_room(self, wish: _Wish) -> bool:
        """Whether there are seats and memory in this step, and, where admission looks ahead, later."""
        num_in, step = self._num_in, self.step
        if num_in + wish.num > self._seats:
            return False
        kept: float = self._watermark
        if self._looks_ahead and num_in > ROWS:
            kept *= math.sqrt(ROWS / num_in)
        enters_with = -(-wish.held // self._size) * self._size
        if self._base + self._growth * step + enters_with + kept > self._slots:
            return False
        if not self._looks_ahead or num_in < self._num_unasked:
            return True
        moments, stride = self._moments, self._stride
        first, stop = int(step / stride) + 1, min(len(moments), int((step + wish.outputs) / stride) + 1)
        growth, room = wish.num * stride, self._slots - (wish.held + wish.num * (self._slack - step))
        return all(moments[place] + growth * place <= room for place in range(first, stop))

    def _suffices(self, budget: int, wish: _Wish) -> bool:
        """Whether a request may enter a step in which so many tokens are left."""
        return budget > 0 and (self._chunked or budget >= wish.todo)

    def _wait_until(self, step: int) -> None:
        """Nobody enters before that step."""
        self.step = max(step, self.step)
        self._take_what_ended()
        self.budget = self._most - self._num_decoding

    def _take_what_ended(self) -> None:
        step, in_prompts, stays = self.step, self._in_prompts, self._stays
        while in_prompts and in_prompts[0][0] < step:
            self._num_decoding += in_prompts.popleft()[1]
        while stays and stays[0].end <= step:
            _, num, base, growth = heapq.heappop(stays)
            self._num_in -= num
            self._num_decoding -= num
            self._num_unasked -= num
            self._base -= base
            self._growth -= growth

    def _compute(self, wish: _Wish) -> None:
        """The request enters in `step`: its prompt takes budget, then each sequence decodes until its end."""
        entered, todo, budget = self.step, wish.todo, self.budget
        in_last = min(todo, budget) if budget > 0 else 0
        rest = todo - in_last
        if rest > 0:
            # Those who came before decode from the next step on.
            each = max(1, self._most - self._num_in)
            num_steps = -(-rest // each)
            in_last = rest - (num_steps - 1) * each
            self.step += num_steps
            budget = each
        self.budget = budget - in_last
        last = max(self.step, entered + -(-todo // self._max_chunk) - 1)
        end = last + wish.outputs
        growth = 0 if wish.is_reserved else wish.num
        base = wish.held + wish.num * self._slack - growth * last if growth else float(wish.held)
        self._num_in += wish.num
        self._base += base
        self._growth += growth
        self._in_prompts.append((last, wish.num))
        heapq.heappush(self._stays, _Stay(end, wish.num, base, growth))
        self._lives.append((last + 1, end, wish.num))
        self._prompts.append((todo, in_last, self.step))
        if self._looks_ahead:
            moments, stride = self._moments, self._stride
            first, stop = int(entered / stride) + 1, int(end / stride) + 1
            if stop > len(moments):
                moments += [0.0] * (stop - len(moments))
            risen = growth * stride
            for place in range(first, stop):
                moments[place] += base + risen * place
        if self.step > entered:
            self._take_what_ended()


def _sum_since(times: Counts, weights: Counts, steps: Counts) -> Counts:
    """The weighted sum of the steps that have passed since each of the times before it, for each of the steps."""
    order = times.argsort(kind="stable")
    rising, weights = times[order], weights[order]
    total = np.concatenate([[0], weights.cumsum()])
    weighted = np.concatenate([[0], (weights * rising).cumsum()])
    num = rising.searchsorted(steps)
    since: Counts = total[num] * steps - weighted[num]
    return since
