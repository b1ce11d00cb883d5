"""Preemption: which admitted requests give blocks up, how many, and what becomes of the blocks.

running ── tail given up ──> paused ── all given up ──> waiting (dropped: recomputed later)
                                                   └──> swapped (copied to the host)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .policies import Costs
from .request import RequestState, Status
from .reservations import Books
from .state import State, Step

Swaps = Callable[[Costs, list[tuple[int, int]], int], bool]
"""Whether positions (start, stop) of each row that loses blocks go to so many host blocks; if not, they are dropped."""


class Victims:
    """The latest in order first. Other strategies are subclasses. `takes_whole`: a victim loses all blocks, not only
    missing ones off its tail. `swaps`: what becomes of them. `fewest_first`: the holder of the fewest blocks first."""

    def __init__(self, *, takes_whole: bool, swaps: Swaps, fewest_first: bool = False) -> None:
        self.takes_whole, self.swaps, self._fewest_first = takes_whole, swaps, fewest_first

    def ranked(self, books: Books, running: list[RequestState]) -> list[RequestState]:
        """Return running requests, given latest first, in the order in which they give blocks up."""
        if not self._fewest_first:
            return running
        num_blocks = books.manager.rows.num_blocks
        return sorted(running, key=lambda request: int(num_blocks[request.live_rows].sum()))

    def candidates(self, books: Books, may_give: Callable[[RequestState], bool]) -> Iterator[RequestState]:
        """Iterate victims that are not placed and `may_give`: paused, followers, then running ones as `ranked`."""
        is_placed, queues = books.manager.is_placed, books.queues
        yield from filter(may_give, [v for v in reversed(list(queues.away)) if v.status is Status.PAUSED])
        running = list(queues.running)[::-1]
        following = [v for v in running if v.follows is not None]
        leading = self.ranked(books, [v for v in running if v.follows is None])
        for victim in (*following, *leading):
            # Most often the first ones suffice, so later ones are not checked.
            if not any(map(is_placed, victim.live_rows)) and may_give(victim):
                yield victim


def preempt(state: State, step: Step, victim: RequestState, num_missing: int, *, may_swap: bool = True) -> None:
    """Stop the victim. Take `num_missing` blocks off its tail, or all if the policy says so, or it is idle or a group.
    A victim that loses none pauses, and does not count as preempted."""
    manager, rows = state.manager, victim.live_rows
    # An idle victim stays out until the caller appends tokens: computed again, it would sample again.
    is_idle = victim.status is Status.RUNNING and state.outstanding.is_idle(victim)
    step.note_shortage()
    takes_tail = not state.victims.takes_whole and not is_idle and len(rows) == 1
    keep = _blocks_kept(state, rows[0], num_missing) if takes_tail else 0
    swaps = may_swap and not is_idle and _swaps(state, step, rows, keep)
    state.remember_high_water(victim)
    gives = keep == 0 or keep < manager.rows.num_blocks[rows[0]]
    if gives:
        _report(state, step, victim, "swap" if swaps else "recompute")
    if not keep and not swaps:
        drop_rows(state, victim, is_idle=is_idle)
        return
    state.queues.leave(victim)
    state.books.lift_bound(victim)
    if swaps:
        moves = manager.tiers.swap_out(np.array(rows), keep)
        step.move(moves)
        state.stats.count("swapped_out_blocks", len(moves.device_to_host))
        victim.count("swapped_blocks", len(moves.device_to_host))
    elif gives:
        manager.sharing.truncate(rows[0], keep)
    has_device_blocks = any(manager.rows.num_blocks[row] for row in rows)
    state.queues.suspend(victim, Status.PAUSED if has_device_blocks else Status.SWAPPED)


def _blocks_kept(state: State, row: int, num_missing: int) -> int:
    """Return how many blocks the row keeps when `num_missing` off its tail become free, which shared ones do not."""
    manager = state.manager
    if num_missing <= 0:
        return manager.rows.num_blocks.item(row)
    reached = np.cumsum(manager.pages_freed(row)[::-1]) >= num_missing
    keep = len(reached) - int(reached.argmax()) - 1 if reached.any() else 0
    # If its windows and states do not allow this length, it gives up all.
    return keep if manager.growth.is_restart(row, keep * manager.block_size) else 0


def _swaps(state: State, step: Step, rows: list[int], keep: int) -> bool:
    """Whether the tail goes to the host: the host has room, and the policy says so."""
    manager, tables = state.manager, state.manager.rows
    if not manager.num_host_blocks or all(tables.num_blocks[row] <= keep for row in rows):
        return False
    if any(len(moves.host_to_device) for moves in step.moves):
        # The batch reads host blocks, and must not write these.
        return False
    wanted = manager.tiers.host_pages_wanted(rows, keep)
    lost = [(min(keep * manager.block_size, total), total) for total in map(tables.num_launched.item, rows)]
    return wanted <= manager.host.num_available and state.victims.swaps(state.costs, lost, wanted)


def drop_rows(state: State, victim: RequestState, *, is_idle: bool = False) -> None:
    """Release the rows of a request. It keeps its tokens, and waits: in the queue or, if idle, for `append`."""
    manager = state.manager
    state.queues.leave(victim)
    state.books.lift_bound(victim)
    for sequence, row in enumerate(victim.rows):
        if row < 0:
            continue
        tokens = manager.rows.tokens[row, : manager.rows.num_tokens[row]].copy()
        is_computed = manager.rows.num_tokens[row] == manager.rows.num_launched[row]
        if is_computed and not state.outstanding.sources_of(victim, sequence):
            state.columns.note_sampled(victim, sequence)
        state.unseat(victim, sequence, tokens)
    state.queues.wait(victim, is_idle=is_idle)


def report_preempted_late(state: State, step: Step) -> None:
    """Report requests as preempted that gave their blocks back in an update, unless that is reported already."""
    for request in state.preempted_late:
        if state.requests.get(request.id) is request:
            _report(state, step, request, "recompute")
    state.preempted_late.clear()


def _report(state: State, step: Step, victim: RequestState, kind: str) -> None:
    """Count the victim as preempted, unless it lost blocks before since it last ran."""
    if victim.preempted_at is not None:
        return
    victim.note_preempted(state.stats.steps)
    state.stats.count_preemption(kind, victim.preemptions)
    step.preempted.append((victim.id, kind))
