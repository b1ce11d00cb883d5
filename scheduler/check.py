"""The scheduler's invariants, recomputed from rows and queues, not counters; numbered as in docs/invariants.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from .request import RequestState, Status
from .state import State


def violations_of(state: State) -> list[str]:
    """Return each violation as a sentence that begins with its invariant's number, the memory layer's last."""
    found: list[str] = []
    places: dict[str, str] = dict.fromkeys(state.idle, "idle")
    queues: tuple[tuple[str, Iterable[RequestState], set[Status]], ...] = (
        ("waiting", state.waiting, {Status.WAITING}),
        ("running", state.running, {Status.RUNNING}),
        ("away", state.away, {Status.LOADING, Status.PAUSED, Status.SWAPPED}),
    )
    for name, queue, statuses in queues:
        orders = [request.order for request in queue]
        if queue is not state.waiting and orders != sorted(orders):
            found.append(f"11: the {name} queue is out of order.")
        for request in queue:
            if request.id in places:
                found.append(f'9: request "{request.id}" is {name} and {places[request.id]}.')
            places[request.id] = name
            if request.status not in statuses:
                found.append(f'9: request "{request.id}" is {request.status.value} and stands in the {name} queue.')
    if set(places) != set(state.requests):
        found.append(f"9: queues and requests differ: {sorted(set(places) ^ set(state.requests))}.")
    held = {pool: Counter[int]() for pool in (state.manager.blocks, state.manager.device)}
    for place, blocks in (*state.outstanding.held_blocks(), *state.hints.held()):
        held[state.manager.index.pools[place]].update(blocks.tolist())
    for pool, wanted in held.items():
        if pool.kept != wanted:
            found.append(f"2: blocks {dict(wanted)} are pinned, or held for ended requests; memory keeps {pool.kept}.")
    found += [*_rows(state), *_in_flight(state), *state.waiting.violations(state.requests.values(), state.idle)]
    sessions = [each.request.session_id for each in state.requests.values() if each.request.session_id]
    found += state.hints.violations(sessions)
    return found + state.reservation.violations(state.books) + state.manager.check()


def _rows(state: State) -> Iterator[str]:
    manager, columns, books = state.manager, state.columns, state.books
    owned: set[int] = set()
    for request in state.requests.values():
        rows = request.live_rows
        owned.update(rows)
        if request.status is Status.WAITING and rows:
            yield f'9: request "{request.id}" is waiting and holds rows {rows}.'
        if request.status is not Status.WAITING and len(rows) != request.num_live:
            yield f'9: request "{request.id}" has {request.num_live} sequences alive and {len(rows)} rows.'
        for sequence, row in enumerate(request.rows):
            if row < 0:
                continue
            if columns.owner[row] is not request or columns.sequence[row] != sequence:
                yield f'9: row {row} does not know that it serves "{request.id}".'
            if manager.rows.num_tokens[row] >= request.max_total[sequence] and request not in state.to_reject:
                yield f'8: request "{request.id}" has {manager.rows.num_tokens[row]} tokens, and has not ended.'
        if request.status is Status.SWAPPED and any(manager.rows.num_blocks[row] for row in rows):
            yield f'9: request "{request.id}" is swapped and holds device blocks.'
        if request.status is Status.RUNNING and any(manager.tiers.num_on_host(row) for row in rows):
            yield f'9: request "{request.id}" is running and has blocks on the host.'
    if differ := owned ^ set(manager.tables.live_rows.tolist()):
        yield f"9: rows {sorted(differ)} are held by no request, or do not exist."
    if (columns.num_bound, columns.sum_max_total) != (len(owned), int(columns.max_total[sorted(owned)].sum())):
        yield (
            f"9: {columns.num_bound} rows of {columns.sum_max_total} tokens at most are counted; {len(owned)} are held."
        )
    if state.running.rows().tolist() != [row for request in state.running for row in request.live_rows]:
        yield "9: the array of running rows differs from the running requests."
    if rowless := [request.id for request in books.bounded if not request.live_rows]:
        yield f"8: worst cases are reserved for {rowless}, which hold no rows."
    # A block that several bounded requests share counts once.
    bounded = [row for request in books.bounded for row in request.live_rows]
    worst = manager.pages_of_rows(bounded) + books.owed_to_bounded() if bounded else 0
    # While batches are out, a row may hold more of a window than is counted, or be owed a block beside a full window.
    late, tables = 0, manager.tables
    for side in manager.layout.bounded:
        held = tables.num_blocks[bounded] - tables.first[side.table, bounded]
        goes_on = tables.num_blocks[bounded] * manager.block_size < columns.max_total[bounded]
        late += int(np.maximum(held + goes_on - side.most, 0).sum()) * side.pages
    if worst > manager.capacity + late:
        yield f"8: {worst} blocks are reserved for worst cases; the pool has {manager.capacity}."


def _in_flight(state: State) -> Iterator[str]:
    manager, limits, batches = state.manager, state.limits, state.outstanding.batches
    # A void share may still compute known tokens: its row lost blocks, and runs again.
    in_batches = {
        row
        for ticket in (batch.ticket for batch in batches)
        for row in ticket.rows.tolist()
        if ticket.place_of(row) >= 0 or (ticket.flight is not None and ticket.flight.share_of(row) is not None)
    }
    live = manager.tables.live_rows
    in_flight = set(live[manager.rows.num_launched[live] != manager.rows.num_computed[live]].tolist())
    if not in_flight <= in_batches:
        yield f"8: rows {sorted(in_flight)} are in flight; the outstanding batches have {sorted(in_batches)}."
    numbers = [batch.number for batch in batches]
    if numbers != sorted(set(numbers)):
        yield f"8: batches {numbers} are out, not rising."
    for batch in batches:
        rows = batch.ticket.rows.tolist()
        if len(set(rows)) != len(rows):
            yield f"8: a row is twice in batch {batch.number}."
        if batch.num_scheduled_tokens > limits.max_tokens_per_step:
            yield f"8: batch {batch.number} has {batch.num_scheduled_tokens} tokens, more than the budget."
        if len(rows) > limits.max_sequences:
            yield f"8: batch {batch.number} has {len(rows)} rows, more than max_sequences."
        for left in batch.ticket.gone.values():
            if not left.is_void and state.requests.get(left.request.id) is not left.request:
                yield f'8: batch {batch.number} samples for request "{left.request.id}", which has ended.'
