"""What a request needs before it may enter or return, and what is kept for it from then on."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from paged.block_manager import Memory
from paged.errors import NeverFits

from .hints import Hints
from .policies import Policy
from .queues import Queues
from .request import RequestState, Status
from .rows import Counts, RowColumns, Rows

Totals = Callable[["Books", RequestState, int], int]
"""Tokens, prompt and outputs, for which a sequence of a request reserves blocks."""

ROWS = 16
"""With so many rows guesses of outputs count as they are; with n, errors count √(ROWS ÷ n) times, as they cancel."""


class Reservation:
    """Blocks on demand, or with `total_of` for what a sequence may become: it `reserves` them when it enters, drawn at
    once, or `is_counted` and drawn when tokens need them. Other strategies are subclasses."""

    reserves = is_counted = False

    def __init__(self, total_of: Totals | None = None, *, is_counted: bool = False) -> None:
        if total_of is not None:
            self.reserves, self.is_counted, self._total_of = True, is_counted, total_of

    def capacity(self, manager: Memory, num_sequences: int) -> int:
        """Return the tokens that each sequence of a group can have in an empty pool, as far as known before."""
        # No sequence shares what it reserves.
        return manager.layout.tokens_in(manager.capacity // (num_sequences if self.reserves else 1))

    def total_of(self, books: Books, request: RequestState, sequence: int) -> int:
        """Return the tokens, prompt and outputs, for which a sequence needs blocks when it enters."""
        return self._total_of(books, request, sequence) if self.reserves else books.num_known(request, sequence)

    def blocks_shared(self, books: Books, num_sequences: int, prompt_len: int) -> int:
        """Return the blocks that a group saves by sharing its prompt."""
        if self.reserves or num_sequences == 1 or not books.manager.prefix_caching:
            return 0
        return (num_sequences - 1) * ((prompt_len - 1) // books.manager.block_size) * books.manager.layout.full_pages

    def refusal(self, books: Books, request: RequestState) -> NeverFits | None:
        """Return why blocks can never lie as a new request needs them, or None."""
        return None

    def take(self, books: Books, request: RequestState, sequence: int) -> None:
        """Keep what a sequence that has just got its row needs; there is room."""
        row = request.rows[sequence]
        if self.is_counted:
            books.columns.reserved[row] = self.total_of(books, request, sequence)
        elif self.reserves:
            books.manager.reserve_rows(np.array([row]), np.array([self.blocks_drawn(books, request, sequence)]))

    def blocks_drawn(self, books: Books, request: RequestState, sequence: int) -> int:
        """Return the blocks that a sequence with a row holds from its first step on, whatever it computes."""
        draws = self.reserves and not self.is_counted
        return books.blocks_for(self.total_of(books, request, sequence)) if draws else 0

    def give_back(self, row: int) -> None:
        """Give up what is kept for a row that is about to be closed."""

    def reason(self, books: Books, request: RequestState, num_free: int) -> str | None:
        """Return why a request without rows has no place though `num_free` blocks are free; None if it has one."""
        return None

    def violations(self, books: Books) -> list[str]:
        """Return what is wrong in the strategy's own books."""
        return []


def most(books: Books, request: RequestState, sequence: int) -> int:
    """Prompt and max_tokens."""
    return request.max_total[sequence]


def expected(
    books: Books, request: RequestState, sequence: int, rounded: Callable[[int], int] = lambda outputs: outputs
) -> int:
    """Prompt and expected_tokens, `rounded` up; max_tokens if there are none, or they are reached."""
    outputs, longest = request.request.expected_tokens, request.max_total[sequence]
    if outputs is None or books.num_output(request, sequence) >= outputs:
        return longest
    return min(longest, request.prompt_len + request.appended[sequence] + rounded(outputs))


