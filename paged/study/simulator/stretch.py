"""Steps without a decision, taken at once: the same rows compute a token each, and no request comes, ends or lacks memory.

Only a caller that knows every sample beforehand can use it, such as a simulator. The work of a batch, and of such steps, is that for a cost model.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged import Batch
from paged.base.arguments import UNLIMITED, latest_time
from paged.block_manager import Memory
from paged.errors import WrongTokens
from paged.scheduler.admission import Admission
from paged.scheduler.composition import Composition
from paged.scheduler.core import Scheduler
from paged.scheduler.request import Status
from paged.scheduler.rows import Rows
from paged.scheduler.state import State
from paged.study.hardware import Spans, StepWork, Tiling
from paged.study.hardware.step_work import mean_pairs, mean_read
from paged.study.policies.interleaving import Apart
from paged.study.policies.whole_batches import Lockstep, WholeBatches

_COMPOSITIONS = {Composition, Apart, Lockstep}


class SteadyBatch(NamedTuple):
    """The first of several steps without a decision, a token a row.

    ids object [n] are the requests, seq_lens int64 [n] the tokens that each row attends to, as in a Batch. The first num_samples rows sample; the
    others are in the middle of their prompts.
    """

    ids: NDArray[np.object_]
    seq_lens: NDArray[np.int64]
    num_samples: int


def steady_steps(scheduler: Scheduler, limit: int) -> int:
    """Return how many of the coming steps, at most `limit`, run the rows of the last one, a token each, while no request enters, ends or gives
    up blocks. 0 if that is not known. Changes nothing."""
    state = scheduler._state
    return _num_steady(state, _steady_rows(state), limit)


def steady_batch(scheduler: Scheduler) -> SteadyBatch:
    """Return the first of those steps; an empty one if there are none."""
    state = scheduler._state
    found = _steady_rows(state)
    if found is None:
        return SteadyBatch(np.empty(0, object), np.empty(0, np.int64), 0)
    rows, num_samples = found
    return SteadyBatch(state.columns.id[rows], state.manager.rows.num_computed[rows] + 1, num_samples)


def skip(scheduler: Scheduler, token_ids: ArrayLike, now: float = 0.0) -> NDArray[np.int64]:
    """Run a step for each column of `token_ids`, int32 [num_samples, steps]: what row i of `steady_batch` samples in each step.

    The state afterwards is that of as many calls of `schedule` and `update`, down to the ids of blocks; the last update is at `now`. Returns the
    blocks that each step drew, int64 [steps]. Raises WrongTokens for another number of rows, for more steps than `steady_steps` allows, and for a
    token at which its row stops, and changes nothing then.
    """
    state = scheduler._state
    now = latest_time(now, state.now)
    tokens = np.asarray(token_ids, np.int32)
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


def _steady_rows(state: State) -> tuple[Rows, int] | None:
    """Return the rows of the coming steps in the order of their batches, one token each, and how many of the first ones sample; the others walk
    through their prompts in lockstep. None if the next step may differ."""
    limits, manager = state.limits, state.manager
    if type(state.composition) not in _COMPOSITIONS or type(state.admission) not in (Admission, WholeBatches):
        # A strategy of the user may decide in any step.
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
    """Return how many of the coming steps admit no request for certain, if the same rows decode in them."""
    if state.queues.is_shut:
        return UNLIMITED
    return state.composition.steps_shut(state) if isinstance(state.composition, Apart) else 0


def _num_steady(state: State, found: tuple[Rows, int] | None, limit: int) -> int:
    """Return how many of the coming steps, at most `limit`, run what `_steady_rows` found without a decision, up to the step in which a row ends or
    samples for the first time."""
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
    """Whether all layers keep all tokens, nothing has to be copied, and no retention ends by time."""
    return (
        memory.layout.is_plain
        and not memory.growth.any_shared_tail
        and memory.offload is None
        and memory.content.retentions.next_end == np.inf
    )


def _most_decodes(memory: Memory, rows: Rows, limit: int) -> int:
    """Return how many tokens, at most `limit`, each of these rows can compute one by one with the blocks that can be drawn, before a row has to look
    up a full block."""
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
        # Each row draws a block every `size` steps, the row with the least room first, so the first draw that fails is known.
        rounds, place = divmod(available, len(rows))
        return min(limit, rounds * size + int(np.partition(spare, place)[place]))
    # Mostly there is room for all steps, which is tried first.
    least, most, middle = 0, limit, limit
    while least < most:
        if int((-(-np.maximum(middle - spare, 0) // size)).sum()) <= available:
            least = middle
        else:
            most = middle - 1
        middle = (least + most + 1) // 2
    return least


def _skip_decodes(memory: Memory, rows: Rows, tokens: NDArray[np.int32]) -> NDArray[np.int64]:
    """Place, commit and settle a batch of these rows, a token each, for each column of `tokens`, int32 [n, k], which the first n rows sample; the
    others compute known tokens. `_most_decodes` has to allow it. Returns the blocks that each batch drew, int64 [k]."""
    tables, size, (num_samples, num_steps) = memory.tables, memory.block_size, tokens.shape
    computed = tables.num_computed[rows]
    have = tables.num_blocks[rows].astype(np.int64)
    # In step j a row computes its token number computed + j. These are the steps in which that token begins a block.
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
    """Draw a block for each of these places in tables; `batches`, int64 [n], rise. One draw evicts in the same order as several.

    A block that is evicted in a later batch is idle, and its node lives, for so many steps longer.
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


