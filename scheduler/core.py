"""The scheduler's public calls. `schedule` makes a batch, `update` or `cancel` ends it; the other calls concern one
request. The same calls give the same decisions, byte for byte: even time is an argument. Calls must not overlap: one
that begins while another runs raises SchedulerInUse."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import chain, islice
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from paged import errors
from paged.base.arguments import (
    UNLIMITED,
    Tokens,
    checked_integer,
    finite_time,
    is_integer,
    latest_time,
    token_array,
    vocabulary_error,
)
from paged.base.copying import Uncopyable
from paged.base.fields import Finite, checked_fields, converted
from paged.base.turns import Turns, alone
from paged.block_manager import BlockManager

from . import admission, ending
from .batch import Batch, Output, Outputs, SchedulerStats
from .check import violations_of
from .drafts import Drafts, place_drafts, validated_drafts
from .hints import Hint, HintOutcome, checked_hint
from .packing import Packer
from .policies import Costs, Policy, policy_named
from .preemption import drop_rows, report_preempted_late
from .request import ABORT, FINISH_REASONS, Request, RequestState, Status, request_root, state_of, validated, wrong
from .rows import NO_ROWS, Counts
from .sessions import SessionView
from .state import Limits, State, Step
from .strategies import strategies_of
from .views import Explanation, Outlook, PrefixExplanation, RequestView, explain, explain_prefix, outlook, view_of

_STATUSES = [status.value for status in Status]


class Scheduler(Uncopyable):
    """Decides what each step runs on the memory of `manager`, which no other scheduler may use.

    policy               a name in POLICIES, or a Policy
    max_tokens_per_step  token budget: most tokens of one batch
    max_sequences        most rows of one batch; admission lets no more sequences run, idle ones aside
    max_model_len        most tokens of one sequence, prompt and output; None: what the pool holds
    max_waiting          most waiting requests; None: no limit
    max_chunk            most tokens of one prompt in one step; None: the token budget
    vocabulary_size      token ids have to be below it; None: not checked
    costs                what swapping and recomputing cost
    tenant_weights       shares of tenants, by name, if the policy's order is "fair"; 1 for tenants not named
    max_outstanding      most batches that may be out at a time
    max_pinned           most blocks (pages, of layers of several kinds) that hints may pin, of all tenants together. No
                         request can use them: they count as taken from the start, for `NeverFits`, too
    max_pinned_per_tenant  the same for each tenant; None: max_pinned
    max_cached_per_tenant  blocks that each tenant's finished requests may leave; more are evicted first. None: no limit
    remember_evicted     how many evictions, and steps, `explain_prefix` remembers
    resumes_known        on: a row that was not in the last batch, or has other blocks now, computes known tokens only,
                         and a request that gave its blocks back returns after the batches that sample for it; for
                         engines that take such a row's tokens from the scheduler
    elsewhere            called each time a request with `num_computed` is admitted, with its id and how many tokens are
                         cached. Returns how many of the next ones exist elsewhere, and whether these come late (see
                         `loaded`), or before the batch that lists them computes. None: all of `num_computed`, late.
                         With layers of several kinds all of them come late, from the first on: the caller fills what
                         every group keeps of them, with the states after them

    `manager`, `policy`, `limits` and `costs` are attributes, for reading. Raises InvalidConfig or UnknownPolicy.
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        policy: str | Policy = "paged",
        max_tokens_per_step: int = 2048,
        max_sequences: int = 256,
        max_model_len: int | None = None,
        max_waiting: int | None = None,
        max_chunk: int | None = None,
        vocabulary_size: int | None = None,
        costs: Costs | None = None,
        tenant_weights: Mapping[str, float] | None = None,
        max_outstanding: int = 4,
        resumes_known: bool = False,
        max_pinned: int = 0,
        max_pinned_per_tenant: int | None = None,
        max_cached_per_tenant: int | None = None,
        remember_evicted: int = 0,
        elsewhere: Callable[[str, int], tuple[int, bool]] | None = None,
    ) -> None:
        if not isinstance(manager, BlockManager):
            raise errors.InvalidConfig(f"a scheduler needs a BlockManager; got {manager!r}.")
        max_chunk = UNLIMITED if max_chunk is None else max_chunk
        limits = Limits(**checked_fields(Limits, locals()))
        most = Annotated[int, Meta(ge=0, le=manager.num_blocks - 1)]
        converted("max_pinned", limits.max_pinned, most)
        converted("max_pinned_per_tenant", limits.max_pinned_per_tenant, most | None)
        if costs is not None and not isinstance(costs, Costs):
            raise errors.InvalidConfig(f"costs has to be a Costs; got {costs!r}.")
        chosen = policy_named(policy)
        weights = converted("tenant_weights", tenant_weights, dict[str, Finite] | None) or {}
        if weights and chosen.order != "fair":
            raise errors.InvalidConfig(
                f'tenant_weights have no effect under policy {chosen.name}, whose order is "{chosen.order}"; take one whose order is "fair", such as '
                "paged-fair."
            )
        memory = manager.claim()
        memory.spare(limits.max_pinned)
        memory.index.remember_evicted(limits.remember_evicted)
        strategies = strategies_of(chosen, memory.capacity, weights)
        if strategies.reservation.reserves and not strategies.reservation.is_counted:
            memory.layout.refuse(f"policy {chosen.name}, which draws what a request may become,")
        self.manager, self.policy, self.limits, self.costs = manager, chosen, limits, costs or Costs()
        self._state = State(memory, chosen, strategies, limits, self.costs, elsewhere)
        prices = self.costs
        # A load is half a swap.
        memory.load_where(lambda start, stop, pages: prices.swap(pages) / 2 < prices.recompute(start, stop))
        self._turns = Turns(errors.SchedulerInUse)
        # Marks the batches of this scheduler. They do not keep the scheduler alive.
        self._owner = object()
        self._packer = Packer(self._owner, self._state)
        memory.growth.take_changes()
        self._num_added = 0
        self._checks = os.environ.get("PAGED_CHECK") == "1"

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is alive, an output undelivered, a batch out, or a prefetch or copy waits for a step."""
        state = self._state
        waits = state.pending_outputs or state.carried.groups or state.hints.to_fetch
        return bool(state.requests or waits or state.outstanding.batches)

    @alone
    def add(self, request: Request, now: float = 0.0) -> None:
        """Put a request into the queue. It arrived at `now` (seconds, any origin); the scheduler's time stays. Raises
        InvalidRequest, DuplicateRequest, WaitingFull, or NeverFits: an empty pool, or the model, cannot hold the prompt
        and one output. Then the request counts as rejected, and `explain` knows it."""
        state = self._state
        if not isinstance(request, Request):
            raise errors.InvalidRequest(f"a Request is needed; got {request!r}.")
        if request.num_computed and state.elsewhere is None:
            state.manager.layout.refuse("num_computed (KV that exists elsewhere)")
        if request.saves:
            state.manager.layout.refuse("saves (blocks that stay held)")
            if state.policy.layout == "region":
                raise wrong(request.id, f"saves: policy {state.policy.name} gives regions back whole, with all blocks.")
        arrival, limits = finite_time(now), state.limits
        request, prompt, root = validated(request, limits.vocabulary_size)
        num_sequences = request.num_sequences
        is_undelivered = state.pending_outputs and any(output.id == request.id for output in state.pending_outputs)
        if request.id in state.requests or is_undelivered or state.outstanding.is_busy(request.id):
            raise errors.DuplicateRequest(request.id)
        if num_sequences > limits.max_sequences:
            raise wrong(request.id, f"{num_sequences} sequences run together; max_sequences is {limits.max_sequences}.")
        if limits.max_waiting is not None and state.waiting.num >= limits.max_waiting:
            raise errors.WaitingFull(limits.max_waiting)
        num_tokens = len(prompt)
        longest = min(num_tokens + request.max_tokens, state.books.max_total_of(num_sequences))
        order = state.order.key_of(request, arrival, self._num_added)
        new = state_of(request, prompt, root, order, longest)
        self._num_added += 1
        if num_tokens >= state.books.max_total or num_sequences > 1:
            self._refuse_what_never_fits(new, num_tokens)
        state.requests[request.id] = new
        if request.session_id is not None:
            state.hints.sessions.begin(request.session_id, arrival)
        state.queues.wait(new)
        if state.foresight is not None or state.waiting.head() is new:
            state.queues.reopen()

    @alone
    def schedule(self, now: float = 0.0, drafts: Drafts | Mapping[Any, Any] | None = None) -> Batch:
        """Decide one step. Return its batch, which is out until `update` or `cancel`; an empty batch needs no end.

        Call it before or after the last batch's update. Batches run in the order in which they were scheduled. A row
        may compute a token that an outstanding batch samples: `source_batches` names that batch. `drafts` guess what
        follows the newest token of decoding rows; they get the budget and memory that are left. `now` (seconds, any
        origin) becomes the scheduler's time, which never falls. Raises TooManyOutstanding, WrongDrafts, or
        InvalidRequest (`now` is not finite), changing nothing.
        """
        state = self._state
        manager, limits, outstanding = state.manager, state.limits, state.outstanding
        if len(outstanding.batches) >= limits.max_outstanding:
            raise errors.TooManyOutstanding(len(outstanding.batches), limits.max_outstanding)
        now = latest_time(now, state.now)
        proposed = drafts if drafts is None else validated_drafts(state, drafts)
        if state.waiting.num:
            # Room for rows that this step may open. Memory may be short, so this comes before any change.
            most = min(state.waiting.num, limits.max_sequences, limits.max_tokens_per_step)
            state.columns.ensure(state.columns.num_bound + most)
        state.set_now(now)
        state.end_due()
        if state.carried.groups:
            state.carried.forget_stale()
        carried = state.carried.groups
        if manager.host_caching or manager.sides.ends.are_kept:
            manager.growth.copies.allow_content(not carried)
        if state.to_reject:
            ending.reject_overgrown(state)
        step = Step(limits.max_tokens_per_step, limits.max_sequences, NO_ROWS)
        outstanding.begin_step()
        state.books.set_owed(None)
        if state.preempted_late:
            report_preempted_late(state, step)
        # Carried groups never mix with other moves: place nothing that might copy, or write what a group still reads.
        if not carried or (len(carried) == 1 and not manager.growth.any_shared_tail):
            state.composition.compose(state, step)
        if not step.num_rows and not outstanding.batches and not carried and not step.loads:
            admission.force_progress(state, step)
        if state.hints.to_fetch and manager.growth.copies.may_copy_content:
            manager.growth.draw_promised()
            state.hints.fetch()
        if proposed is not None:
            place_drafts(state, step, proposed)
        if carried:
            group = state.carried.take()
            step.move(group.moves)
            step.loads.extend(map(tuple, group.loads.tolist()))
        batch = self._packer.pack(step)
        if limits.remember_evicted:
            state.note_admissions(batch.number, step.admitted)
        if not batch.is_empty:
            outstanding.put_out(batch)
        self._raise_violations()
        return batch

    @alone
    def update(self, batch: Batch, token_ids: Any, counts: Any = None, now: float = 0.0) -> Outputs:
        """End a batch that ran. Return new tokens and ends of all sequences.

        `token_ids`: the sampled ids in row order; of a row with drafts, its right drafts and the token after them.
        `counts`: how many each row gets, int [n]; None: one for each row that samples. A row that samples and gets 0
        waits for `append`; what later batches compute of its missing token is void. `now`: see `schedule`. Raises
        ForeignBatch, BatchEnded, BatchOutOfOrder (an older is out), WrongTokens or InvalidRequest, changing nothing.
        """
        state = self._state
        now = latest_time(now, state.now)
        is_out = self._is_out(batch, 0, "updated")
        out, most = state.outstanding.batches, state.limits.vocabulary_size
        tokens, uneven = ending.checked(batch, token_ids, counts, out=out, vocabulary_size=most)
        state.set_now(now)
        if is_out:
            state.outstanding.end(batch)
        outputs = ending.update(state, batch, tokens, uneven)
        self._raise_violations()
        return outputs

    @alone
    def cancel(self, batch: Batch, moved: bool = False) -> None:
        """End the latest batch, which did not run. `moved`: its moves ran; otherwise the next batch makes them. Its
        admissions, preemptions, swaps and evictions stay. Raises ForeignBatch, BatchEnded, BatchOutOfOrder (a later
        batch is out), BatchError (a later batch has moved) or InvalidRequest, changing nothing."""
        if not self._is_out(batch, -1, "cancelled"):
            return
        has_moved = converted("moved", moved, bool, errors.InvalidRequest)
        self._state.carried.check_cancel(batch, has_moved)
        self._state.outstanding.end(batch)
        ending.cancel(self._state, batch, has_moved)
        self._raise_violations()

    @alone
    def abort(self, request_id: str) -> Output | None:
        """End a request in any state. Return its last output (one for all sequences); None if it has ended already. Its
        blocks are released at once, even in flight. Blocks that are being loaded are released when the batch that lists
        the loads ends: stop the loader before. Its id is free when no batch computes it. Raises UnknownRequest."""
        request = self._known(request_id)
        return None if request is None else ending.end_request(self._state, request, ABORT, "was aborted.")[-1]

    @alone
    def finish(self, request_id: str, sequence: int = 0, reason: str = "stop") -> Output | None:
        """End one sequence in any state, for the reason "stop" (a string was found, say) or "length". What outstanding
        batches sample for it is ignored. Return its last output, with the usage if no sequence is left; None if the
        sequence has ended already. Raises UnknownRequest, or InvalidRequest (no such sequence or reason)."""
        state, request = self._state, self._known(request_id)
        if not isinstance(reason, str) or reason not in ("stop", "length"):
            raise wrong(request_id, f'reason has to be "stop" or "length"; got {reason!r}.')
        if not is_integer(sequence) or sequence < 0 or (request is not None and sequence >= len(request.rows)):
            raise errors.InvalidRequest(f'request "{request_id}" has no sequence {sequence!r}.')
        if request is None or not request.is_live(sequence):
            return None
        usage = ending.end_sequences(state, request, [int(sequence)], FINISH_REASONS.index(reason))
        return Output(request_id, int(sequence), [], reason, usage)

    @alone
    def fork(self, request_id: str, sequence: int = 0) -> int:
        """Start one more sequence of a running request, with the tokens and blocks of `sequence`. Return its number,
        which may be that of an ended fork. The next batch copies the partial block, and makes no other moves. In the
        usage, outputs so far count for both. Raises UnknownRequest, RequestInFlight, InvalidRequest (the sequence does
        not run, the request is private, the policy reserves or runs batches whole, or max_sequences run already) or
        OutOfBlocks (no block for the copy), changing nothing."""
        request = self._living(request_id)
        return admission.fork(self._state, request, self._live_sequence(request, sequence))

    @alone
    def append(self, request_id: str, tokens: Any, sequence: int = 0) -> None:
        """Append known tokens to a live sequence, such as a tool's answer. If it can never fit then, it ends "rejected"
        in the next step. Raises UnknownRequest, RequestInFlight, InvalidRequest (sequence, token) or InvalidTokens."""
        state = self._state
        request = self._living(request_id)
        array = token_array(tokens)
        size = state.limits.vocabulary_size
        if size is not None and (error := vocabulary_error(array, size)) is not None:
            raise wrong(request_id, error)
        sequence = self._live_sequence(request, sequence)
        if state.outstanding.computes(request) or state.outstanding.is_busy(request_id):
            # A void share counts, too, so that the caller can predict the refusal from its batches.
            raise errors.RequestInFlight(request_id)
        have, longest = state.books.num_known(request, sequence), state.books.max_total_of(len(request.rows))
        # A sequence that never fits ends. Its excess tokens are dropped: with them all rows' tables would grow.
        array = array[: max(0, longest - have)]
        num_more = len(array)
        state.extend(request, sequence, array)
        state.queues.reopen()
        if num_more:
            # Its reserved worst case did not include these tokens.
            state.books.lift_bound(request)
        longest_now = min(request.max_total[sequence] + num_more, longest)
        request.grow(sequence, num_more, longest_now)
        if (row := request.rows[sequence]) >= 0:
            state.columns.prolong(row, num_more, longest_now)
            if state.reservation.is_counted:
                state.reservation.take(state.books, request, sequence)
        if have + num_more >= longest and request not in state.to_reject:
            state.to_reject.append(request)

    @alone
    def loaded(self, request_id: str, num_tokens: int) -> None:
        """Note that the first `num_tokens` of a loading request's loads have arrived; it computes the rest. With layers of
        several kinds fewer than all are none: it waits, and asks `elsewhere` again. Raises UnknownRequest,
        InvalidRequest (it loads none, or fewer), RequestInFlight (a batch computes a shared block)."""
        state, manager = self._state, self._state.manager
        request = self._living(request_id)
        if request.status is not Status.LOADING or not request.num_loading:
            raise errors.InvalidRequest(
                f'request "{request_id}" is {request.status.value}; it does not wait for tokens from elsewhere.'
            )
        row = request.live_rows[0]
        if manager.sharing.is_unconfirmed(row):
            # Its nodes would be confirmed behind pending ones.
            raise errors.RequestInFlight(request_id)
        hit, asked = int(manager.rows.num_launched[row]), request.num_loading
        if not is_integer(num_tokens) or not 0 <= num_tokens <= asked:
            raise wrong(request_id, f"{num_tokens!r} tokens cannot have arrived; {asked} were asked for.")
        state.queues.reopen()
        if num_tokens < asked and manager.layout.sides:
            drop_rows(state, request)
            request.await_load(None)
            return
        state.queues.leave(request)
        request.await_load(0)
        manager.set_computed(row, hit + int(num_tokens))
        manager.shrink(row, state.reservation.blocks_drawn(state.books, request, 0))
        state.queues.run(request, state.stats.steps)

    @alone
    def hint(self, hint: Hint, now: float = 0.0) -> HintOutcome:
        """Carry out a hint: what the caller knows of the next use of content. Return what became of it. `now` is as in
        `schedule`. Raises InvalidHint, UnknownRequest or InvalidRequest (`now`), changing nothing."""
        state = self._state
        hint, now, request = checked_hint(hint), latest_time(now, state.now), None
        is_unpin = hint.action == "unpin"
        if hint.request is not None:
            request = state.requests.get(hint.request) if is_unpin else self._known(hint.request)
        state.set_now(now)
        state.end_due()
        if hint.request is not None and request is None and not is_unpin:
            return HintOutcome("missing", f'request "{hint.request}" has ended; name its session or its tokens.')
        outcome = state.hints.carry_out(hint, request)
        state.queues.reopen()
        self._raise_violations()
        return outcome

    @alone
    def bring(self, hint: Hint, first: int, write: Callable[[int, Counts], None]) -> int | None:
        """Fill free blocks of the device with a hint's full blocks from number `first` on, which exist elsewhere.
        `write(start, blocks)` has to fill `blocks`, int64 [n], from number `first + start` on. Return how many of them
        are there now: fewer if few blocks are free, 0 if the device lacks one before them. Return None while batches
        are out or copies wait: these may write free blocks. Raises InvalidHint, UnsupportedByLayers, or as
        `write`, changing nothing."""
        state, hint = self._state, checked_hint(hint)
        state.manager.layout.refuse("bring (content that exists elsewhere)")
        if hint.tokens is None or not is_integer(first) or first < 0:
            raise errors.InvalidHint(
                f"blocks that exist elsewhere are of tokens, from block 0 or a later one; got {first!r}."
            )
        if state.outstanding.batches or state.carried.groups or state.hints.to_fetch:
            return None
        num = state.hints.bring(hint, first, write)
        state.queues.reopen()
        self._raise_violations()
        return num

    def explain_prefix(
        self, tokens: Any, *, salt: str | None = None, adapter: str | None = None, extra_key: Any = None
    ) -> PrefixExplanation:
        """Return how much of a prompt is cached, and why no more is: evicted (when and for whom: `remember_evicted`),
        never computed, or with another salt, adapter or extra_key. Raises InvalidTokens or InvalidNamespace."""
        array = token_array(tokens)
        return explain_prefix(self._state, array, request_root(salt, adapter, extra_key))

    def session(self, session_id: str) -> SessionView:
        """Return what is known of a session. Raises UnknownSession."""
        sessions = self._state.hints.sessions
        if not isinstance(session_id, str) or session_id not in sessions.by_id:
            raise errors.UnknownSession(session_id)
        return sessions.view_of(sessions.by_id[session_id], self._state.hints.num_pinned(session_id))

    def sessions(self, limit: int, prefix: str = "") -> list[SessionView]:
        """Return up to `limit` sessions whose ids begin with `prefix`, the latest first: by when they began or their
        last turn ended. Raises InvalidConfig."""
        most, found = checked_integer("limit", limit, 0, UNLIMITED), reversed(self._state.hints.sessions.by_id)
        return [self.session(each) for each in islice((each for each in found if each.startswith(prefix)), most)]

    @property
    def num_sessions(self) -> int:
        """Sessions that are known."""
        return len(self._state.hints.sessions.by_id)

    @property
    def num_pinned(self) -> int:
        """Blocks that hints have pinned."""
        return self._state.hints.num_pinned()

    @alone
    def saved(self, request_id: str) -> None:
        """Release the blocks of an ended request with `saves`, because they have been copied. Raises UnknownRequest, or
        InvalidRequest (it lives, or nothing is held for it)."""
        outstanding = self._state.outstanding
        if not isinstance(request_id, str) or request_id not in outstanding.held:
            lives = self._known(request_id) is not None
            raise wrong(request_id, "it has not ended." if lives else "nothing is held: it saves nothing, or is saved.")
        outstanding.let_go(request_id)
        self._state.queues.reopen()

    def saving_blocks(self, request_id: str) -> Counts:
        """Return the blocks that stay held for an ended request until `saved`, int64 [n]. Raises UnknownRequest."""
        held = self._state.outstanding.held
        if not isinstance(request_id, str) or request_id not in held:
            self._known(request_id)
        return np.concatenate([NO_ROWS, *(blocks for *_, blocks in held.get(request_id, ()))])

    def explain(self, request_id: str, *, with_holders: bool = True) -> Explanation:
        """Return why a request does not run, and how many blocks it needs and are free; `with_holders`, also who holds
        blocks, and what its layers hold, which takes most of the time. Raises UnknownRequest."""
        return explain(self._state, request_id, self._known(request_id), with_holders=with_holders)

    def outlook(self) -> Outlook:
        """Return who runs and who waits, without requests that wait for append(); input of `paged.engine.forecast`."""
        return outlook(self._state)

    def requests(self, limit: int) -> list[RequestView]:
        """Return up to `limit` live requests: running, then suspended, then waiting ones. Raises InvalidConfig."""
        most, queues = checked_integer("limit", limit, 0, UNLIMITED), self._state.queues
        every = chain(queues.running, queues.away, queues.waiting, queues.idle.values())
        return [view_of(self._state, request) for request in islice(every, most)]

    def request(self, request_id: str) -> RequestView:
        """Return the figures of a live request. Raises UnknownRequest."""
        return view_of(self._state, self._living(request_id))

    @property
    def next_id(self) -> str | None:
        """The waiting request that is served next; None if none waits."""
        waiting = self._state.waiting
        return waiting.head().id if waiting.num else None

    def status(self, request_id: str) -> str:
        """Return the request's state. Raises UnknownRequest."""
        request = self._known(request_id)
        return (self._state.ended[request_id][0] if request is None else request.status).value

    def counts(self) -> dict[str, int]:
        """Return how many requests are in each state; those that wait for append() are waiting, followers are running.
        `submitted` is the sum of all others."""
        state, stats = self._state, self._state.stats
        num = dict.fromkeys(_STATUSES, 0)
        for request in state.away:
            num[request.status] += 1
        num |= {"waiting": state.waiting.num + len(state.idle), "running": state.running.num}
        num |= {"finished": stats.finished, "rejected": stats.rejected, "aborted": stats.aborted}
        return {"submitted": self._num_added} | num

    @property
    def num_reserved(self) -> int:
        """Blocks kept by count for running requests, beyond those that they hold."""
        return self._state.books.reserved()

    def waiting_ids(self) -> list[str]:
        """Return ids of waiting requests, in order, and then of those that wait for append()."""
        return [*(request.id for request in self._state.waiting), *self._state.idle]

    def running_ids(self) -> list[str]:
        """Return ids of running requests, in order."""
        return [request.id for request in self._state.running]

    def running_rows(self) -> Counts:
        """Return a copy of the running rows, in order, int64 [n]: these may take drafts."""
        return self._state.running.rows().copy()

    def id_of(self, row: int) -> str | None:
        """Return the id of the request that the row serves; None if it serves none."""
        ids = self._state.columns.id
        return ids[row] if is_integer(row) and 0 <= row < len(ids) else None

    def rows_of(self, request_id: str) -> list[int]:
        """Return the rows of a request's live sequences; none while it waits. Raises UnknownRequest."""
        return self._living(request_id).live_rows

    def row_of(self, request_id: str, sequence: int = 0) -> int:
        """Return the row of a sequence, -1 if it has none. Raises UnknownRequest or InvalidRequest (no sequence)."""
        rows = self._living(request_id).rows
        if not is_integer(sequence) or not 0 <= sequence < len(rows):
            raise errors.InvalidRequest(f'request "{request_id}" has {len(rows)} sequences; there is no {sequence!r}.')
        return rows[sequence]

    def tokens_of(self, request_id: str, sequence: int = 0) -> Tokens:
        """Return a copy of a live sequence's known tokens, int32 [n]. Raises UnknownRequest or InvalidRequest."""
        request = self._living(request_id)
        sequence = self._live_sequence(request, sequence)
        known, manager, row = request.tokens[sequence], self._state.manager, request.rows[sequence]
        return (manager.rows.tokens[row, : manager.rows.num_tokens[row]] if known is None else known).copy()

    def stats(self) -> SchedulerStats:
        """Return a copy of the totals so far."""
        stats, figures = self._state.stats, self._state.manager.sharing
        hits = {"hit_tokens": figures.hit_tokens, "host_hit_tokens": figures.host_hit_tokens}
        return msgspec.structs.replace(stats, shared_in_flight_tokens=figures.pending_hit_tokens, **hits)

    def check(self) -> list[str]:
        """Return every violation of the scheduler's and the memory layer's invariants; empty when all is well."""
        found = violations_of(self._state)
        counts = self.counts()
        if counts.pop("submitted") != sum(counts.values()):
            found.append(f"9: {self._num_added} requests were submitted; {counts} add up to {sum(counts.values())}.")
        return found

    def _known(self, request_id: str) -> RequestState | None:
        if not isinstance(request_id, str):
            raise errors.UnknownRequest(repr(request_id))
        request = self._state.requests.get(request_id)
        if request is None and request_id not in self._state.ended:
            raise errors.UnknownRequest(request_id)
        return request

    def _living(self, request_id: str) -> RequestState:
        request = self._known(request_id)
        if request is None:
            raise errors.UnknownRequest(request_id)
        return request

    def _live_sequence(self, request: RequestState, sequence: Any) -> int:
        is_one = is_integer(sequence) and 0 <= sequence < len(request.rows)
        if not is_one or not request.is_live(sequence):
            raise errors.InvalidRequest(f'request "{request.id}" has no live sequence {sequence!r}.')
        return int(sequence)

    def _is_out(self, batch: object, place: int, verb: str) -> bool:
        """Return whether the batch is out. Raises unless it is ours, not ended, and at `place`: 0 oldest, -1 latest."""
        if not isinstance(batch, Batch):
            raise errors.InvalidRequest(f"a Batch is needed; got {batch!r}.")
        if batch.ticket.owner is not self._owner:
            raise errors.ForeignBatch(batch.number)
        if batch.is_empty:
            return False
        batches = self._state.outstanding.batches
        if batch not in batches:
            raise errors.BatchEnded(batch.number)
        if batches[place] is not batch:
            raise errors.BatchOutOfOrder(batch.number, batches[place].number, verb)
        return True

    def _refuse_what_never_fits(self, new: RequestState, num_tokens: int) -> None:
        """If the prompt and one output never fit, count the request as rejected and raise NeverFits."""
        state, books = self._state, self._state.books
        model, num_blocks = state.limits.max_model_len, state.manager.capacity
        needed = (books.blocks_for(num_tokens + 1) + state.manager.layout.spare_pages) * new.num_live
        needed -= state.reservation.blocks_shared(books, new.num_live, num_tokens)
        error = state.reservation.refusal(books, new)
        if model is not None and num_tokens + 1 > model:
            message = (
                f'request "{new.id}" needs {num_tokens + 1:,} tokens for its prompt and a first output; the model takes {model:,}. '
                f"Shorten the prompt to {model - 1:,} tokens."
            )
            error = errors.NeverFits(message, needed=num_tokens + 1, limit=model, unit="tokens")
        elif error is None and needed > num_blocks:
            fits = state.manager.layout.tokens_in(num_blocks) - 1
            most = state.limits.max_pinned
            pinned = f" without {most:,} that may be pinned" if most else ""
            advice = f", or shorten the prompt to {fits:,} tokens" if new.num_live == 1 and fits > 0 else ""
            each = f" of each of its {new.num_live:,} sequences" if new.num_live > 1 else ""
            message = (
                f'request "{new.id}" needs {needed:,} blocks for its {num_tokens:,} prompt tokens and a first output{each}; the pool has '
                f"{num_blocks:,}{pinned}. Raise num_blocks to {needed + most:,}{advice}."
            )
            error = errors.NeverFits(message, needed=needed, limit=num_blocks, unit="blocks")
        if error is not None:
            state.requests[new.id] = new
            state.end(new, Status.REJECTED, str(error))
            raise error

    def _raise_violations(self) -> None:
        """Check everything, where PAGED_CHECK asks for it."""
        violations = self.check() if self._checks else ()
        assert not violations, "; ".join(violations)
