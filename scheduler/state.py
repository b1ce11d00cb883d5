"""What the scheduler remembers between steps, and what it gathers while it makes one.

Does not decide anything itself.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.block_manager import Memory, Moves

from .accounting import SchedulerStats
from .batch import Output, RequestUsage
from .carried import CarriedCopies
from .foresight import Foresight
from .lengths import OutputLengths
from .outstanding import Outstanding
from .policies import Costs, Policy
from .queues import Queues
from .request import RequestState, replaced
from .reservations import Books
from .rows import RowColumns, Rows
from .status import Status

if TYPE_CHECKING:
    from .strategies import Strategies

_NO_COUNTS: NDArray[np.int64] = np.empty(0, np.int64)
# Ended requests that `explain` and `status` still answer for.
_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Counts that a caller sets: tokens and rows of a step, tokens of a sequence, waiting requests, tokens of one prompt a step, token ids,
    batches that are out."""

    max_tokens_per_step: int
    max_sequences: int
    max_model_len: int | None
    max_waiting: int | None
    max_chunk: int
    vocabulary_size: int | None
    max_outstanding: int


class Step(msgspec.Struct, eq=False, gc=False):
    """One step while it is made: what is left of its budget, and what has been decided."""

    budget: int
    seats: int
    decodes: Rows
    # Tokens of each of `decodes` that are launched, and one more.
    decode_starts: NDArray[np.int64] = _NO_COUNTS
    decode_ends: NDArray[np.int64] = _NO_COUNTS
    # Row, tokens launched before, tokens of this step, and whether these are all that it knows or will know.
    chunks: list[tuple[int, int, int, bool]] = []
    # Rows of this batch whose prompt goes on past it, with what each had launched before: others may follow them.
    leaders: dict[int, int] = {}
    moves: list[Moves] = []
    # The batch that samples what each of `decodes` computes, where all of them are its rows in its order; -1: they are not.
    decodes_after: int = -1
    # Drafts behind each of `decodes`, and their tokens, packed; None: there are none.
    draft_counts: NDArray[np.int64] | None = None
    draft_tokens: NDArray[np.int32] | None = None
    loads: list[tuple[int, int, int]] = []
    asked: list[RequestState] = []
    preempted: list[tuple[str, str]] = []
    admitted: list[str] = []
    # A row lacked memory: no request comes in.
    is_short: bool = False
    may_move: bool = True
    # A host block that this batch reads must not be written by it.
    has_swapped_in: bool = False

    def place(self, chunk: tuple[int, int, int, bool], *, leads: bool) -> None:
        """A row computes this chunk, and takes a seat; `leads`: its prompt goes on past it, and others may follow it."""
        self.chunks.append(chunk)
        self.budget -= chunk[2]
        self.seats -= 1
        if leads:
            self.leaders[chunk[0]] = chunk[1]

    @property
    def num_rows(self) -> int:
        """Rows placed so far."""
        return len(self.decodes) + len(self.chunks)