class Books:
    """Block arithmetic: what requests need and owe, and what is there for them. `max_total`: most tokens of a sequence
    alone in the pool. `bounded`: requests whose worst case is reserved; they are no victims."""

    def __init__(
        self,
        manager: Memory,
        columns: RowColumns,
        queues: Queues,
        hints: Hints,
        policy: Policy,
        reservation: Reservation,
        most: int,
    ) -> None:
        self.manager, self.columns, self.reservation, self.max_total = manager, columns, reservation, most
        self._hints = hints
        self.queues, self._max_preemptions = queues, policy.max_preemptions
        self._looks_ahead = policy.foresight != "none"
        self.bounded: dict[RequestState, None] = {}
        self.watermark_blocks = int(policy.watermark * manager.capacity)
        self._owed: int | None = None
        # Blocks that a sequence of so many tokens needs.
        self.blocks_for = manager.layout.pages_for

    def rows_in(self) -> Rows:
        """Return the running rows, and then those of loading, paused and swapped requests."""
        running = self.queues.running.rows()
        if not self.queues.away.num:
            return running
        away = [row for request in self.queues.away for row in request.live_rows]
        return np.concatenate([running, np.array(away, np.int64)])

    def max_total_of(self, num_sequences: int) -> int:
        """Return the most tokens of each sequence of a group alone in the pool, as far as known before."""
        largest = self.max_total
        return largest if num_sequences == 1 else min(largest, self.reservation.capacity(self.manager, num_sequences))

    def num_known(self, request: RequestState, sequence: int) -> int:
        """Return the known tokens of a live sequence; 0 if it has ended."""
        row, tokens = request.rows[sequence], request.tokens[sequence]
        if row >= 0:
            return self.manager.rows.num_tokens.item(row)
        return 0 if tokens is None else len(tokens)

    def num_output(self, request: RequestState, sequence: int) -> int:
        """Return the known output tokens of a live sequence."""
        return self.num_known(request, sequence) - request.prompt_len - request.appended[sequence]

    def kept(self, rows: Rows) -> Counts:
        """Return the tokens of each row, known or reserved by count, with blocks kept from newcomers, int64 [n]."""
        known = self.manager.rows.num_tokens[rows]
        return np.maximum(known, self.columns.reserved[rows]) if self.reservation.is_counted else known

    def is_due(self, request: RequestState) -> bool:
        """Whether it was preempted so often that it re-enters only with its worst case reserved."""
        return self._max_preemptions is not None and request.preemptions >= self._max_preemptions

    def to_enter(self, request: RequestState) -> int:
        """Return all blocks that a waiting request needs, shared ones included: for its prompt, or its reservation."""
        live, is_due = request.live_sequences, self.is_due(request)
        totals = [self.reservation.total_of(self, request, sequence) for sequence in live]
        if is_due:
            totals = [max(total, request.max_total[i]) for i, total in zip(live, totals, strict=True)]
        shared = 0 if is_due else self.reservation.blocks_shared(self, len(live), request.prompt_len)
        return sum(map(self.blocks_for, totals)) - shared + len(live) * self.manager.layout.spare_pages

    def to_share(self, request: RequestState) -> int:
        """Return the blocks of a waiting request's prefix that rows hold: sharing them draws nothing."""
        if not request.request.reads_cache:
            return 0
        # An unconfirmed block may be taken back, so it cannot replace a promised one.
        confirmed = self.reservation.is_counted or self.is_due(request)
        return self.manager.content.held_prefix(request.first_tokens, request.root, confirmed=confirmed)

    def to_return(self, request: RequestState) -> int:
        """Return the blocks that a paused or swapped request takes from the available ones to run again."""
        rows = np.array(request.live_rows, np.int64)
        targets = self.columns.max_total[rows] if self.is_due(request) else self.kept(rows)
        return self._to_hold(request, targets, self.manager.growth.owed)

    def to_go_on(self, request: RequestState) -> int:
        """Return the blocks that an admitted request needs for its next token; if away, for one token of each row."""
        manager, is_running = self.manager, request.status is Status.RUNNING
        ends: list[int] = []
        for row in request.live_rows:
            is_next = manager.rows.num_tokens[row] > manager.rows.num_launched[row] and not (is_running and any(ends))
            ends.append(manager.rows.num_launched.item(row) + 1 if is_next else 0)
        return self._to_hold(request, np.array(ends, np.int64), manager.growth.lacking)

    def _to_hold(self, request: RequestState, ends: Counts, lacking: Callable[[Rows, Counts, Counts], Counts]) -> int:
        """Return the blocks that a request with rows needs to be on the device, with room for `ends` tokens."""
        tiers, rows = self.manager.tiers, np.array(request.live_rows, np.int64)
        have = self.manager.rows.num_blocks[rows] + np.array([*map(tiers.num_on_host, rows.tolist())], np.int64)
        return tiers.device_blocks_wanted(rows.tolist()) + int(lacking(rows, ends, have).sum())

    def set_owed(self, num_blocks: int | None) -> None:
        """Note what all admitted requests are owed now; None: it is counted when needed."""
        self._owed = num_blocks

    def owe(self, request: RequestState) -> None:
        """Note that a request admitted in this step may lack blocks."""
        if request in self.bounded:
            # Its worst case is reserved; a new count is rare enough.
            self._owed = None
        elif self._owed is not None:
            self._owed += self.owed_to(request.live_rows)

    def num_free(self) -> int:
        """Return the blocks for newcomers: not promised, not owed to admitted requests, not in the watermark."""
        if self._owed is None:
            self.manager.growth.draw_promised()
            self._owed = self.owed()
        return self.manager.growth.num_unpromised - self._owed - self.watermark()

    def free_for(self, request: RequestState) -> int:
        """Return `num_free` for this newcomer: where it reserves what it draws later, without what hints may pin meanwhile."""
        return self.num_free() - self.yet_to_pin(request)

    def yet_to_pin(self, request: RequestState) -> int:
        """Return the blocks that hints may pin while it waits to draw what it reserved; 0 if it reserves nothing by count."""
        return self._hints.num_yet_to_pin() if self.reservation.is_counted or self.is_due(request) else 0

    def watermark(self) -> int:
        """Return the blocks that newcomers leave available; with foresight, fewer for many rows."""
        if not self.queues.running.num:
            return 0
        if not self._looks_ahead:
            return self.watermark_blocks
        return int(self.watermark_blocks * min(1.0, math.sqrt(ROWS / self.queues.num_in)))

    def has_room(self, request: RequestState) -> bool:
        if self.manager.device.num_available <= self.watermark():
            # Each entry draws at least one block, so what is owed need not be counted.
            return False
        free, needed = self.free_for(request), self.to_enter(request)
        if needed > free and (free <= 0 or needed - self.to_share(request) > free):
            return False
        return self.reservation.reason(self, request, free) is None

    def allowance(self, request: RequestState) -> int:
        """Return the blocks that the request may draw, without those that others have reserved."""
        own = self.debt_at_worst(request) if request in self.bounded else 0
        return self.manager.device.num_available - self.owed_to_bounded() + own

    def debt_at_worst(self, request: RequestState) -> int:
        """Return the blocks that the request's rows may still draw up to their full length."""
        rows = np.array(request.live_rows, np.int64)
        return int(self.manager.growth.owed(rows, self.columns.max_total[rows]).sum())

    def owed(self) -> int:
        """Return the blocks that admitted requests still need: for prompts in the middle, and reservations."""
        loading = sum(
            self.owed_to(request.live_rows) for request in self.queues.away if request.status is Status.LOADING
        )
        return self.owed_to(self.queues.running.rows()) + loading + self._owed_beyond()

    def reserved(self) -> int:
        """Return the blocks kept by count for running requests, beyond those that they hold."""
        counted = self.owed_to(self.queues.running.rows()) if self.reservation.is_counted else 0
        return counted + self._owed_beyond()

    def owed_to_bounded(self) -> int:
        return sum(self.debt_at_worst(request) for request in self.bounded)

    def owed_to(self, rows: Rows | list[int]) -> int:
        """Return the blocks that rows still need for what they know or have reserved by count."""
        rows = np.asarray(rows, np.int64)
        return int(self.manager.growth.owed(rows, self.kept(rows)).sum())

    def _owed_beyond(self) -> int:
        """Return the blocks for worst cases, without those that are kept anyway."""
        return sum(max(0, self.debt_at_worst(request) - self.owed_to(request.live_rows)) for request in self.bounded)

    def bound_if_due(self, request: RequestState) -> None:
        """Reserve the worst case of a request that is due, if it is available; otherwise it stays a victim."""
        if not self.is_due(request) or request in self.bounded:
            return
        worst = self.debt_at_worst(request) if request.live_rows else self.to_enter(request) - self.to_share(request)
        if worst + self.owed_to_bounded() + self.yet_to_pin(request) <= self.manager.device.num_available:
            self.bounded[request] = None

    def lift_bound(self, request: RequestState) -> None:
        self.bounded.pop(request, None)
