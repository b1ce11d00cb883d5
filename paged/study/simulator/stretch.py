"""Steps that need no decision, taken at once: while the same rows compute a token each, and no request comes, goes or is short of memory.

For a caller that knows beforehand what every row samples: a simulator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.base.arguments import UNLIMITED, is_integer, latest_time
from paged.block_manager import Memory
from paged.errors import InvalidRequest, WrongTokens
from paged.scheduler.admission import Admission
from paged.scheduler.composition import Composition
from paged.scheduler.core import Scheduler
from paged.scheduler.request import Status
from paged.scheduler.rows import Rows
from paged.scheduler.state import State
from paged.study.policies.interleaving import Apart
from paged.study.policies.lockstep import Lockstep
from paged.study.policies.whole_batches import WholeBatches

_COMPOSITIONS = {Composition, Apart, Lockstep}


class SteadyBatch(NamedTuple):
    """What the first of several steps runs that decide nothing, a token a row.

    ids object [n] are the requests, seq_lens int64 [n] the tokens that each row attends to, as a Batch has them. The first num_samples
    sample; the others are in the middle of their prompts.
    """

    ids: NDArray[np.object_]
    seq_lens: NDArray[np.int64]
    num_samples: int


def steady_steps(scheduler: Scheduler, limit: int) -> int:
    """How many of the coming steps, at most `limit`, would run the rows of the last one, a token each, with no request coming in,
    ending or giving blocks up. 0 where that is not known, which never is an error. Nothing changes. Raises InvalidRequest for a
    limit that is no integer."""
    if not is_integer(limit):
        raise InvalidRequest(f"limit has to be an integer; got {limit!r}.")
    state = scheduler._state
    return _num_steady(state, _steady_rows(state), limit)


def steady_batch(scheduler: Scheduler) -> SteadyBatch:
    """What the first of those steps runs; nothing where there are none."""
    state = scheduler._state
    found = _steady_rows(state)
    if found is None:
        return SteadyBatch(np.empty(0, object), np.empty(0, np.int64), 0)
    rows, num_samples = found
    return SteadyBatch(state.columns.id[rows], state.manager.rows.num_computed[rows] + 1, num_samples)


def skip(scheduler: Scheduler, token_ids: Any, now: float = 0.0) -> NDArray[np.int64]:
    """So many steps ran as int32 `token_ids` [num_samples, steps] has columns: what row i of `steady_batch` sampled in each.

    Leaves behind what so many calls of `schedule` and `update` would, down to the ids of the blocks, of which the last came at `now`.
    Returns the blocks that each step drew, int64 [steps]. Raises WrongTokens for another number of rows, for more steps than
    `steady_steps` allows, and for a token at which its row stops, or InvalidRequest (now, see `schedule`), changing nothing.
    """
    state = scheduler._state
    now = latest_time(now, state.now)
    tokens = _validated(token_ids, state.limits.vocabulary_size)
    num_rows, num_steps = tokens.shape
    if not num_steps:
        return np.empty(0, np.int64)
    found = _steady_rows(state)
    allowed = _num_steady(state, found, num_steps)
    expected = 0 if found is None else found[1]
    if found is None or num_rows != expected or num_steps > allowed:
        raise WrongTokens(
            f"skip: {allowed} of the next {num_steps} steps are steady, and {expected} rows sample in them; got tokens for {num_rows} rows."
        )
    rows = found[0]
    totals = state.manager.rows.num_tokens[rows[:expected], None] + np.arange(1, num_steps + 1)
    if state.columns.stops_at(rows[:expected].repeat(num_steps), tokens.reshape(-1), totals.reshape(-1)):
        raise WrongTokens("skip: one of the tokens is a stop id of its row; that step is not steady.")
    state.set_now(now)
    drawn = _skip_decodes(state.manager, rows, tokens)
    if state.running.steady is not None:
        computed, ends = state.running.steady
        state.running.steady = (computed + num_steps, ends + num_steps)
    if isinstance(state.composition, Apart):
        state.composition.skipped(num_steps)
    state.stats.count_batches(num_steps, len(rows) * num_steps, tokens.size)
    scheduler._raise_violations()
    return drawn


def _validated(token_ids: Any, vocabulary_size: int | None) -> NDArray[np.int32]:
    try:
        tokens = np.asarray(token_ids)
    except ValueError:
        raise WrongTokens(f"skip: token_ids has to be int32 [rows, steps]; got {token_ids!r}.") from None
    if tokens.ndim != 2 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise WrongTokens(f"skip: token_ids has to be int32 [rows, steps]; got {tokens.dtype} {tokens.shape}.")
    end = min(vocabulary_size or 2**31, 2**31)
    if tokens.size and not (int(tokens.min()) >= 0 and int(tokens.max()) < end):
        raise WrongTokens(f"skip: token ids have to be from 0 to {end - 1}; got {tokens.min()} to {tokens.max()}.")
    return tokens.astype(np.int32)


def _steady_rows(state: State) -> tuple[Rows, int] | None:
    """The rows that the coming steps run, one token each, in the order of their batches, and how many of them, the first ones, sample;
    the others are in the middle of prompts that they walk in lockstep. None where the next step may be another one."""
    limits, manager = state.limits, state.manager
    if type(state.composition) not in _COMPOSITIONS or type(state.admission) not in (Admission, WholeBatches):
        # A strategy of the user's own may decide in any step.
        return None
    if not state.running.num or (state.running.steady is None and not isinstance(state.composition, Lockstep)):
        return None
    rows = state.running.rows()
    if len(rows) > min(limits.max_tokens_per_step, limits.max_sequences):
        return None
    if state.outstanding.batches or state.carried.groups or state.to_reject or state.books.bounded:
        return None
    if state.pending_outputs or state.columns.not_sampling:
        return None
    if (state.waiting.num or state.away.num) and not _steps_shut(state):
        return None
    if any(state.columns.owner[row].status is Status.RUNNING for row in state.columns.recovering):
        return None
    if not _may_skip(manager):
        return None
    if state.running.steady is None:
        return state.composition.walking(state, rows) if isinstance(state.composition, Lockstep) else None
    return rows, len(rows)


def _steps_shut(state: State) -> int:
    """How many of the coming steps surely let no request in, if the same rows decode in them."""
    if state.queues.is_shut:
        return UNLIMITED
    return state.composition.steps_shut(state) if isinstance(state.composition, Apart) else 0


def _num_steady(state: State, found: tuple[Rows, int] | None, limit: int) -> int:
    """How many of the coming steps, at most `limit`, run what `_steady_rows` found and decide nothing; the step in which one of them ends,
    or samples for the first time, is not among them."""
    if found is None or limit < 1:
        return 0
    (rows, num_samples), manager = found, state.manager
    if state.waiting.num or state.away.num:
        limit = min(limit, _steps_shut(state))
    if state.foresight is not None and state.waiting.num:
        limit = min(limit, max(0, state.foresight.next_look - state.stats.steps))
    known = manager.rows.num_tokens[rows]
    left = state.columns.max_total[rows] - known
    left[num_samples:] = (known - manager.rows.num_computed[rows])[num_samples:]
    return max(0, _most_decodes(manager, rows, min(limit, int(left.min()) - 1)))


def _may_skip(memory: Memory) -> bool:
    """Whether all layers keep all tokens, nothing is to be copied, and no content ends by time."""
    return (
        memory.layout.is_plain
        and not memory.growth.any_shared_tail
        and memory.offload is None
        and memory.content.retentions.next_end == np.inf
    )


def _most_decodes(memory: Memory, rows: Rows, limit: int) -> int:
    """How many tokens, at most `limit`, each of these rows can compute one by one with the blocks that can be drawn, before one of
    them has to look a full block up."""
    tables, size = memory.tables, memory.block_size
    computed = tables.num_computed[rows]
    if memory.index.num_looking_up:
        asking = tables.looks_up[rows].nonzero()[0]
        if len(asking):
            limit = min(limit, size - 1 - int((computed[asking] % size).max()))
    if limit < 1:
        return 0
    spare = tables.num_blocks[rows] * size - computed
    available = memory.growth.num_unpromised
    if int(spare.max()) < size:
        # Each row draws a block every `size` steps, the one with the least room first: the draw that fails is known.
        rounds, place = divmod(available, len(rows))
        return min(limit, rounds * size + int(np.partition(spare, place)[place]))
    # Mostly there is room for all of them: that is asked first.
    least, most, middle = 0, limit, limit
    while least < most:
        if int((-(-np.maximum(middle - spare, 0) // size)).sum()) <= available:
            least = middle
        else:
            most = middle - 1
        middle = (least + most + 1) // 2
    return least


def _skip_decodes(memory: Memory, rows: Rows, tokens: NDArray[np.int32]) -> NDArray[np.int64]:
    """Place, commit and settle a batch of these rows, a token each, for each column of `tokens`, int32 [n, k]: what the first n of them
    sampled. The others go on in what they know. `_most_decodes` has said that they can. Returns the blocks that each batch drew, int64 [k]."""
    tables, size, (num_samples, num_steps) = memory.tables, memory.block_size, tokens.shape
    computed = tables.num_computed[rows]
    have = tables.num_blocks[rows].astype(np.int64)
    # In step j of these a row computes its token number computed + j: the steps in which that one begins a block.
    first = have * size - computed
    counts = -(-np.maximum(num_steps - first, 0) // size)
    places = np.repeat(np.arange(len(rows)), counts)
    nth = np.arange(len(places)) - np.repeat(counts.cumsum() - counts, counts)
    steps = first[places] + nth * size
    order = np.argsort(steps, kind="stable")
    places, columns, steps = places[order], (have[places] + nth)[order], steps[order]
    memory.extend_by(rows[:num_samples], tokens.reshape(-1), np.full(num_samples, num_steps))
    start = memory.batch
    if len(steps):
        _draw_ahead(memory, rows[places], columns, start + steps)
    memory.begin_batch(start + num_steps)
    tables.num_launched[rows] = tables.num_computed[rows] = computed + num_steps
    return np.bincount(steps, minlength=num_steps)


def _draw_ahead(memory: Memory, rows: Rows, columns: NDArray[np.int64], batches: NDArray[np.int64]) -> None:
    """A block for each of these places in tables, whose batches, int64 [n], rise: one draw evicts in the order in which so many would.

    A block that is evicted in a later batch lay idle, and its node lived, for so many steps longer.
    """
    device = memory.device
    evicted, first = device.num_evicted, int(batches[0])
    memory.begin_batch(first)
    memory.growth.promise(rows, columns)
    memory.growth.draw_promised()
    if count := device.num_evicted - evicted:
        later = int(batches[-count:].sum()) - count * first
        device.idle_steps += later
        memory.index.lifetime_steps += later
