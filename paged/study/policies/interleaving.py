"""Steps that compute prompts or decodes, never both, as TGI's router composes them.

Newcomers interrupt decoding by the ratio of waiting to running requests, and by how long decoding has gone on.

    prompts that were begun ──> newcomers, if enough can enter, or decoding went on long enough ──> decodes
"""

import math

import numpy as np

from paged.base.arguments import UNLIMITED
from paged.base.words import counted
from paged.block_manager import Memory
from paged.scheduler.composition import Composition, compose_running
from paged.scheduler.policies import Policy
from paged.scheduler.queues import Queues
from paged.scheduler.request import Status
from paged.scheduler.rows import Counts, Rows
from paged.scheduler.state import State, Step


class Apart(Composition):
    """Newcomers interrupt decoding when at least `ratio` times the running requests can enter together, or after `most_steps` decode steps in a row
    (None: no such bound)."""

    def __init__(self, policy: Policy, *, ratio: float, most_steps: int | None) -> None:
        self._policy, self._ratio, self._most_steps = policy.name, ratio, most_steps
        # Decode steps in a row.
        self._num_steps = 0

    def compose(self, state: State, step: Step) -> None:
        wants_in = bool(state.waiting.num or state.away.num)
        if wants_in and state.running.num and not _is_mid_prompt(state) and self._interrupts(state, step):
            state.admission.let_in(state, step)
        if not step.num_rows and state.running.num:
            compose_running(state, step)
            if len(step.decodes):
                self._num_steps += 1
                return
        if not step.num_rows and wants_in:
            state.admission.let_in(state, step)
        self._num_steps = 0

    def wanted(self, manager: Memory, rows: Rows, todo: Counts) -> Counts:
        """Return the tokens of prompts alone if a prompt was begun, else `todo`."""
        return np.where(todo > 1, todo, 0) if (todo > 1).any() else todo

    def steps_shut(self, state: State) -> int:
        """Return how many of the coming steps admit no request for certain, if the same rows decode in them. Decoding rows only draw more blocks, so
        requests that do not fit together now do not fit until one ends."""
        state.books.set_owed(None)
        step = Step(state.limits.max_tokens_per_step, state.limits.max_sequences, np.empty(0, np.int64))
        if not state.waiting.num or state.away.num or self._interrupts(state, step):
            return 0
        if not self._num_steps:
            return 1
        return UNLIMITED if self._most_steps is None else self._most_steps - self._num_steps

    def skipped(self, num_steps: int) -> None:
        """Count decode steps that were taken at once."""
        self._num_steps += num_steps

    def reason(self, queues: Queues) -> str | None:
        if not queues.running.num:
            return None
        bound = self._most_steps
        return (
            f"policy {self._policy} interrupts decoding when {counted(self._num_to_interrupt(queues), 'request')} can enter together, and "
            f"{queues.waiting.num} wait{'' if bound is None else f', or after {bound} steps that decode, and there were {self._num_steps}'}."
        )

    def _num_to_interrupt(self, queues: Queues) -> int:
        """Requests that have to fit together before they interrupt decoding."""
        return max(1, math.floor(self._ratio * queues.running.num))

    def _interrupts(self, state: State, step: Step) -> bool:
        if any(other.status in (Status.PAUSED, Status.SWAPPED) for other in state.away):
            return True
        if not self._num_steps:
            # Requests that entered last decode once before others enter.
            return False
        if self._most_steps is not None and self._num_steps >= self._most_steps:
            return True
        return _can_enter(state, step, self._num_to_interrupt(state.queues))


def _is_mid_prompt(state: State) -> bool:
    """Whether a running row has more than one token to compute: a prompt that was begun comes first."""
    manager = state.manager
    rows = state.running.rows()
    return bool(np.any(manager.rows.num_tokens[rows] - manager.rows.num_launched[rows] > 1))


def _can_enter(state: State, step: Step, least: int) -> bool:
    """Whether the first `least` waiting requests fit together, each with blocks of its own."""
    if state.waiting.num < least:
        return False
    state.manager.growth.draw_promised()
    blocks = state.books.num_free()
    seats = min(step.seats, state.limits.max_sequences - state.running.num_rows)
    tokens = step.budget
    for number, request in enumerate(state.waiting):
        if number == least:
            break
        blocks -= state.books.to_enter(request)
        tokens -= max(len(known) for known in request.tokens if known is not None)
        seats -= request.num_live
        if min(blocks, tokens, seats) < 0:
            return False
    return True
