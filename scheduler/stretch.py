"""Steps that need no decision, taken at once: while the same rows compute a token each, and no request comes, goes or is short of memory.

For who knows beforehand what every row samples: a simulator. `skip` leaves behind what so many calls of schedule and update would,
down to the ids of the blocks; `steady_steps` says how many there are. Knows what could end such a stretch. Decides nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged.scheduler.batch import SteadyBatch
from paged.scheduler.rows import Rows
from paged.scheduler.state import State
from paged.scheduler.status import Status


def steady_rows(state: State) -> tuple[Rows, int] | None:
    """The rows that the coming steps run, one token each, in the order of their batches, and how many of them, the first ones, sample;
    the others are in the middle of prompts that they walk in lockstep. None where the next step may be another one."""
    limits, manager = state.limits, state.manager
    if not state.running.num or (state.steady is None and not state.composition.one_token_each):
        return None
    rows = state.running_rows.array(state.running)
    if len(rows) > min(limits.max_tokens_per_step, limits.max_sequences):
        return None
    if state.outstanding or state.carried or state.transfers or state.to_reject or state.bounded:
        return None
    if state.pending_outputs or state.silent:
        return None
    if (state.waiting.num or state.away.num) and (state.composition.lets_in_by_steps or not state.admission_blocked):
        return None
    if any(state.columns.owner[row].status is Status.RUNNING for row in state.recovering):
        return None
    if not manager.may_skip:
        return None
    if state.steady is None:
        return state.composition.walking(state, rows)
    return (rows, len(rows)) if state.steady[0] is rows else None


def steady_steps(state: State, found: tuple[Rows, int] | None, limit: int) -> int:
    """How many of the coming steps, at most `limit`, run what `steady_rows` found and decide nothing; the step in which one of them ends,
    or samples for the first time, is not among them."""
    if found is None or limit < 1:
        return 0
    (rows, num_samples), manager = found, state.manager
    if state.foresight is not None and state.waiting.num:
        limit = min(limit, state.foresight.steps_left)
    known = manager.num_tokens[rows]
    left = state.columns.max_total[rows] - known
    left[num_samples:] = (known - manager.num_computed[rows])[num_samples:]
    return max(0, manager.most_decodes(rows, min(limit, int(left.min()) - 1)))


def steady_batch(state: State, found: tuple[Rows, int] | None) -> SteadyBatch:
    """What the first of these steps runs; nothing where there is none."""
    if found is None:
        return SteadyBatch(np.empty(0, object), np.empty(0, np.int64), 0)
    rows, num_samples = found
    return SteadyBatch(state.columns.id[rows], state.manager.num_computed[rows] + 1, num_samples)


def has_stop(state: State, rows: Rows, token_ids: NDArray[np.int32]) -> bool:
    """Whether any of `token_ids` [rows, steps] is a stop id of its row."""
    if not state.columns.num_with_stops:
        return False
    return bool(state.columns.is_stop(rows[:, None], token_ids).any())


def skip(state: State, rows: Rows, token_ids: NDArray[np.int32]) -> NDArray[np.int64]:
    """The coming steps have run these rows, `token_ids[i, j]` being what row i sampled in step j. The caller has asked `steady_rows`,
    `steady_steps` and `has_stop`. Returns the blocks that each step drew, int64 [steps]."""
    num_steps = token_ids.shape[1]
    drawn = state.manager.skip_decodes(rows, token_ids)
    if state.steady is not None:
        steady, computed, ends = state.steady
        state.steady = (steady, computed + num_steps, ends + num_steps)
    state.composition.skipped(num_steps)
    stats = state.stats
    stats.steps += num_steps
    stats.computed_tokens += len(rows) * num_steps
    stats.output_tokens += token_ids.size
    return drawn
