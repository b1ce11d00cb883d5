"""What a request needs before it may enter or return, and what is kept for it from then on.

A strategy is a subclass of `Reservation`. Does not decide who enters, and frees nothing for anyone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paged.block_manager import Memory
from paged.errors import NeverFits

from .policies import Policy
from .queues import Queues
from .request import RequestState
from .rows import RowColumns, Rows
from .status import Status

Counts = NDArray[np.int64]
Totals = Callable[["Books", RequestState, int], int]
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

    def total_of(self, books: Books, request: RequestState, sequence: int) -> int:
        """Tokens, prompt and outputs, for which a sequence needs blocks when it enters."""
        known = request.tokens[sequence]
        return len(known) if known is not None else int(books.manager.rows.num_tokens[request.rows[sequence]])

    def blocks_shared(self, books: Books, num_sequences: int, prompt_len: int) -> int:
        """Blocks that a group saves by sharing its prompt, against as many single sequences."""
        if num_sequences == 1 or not books.manager.prefix_caching:
            return 0
        return (num_sequences - 1) * ((prompt_len - 1) // books.manager.block_size)

    def has_place(self, books: Books, request: RequestState) -> bool:
        """Whether free blocks lie as a request needs them that has no rows yet; those that have are where they are."""
        return True

    def refusal(self, books: Books, request: RequestState) -> NeverFits | None:
        """Why blocks cannot ever lie as a new request needs them."""
        return None

    def take(self, books: Books, request: RequestState, sequence: int) -> None:
        """A sequence that has just got its row keeps what it needs; there is room."""

    def take_more(self, books: Books, request: RequestState, sequence: int) -> None:
        """The caller appended tokens to a sequence with a row."""

    def blocks_drawn(self, books: Books, request: RequestState, sequence: int) -> int:
        """Blocks that a sequence with a row holds from its first step on, whatever it computes."""
        return 0

    def kept(self, books: Books, rows: Rows) -> Counts:
        """Tokens of each row for which blocks are kept from newcomers, int64 [n]: those that it knows, at least."""
        return books.manager.rows.num_tokens[rows]

    def blocks_counted(self, books: Books) -> int:
        """Blocks kept by count for those who run, beyond those that they hold."""
        return 0

    def give_back(self, row: int) -> None:
        """The row is about to be closed."""

    def reason(self, books: Books, request: RequestState, num_free: int) -> str | None:
        """Why a waiting request has no place though so many blocks are free; None if it has one."""
        return None

    def violations(self, books: Books) -> list[str]:
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

    def total_of(self, books: Books, request: RequestState, sequence: int) -> int:
        return self._total_of(books, request, sequence)

    def blocks_shared(self, books: Books, num_sequences: int, prompt_len: int) -> int:
        """None: each reserves its own."""
        return 0

    def take(self, books: Books, request: RequestState, sequence: int) -> None:
        drawn = self.blocks_drawn(books, request, sequence)
        books.manager.reserve_rows(np.array([request.rows[sequence]]), np.array([drawn]))

    def blocks_drawn(self, books: Books, request: RequestState, sequence: int) -> int:
        return books.blocks_for(self.total_of(books, request, sequence))


class Counted(Drawn):
    """Blocks for `total_of` tokens are kept by count, and drawn when tokens need them."""

    is_counted = True

    def take(self, books: Books, request: RequestState, sequence: int) -> None:
        books.columns.reserved[request.rows[sequence]] = self.total_of(books, request, sequence)

    take_more = take

    def blocks_drawn(self, books: Books, request: RequestState, sequence: int) -> int:
        return 0

    def kept(self, books: Books, rows: Rows) -> Counts:
        return np.maximum(books.manager.rows.num_tokens[rows], books.columns.reserved[rows])

    def blocks_counted(self, books: Books) -> int:
        rows = books.running_rows()
        return books.beyond(rows, books.columns.reserved[rows])


def most(books: Books, request: RequestState, sequence: int) -> int:
    """Prompt and max_tokens."""
    return request.max_total[sequence]


def expected(books: Books, request: RequestState, sequence: int) -> int:
    """Prompt and expected_tokens."""
    return total_with(request, sequence, expected_left(books, request, sequence))


def expected_left(books: Books, request: RequestState, sequence: int) -> int | None:
    """The request's expected_tokens; None where there are none, or they are reached."""
    outputs = request.request.expected_tokens
    num_known = Reservation.total_of(books.reservation, books, request, sequence)
    is_reached = outputs is not None and num_known - request.prompt_len - request.appended[sequence] >= outputs
    return None if is_reached else outputs


def total_with(request: RequestState, sequence: int, outputs: int | None) -> int:
    """Prompt and so many outputs; None: max_tokens of them."""
    longest = request.max_total[sequence]
    return longest if outputs is None else min(longest, request.prompt_len + request.appended[sequence] + outputs)


