"""A scheduler for transformers' continuous batching: its interface over our scheduler.

    RequestState  →  paged.Request                          a request comes
    paged.Batch   →  FutureRequestStates and block tables   a step is decided; a large one runs in several parts
    RequestStates' newest tokens → Scheduler.update         all parts ran, and the next step begins

Both schedulers end a request at the same token: a stop id, or its length. Ours alone decides the tokens of a step and the
blocks that they write; transformers' own accounting is not used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching.requests import FutureRequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import Scheduler as TheirScheduler

from paged.block_manager import BlockManager
from paged.errors import PagedError, Unfinished
from paged.integrations.engine_tables import EngineTables
from paged.integrations.transformers.block_store import BlockStore
from paged.scheduler import Batch, Costs, Request, Scheduler as Decisions

Fail = Callable[[Any, Exception], None]

# Full blocks for transformers to hash: a number in 5.17, later one for each kind of layer. In both, 0 means none.
_NOTHING_TO_HASH: Any = 0


class Scheduler(TheirScheduler):  # type: ignore[misc]
    """The scheduler of a ContinuousBatchProcessor.

    store           its blocks
    policy          a name in paged.POLICIES
    costs           of swapping and recomputing; None: the defaults
    prefix_caching  equal prefixes share their blocks
    fail            called with a RequestState and the error, if it ends before its length without a stop id
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
        # By request, its sequences, which active_requests has, too.
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
        self._tables = EngineTables(self.decisions.manager, first_block=self._store.first_block)
        # The outstanding step, its rows' states, and its parts that are still to run: ranges of places.
        self._batch: Batch | None = None
        self._states: list[Any] = []
        self._parts: deque[range] = deque()

    # Requests come and go.

    def add_waiting_request(self, state: Any) -> None:
        """Add a request with a sequence for it and each of its children. Raises paged's errors, with which the request fails."""
        states = [state, *(state.fork(f"{state.request_id}__child#{i}") for i in range(state.num_children))]
        for each in states:
            each.num_children = 0
        try:
            self.decisions.add(_request_of(state, len(states), self._store), now=state.created_time)
        except PagedError as error:
            # The caller ends `state`.
            for each in states[1:]:
                self._fail(each, error)
            raise
        self._groups[state.request_id] = states
        self.active_requests.update((each.request_id, each) for each in states)

    def finish_request(self, request_id: str) -> None:
        """Note that transformers has ended a sequence: at its last token, which our scheduler gets at the end of the step, or because it failed."""
        state = self.active_requests.pop(request_id, None)
        if state is not None and state.status != RequestStatus.FINISHED:
            self._end(state)

    def clear_cancelled_requests(self) -> list[Any]:
        """End the step before, once all of its parts ran. Return the requests that were cancelled meanwhile."""
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
        """End this sequence in our scheduler, in whatever state."""
        id, sequence = next((id, group.index(state)) for id, group in self._groups.items() if state in group)
        is_alone = len(self._groups[id]) == 1
        output = self.decisions.abort(id) if is_alone else self.decisions.finish(id, sequence)
        self._forget(id, state, is_last=output is None or output.usage is not None)

    def _forget(self, id: str, state: Any, *, is_last: bool) -> None:
        """Forget a sequence that has ended in our scheduler; after the last one, its request."""
        self._store.tables.pop(state.request_id, None)
        if is_last:
            del self._groups[id]

    # A step.

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[list[Any], bool, int, int]:
        """Return what runs next: our next step, or a part of one that reads more tokens than transformers' buffer holds: its rows, whether the kernel
        for decoding can run it, its tokens, and the tokens that it reads."""
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
        """Decide a step with rows, if there is one, make its copies, and send its tables."""
        while True:
            batch = self.decisions.schedule(self._clock())
            for id in batch.admitted:
                for row in self.decisions.rows_of(id):
                    self._tables.open(row, len(self._groups[id][0].initial_tokens))
            self._tables.note(batch)
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
        for place, blocks, is_whole in self._tables.changes(batch):
            id = self._states[place].request_id
            if is_whole:
                tables[id] = blocks
            else:
                tables[id] += blocks
        self._parts.extend(_parts_of((batch.seq_lens - batch.num_tokens).tolist(), most_read))

    def _take_in(self) -> None:
        """End the outstanding step: give our scheduler the sampled tokens."""
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
        """Return every violated invariant of decisions and memory, as sentences; empty if there is none."""
        return self.decisions.check()


def _request_of(state: Any, num_sequences: int, store: BlockStore) -> Request:
    """Return our request for one of transformers. Without a maximum its output may fill the cache."""
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
    """Return ranges of places that read at most `most` tokens together; a single row never reads more than the cache holds."""
    parts, start, total = [], 0, 0
    for place, count in enumerate(num_read):
        if total + count > most and place > start:
            parts.append(range(start, place))
            start, total = place, 0
        total += count
    return [*parts, range(start, len(num_read))]
