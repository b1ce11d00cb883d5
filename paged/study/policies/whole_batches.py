"""Batches that are admitted together and run until their last request ends, each row preallocated to the longest. All rows compute the same positions,
as a model does that takes one rectangle of tokens.
"""

from collections.abc import Sequence

import numpy as np

from paged.block_manager import Memory
from paged.scheduler.admission import Admission, admit, shut
from paged.scheduler.composition import Composition
from paged.scheduler.policies import Policy
from paged.scheduler.queues import Queues
from paged.scheduler.request import RequestState
from paged.scheduler.reservations import Books, Reservation, most
from paged.scheduler.rows import Counts, Rows
from paged.scheduler.state import Limits, State, Step


class WholeBatches(Admission):
    """Requests enter when nothing runs, as many as fit together. The token budget does not bound a batch: its prompts take as many steps as they
    need."""

    joins = False

    def __init__(self, policy: Policy, lockstep: "Lockstep", longest: "Longest | None") -> None:
        super().__init__(policy)
        self._lockstep, self._longest = lockstep, longest

    def admit_waiting(self, state: State, step: Step) -> None:
        """Admit the head of the queue, and the requests behind it that fit beside it in rows and memory."""
        if state.running.num or state.away.num:
            shut(state, step)
            return
        state.manager.growth.draw_promised()
        free = state.books.num_free()
        batch: list[RequestState] = []
        num_rows = 0
        for request in state.waiting:
            num_rows += request.num_live
            if num_rows > min(step.seats, state.limits.max_sequences) or state.outstanding.keeps_out(request):
                break
            # A request alone may share cached blocks; sharing within a batch is not foreseen.
            together = [*batch, request]
            has_room = self._blocks_together(state, together) <= free if batch else state.books.has_room(request)
            if not has_room:
                break
            batch = together
        if batch:
            self.begin_batch(state.limits, batch)
        for request in batch:
            admit(state, step, request)

    def begin_batch(self, limits: Limits, requests: Sequence[RequestState]) -> None:
        """Note the first position and the length that the batch's rows have in common."""
        self._lockstep.begin_batch(requests)
        if self._longest is not None:
            self._longest.begin_batch(limits, requests)

    def _blocks_together(self, state: State, requests: Sequence[RequestState]) -> int:
        """Return the blocks that these waiting requests need as one batch."""
        if self._longest is not None:
            num_rows = sum(request.num_live for request in requests)
            return num_rows * state.books.blocks_for(_common_total(state.limits, requests))
        return sum(state.books.to_enter(request) for request in requests)


class Longest(Reservation):
    """Each row of a batch draws blocks for the batch's longest prompt and largest max_tokens. The prompt of a preempted request includes its
    outputs. A batch of one request draws what that request can use."""

    def __init__(self) -> None:
        super().__init__(most)
        self._total = 0

    def total_of(self, books: Books, request: RequestState, sequence: int) -> int:
        """Return the most tokens of the request's sequences; once it is in a batch, at least what the batch reserves."""
        own = max(request.max_total)
        return max(own, self._total) if request.rows[sequence] >= 0 else own

    def begin_batch(self, limits: Limits, requests: Sequence[RequestState]) -> None:
        """Reserve for these requests as one batch."""
        self._total = _common_total(limits, requests)


def _common_total(limits: Limits, requests: Sequence[RequestState]) -> int:
    if len(requests) == 1:
        return max(requests[0].max_total)
    longest = max(request.prompt_len + max(request.appended) for request in requests)
    total = longest + max(request.request.max_tokens for request in requests)
    limit = limits.max_model_len
    return total if limit is None else min(total, limit)


class Lockstep(Composition):
    """All rows compute up to the batch's first position, and then one token a step, even in the middle of a prompt. A row that a prefix hit put
    ahead stays ahead.

    With `is_padded` the batch begins with its longest prompt, as if shorter ones were padded, else with its shortest.
    """

    one_token_each = True

    def __init__(self, policy: str, *, is_padded: bool) -> None:
        self._policy, self._is_padded = policy, is_padded
        # Tokens that the rows of this batch compute before they go on in lockstep.
        self._first = 0

    def begin_batch(self, requests: Sequence[RequestState]) -> None:
        """Take these waiting requests as the next batch, beside which nothing runs."""
        known = [len(tokens) for request in requests for tokens in request.tokens if tokens is not None]
        self._first = max(known) if self._is_padded else min(known)

    def wanted(self, manager: Memory, rows: Rows, todo: Counts) -> Counts:
        lacks = self._first - manager.rows.num_launched[rows]
        is_behind = lacks > 0
        if is_behind.any():
            return np.where(is_behind, np.minimum(todo, lacks), 0)
        return np.minimum(todo, 1)

    def reason(self, queues: Queues) -> str | None:
        if not queues.running.num:
            return None
        return f"policy {self._policy} admits the next batch when the last request of this one has ended."

    def walking(self, state: State, rows: Rows) -> tuple[Rows, int] | None:
        """Return the rows of the next step, decodes first, and how many of them decode, if some rows walk through their prompts a token a step. None
        if none does, or if the next step cannot be foreseen."""
        manager = state.manager
        computed = manager.rows.num_computed[rows]
        todo = manager.rows.num_tokens[rows] - computed
        if (computed < self._first).any() or (todo < 1).any():
            return None
        decodes, walkers = rows[todo == 1], rows[todo > 1]
        if not len(walkers) or not _go_alone(manager, walkers):
            return None
        return np.concatenate([decodes, walkers]), len(decodes)


def _go_alone(memory: Memory, rows: Rows) -> bool:
    """Whether no row looks up a block in its next step, or leaves one to another row of its batch, unless it fills a block."""
    index, num_blocks = memory.index, memory.tables.num_blocks
    if not memory.prefix_caching:
        return True
    paths = [(row, index.paths[row]) for row in rows.tolist()]
    return all(
        path.open is not None or (path.published != num_blocks[row] and not index.is_behind(row)) for row, path in paths
    )
