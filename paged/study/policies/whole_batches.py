"""Batches that are admitted together and run until their last request ends, each row preallocated to the longest."""

from __future__ import annotations

from collections.abc import Sequence

from paged.scheduler.admission import Admission, admit, shut
from paged.scheduler.policies import Policy
from paged.scheduler.request import RequestState
from paged.scheduler.reservations import Books, Reservation, most
from paged.scheduler.state import Limits, State, Step
from paged.study.policies.lockstep import Lockstep


class WholeBatches(Admission):
    """Requests enter when nothing runs, as many as fit together. The token budget does not bound a batch: its prompts take as many steps as they
    need."""

    joins = False

    def __init__(self, policy: Policy, lockstep: Lockstep, longest: Longest | None) -> None:
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
            return self._longest.blocks_together(state.books, state.limits, requests)
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

    def blocks_together(self, books: Books, limits: Limits, requests: Sequence[RequestState]) -> int:
        """Return the blocks that these waiting requests draw as one batch."""
        return sum(request.num_live for request in requests) * books.blocks_for(_common_total(limits, requests))

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
