"""A scheduler for transformers' continuous batching: its interface in front, ours behind.

    RequestState  →  paged.Request                          a request comes
    paged.Batch   →  FutureRequestStates and block tables   a step is decided; a large one runs in several parts
    RequestStates' newest tokens → Scheduler.update         all parts ran, and the next step begins

transformers ends a request at a stop id or at its length, and so does ours, at the same token. Which tokens run in a
step, and which blocks they write, is ours alone: nothing of transformers' own accounting is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching.requests import FutureRequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import Scheduler as TheirScheduler

from paged.block_manager import BlockManager
from paged.errors import PagedError, Unfinished
from paged.integrations.told import ToldTables
from paged.integrations.transformers.block_store import BlockStore
from paged.scheduler import Batch, Costs, Request, Scheduler as Decisions

Fail = Callable[[Any, Exception], None]

# Blocks that transformers is to hash when they are full: a number in 5.17, later a number for each kind of layer. None, in both.
_NOTHING_TO_HASH: Any = 0


class Scheduler(TheirScheduler):  # type: ignore[misc]
    """What a ContinuousBatchProcessor asks what to run next.

    store           its blocks
    policy          a name in paged.POLICIES
    costs           what swapping and recomputing cost; None: the usual
    prefix_caching  equal prefixes share their blocks
    fail            called with a RequestState and why, for one that ends without an answer of its length
    clock           seconds
    """

    def __init__(
        self,
        cache: Any,
        max_requests_per_batch: int,
        *,
        store: BlockStore,
        policy: str,
        costs: Costs | None,
        prefix_caching: bool,
        fail: Fail,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._prefix_caching, self._fail, self._clock = store, prefix_caching, fail, clock
        self._policy, self._costs = policy, costs
        super().__init__(cache, safety_margin=0.0, max_requests_per_batch=max_requests_per_batch)

    def reset(self) -> None:
        """Forget all requests, and all content."""
        super().reset()
        # By request, its sequences; active_requests has each of them.
        self._groups: dict[str, list[Any]] = {}
        self._store.tables.clear()
        self.decisions = Decisions(
            BlockManager(
                self._store.num_blocks,
                self._store.block_size,
                host_blocks=self._store.num_host_blocks,
                prefix_caching=self._prefix_caching,
            ),
            policy=self._policy,
            costs=self._costs,
            max_tokens_per_step=self.cache.max_batch_tokens,
            max_sequences=self.max_requests_per_batch,
        )
        self._told = ToldTables(self.decisions.manager, first_block=self._store.first_block)
        # The step that is out, whose rows these are, and the parts of it that have not been handed out: ranges of places.
        self._batch: Batch | None = None
        self._states: list[Any] = []
        self._parts: deque[range] = deque()

    # Requests come and go.

    def add_waiting_request(self, state: Any) -> None:
        """Take a request, and as many more answers of it as it has children. Raises paged's errors, by which it ends as failed."""
        states = [state, *(state.fork(f"{state.request_id}__child#{i}") for i in range(state.num_children))]
        for each in states:
            each.num_children = 0
        try:
            self.decisions.add(_request_of(state, len(states), self._store), now=state.created_time)
        except PagedError as error:
            # The caller ends `state` itself.
            for each in states[1:]:
                self._fail(each, error)
            raise
        self._groups[state.request_id] = states
        self.active_requests.update((each.request_id, each) for each in states)

    def finish_request(self, request_id: str) -> None:
        """transformers has ended a sequence: at its last token, which our scheduler learns when the step has ended, or because it failed."""
        state = self.active_requests.pop(request_id, None)
        if state is not None and state.status != RequestStatus.FINISHED:
            self._end(state)

    def clear_cancelled_requests(self) -> list[Any]:
        """A step begins: the one before it has ended, once all of its parts ran. Returns those who were cancelled meanwhile."""
        if self._parts:
            return []
        self._take_in()
        with self._cancellation_lock:
            ids, self._requests_to_cancel = sorted(self._requests_to_cancel), set()
        cancelled = [state for id in ids if (state := self.active_requests.pop(id, None)) is not None]
        for state in cancelled:
            self._end(state)
        return cancelled

    def _end(self, state: Any) -> None:
        """Our scheduler ends this sequence, whatever it is doing."""
        id, sequence = next((id, group.index(state)) for id, group in self._groups.items() if state in group)
        is_alone = len(self._groups[id]) == 1
        output = self.decisions.abort(id) if is_alone else self.decisions.finish(id, sequence)
        self._forget(id, state, is_last=output is None or output.usage is not None)

    def _forget(self, id: str, state: Any, *, is_last: bool) -> None:
        """A sequence of this request has ended in our scheduler, as the last one or not."""
        self._store.tables.pop(state.request_id, None)
        if is_last:
            del self._groups[id]

    # A step.

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[list[Any], bool, int, int]:
        """What runs next: a step of ours, or the next part of one that reads more tokens than transformers' buffer has room for. Returns
        its rows, whether the kernel for decoding can run it, its tokens, and the tokens that it reads."""
        if not self._parts:
            self._decide(cache_budget)
        if not self._parts:
            return [], False, 0, 0
        batch = self._batch
        assert batch is not None, "parts are of a batch"
        part = self._parts.popleft()
        places = slice(part.start, part.stop)
        counts = batch.num_tokens[places]
        begins = batch.seq_lens[places] - counts
        limit = self._store.longest_decode
        only_decodes = limit > 0 and bool((counts == 1).all() and (begins < limit).all())
        starts = batch.query_start_loc[part.start : part.stop + 1].tolist()
        tokens, samples = batch.token_ids[starts[0] : starts[-1]].tolist(), batch.samples[places].tolist()
        rows = []
        for state, begin, count, start, is_sampled in zip(
            self._states[places], begins.tolist(), counts.tolist(), starts, samples, strict=False
        ):
            state.status = RequestStatus.DECODING if is_sampled else RequestStatus.PREFILLING
            state.position_offset = begin
            state.tokens_to_process = tokens[start - starts[0] : start - starts[0] + count]
            state.remaining_prefill_tokens = []
            rows.append(FutureRequestState(state, is_sampled, _NOTHING_TO_HASH, count))
        return rows, only_decodes, len(tokens), int(begins.sum())

    def _decide(self, most_read: int) -> None:
        """Decide a step with rows, if there is one; make its copies, and send its tables."""
        while True:
            batch = self.decisions.schedule(self._clock())
            for id in batch.admitted:
                for row in self.decisions.rows_of(id):
                    self._told.open(row, len(self._groups[id][0].initial_tokens))
            self._told.note(batch)
            if batch.is_empty:
                return
            self._store.run(batch.moves)
            self._batch = batch
            self._states = [
                self._groups[id][k] for id, k in zip(batch.ids.tolist(), batch.sequences.tolist(), strict=True)
            ]
            if len(batch.rows):
                break
            self._take_in()
        tables = self._store.tables
        for place, blocks, is_whole in self._told.tell(batch):
            id = self._states[place].request_id
            if is_whole:
                tables[id] = blocks
            else:
                tables[id] += blocks
        self._parts.extend(_parts_of((batch.seq_lens - batch.num_tokens).tolist(), most_read))

    def _take_in(self) -> None:
        """End the step that was out: give our scheduler what was sampled."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        tokens = [
            state.generated_tokens[-1]
            for state, is_sampled in zip(self._states, batch.samples.tolist(), strict=True)
            if is_sampled
        ]
        for output in self.decisions.update(batch, tokens, now=self._clock()):
            if output.finish_reason is None:
                continue
            state = self._groups[output.id][output.sequence]
            self._forget(output.id, state, is_last=output.usage is not None)
            if self.active_requests.pop(state.request_id, None) is not None:
                self._fail(state, self._why_unfinished(output))

    def _why_unfinished(self, output: Any) -> Unfinished:
        room = self._store.num_blocks * self._store.block_size
        return Unfinished(
            f'paged: request "{output.id}" ends with "{output.finish_reason}": the cache holds {room:,} tokens, and no more of it.'
        )

    def check(self) -> list[str]:
        """Every violated invariant of decisions and memory, as sentences; empty when all is well."""
        return self.decisions.check()


def _request_of(state: Any, num_sequences: int, store: BlockStore) -> Request:
    """A request of transformers', as one of ours. Without a length it may take what the cache holds."""
    stops = state.eos_token_id if isinstance(state.eos_token_id, list | tuple | set) else [state.eos_token_id]
    return Request(
        id=state.request_id,
        prompt=state.initial_tokens,
        max_tokens=store.num_blocks * store.block_size if state.max_new_tokens is None else state.max_new_tokens,
        # transformers says -1 for none.
        stop_token_ids=tuple(int(token) for token in stops if token is not None and token >= 0),
        num_sequences=num_sequences,
    )


def _parts_of(num_read: list[int], most: int) -> list[range]:
    """Consecutive places that read no more than `most` tokens together; one alone never reads more than the cache holds."""
    parts, start, total = [], 0, 0
    for place, count in enumerate(num_read):
        if total + count > most and place > start:
            parts.append(range(start, place))
            start, total = place, 0
        total += count
    return [*parts, range(start, len(num_read))]
