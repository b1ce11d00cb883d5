"""What the scheduler remembers between steps, and what it gathers while it makes one."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from paged.base.arguments import Tokens
from paged.base.fields import AtLeast0, AtLeast1
from paged.block_manager import Memory, Moves
from paged.block_manager.moves import NO_MOVES

from .batch import Output, SchedulerStats
from .foresight import Foresight, OutputLengths
from .hints import Hints, Quotas
from .outstanding import CarriedCopies, Outstanding
from .policies import Costs, Policy
from .queues import Queues
from .request import RequestState, Status
from .reservations import Books
from .rows import NO_ROWS, Counts, RowColumns, Rows

if TYPE_CHECKING:
    from .strategies import Strategies

# Ended requests that are remembered.
_REMEMBERED = 10_000


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller sets of each step, as in `Scheduler`."""

    max_tokens_per_step: AtLeast1
    max_sequences: AtLeast1
    max_model_len: AtLeast1 | None
    max_waiting: AtLeast1 | None
    max_chunk: AtLeast1
    vocabulary_size: AtLeast1 | None
    max_outstanding: AtLeast1
    resumes_known: bool
    max_pinned: AtLeast0
    max_pinned_per_tenant: AtLeast0 | None
    max_cached_per_tenant: AtLeast0 | None
    remember_evicted: AtLeast0


class Step(msgspec.Struct, eq=False, gc=False):
    """One step while it is made: what is left of its budget, and the decisions so far."""

    budget: int
    seats: int
    decodes: Rows
    decode_starts: Counts = NO_ROWS  # launched tokens of each of `decodes`
    # The batch that samples what `decodes` compute, if these are its rows in its order; else -1.
    decodes_after: int = -1
    draft_counts: Counts | None = None  # drafts of each of `decodes`
    draft_tokens: Tokens | None = None  # and their tokens, packed
    # Row, launched tokens, tokens of this step, and whether they are all: see `note_chunk`.
    chunks: list[tuple[int, int, int, bool]] = []
    # Request, row and launched tokens where the prompt goes on past this batch: others may follow.
    leaders: list[tuple[RequestState, int, int]] = []
    moves: list[Moves] = []
    loads: list[tuple[int, int, int]] = []
    loads_to: dict[int, int] = {}  # by row, up to which token the batch itself loads, if the row is placed
    preempted: list[tuple[str, str]] = []
    admitted: list[str] = []
    is_short: bool = False  # a victim gives up blocks: admit no request in this step

    def place_decodes(self, rows: Rows, starts: Counts, *, after: int = -1) -> None:
        """Place a token of each row. `after`: the batch that samples these tokens, if it has these very rows."""
        self.decodes, self.decode_starts, self.decodes_after = rows, starts, after
        self.budget -= len(rows)
        self.seats -= len(rows)

    def load(self, row: int, num_tokens: int) -> None:
        """Let the batch load the row up to so many tokens, in front of what it computes of it."""
        self.loads_to[row] = num_tokens

    def note_chunk(
        self, request: RequestState, row: int, launched: int, count: int, *, is_whole: bool, num_loaded: int = 0
    ) -> None:
        """Place the next `count` tokens of the request's row, of which the batch computes all but the first `num_loaded`.
        `is_whole`: they are all that it knows or will know."""
        self.chunks.append((row, launched + num_loaded, count - num_loaded, is_whole))
        self.budget -= count - num_loaded
        self.seats -= 1
        if not is_whole and request.request.writes_cache:
            self.leaders.append((request, row, launched))

    def lengthen(self, counts: Counts, tokens: Tokens) -> None:
        """Add `counts[i]` drafts to each decode, packed in `tokens`."""
        self.draft_counts, self.draft_tokens = counts, tokens
        self.budget -= len(tokens)

    def move(self, moves: Moves) -> None:
        """Add copies to those that the batch begins with."""
        if moves is not NO_MOVES and len(moves):
            self.moves.append(moves)

    def note_shortage(self) -> None:
        self.is_short = True

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.chunks)


