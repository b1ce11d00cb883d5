"""The blocks that a request needs to enter or return, and those that are kept for it from then on."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import numpy as np

from paged.block_manager import Memory
from paged.errors import NeverFits

from .hints import Hints
from .policies import Policy
from .queues import Queues
from .request import RequestState, Status
from .rows import Counts, RowColumns, Rows

Totals = Callable[["Books", RequestState, int], int]
"""Returns the tokens, prompt and outputs, for which a sequence of a request reserves blocks."""

_AWAY = (Status.LOADING, Status.PAUSED, Status.SWAPPED)
ROWS = 16
"""A policy states its margins for so many rows. Errors of guesses cancel: n rows need √(ROWS ÷ n) of the margins."""


class Reservation:
    """Blocks on demand; or, with `total_of`, a sequence `reserves` blocks for so many tokens when it enters. They are
    drawn at once, or `is_counted`: kept by count, and drawn when tokens need them. Other strategies are subclasses."""

    def __init__(self, total_of: Totals | None = None, *, is_counted: bool = False) -> None:
        self.reserves, self.is_counted = total_of is not None, is_counted
        self._total_of = total_of or Books.num_known

    def capacity(self, manager: Memory, num_sequences: int) -> int:
        """Return an upper bound of the tokens that each sequence of a group can have in an empty pool."""
        # Reserved blocks are not shared. Others may be, and how many is not known before.
        return manager.layout.tokens_in(manager.capacity // (num_sequences if self.reserves else 1))

    def total_of(self, books: Books, request: RequestState, sequence: int) -> int:
        """Return the tokens, prompt and outputs, for which a sequence needs blocks when it enters."""
        return self._total_of(books, request, sequence)

    def blocks_shared(self, books: Books, num_sequences: int, prompt_len: int) -> int:
        """Return the blocks that a group saves by sharing its prompt."""
        if self.reserves or not books.manager.prefix_caching:
            return 0
        return (num_sequences - 1) * ((prompt_len - 1) // books.manager.block_size) * books.manager.layout.full_pages

    def refusal(self, books: Books, request: RequestState) -> NeverFits | None:
        """Return the error for a new request whose blocks can never lie as the strategy needs them; else None."""
        return None

    def take(self, books: Books, request: RequestState, sequence: int) -> None:
        """Reserve blocks for a sequence that has just got its row; if `is_counted`, also after an `append`."""
        row = request.rows[sequence]
        if self.is_counted:
            books.columns.reserved[row] = self.total_of(books, request, sequence)
        elif self.reserves:
            books.manager.reserve_rows(np.array([row]), np.array([self.blocks_drawn(books, request, sequence)]))

    def blocks_drawn(self, books: Books, request: RequestState, sequence: int) -> int:
        """Return the blocks that a row holds at least, whatever it has computed: reserved ones, if drawn; else 0."""
        draws = self.reserves and not self.is_counted
        return books.blocks_for(self.total_of(books, request, sequence)) if draws else 0

    def give_back(self, row: int) -> None:
        """Give up the reservation of a row that is about to be released."""

    def reason(self, books: Books, request: RequestState, num_free: int) -> str | None:
        """Return a sentence: why a request cannot enter although `num_free` blocks are free. None if it can."""
        return None

    def violations(self, books: Books) -> list[str]:
        """Return what is wrong in the strategy's own books."""
        return []


def most(books: Books, request: RequestState, sequence: int) -> int:
    """Return the full length: prompt and max_tokens, as far as pool and model allow."""
    return request.max_total[sequence]


def expected(
    books: Books, request: RequestState, sequence: int, rounded: Callable[[int], int] = lambda outputs: outputs
) -> int:
    """Return prompt and expected_tokens, `rounded` up; the full length if they are not known, or are reached."""
    outputs, longest = request.request.expected_tokens, request.max_total[sequence]
    if outputs is None or books.num_output(request, sequence) >= outputs:
        return longest
    return min(longest, request.prompt_len + request.appended[sequence] + rounded(outputs))


