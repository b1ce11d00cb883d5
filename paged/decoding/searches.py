"""The searches of an engine, which advance when a batch has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from paged.decoding.beams import BeamGroups, BeamSearch
from paged.decoding.contrastive import ContrastiveSearch
from paged.decoding.drafter import Drafter
from paged.decoding.forked_request import Branch, ForkedRequest
from paged.decoding.search import Hypothesis, Search
from paged.errors import NeverFits
from paged.sampling.rows import RowSampling
from paged.sampling.search_params import BeamSearchParams, SearchParams
from paged.scheduler import Batch, Request, RequestUsage, Scheduler


class Found(NamedTuple):
    """The result of an ended search: its best hypotheses, each with its reason, "stop" or "length"."""

    request_id: str
    hypotheses: list[tuple[Hypothesis, str]]
    usage: RequestUsage | None


class _Asked(NamedTuple):
    forked: ForkedRequest
    params: SearchParams
    stops: frozenset[int]


class Searches:
    """Searches by the id of their request. A request of the scheduler's that serves one may have another id."""

    def __init__(self, scheduler: Scheduler, sampling: RowSampling, drafter: Drafter | None) -> None:
        self._scheduler, self._sampling, self._drafter = scheduler, sampling, drafter
        self._asked: dict[str, _Asked] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._asked

    def __bool__(self) -> bool:
        return bool(self._asked)

    def add(self, request: Request, params: SearchParams, stops: Sequence[int], now: float) -> int:
        """Begin a search from the request's prompt. Return how many tokens an answer has at most. Raises as Scheduler.add."""
        manager, longest = self._scheduler.manager, self._scheduler.limits.max_model_len
        limit = manager.longest
        limit = limit if longest is None else min(limit, longest)
        # Candidates for the last token are computed, too, and have to have room for one behind them.
        num_behind = 0 if isinstance(params, BeamSearchParams) else 1
        room, needed = limit - len(request.prompt) - num_behind, len(request.prompt) + num_behind + 1
        if num_behind and needed > limit:
            raise NeverFits(
                f'request "{request.id}" needs {needed} tokens for its prompt, candidates for a first output and what may follow; {limit} fit.',
                needed=needed,
                limit=limit,
                unit="tokens",
            )
        max_tokens = max(1, min(params.max_tokens, room))
        search = _search_of(params, stops, max_tokens, len(request.prompt))
        # One more than it will have: so the scheduler never ends it by its length.
        request = msgspec.structs.replace(request, max_tokens=max_tokens + 1)
        # The scheduler ends a request that outgrows the pool: branches fork only if it holds all. One more, since the first sequence's number
        # is not given again.
        longest_blocks = -(-(len(request.prompt) + max_tokens) // manager.block_size)
        may_fork = (params.num_branches + 1) * longest_blocks <= manager.num_blocks
        forked = ForkedRequest(request, search, self._scheduler, now, may_fork=may_fork, open_row=self._open)
        self._asked[request.id] = _Asked(forked, params, frozenset(stops))
        return max_tokens

    def owner_of(self, request_id: str) -> str | None:
        """Return the request whose search a request of the scheduler's serves; None if it serves none."""
        if not self._asked:
            return None
        return next((owner for owner, asked in self._asked.items() if request_id in asked.forked.ids), None)

    def admitted(self, request_id: str) -> bool:
        """Note that a request of the scheduler's got rows. Return whether they are branches, which are read from now on."""
        owner = self.owner_of(request_id)
        if owner is None:
            return False
        for branch in self._asked[owner].forked.branches_of(request_id):
            self._open(branch)
        return True

    def ended(self, batch: Batch) -> list[Found]:
        """Note that a batch has ended: branches that it read are ready, and searches whose branches all are advance. Return and forget those
        that are over."""
        if not self._asked:
            return []
        sampled = batch.samples
        for request_id, sequence in zip(batch.ids[sampled].tolist(), batch.sequences[sampled].tolist(), strict=True):
            owner = self.owner_of(request_id)
            if owner is not None:
                for branch in self._asked[owner].forked.branches_of(request_id):
                    branch.is_ready = branch.is_ready or branch.sequence == sequence
        over = []
        for owner, asked in list(self._asked.items()):
            asked.forked.advance()
            if asked.forked.search.is_over:
                over.append(self._over(owner, asked))
        return over

    def finish_best(self, request_id: str, reason: str) -> None:
        """Finish the first branch, before the search ends. Raises InvalidRequest for another reason than "stop" or "length"."""
        forked = self._asked[request_id].forked
        forked.finish(forked.branches[0], reason)

    def end(self, request_id: str) -> RequestUsage | None:
        """End a search without an answer."""
        forked = self._asked.pop(request_id).forked
        forked.end()
        return forked.usage

    def _over(self, owner: str, asked: _Asked) -> Found:
        best = asked.forked.search.hypotheses[: asked.params.n]
        usage = self.end(owner)
        if usage is not None:
            usage = msgspec.structs.replace(usage, output_tokens=sum(len(each.tokens) for each in best))
        return Found(owner, [(each, "stop" if each.tokens[-1] in asked.stops else "length") for each in best], usage)

    def _open(self, branch: Branch) -> None:
        """Set how the row of a branch is read, if it has one."""
        row = self._scheduler.row_of(branch.request_id, branch.sequence)
        if row >= 0:
            search, vocabulary = branch.owner.search, self._scheduler.limits.vocabulary_size
            # A wide search may want more tokens than the vocabulary has.
            num = search.num_candidates if vocabulary is None else min(search.num_candidates, vocabulary)
            self._sampling.set_branch(row, branch, num, wants_states=search.wants_states)
            if self._drafter is not None:
                self._drafter.begin(row, drafts=False)


def _search_of(params: SearchParams, stops: Sequence[int], max_tokens: int, num_prompt: int) -> Search:
    if not isinstance(params, BeamSearchParams):
        return ContrastiveSearch(
            params.penalty_alpha, params.top_k, stops=stops, max_tokens=max_tokens, num_prompt=num_prompt
        )
    rules: dict[str, Any] = {
        "stops": stops,
        "max_tokens": max_tokens,
        "length_penalty": params.length_penalty,
        "early_stopping": params.early_stopping,
    }
    if params.num_beam_groups > 1:
        return BeamGroups(params.beam_width, params.num_beam_groups, params.diversity_penalty, **rules)
    return BeamSearch(params.beam_width, **rules)