class State:
    def __init__(
        self,
        manager: Memory,
        policy: Policy,
        strategies: Strategies,
        limits: Limits,
        costs: Costs,
        elsewhere: Callable[[str, int], tuple[int, bool]] | None = None,
    ) -> None:
        self.manager = manager
        self.elsewhere = elsewhere
        self.policy = policy
        self.reservation, self.admission, self.composition, self.victims, self.order = strategies
        self.limits = limits
        self.costs = costs
        self.requests: dict[str, RequestState] = {}
        self.ended: OrderedDict[str, tuple[Status, str]] = OrderedDict()
        self.columns = RowColumns()
        self.outstanding = Outstanding(manager, self.columns, resumes_known=limits.resumes_known)
        self.hints = Hints(manager, limits.max_pinned, limits.max_pinned_per_tenant, lambda: self.now)
        self.quotas = None if (quota := limits.max_cached_per_tenant) is None else Quotas(manager, quota)
        # By step, its time and whom it admitted, of the last steps: for `explain_prefix`.
        self.admissions: OrderedDict[int, tuple[float, tuple[str, ...]]] = OrderedDict()
        # Requests that became idle in an update: the next batch reports them as preempted.
        self.preempted_late: list[RequestState] = []
        self.carried = CarriedCopies(self.columns)
        # Of requests that ended outside a batch.
        self.pending_outputs: list[Output] = []
        self.to_reject: list[RequestState] = []
        # The latest time from the caller, at first the earliest possible.
        self.now = -sys.float_info.max
        self.stats = SchedulerStats()
        capacity = self.reservation.capacity(manager, 1)
        max_total = capacity if limits.max_model_len is None else min(capacity, limits.max_model_len)
        looks_ahead = policy.foresight != "none"
        self.lengths = OutputLengths(max_total, policy.known_outputs if looks_ahead else 0)
        self.queues = queues = Queues(self.order.queue(self.lengths, manager))
        self.waiting, self.running, self.away, self.idle = queues.waiting, queues.running, queues.away, queues.idle
        self.books = Books(manager, self.columns, queues, self.hints, policy, self.reservation, max_total)
        self.foresight = Foresight(policy, self.books, self.lengths, self.stats) if looks_ahead else None

    def set_now(self, now: float) -> None:
        self.now = now

    def end_due(self) -> None:
        """End the retentions and pins whose time has come."""
        if self.manager.content.retentions.next_end <= self.now:
            self.manager.content.retentions.expire(self.now)
        self.hints.expire(self.now)

    def note_admissions(self, number: int, admitted: list[str]) -> None:
        """Remember whom a step admitted, for `explain_prefix`."""
        self.admissions[number] = self.now, tuple(admitted)
        if len(self.admissions) > self.limits.remember_evicted:
            self.admissions.popitem(last=False)

    def seat(self, request: RequestState, sequence: int, row: int, hit_tokens: int) -> None:
        """Give a row that was opened for a waiting sequence, with `hit_tokens` from the cache, to that sequence."""
        request.move(sequence, row, None)
        self.columns.bind(row, request, sequence)
        self.outstanding.forget_awaited()
        if request.is_new:
            request.count("hit_tokens", hit_tokens)
        elif request.high_water[sequence] > hit_tokens:
            self.columns.recover(row, hit_tokens)

    def unseat(self, request: RequestState, sequence: int, tokens: Tokens | None) -> int:
        """Take the row, to be released, from a sequence that keeps `tokens`; None: it has ended. Return it, or -1."""
        row = request.rows[sequence]
        if self.outstanding.batches:
            self.outstanding.leave(request, sequence, has_ended=tokens is None)
        request.move(sequence, -1, tokens)
        if row >= 0:
            self.reservation.give_back(row)
            self.columns.release(row)
        return row

    def remember_high_water(self, request: RequestState, starts: Mapping[int, int] | None = None) -> None:
        """Note how much of the request was computed, before it loses blocks: computing it again is waste. `starts`: of
        rows in a batch that did not run, where their shares begin."""
        launched, starts = self.manager.rows.num_launched, starts or {}
        for row in request.live_rows:
            self.columns.recover(row, starts.get(row, launched.item(row)))

    def end(self, request: RequestState, status: Status, sentence: str) -> None:
        """End a request that holds nothing any more. `sentence`: what `explain` says of it."""
        request_id, ended = request.request.id, self.ended
        request.become(status)
        del self.requests[request_id]
        self.waiting.ended(request)
        # Where the id was used before, this end is the latest.
        ended.pop(request_id, None)
        if len(ended) >= _REMEMBERED:
            ended.popitem(last=False)
        ended[request_id] = status, sentence
        self.stats.count(status)
