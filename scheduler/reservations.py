"""What a request needs before it may enter or return, and what is kept for it from then on.

A strategy is a subclass of `Reservation`. Knows how many tokens and blocks each asks for. Does not decide who enters, and frees nothing
for anyone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from paged.block_manager import Memory
from paged.errors import NeverFits

from .request import RequestState
from .rows import Rows
from .state import State

Counts = NDArray[np.int64]
Totals = Callable[[State, RequestState, int], int]
"""Tokens, prompt and outputs, for which a sequence of a request reserves blocks."""


class Reservation:
    """This one keeps nothing: a sequence enters with blocks for what it knows, and draws others when tokens need them.

    reserves    blocks are kept for more than what is known
    is_counted  they are kept by count, and drawn when tokens need them
    """

    reserves = is_counted = False

    def capacity(self, manager: Memory, num_sequences: int) -> int:
        """Tokens that each sequence of a group can have in an empty pool, as far as that is known before."""
        return manager.num_blocks * manager.block_size

    def total_of(self, state: State, request: RequestState, sequence: int) -> int:
        """Tokens, prompt and outputs, for which a sequence needs blocks when it enters."""
        known = request.tokens[sequence]
        return len(known) if known is not None else int(state.manager.num_tokens[request.rows[sequence]])

    def blocks_shared(self, state: State, num_sequences: int, prompt_len: int) -> int:
        """Blocks that a group saves by sharing its prompt, against as many single sequences."""
        if num_sequences == 1 or not state.manager.prefix_caching:
            return 0
        return (num_sequences - 1) * ((prompt_len - 1) // state.manager.block_size)

    def blocks_together(self, state: State, requests: Sequence[RequestState]) -> int:
        """Blocks that these waiting requests need if they enter as one batch."""
        return sum(blocks_to_enter(state, request) for request in requests)

    def begin_batch(self, state: State, requests: Sequence[RequestState]) -> None:
        """These waiting requests, with which nothing runs, are a batch."""

    def has_place(self, state: State, request: RequestState) -> bool:
        """Whether free blocks lie as a request needs them that has no rows yet; those that have are where they are."""
        return True

    def refusal(self, state: State, request: RequestState) -> NeverFits | None:
        """Why blocks cannot ever lie as a new request needs them."""
        return None

    def take(self, state: State, request: RequestState, sequence: int) -> None:
        """A sequence that has just got its row keeps what it needs; there is room."""

    def take_more(self, state: State, request: RequestState, sequence: int) -> None:
        """The caller appended tokens to a sequence with a row."""

    def blocks_drawn(self, state: State, request: RequestState, sequence: int) -> int:
        """Blocks that a sequence with a row holds from its first step on, whatever it computes."""
        return 0

    def kept(self, state: State, rows: Rows) -> Counts:
        """Tokens of each row for which blocks are kept from newcomers, int64 [n]: those that it knows, at least."""
        return state.manager.num_tokens[rows]

    def blocks_counted(self, state: State) -> int:
        """Blocks kept by count for those who run, beyond those that they hold."""
        return 0

    def give_back(self, row: int) -> None:
        """The row is about to be closed."""

    def reason(self, state: State, request: RequestState, num_free: int) -> str | None:
        """Why a waiting request has no place though so many blocks are free; None if it has one."""
        return None

    def violations(self, state: State) -> list[str]:
        """What of the strategy's own books is wrong."""
        return []


class Drawn(Reservation):
    """Blocks for `total_of` tokens are drawn when a sequence enters."""

    reserves = True

    def __init__(self, total_of: Totals) -> None:
        self._total_of = total_of

    def capacity(self, manager: Memory, num_sequences: int) -> int:
        """No sequence of a group shares what it reserves."""
        return manager.num_blocks // num_sequences * manager.block_size

    def total_of(self, state: State, request: RequestState, sequence: int) -> int:
        return self._total_of(state, request, sequence)

    def blocks_shared(self, state: State, num_sequences: int, prompt_len: int) -> int:
        """None: each reserves its own."""
        return 0

    def take(self, state: State, request: RequestState, sequence: int) -> None:
        drawn = self.blocks_drawn(state, request, sequence)
        state.manager.reserve_rows(np.array([request.rows[sequence]]), np.array([drawn]))

    def blocks_drawn(self, state: State, request: RequestState, sequence: int) -> int:
        return state.blocks_for(self.total_of(state, request, sequence))


class Counted(Drawn):
    """Blocks for `total_of` tokens are kept by count, and drawn when tokens need them."""

    is_counted = True

    def take(self, state: State, request: RequestState, sequence: int) -> None:
        state.columns.reserved[request.rows[sequence]] = self.total_of(state, request, sequence)

    take_more = take

    def blocks_drawn(self, state: State, request: RequestState, sequence: int) -> int:
        return 0

    def kept(self, state: State, rows: Rows) -> Counts:
        return np.maximum(state.manager.num_tokens[rows], state.columns.reserved[rows])

    def blocks_counted(self, state: State) -> int:
        rows = state.running_rows.array(state.running)
        return state.blocks_beyond(rows, state.columns.reserved[rows])


def most(state: State, request: RequestState, sequence: int) -> int:
    """Prompt and max_tokens."""
    return request.max_total[sequence]


def is_due(state: State, request: RequestState) -> bool:
    """Whether it was preempted so often that it re-enters only with its worst case reserved."""
    bound = state.policy.max_preemptions
    return bound is not None and request.preemptions >= bound


def blocks_to_enter(state: State, request: RequestState) -> int:
    """Blocks that a waiting request needs in all, shared ones included: its prompt, or what it reserves."""
    reservation, reserves_all = state.reservation, is_due(state, request)
    live = [sequence for sequence, tokens in enumerate(request.tokens) if tokens is not None]
    blocks = 0
    for sequence in live:
        total = reservation.total_of(state, request, sequence)
        blocks += state.blocks_for(max(total, request.max_total[sequence]) if reserves_all else total)
    # What the first sequence computes the others share.
    return blocks if reserves_all else blocks - reservation.blocks_shared(state, len(live), request.prompt_len)


def blocks_to_return(state: State, request: RequestState) -> int:
    """Blocks that a paused or swapped request takes from what is available before it may run again."""
    manager, rows = state.manager, np.array(request.live_rows, np.int64)
    needed = manager.tiers.device_blocks_wanted(request.live_rows)
    targets = state.columns.max_total[rows] if is_due(state, request) else state.reservation.kept(state, rows)
    for row, target in zip(request.live_rows, targets.tolist(), strict=True):
        on_device, on_host = int(manager.num_table_blocks[row]), manager.tiers.num_on_host(row)
        needed += max(0, state.blocks_for(target) - on_device - on_host)
    return needed