class Books:
    """Counts blocks (pages, of layers of several kinds): needed, free, and *owed*, which admitted requests will draw.
    `max_total`: most tokens of a sequence. `bounded`: requests whose worst case is reserved; they are no victims."""

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
        self.queues, self._hints, self._policy = queues, hints, policy
        self.bounded: dict[RequestState, None] = {}
        self.watermark_blocks = int(policy.watermark * manager.capacity)
        self._owed: int | None = None
        # Blocks that a sequence of so many tokens needs.
        self.blocks_for = manager.layout.pages_for

    def rows_in(self, away: Collection[Status] = _AWAY) -> Rows:
        """Return the rows of running requests, then of loading, paused and swapped ones, as far as they are `away`."""
        running = self.queues.running.rows()
        if not self.queues.away.num:
            return running
        rows = [row for request in self.queues.away if request.status in away for row in request.live_rows]
        return np.concatenate([running, np.array(rows, np.int64)])

    def max_total_of(self, num_sequences: int) -> int:
        """Return an upper bound of the tokens of each sequence of a group that is alone in the pool."""
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
        """Return for how many tokens of each row newcomers leave blocks, int64 [n]: known, or reserved by count."""
        known = self.manager.rows.num_tokens[rows]
        return np.maximum(known, self.columns.reserved[rows]) if self.reservation.is_counted else known

    def is_due(self, request: RequestState) -> bool:
        """Whether the request was preempted so often that it re-enters only with its worst case reserved."""
        most = self._policy.max_preemptions
        return most is not None and request.preemptions >= most

    def to_enter(self, request: RequestState) -> int:
        """Return the blocks that a waiting request needs for its known tokens, or reserves, cached ones included."""
        live, is_due = request.live_sequences, self.is_due(request)
        least = request.max_total if is_due else [0] * len(request.rows)
        totals = [max(self.reservation.total_of(self, request, i), least[i]) for i in live]
        shared = 0 if is_due else self.reservation.blocks_shared(self, len(live), request.prompt_len)
        return sum(map(self.blocks_for, totals)) - shared + len(live) * self.manager.layout.spare_pages

    def to_share(self, request: RequestState) -> int:
        """Return how many blocks of a waiting request's cached prefix rows hold: it shares them, and draws none."""
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
        """Return the blocks that a running request needs for its next token; if it is away, for one of each row."""
        manager, is_running = self.manager, request.status is Status.RUNNING
        ends: list[int] = []
        for row in request.live_rows:
            is_next = manager.rows.num_tokens[row] > manager.rows.num_launched[row] and not (is_running and any(ends))
            ends.append(manager.rows.num_launched.item(row) + 1 if is_next else 0)
        return self._to_hold(request, np.array(ends, np.int64), manager.growth.lacking)

    def _to_hold(self, request: RequestState, ends: Counts, lacking: Callable[[Rows, Counts, Counts], Counts]) -> int:
        """Return the blocks that a request needs to have its rows on the device, with room for `ends` tokens."""
        tiers, rows = self.manager.tiers, np.array(request.live_rows, np.int64)
        have = self.manager.rows.num_blocks[rows] + np.array([*map(tiers.num_on_host, rows.tolist())], np.int64)
        return tiers.device_pages_wanted(rows.tolist()) + int(lacking(rows, ends, have).sum())

    def set_owed(self, num_blocks: int | None) -> None:
        """Note how many blocks all admitted requests are owed now; None: they are counted when needed."""
        self._owed = num_blocks

    def owe(self, request: RequestState) -> None:
        """Count what is owed to a request that was admitted in this step."""
        if self._owed is not None:
            self._owed += self.owed_to(request.live_rows)

    def num_free(self) -> int:
        """Return the blocks that newcomers may draw: neither promised, nor owed, nor in the watermark."""
        if self._owed is None:
            self.manager.growth.draw_promised()
            self._owed = self.owed()
        return self.manager.growth.num_unpromised - self._owed - self.watermark()

    def free_for(self, request: RequestState) -> int:
        """Return `num_free`, less what hints may pin before this newcomer draws what it reserves by count."""
        return self.num_free() - self.yet_to_pin(request)

    def yet_to_pin(self, request: RequestState) -> int:
        """Return the blocks that hints may pin before the request draws what it reserves by count, if it does."""
        return self._hints.num_yet_to_pin() if self.reservation.is_counted or self.is_due(request) else 0

    def watermark(self) -> int:
        """Return the blocks that newcomers leave available: 0 if nothing runs; by foresight, fewer for many rows."""
        if not self.queues.running.num:
            return 0
        if self._policy.foresight == "none":
            return self.watermark_blocks
        return int(self.watermark_blocks * min(1.0, math.sqrt(ROWS / self.queues.num_in)))

    def has_room(self, request: RequestState) -> bool:
        if self.manager.device.num_available <= self.watermark():
            # Every request draws at least one block, so what is owed need not be counted.
            return False
        free, needed = self.free_for(request), self.to_enter(request)
        if needed > free and (free <= 0 or needed - self.to_share(request) > free):
            return False
        return self.reservation.reason(self, request, free) is None

    def allowance(self, request: RequestState) -> int:
        """Return the available blocks that the request may draw: all but the reserved worst cases of others."""
        return self.manager.device.num_available - self.owed_to_bounded(but=request)

    def owed(self) -> int:
        """Return the blocks that admitted requests still need: for half-computed prompts, and for reservations."""
        return self.owed_to(self.rows_in((Status.LOADING,))) + self._owed_beyond()

    def reserved(self) -> int:
        """Return the blocks kept by count for running requests, beyond those that they hold."""
        counted = self.owed_to(self.queues.running.rows()) if self.reservation.is_counted else 0
        return counted + self._owed_beyond()

    def owed_to_bounded(self, but: RequestState | None = None) -> int:
        """Return the blocks that bounded requests, `but` this one, may still draw up to their full length."""
        rows = [row for request in self.bounded if request is not but for row in request.live_rows]
        return self.owed_to(rows, at_worst=True)

    def owed_to(self, rows: Rows | list[int], *, at_worst: bool = False) -> int:
        """Return the blocks that rows still need for what they know or have reserved by count, or `at_worst`."""
        if not len(rows):
            return 0
        rows = np.asarray(rows, np.int64)
        return int(self.manager.growth.owed(rows, self.columns.max_total[rows] if at_worst else self.kept(rows)).sum())

    def _owed_beyond(self) -> int:
        """Return the blocks of reserved worst cases that `owed_to` does not count."""
        rows = [row for request in self.bounded for row in request.live_rows]
        return self.owed_to(rows, at_worst=True) - self.owed_to(rows)

    def bound_if_due(self, request: RequestState) -> None:
        """Reserve the worst case of a request that is due, if the blocks are available; else it may be a victim."""
        if not self.is_due(request) or request in self.bounded:
            return
        rows = request.live_rows
        worst = self.owed_to(rows, at_worst=True) if rows else self.to_enter(request) - self.to_share(request)
        if worst + self.owed_to_bounded() + self.yet_to_pin(request) <= self.manager.device.num_available:
            self.bounded[request] = None
            # Its worst case is owed now. This is rare, so all is counted again.
            self._owed = None

    def lift_bound(self, request: RequestState) -> None:
        self.bounded.pop(request, None)
