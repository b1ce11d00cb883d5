"""The scheduler's state between steps, and one step in the making."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np

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

# Ended requests whose ids are still known; the oldest is forgotten first.
_REMEMBERED = 10_000


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that a scheduler was made with; `Scheduler` says what each is."""

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
    """A step in the making: what is left of its budget, and what is decided so far."""

    budget: int  # tokens that may still be placed
    seats: int  # rows that may still be placed
    decodes: Rows  # rows that compute their newest token, and drafts after it
    decode_starts: Counts = NO_ROWS  # launched tokens of each of `decodes`
    # The batch that samples the tokens that `decodes` compute, if its rows are these very ones in this order; else -1.
    decodes_after: int = -1
    draft_counts: Counts | None = None  # drafts of each of `decodes`
    draft_tokens: Tokens | None = None  # ids of all drafts, packed
    # (row, its first token to compute, number of tokens, is_whole) of each other row: see `note_chunk`.
    chunks: list[tuple[int, int, int, bool]] = []
    # (request, row, launched tokens) where tokens are left for later batches: other requests may follow this row.
    leaders: list[tuple[RequestState, int, int]] = []
    moves: list[Moves] = []
    loads: list[tuple[int, int, int]] = []  # see `Batch.loads`
    loads_to: dict[int, int] = {}  # by row: if the row is placed, the batch loads its tokens up to this one
    preempted: list[tuple[str, str]] = []
    admitted: list[str] = []
    is_short: bool = False  # a victim was asked for blocks: this step admits no request

    def place_decodes(self, rows: Rows, starts: Counts, *, after: int = -1) -> None:
        """Place one token of each row. `starts`: their launched tokens, int64 [n]; `after`: see `decodes_after`."""
        self.decodes, self.decode_starts, self.decodes_after = rows, starts, after
        self.budget -= len(rows)
        self.seats -= len(rows)

    def load(self, row: int, num_tokens: int) -> None:
        """Let the batch load the first `num_tokens` tokens of the row, before it computes the next ones."""
        self.loads_to[row] = num_tokens

    def note_chunk(
        self, request: RequestState, row: int, launched: int, count: int, *, is_whole: bool, num_loaded: int = 0
    ) -> None:
        """Place the row's next `count` tokens. The batch loads the first `num_loaded` of them and computes the rest.
        `is_whole`: none is left after them, neither a known one nor one that an outstanding batch samples."""
        self.chunks.append((row, launched + num_loaded, count - num_loaded, is_whole))
        self.budget -= count - num_loaded
        self.seats -= 1
        if not is_whole and request.request.writes_cache:
            self.leaders.append((request, row, launched))

    def lengthen(self, counts: Counts, tokens: Tokens) -> None:
        """Add `counts[i]` drafts to row `decodes[i]`. `tokens`: the ids of all drafts, packed."""
        self.draft_counts, self.draft_tokens = counts, tokens
        self.budget -= len(tokens)

    def move(self, moves: Moves) -> None:
        """Add copies that run before the batch computes."""
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
        self.ended: OrderedDict[str, tuple[Status, str]] = OrderedDict()  # by id: status, and sentence of `explain`
        self.columns = RowColumns()
        self.outstanding = Outstanding(manager, self.columns, resumes_known=limits.resumes_known)
        self.hints = Hints(manager, limits.max_pinned, limits.max_pinned_per_tenant, lambda: self.now)
        self.quotas = None if (quota := limits.max_cached_per_tenant) is None else Quotas(manager, quota)
        # For `explain_prefix`. By batch number, of the last batches: time, and ids of the requests that it admitted.
        self.admissions: OrderedDict[int, tuple[float, tuple[str, ...]]] = OrderedDict()
        # Requests that became idle in an update: the next batch reports them as preempted.
        self.preempted_late: list[RequestState] = []
        self.carried = CarriedCopies(self.columns)
        # Last outputs of requests that ended outside an update. The next update delivers them.
        self.pending_outputs: list[Output] = []
        self.to_reject: list[RequestState] = []  # `append` made them too long: the next step ends them
        # The latest time that the caller gave; before that, the earliest possible.
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
        """Remember which requests batch `number` admitted, for `explain_prefix`."""
        self.admissions[number] = self.now, tuple(admitted)
        if len(self.admissions) > self.limits.remember_evicted:
            self.admissions.popitem(last=False)

    def seat(self, request: RequestState, sequence: int, row: int, hit_tokens: int) -> None:
        """Give a waiting sequence the row that was opened for it. `hit_tokens`: tokens of it that were cached."""
        request.move(sequence, row, None)
        self.columns.bind(row, request, sequence)
        self.outstanding.forget_awaited()
        if request.is_new:
            request.count("hit_tokens", hit_tokens)
        elif request.high_water[sequence] > hit_tokens:
            self.columns.recover(row, hit_tokens)

    def unseat(self, request: RequestState, sequence: int, tokens: Tokens | None) -> None:
        """Release the sequence's row, if it has one. It keeps `tokens` (None: it has ended)."""
        row = request.rows[sequence]
        if self.outstanding.batches:
            self.outstanding.leave(request, sequence, has_ended=tokens is None)
        request.move(sequence, -1, tokens)
        if row >= 0:
            self.reservation.give_back(row)
            self.columns.release(row)
            self.manager.release(row)

    def extend(self, request: RequestState, sequence: int, tokens: Tokens) -> None:
        """Append known tokens to a live sequence, which samples after them; it may have no row. A request that waits
        for tokens goes into the queue."""
        # This comes first: memory for the tokens may be short.
        if (row := request.rows[sequence]) >= 0:
            self.manager.extend_by(np.array([row]), tokens, np.array([len(tokens)]))
            self.running.change()
        else:
            request.extend(sequence, tokens)
        self.columns.note_sampled(request, sequence, has_sampled=False)
        if len(tokens):
            self.queues.requeue(request)

    def remember_high_water(self, request: RequestState, starts: Mapping[int, int] | None = None) -> None:
        """Note the computed tokens of each row before it loses blocks: computing them again counts as recomputing.
        `starts`: by row of a batch that did not run, the token at which its share begins."""
        launched, starts = self.manager.rows.num_launched, starts or {}
        for row in request.live_rows:
            self.columns.recover(row, starts.get(row, launched.item(row)))

    def end(self, request: RequestState, status: Status, sentence: str) -> None:
        """End a request that has no row any more. `sentence`: what `explain` says of it from now on."""
        request_id, ended = request.request.id, self.ended
        request.become(status)
        del self.requests[request_id]
        self.waiting.ended(request)
        # An id that was used before moves to the end of the order.
        ended.pop(request_id, None)
        if len(ended) >= _REMEMBERED:
            ended.popitem(last=False)
        ended[request_id] = status, sentence
        self.stats.count(status)