class Books:
    """What requests need and owe, in blocks: what each asks for before it enters or returns, and what is kept for those who were admitted.

    max_total  tokens that a sequence alone in the pool can have, prompt and output
    bounded    requests whose worst case is reserved: they are no victims
    """

    def __init__(
        self,
        manager: Memory,
        columns: RowColumns,
        queues: Queues,
        policy: Policy,
        reservation: Reservation,
        max_total: int,
    ) -> None:
        self.manager, self.columns, self.reservation, self.max_total = manager, columns, reservation, max_total
        self._queues, self._max_preemptions = queues, policy.max_preemptions
        self.bounded: list[RequestState] = []
        self.watermark_blocks = int(policy.watermark * manager.num_blocks)

    def running_rows(self) -> Rows:
        """The rows that run, in order, int64 [n]."""
        return self._queues.running_rows.array(self._queues.running)

    def max_total_of(self, num_sequences: int) -> int:
        """Tokens that each sequence of a group alone in the pool can have, prompt and output, as far as that is known before."""
        return min(self.max_total, self.reservation.capacity(self.manager, num_sequences))

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.manager.block_size)

    def beyond(self, rows: Rows, tokens: Counts) -> int:
        """Blocks that so many tokens of each of these rows take beyond those that it holds."""
        short = -(-tokens // self.manager.block_size) - self.manager.rows.num_blocks[rows]
        return int(short[short > 0].sum())

    def is_due(self, request: RequestState) -> bool:
        """Whether it was preempted so often that it re-enters only with its worst case reserved."""
        return self._max_preemptions is not None and request.preemptions >= self._max_preemptions

    def to_enter(self, request: RequestState) -> int:
        """Blocks that a waiting request needs in all, shared ones included: its prompt, or what it reserves."""
        reservation, reserves_all = self.reservation, self.is_due(request)
        live = [sequence for sequence, tokens in enumerate(request.tokens) if tokens is not None]
        blocks = 0
        for sequence in live:
            total = reservation.total_of(self, request, sequence)
            blocks += self.blocks_for(max(total, request.max_total[sequence]) if reserves_all else total)
        # What the first sequence computes the others share.
        return blocks if reserves_all else blocks - reservation.blocks_shared(self, len(live), request.prompt_len)

    def to_return(self, request: RequestState) -> int:
        """Blocks that a paused or swapped request takes from what is available before it may run again."""
        manager, rows = self.manager, np.array(request.live_rows, np.int64)
        needed = manager.tiers.device_blocks_wanted(request.live_rows)
        targets = self.columns.max_total[rows] if self.is_due(request) else self.reservation.kept(self, rows)
        for row, target in zip(request.live_rows, targets.tolist(), strict=True):
            on_device, on_host = int(manager.rows.num_blocks[row]), manager.tiers.num_on_host(row)
            needed += max(0, self.blocks_for(target) - on_device - on_host)
        return needed

    def allowance(self, request: RequestState) -> int:
        """Blocks that the request may draw: what others have reserved is not there for it."""
        available = self.manager.device.num_available
        if not self.bounded:
            return available
        own = self.debt_at_worst(request) if request.is_bounded else 0
        return available - self.owed_to_bounded() + own

    def debt_of(self, request: RequestState) -> int:
        """Blocks that this one request, which has rows, still needs for what it knows or has reserved by count."""
        rows = np.array(request.live_rows, np.int64)
        return self.beyond(rows, self.reservation.kept(self, rows))

    def debt_at_worst(self, request: RequestState, *, beyond_known: bool = False) -> int:
        """Blocks that the request's rows may still draw until all are as long as they can be; `beyond_known`: only those past
        what is kept for them anyway."""
        rows = np.array(request.live_rows, np.int64)
        worst = self.columns.max_total[rows]
        debt = self.beyond(rows, worst)
        if beyond_known:
            debt -= self.beyond(rows, np.minimum(self.reservation.kept(self, rows), worst))
        return debt

    def owed(self) -> int:
        """Blocks that admitted requests still need for what they were admitted with: prompts in the middle, and worst cases
        where those are reserved."""
        rows = self.running_rows()
        owed = self.beyond(rows, self.reservation.kept(self, rows)) if len(rows) else 0
        owed += sum(self.debt_of(request) for request in self._queues.away if request.status is Status.LOADING)
        return owed + self.owed_to_bounded(beyond_known=True)

    def owed_to_bounded(self, *, beyond_known: bool = False) -> int:
        """Blocks that requests with a reserved worst case still may draw; `beyond_known`: only those past their known tokens."""
        return sum(self.debt_at_worst(request, beyond_known=beyond_known) for request in self.bounded)

    def reserved(self) -> int:
        """Blocks kept by count for those who run, beyond those that they hold."""
        return self.reservation.blocks_counted(self) + self.owed_to_bounded(beyond_known=True)

    def bound_if_due(self, request: RequestState) -> None:
        """Reserve the worst case of a request that was preempted often, if it is there: forced in without, it stays a victim."""
        if not self.is_due(request) or request.is_bounded:
            return
        if request.live_rows:
            worst = self.debt_at_worst(request)
        else:
            worst = self.to_enter(request)
            if request.request.reads_cache:
                tokens = next(tokens for tokens in request.tokens if tokens is not None)
                worst -= self.manager.content.held_prefix(tokens, request.root, confirmed=True)
        if worst + self.owed_to_bounded() <= self.manager.device.num_available:
            request.is_bounded = True
            self.bounded.append(request)

    def lift_bound(self, request: RequestState) -> None:
        """The request's worst case is not what was reserved, or is reserved no more."""
        if request.is_bounded:
            request.is_bounded = False
            self.bounded.remove(request)
