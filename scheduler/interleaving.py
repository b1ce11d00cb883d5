"""Steps that compute prompts or decodes, never both: when those who wait interrupt those who decode.

Knows the ratio of waiting to served requests and how long decoding has gone on, as TGI's router does. Does not know what a
request needs; admission.py does.

    prompts that were begun ──> newcomers, if enough can enter, or decoding went on long enough ──> decodes
"""

from __future__ import annotations

import math

import numpy as np

from scheduler.admission import let_in, owed, watermark
from scheduler.composition import compose_running
from scheduler.reservations import blocks_to_enter
from scheduler.state import State, Step
from scheduler.status import Status


def compose_apart(state: State, step: Step) -> None:
    """Place prompts or decodes."""
    wants_in = bool(state.waiting.num or state.away.num)
    if wants_in and state.running.num and not _is_mid_prompt(state) and _interrupts(state, step):
        let_in(state, step)
    if not step.num_rows and state.running.num:
        compose_running(state, step)
        if len(step.decodes):
            state.num_decode_steps += 1
            return
    if not step.num_rows and wants_in:
        let_in(state, step)
    state.num_decode_steps = 0


def newcomers_to_interrupt(state: State) -> int:
    """Requests that have to be able to enter together before they interrupt decoding."""
    return max(1, math.floor(state.policy.waiting_served_ratio * state.running.num))


def _is_mid_prompt(state: State) -> bool:
    """Whether a running row has more than one token to go: prompts that were begun come first."""
    manager = state.manager
    rows = state.running_rows.array(state.running)
    return bool(np.any(manager.num_tokens[rows] - manager.num_launched[rows] > 1))


def _interrupts(state: State, step: Step) -> bool:
    if any(other.status in (Status.PAUSED, Status.SWAPPED) for other in state.away):
        return True
    if not state.num_decode_steps:
        # The latest to enter decode once before others enter.
        return False
    bound = state.policy.max_waiting_steps
    if bound is not None and state.num_decode_steps >= bound:
        return True
    return _can_enter(state, step, newcomers_to_interrupt(state))


def _can_enter(state: State, step: Step, least: int) -> bool:
    """Whether the first `least` of those who wait fit together, each with blocks of its own."""
    if state.waiting.num < least:
        return False
    state.manager.draw_promised()
    blocks = state.manager.num_available - owed(state, step) - watermark(state)
    seats = min(step.seats, state.limits.max_sequences - state.running_rows.count())
    tokens = step.budget
    for number, request in enumerate(state.waiting):
        if number == least:
            break
        blocks -= blocks_to_enter(state, request)
        tokens -= max(len(known) for known in request.tokens if known is not None)
        seats -= request.num_live
        if min(blocks, tokens, seats) < 0:
            return False
    return True
