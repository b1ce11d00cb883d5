"""Steps that need no decision, taken at once: while the same rows decode, nobody comes, goes or is short of memory.

For who knows beforehand what every row samples: a simulator. `skip` leaves behind what so many calls of schedule and update would,
down to the ids of the blocks; `steady_steps` says how many there are. Knows what could end such a stretch. Decides nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler.rows import Rows
from scheduler.state import State
from scheduler.status import Status


def steady_rows(state: State) -> Rows | None:
    """The rows that the coming steps run, one token each, in their order; None where the next step may be another one."""
    if state.steady is None or not state.running.num:
        return None
    rows, limits, manager = state.steady[0], state.limits, state.manager
    if rows is not state.running_rows.array(state.running) or len(rows) > min(
        limits.max_tokens_per_step, limits.max_sequences
    ):
        return None
    if state.outstanding or state.carried or state.doomed or state.transfers or state.to_reject or state.bounded:
        return None
    if state.pending_outputs or state.silent:
        return None
    # Who composes apart counts the steps that others wait.
    if (state.waiting.num or state.away.num) and (state.composes_apart or not state.is_shut):
        return None
    if any(state.columns.owner[row].status is Status.RUNNING for row in state.recovering):
        return None
    return rows if manager.may_skip else None


def steady_steps(state: State, limit: int) -> int:
    """How many of the coming steps, at most `limit`, run these rows and decide nothing; the step in which one of them ends is not
    among them."""
    rows = steady_rows(state)
    if rows is None or limit < 1:
        return 0
    manager = state.manager
    if state.foresight is not None and state.waiting.num:
        limit = min(limit, state.foresight.steps_left)
    ends = int((state.columns.max_total[rows] - manager.num_tokens[rows]).min())
    return max(0, manager.most_decodes(rows, min(limit, ends - 1)))


def has_stop(state: State, rows: Rows, token_ids: NDArray[np.int32]) -> bool:
    """Whether any of `token_ids` [rows, steps] is a stop id of its row."""
    if not state.columns.num_with_stops:
        return False
    return bool((token_ids[:, :, None] == state.columns.stops[rows][:, None, :]).any())


def skip(state: State, token_ids: NDArray[np.int32]) -> NDArray[np.int64]:
    """The coming steps have run, `token_ids[i, j]` being what row i sampled in step j. The caller has asked `steady_steps` and
    `has_stop`. Returns the blocks that each step drew, int64 [steps]."""
    assert state.steady is not None, "a steady stretch has rows"
    rows, computed, ends = state.steady
    num_steps = token_ids.shape[1]
    drawn = state.manager.skip_decodes(rows, token_ids)
    state.steady = (rows, computed + num_steps, ends + num_steps)
    if state.composes_apart:
        state.num_decode_steps += num_steps
    stats = state.stats
    stats.steps += num_steps
    stats.computed_tokens += token_ids.size
    stats.output_tokens += token_ids.size
    return drawn