def work_of(batch: Batch, block_size: int, tiling: Tiling | None = None, spans: Spans = ()) -> StepWork:
    """Return a batch's work; with `tiling` its tiles, too, and contexts as far as layers attend (`spans`)."""
    moves, ends, counts = batch.moves, batch.seq_lens, batch.num_tokens
    num_rows, computed = len(batch.rows), batch.num_scheduled_tokens
    context = mean_read(spans, ends - counts, ends)
    read = context.sum().item()
    decoding, attended = context, read
    if computed != num_rows:
        attended = mean_pairs(spans, ends - counts, ends)
        decoding = context[(counts == 1) & batch.samples]
    num_tiles = sampling = positions = 0
    if tiling is not None:
        longest = tiling.longest_contexts(batch.positions + 1)
        num_tiles, positions = len(longest), int(tiling.whole_pieces(longest).sum())
        sampling = len(np.unique((batch.query_start_loc[1:][batch.samples] - 1) // tiling.places))
    return StepWork(
        computed_tokens=computed,
        sampled_rows=int(np.count_nonzero(batch.samples)),
        context_tokens=read,
        attended_pairs=attended,
        moved_tokens=(len(moves.device_to_host) + len(moves.host_to_device)) * block_size,
        decode_rows=len(decoding),
        decode_context=read if decoding is context else decoding.sum().item(),
        longest_decode=decoding.max().item() if len(decoding) else 0,
        rows=num_rows,
        tiles=num_tiles,
        sampling_tiles=sampling,
        tile_context=positions,
    )


def steady_work(first: SteadyBatch, num_steps: int, tiling: Tiling | None = None, spans: Spans = ()) -> StepWork:
    """Return the work of so many steps with the same rows, a token each, of which `first` is the first. Amounts that rise with the contexts are columns,
    [steps], the others numbers."""
    known, sampled = first.seq_lens, first.num_samples
    rising = np.arange(num_steps)
    if spans:
        ends = known[:, None] + rising
        each = mean_read(spans, ends - 1, ends)
        context, longest_decode = each.sum(axis=0), each.max(axis=0, initial=0)
    else:
        context = int(known.sum()) + len(known) * rising.astype(np.float64)
        longest_decode = float(known.max(initial=0)) + rising
    num_tiles, sampling, positions = 0.0, 0.0, np.zeros(num_steps)
    if tiling is not None:
        longest = tiling.longest_contexts(known)
        num_tiles, sampling = float(len(longest)), float(-(-sampled // tiling.places))
        positions = tiling.whole_pieces(longest[:, None] + rising).sum(axis=0).astype(np.float64)
    return StepWork(
        computed_tokens=float(len(known)),
        sampled_rows=float(sampled),
        context_tokens=context,
        attended_pairs=context,
        decode_rows=float(len(known)),
        decode_context=context,
        longest_decode=longest_decode if len(known) else 0.0,
        rows=float(len(known)),
        tiles=num_tiles,
        sampling_tiles=sampling,
        tile_context=positions,
    )
