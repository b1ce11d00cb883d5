"""A forecast of when each waiting request is admitted, in steps and in computed tokens, since the scheduler has no
clock.

    row 0    ■■■■■■■■|                      ■ a decode    □ a prompt    | an end: a seat and blocks
    row 1    ■■■■■■■■■■■■■■|
    waiting           □□■■■■■■■■■|          enters at step 8, when row 0 has ended
    waiting                 □■■■■■■■■■■     enters at step 14

Requests enter in order, when seats, memory and budget suffice, and stay for their expected outputs. Ignored are
preemptions, content that is evicted or cached from now on, and requests that pass others or come later. Of batches that
no request joins, the tokens of prompts count, and not their steps.
"""

from __future__ import annotations

from bisect import insort

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.scheduler import Outlook

Counts = NDArray[np.int64]


class Forecast(msgspec.Struct, frozen=True):
    """For the waiting requests in their order, and then for `more` requests, int64 [n] each.

    steps   steps before the one that admits the request; 0: the next step admits it
    tokens  tokens that are computed before that step
    """

    steps: Counts
    tokens: Counts


def forecast(outlook: Outlook, *, more: int = 0, prompt_len: int = 1, output_len: int | None = None) -> Forecast:
    """Return the forecast for all waiting requests, and for `more` behind them of these lengths (None: the mean output)."""
    longest = max(1, outlook.max_total - prompt_len)
    left = output_len or outlook.mean_output or longest // 2
    left = max(1, min(left, longest))
    held = prompt_len + left if outlook.reserves else prompt_len
    columns = np.array([outlook.num_sequences, outlook.held, outlook.todo, outlook.left]).T.tolist()
    future = _Future(outlook)
    # Decodes first, as in a step.
    for wish in sorted(columns[: outlook.num_running], key=lambda wish: wish[2] > 1):
        future.put_in(*wish)
    entered = [future.enter(*wish) for wish in columns[outlook.num_running :] + [[1, held, prompt_len, left]] * more]
    steps, tokens = np.array(entered[outlook.num_suspended :], np.int64).reshape(-1, 2).T
    return Forecast(steps, tokens)


class _Future:
    """The coming steps, up to the one that admits the latest request."""

    def __init__(self, outlook: Outlook) -> None:
        self._outlook = outlook
        # The step that may admit the next request, tokens that are computed before it, and the budget left in it.
        self._step = self._tokens = 0
        self._budget = outlook.limits.max_tokens_per_step
        # The step in which the current batch began: a batch that no request joins may be entered only then.
        self._began = -1
        # Requests that are in, the latest end first: (−end, sequences, base, growth); each holds base + growth · step.
        self._stays: list[tuple[int, int, float, int]] = []
        self._num_in = self._growth = 0
        self._base = 0.0

    def enter(self, num: int, held: int, todo: int, left: int) -> tuple[int, int]:
        """Admit the next request once there is room. Return the step, and the tokens that are computed before it."""
        outlook = self._outlook
        least = 1 if outlook.chunked else todo
        while self._num_in:
            is_open = outlook.joins or self._step == self._began
            has_room = is_open and self._has_room(num, held, left)
            if has_room and (self._budget >= least or not outlook.joins):
                break
            # If the request has room, the next step may have the budget. If not, nothing changes before the next end.
            is_soon = has_room and outlook.limits.max_tokens_per_step - self._num_in >= least
            self._go_on(self._step + 1 if is_soon else -self._stays[-1][0])
        if not self._num_in:
            self._began = self._step
        entered = self._step, self._tokens
        self.put_in(num, held, todo, left)
        return entered

    def put_in(self, num: int, held: int, todo: int, left: int) -> None:
        """Admit a request now: its prompt takes budget, then each of its sequences decodes until its end."""
        outlook = self._outlook
        while todo > self._budget and outlook.joins:
            todo -= max(0, self._budget)
            self._budget = min(0, self._budget)
            self._go_on(self._step + 1)
        self._budget -= todo
        growth, base = (0, float(held)) if outlook.reserves else self._line(num, held)
        insort(self._stays, (-self._step - left, num, base, growth))
        self._num_in += num
        self._base += base
        self._growth += growth

    def _line(self, num: int, held: int) -> tuple[int, float]:
        """Return growth and base of sequences that hold so much now; on average a last block is half empty."""
        return num, held + num * ((self._outlook.block_size - 1) / 2 - self._step)

    def _has_room(self, num: int, held: int, left: int) -> bool:
        """Whether there are seats and memory in this step and, if admission looks ahead, until all have ended."""
        outlook, step = self._outlook, self._step
        blocks = -(-held // outlook.block_size)
        needed = self._base + self._growth * step + blocks * outlook.block_size + outlook.spare
        if self._num_in + num > outlook.limits.max_sequences or needed > outlook.slots:
            return False
        if not outlook.looks_ahead:
            return True
        # Memory is fullest just before an end.
        more_growth, more_base = self._line(num, held)
        growth, base, last = self._growth + more_growth, self._base + more_base, step + left
        for negative_end, _, its_base, its_growth in reversed(self._stays):
            if -negative_end >= last:
                break
            if base - growth * negative_end > outlook.slots:
                return False
            base -= its_base
            growth -= its_growth
        return base + growth * last <= outlook.slots

    def _go_on(self, step: int) -> None:
        """End this step as it is; in the steps until `step` all sequences decode."""
        most = self._outlook.limits.max_tokens_per_step
        self._tokens += most - self._budget + (step - self._step - 1) * self._num_in
        self._step = step
        while self._stays and -self._stays[-1][0] <= step:
            _, num, base, growth = self._stays.pop()
            self._num_in -= num
            self._base -= base
            self._growth -= growth
        self._budget = most - self._num_in