class State:
    """All that outlives a step."""

    def __init__(
        self,
        manager: Memory,
        policy: Policy,
        strategies: Strategies,
        limits: Limits,
        costs: Costs,
        *,
        resumes_known: bool,
    ) -> None:
        self.manager = manager
        self.policy = policy
        self.reservation, self.admission, self.composition, self.victims, self.order = strategies
        # An ordinary request needs no more than its prompt's blocks, and not all of them at once.
        self.enters_in_parts = self.admission.chunked and not self.reservation.reserves
        self.limits = limits
        self.costs = costs
        self.requests: dict[str, RequestState] = {}
        self.ended: OrderedDict[str, tuple[Status, str]] = OrderedDict()
        self.columns = RowColumns()
        self.outstanding = Outstanding(manager, self.columns, resumes_known=resumes_known)
        # Requests that gave their last blocks back in an update: the next batch says that they were preempted.
        self.parked_late: list[RequestState] = []
        self.carried = CarriedCopies(self.columns)
        self.pending_outputs: list[Output] = []
        self.to_reject: list[RequestState] = []
        # The latest time that the caller has told, which never goes back; before the first one, the earliest that there is.
        self.now = -sys.float_info.max
        # After an update in which all running rows sampled a token: the rows that go on, and the tokens that each has computed
        # and knows. While these are the running rows still, each has just one token to go.
        self.steady: tuple[Rows, NDArray[np.int64], NDArray[np.int64]] | None = None
        # No waiting or suspended request can be admitted until a request ends, or comes: decodes make no room.
        self.admission_blocked = False
        # Rows below their high-water mark, whose tokens are recomputed ones.
        self.recovering: dict[int, int] = {}
        # Rows of sequences that wait for tokens from the caller and lost their KV: computed again, they do not sample again.
        self.silent: set[int] = set()
        self.stats = SchedulerStats()
        capacity = self.reservation.capacity(manager, 1)
        max_total = capacity if limits.max_model_len is None else min(capacity, limits.max_model_len)
        # How long outputs became. Where admission looks ahead, assumed ones stand in at first.
        looks_ahead = policy.foresight != "none"
        self.lengths = OutputLengths(max_total, policy.known_outputs if looks_ahead else 0)
        self.queues = queues = Queues(self.order.queue(self.lengths))
        self.waiting, self.running, self.away, self.parked = queues.waiting, queues.running, queues.away, queues.parked
        self.running_rows = queues.running_rows
        self.books = Books(manager, self.columns, queues, policy, self.reservation, max_total)
        # What admission foresees, where the policy looks ahead.
        self.foresight = Foresight(policy, self.books, self.lengths, self.stats) if looks_ahead else None

    def start_running(self, state: RequestState) -> None:
        """The request, which has rows and is in no queue, runs from now on."""
        if state.has_given:
            state.has_given = False
            state.longest_pause = max(state.longest_pause, self.stats.steps - state.gave_at)
        self.queues.run(state)

    def delivers(self, state: RequestState, sequence: int) -> bool:
        """Whether the sequence has an output to come."""
        return state.rows[sequence] >= 0 or state.tokens[sequence] is not None

    def seat(self, state: RequestState, sequence: int, row: int, hit_tokens: int) -> None:
        """The row, which has been opened for a sequence of a waiting request with so many tokens from the cache, is that sequence's."""
        state.tokens[sequence] = None
        state.rows[sequence] = row
        self.columns.bind(row, state, sequence)
        if state.is_new:
            state.hit_tokens += hit_tokens
            return
        if state.is_quiet[sequence]:
            self.silent.add(row)
        if state.high_water[sequence] > hit_tokens:
            self.recovering[row] = state.high_water[sequence]

    def release_row(self, state: RequestState, sequence: int, *, has_ended: bool = True) -> None:
        """The sequence gives its row back and forgets its tokens."""
        row = state.rows[sequence]
        if self.outstanding.batches:
            self.outstanding.leave(state, sequence, has_ended=has_ended)
        state.rows[sequence] = -1
        if self.recovering:
            self.recovering.pop(row, None)
        if self.silent:
            self.silent.discard(row)
        self.reservation.give_back(row)
        self.manager.release(row)
        self.columns.release(row, sequence)

    def retain_content(self, state: RequestState, row: int) -> None:
        """The sequence in this row has finished: what it computed is kept as its request wishes."""
        retention = state.request.retention
        if retention is not None:
            until = math.inf if retention.lasts is None else self.now + retention.lasts
            self.manager.content.retain_row(row, int(retention.priority), until if until < math.inf else None)

    def remember_high_water(self, state: RequestState) -> None:
        """What has been computed of the request is about to be lost in part: computing it again is waste."""
        for sequence, row in enumerate(state.rows):
            if row >= 0:
                launched = int(self.manager.rows.num_launched[row])
                before = self.recovering.get(row, 0)
                self.outstanding.note_computed(row, before)
                state.high_water = replaced(state.high_water, sequence, max(state.high_water[sequence], launched))
                self.recovering[row] = state.high_water[sequence]

    def end(self, state: RequestState, ending: tuple[Status, str]) -> None:
        """The request, which holds nothing any more, has ended: its status from now on, and the sentence that `explain` says."""
        status = ending[0]
        self.queues.end(state, status)
        request_id, ended = state.request.id, self.ended
        del self.requests[request_id]
        self.order.ended(state)
        if request_id in ended:
            # An id that was used before: this end is the latest.
            del ended[request_id]
        elif len(ended) >= _REMEMBERED:
            ended.popitem(last=False)
        ended[request_id] = ending
        if status is Status.FINISHED:
            self.stats.finished += 1
        elif status is Status.ABORTED:
            self.stats.aborted += 1
        else:
            self.stats.rejected += 1

    def usage_of(self, state: RequestState) -> RequestUsage:
        """What the request took so far."""
        return RequestUsage(
            state.prompt_len,
            state.num_output,
            state.hit_tokens,
            state.recomputed_tokens,
            state.swapped_blocks,
            state.preemptions,
        )
