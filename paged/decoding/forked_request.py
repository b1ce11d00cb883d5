"""A request with a search: its branches on the scheduler. A branch that continues is forked, another one is finished.

    r / 0 | ... a |   step: a x, a y go on   | r / 0 | ... a x |      a's blocks are held once, and its partial one is copied
    r / 1 | ... b |   and b does not         | r / 2 | ... a y |      b's blocks go back

All branches of a step wait for one another: each row that has sampled keeps its blocks, with nothing to compute,
until the last one has. Where a fork has no room, a block or a seat, its branch comes in again as a request of its
own, and finds the shared blocks in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from paged.decoding.search import Ahead, Search
from paged.errors import DuplicateRequest, InvalidRequest, OutOfBlocks, RequestInFlight, UnknownRequest
from paged.scheduler import Request, RequestUsage, Scheduler

if TYPE_CHECKING:
    from torch import Tensor


class Branch:
    """One branch of a search: a sequence of a scheduler's request. It reads the tokens that may come next."""

    def __init__(self, owner: ForkedRequest, request_id: str, sequence: int, tokens: tuple[int, ...] = ()) -> None:
        self.owner, self.request_id, self.sequence, self.tokens = owner, request_id, sequence, tokens
        self.prompt_ids: list[int] = []
        self._read: tuple[Sequence[int], Sequence[float]] | None = None
        self._states: dict[int, Tensor] = {}
        # Whether the batch that read it has ended.
        self.is_ready = False

    def read_output(self, place: int, ids: Sequence[int], values: Sequence[float], ranks: Sequence[int]) -> None:
        """Take the likeliest tokens of a step, the chosen one among them."""
        self._read = (ids, values)

    def read_prompt(self, place: int, ids: Sequence[int], values: Sequence[float], ranks: Sequence[int]) -> None:
        """Raise: a search asks for no log-probabilities of the prompt."""
        raise AssertionError("searches do not ask for the prompt's log-probabilities")

    def read_state(self, position: int, state: Tensor) -> None:
        """Take a hidden state that a step has computed."""
        self._states[position] = state

    def take(self) -> Ahead:
        """Return what may come next, once it is ready."""
        found = self._read
        assert found is not None, "a batch that ended has read it"
        states, self._states = self._states, {}
        self._read, self.is_ready = None, False
        return Ahead(*found, states)


class ForkedRequest:
    """The branches of one request, from its prompt on.

    may_fork  the pool holds all of them at their full length; if not, none forks, and each comes in again
    open_row  called for each branch that gets a row without being admitted
    """

    def __init__(
        self,
        request: Request,
        search: Search,
        scheduler: Scheduler,
        now: float,
        *,
        may_fork: bool,
        open_row: Callable[[Branch], None],
    ) -> None:
        self.search = search
        self.usage: RequestUsage | None = None
        if search.wants_states:
            # States of cached content are not known. In a namespace of its own it hits only what its own branches have computed.
            request = msgspec.structs.replace(request, extra_key=request.id)
        self._request, self._scheduler, self._now, self._open_row = request, scheduler, now, open_row
        self._may_fork = may_fork
        self.branches = [Branch(self, request.id, 0)]
        # The scheduler's requests: the first one, and those of branches that came in again.
        self.ids = {request.id}
        self._num_again = 0
        scheduler.add(self._request, now=now)

    def branches_of(self, request_id: str) -> list[Branch]:
        """Return the branches that are sequences of this request of the scheduler's."""
        return [branch for branch in self.branches if branch.request_id == request_id]

    def advance(self) -> None:
        """Advance if all branches are ready, between two steps; the search may be over then."""
        if not self.branches or not all(branch.is_ready for branch in self.branches):
            return
        branches = self.branches
        following = self.search.advance([branch.take() for branch in branches])
        continued = {place for place, _ in following}
        # Before forks, which need their blocks.
        for place, branch in enumerate(branches):
            if place not in continued:
                self.finish(branch)
        taken: set[int] = set()
        self.branches = []
        # Fork before the parent gets its next token.
        for place, _ in following:
            if place in taken:
                self.branches.append(self._forked(branches[place]))
            else:
                taken.add(place)
                self.branches.append(branches[place])
        for (_, token), branch in zip(following, self.branches, strict=True):
            branch.tokens = (*branch.tokens, token)
            if branch.sequence < 0:
                self._come_in_again(branch)
            else:
                self._scheduler.append(branch.request_id, [token], branch.sequence)
        # Others may use the id of a branch that has ended.
        self.ids = {self._request.id, *(branch.request_id for branch in self.branches)}

    def end(self) -> None:
        """Release all branches."""
        self.branches = []
        for request_id in sorted(self.ids):
            try:
                ended = self._scheduler.abort(request_id)
            except UnknownRequest:
                continue
            self._note(request_id, ended.usage if ended is not None else None)

    def finish(self, branch: Branch, reason: str = "stop") -> None:
        """Finish a branch. Raises InvalidRequest for another reason than "stop" or "length"."""
        ended = self._scheduler.finish(branch.request_id, branch.sequence, reason)
        self._note(branch.request_id, None if ended is None else ended.usage)

    def _note(self, request_id: str, usage: RequestUsage | None) -> None:
        if usage is not None and request_id == self._request.id:
            self.usage = usage

    def _forked(self, parent: Branch) -> Branch:
        """Return a branch beside its parent, or one without a sequence if there is no room for it."""
        branch = Branch(self, parent.request_id, -1, parent.tokens)
        if not self._may_fork:
            return branch
        try:
            branch.sequence = self._scheduler.fork(parent.request_id, parent.sequence)
        except (OutOfBlocks, InvalidRequest, RequestInFlight):
            return branch
        self._open_row(branch)
        return branch

    def _come_in_again(self, branch: Branch) -> None:
        branch.sequence, prompt = 0, [*self._request.prompt, *branch.tokens]
        is_added = False
        while not is_added:
            self._num_again += 1
            branch.request_id = f"{self._request.id}/branch-{self._num_again}"
            # A caller's request may have this id.
            with suppress(DuplicateRequest):
                request = msgspec.structs.replace(self._request, id=branch.request_id, prompt=prompt)
                self._scheduler.add(request, now=self._now)
                is_added = True
