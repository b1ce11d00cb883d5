"""A serving engine around a scheduler, with a stand-in for the model and every oracle of the kit watching.

Each public method is one thing that an engine does: add, schedule, run, update, cancel, abort, finish, append,
loaded. It runs at once, compares what came back with the books, the shadow KV and the invariants, and raises
`Violation` with the program that led there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paged.testing import batch_oracles, life_oracles
from paged.testing.books import ExpectedRequest
from paged.testing.conformance import held_to
from paged.testing.content import POISON, typed
from paged.testing.event_reader import EventWatch
from paged.testing.figures import Figures
from paged.testing.flight import Flight, Key, Mirror, Source
from paged.testing.naive_hints import NaiveHints
from paged.testing.naive_layers import has_states
from paged.testing.naive_retentions import NaiveRetentions
from paged.testing.shadow_groups import ShadowGroups, views_of
from paged.testing.shadow_kv import ShadowKV
from paged.testing.violation import Call, Program, Violation, sentence_of
from paged.testing.world import Builder, World, build_scheduler

Delivery = tuple[list[int], str | None]
"""What an output says of a sequence: its new tokens, and why it ended."""


@dataclass
class Loading:
    """What a request waits for from elsewhere: so many tokens, into blocks that are listed with their first token each."""

    num_tokens: int
    blocks: list[tuple[int, int]] = field(default_factory=list)


class SchedulerRig:
    """Drives one scheduler in one `World`; every method checks before it returns."""

    def __init__(self, world: World, build: Builder = build_scheduler) -> None:
        self.world = world
        self.scheduler: Any = held_to("StepScheduler", build(world))
        self.manager: Any = self.scheduler.manager
        self.shadow: Any = ShadowKV(world.num_blocks, world.block_size, world.host_blocks)
        if world.groups:
            self.shadow = ShadowGroups(world.groups, world.num_blocks, world.block_size, world.host_blocks)
        self.events_read = EventWatch(self.manager, world.event_stride, self.contents)
        self.books: dict[str, ExpectedRequest] = {}
        self.flights: list[Flight] = []
        self.loads: dict[str, Loading] = {}
        # Blocks of requests that have ended and save, and what their computed tokens were then.
        self.saving: dict[str, tuple[list[int], list[int]]] = {}
        self.was_saved: set[str] = set()
        # Tokens asked for by loading requests whose batch was cancelled: appended tokens do not change what is listed again.
        self.asked: dict[str, int] = {}
        self.mirror: Mirror = {}
        # Tokens of each sequence that an update confirmed and nothing took since.
        self.computed: dict[Key, int] = {}
        self.statuses: dict[str, str] = {}
        self.figures = Figures()
        self.past: set[str] = set()
        # How often each request was preempted: some policies reserve more for those that were.
        self.preempted: Counter[str] = Counter()
        # When each request came.
        self.arrivals: dict[str, float] = {}
        # How often one behind it came in before it.
        self.passed: Counter[str] = Counter()
        # What was guessed to come next of each sequence, for the batch that was scheduled last.
        self.proposed: dict[Key, list[int]] = {}
        self.num_added = self.num_looks = 0
        self.hints = NaiveHints(self)
        self.retentions = NaiveRetentions(self)
        # Groups of moves that are still to run, one a batch: of cancelled batches (None), or copies for forks, by what is written.
        self.carried: list[dict[int, int] | None] = []
        # The latest batch that was cancelled after its moves had run.
        self.last_moved = 0
        self.has_failed = False
        # Within `step`, which waits for others and begins a batch before it ends one.
        self._is_between = False
        # Whether a call came since everything was looked at.
        self._is_unseen = False
        self.now = 0.0
        self.calls: list[Call] = []
        self.decisions: list[Any] = []
        self.events: Counter[str] = Counter()
        # What tiers hold, from a look until the subject is called again.
        self._contents: dict[str, set[Any]] = {}
        self._roots: dict[object, bytes] = {}
        self._namespaces: dict[bytes, object] = {}

    @property
    def live(self) -> list[str]:
        """Ids of the requests that have not ended, in the order in which they were added."""
        return [id for id, book in self.books.items() if book.is_live]

    @property
    def has_work(self) -> bool:
        """Whether anything is left to do or to report."""
        return bool(self.live or self.flights or self.scheduler.has_unfinished)

    @property
    def program(self) -> Program:
        """What led here."""
        return Program("SchedulerRig", self.world, tuple(self.calls))

    @property
    def carries_moves(self) -> bool:
        """Whether moves that were decided before the next batch are still to run."""
        return bool(self.carried)

    def in_flight(self, id: str) -> bool:
        """Whether a batch that is out computes for this request, void or not."""
        return any(key[0] == id for flight in self.flights for key in flight.keys)

    def is_held(self, id: str) -> bool:
        """Whether a batch that is out computes or loads for this request, or its blocks are being saved: the id is taken."""
        return self.in_flight(id) or id in self.saving or any(id in flight.loading for flight in self.flights)

    @property
    def taken_ids(self) -> list[str]:
        """Ids of requests that have ended, and that batches which are out still hold."""
        return [id for id, book in self.books.items() if not book.is_live and self.is_held(id)]

    def known(self, id: str, sequence: int) -> tuple[object, list[int]]:
        """Namespace and all tokens of a sequence, from the books."""
        book = self.books[id]
        return book.namespace, book.sequences[sequence].tokens

    def foreseen(self, key: Key) -> list[int | Source]:
        """All tokens of a sequence, and for those that batches which are out sample, which batch and at which place."""
        tokens: list[int | Source] = list(self.known(*key)[1])
        return tokens + [source for flight in self.flights for source in flight.sources(key)]

    def contents(self, tier: str = "device") -> set[Any]:
        """`cached_contents` of the manager, asked once between two calls that may change it; not to be changed."""
        if tier not in self._contents:
            self._contents[tier] = self.manager.cached_contents(*([tier] if tier == "host" else []))
        return self._contents[tier]

    def is_undecided(self, key: Key) -> bool:
        """Whether a batch that is out has drafts of the sequence."""
        return any(flight.is_undecided(key) for flight in self.flights)

    def progress(self, key: Key) -> int | None:
        """Tokens of a sequence that are computed, or are by batches that are out, and that nothing took; None: nothing of it is."""
        ends = [end for flight in self.flights if (end := flight.end_of(key)) is not None]
        return max([*ends, self.computed[key]]) if key in self.computed else max(ends, default=None)

    def add(self, request: Any) -> None:
        """Submit a request. What no empty pool could hold has to be refused by `NeverFits`, and nothing else may be."""
        from paged.errors import DuplicateRequest, NeverFits, WaitingFull

        self._note("add", request)
        is_known = request.id in self.books and (self.books[request.id].is_live or self.is_held(request.id))
        waiting = len(self.scheduler.waiting_ids())
        # Those that wait for tokens from the caller take no place among the waiting.
        waiting_to_run = sum(not self.books[id].is_idle for id in self.scheduler.waiting_ids())
        try:
            with self._blaming(DuplicateRequest, NeverFits, WaitingFull):
                self.scheduler.add(request, now=self.now)
        except NeverFits:
            self._fail_on(life_oracles.refusal(self.world, request))
            # The id now stands for the refused request, whichever had it before.
            self.books.pop(request.id, None)
            self.num_added += 1
            self.events["refused"] += 1
        except DuplicateRequest:
            self._fail_on([] if is_known else [f"{request.id} is free again, and yet refused as a duplicate"])
            self.events["duplicate refused"] += 1
        except WaitingFull:
            is_full = self.world.max_waiting is not None and waiting >= self.world.max_waiting
            self._fail_on([] if is_full else [f"{waiting} wait, limit {self.world.max_waiting}: not full"])
            self.events["waiting full"] += 1
        else:
            self._fail_on([f"{request.id} was taken twice"] if is_known else [])
            self._fail_on(life_oracles.acceptance(self.world, request))
            is_over = self.world.max_waiting is not None and waiting_to_run >= self.world.max_waiting
            self._fail_on(
                [f"{request.id} was taken, and {waiting_to_run} waited already: no more may"] if is_over else []
            )
            self.arrivals[request.id] = self.now
            # A used id comes last again: the order of the books is the order of arrival.
            self.books.pop(request.id, None)
            self.statuses.pop(request.id, None)
            self.books[request.id] = ExpectedRequest(request, self.world.limit_of(request))
            if self.world.groups:
                self.root(self.books[request.id].namespace)
            self._forget_progress(request.id)
            self.figures.forget(request.id)
            self.past.discard(request.id)
            self.was_saved.discard(request.id)
            self.num_added += 1
            self.hints.begin(request)
            self.retentions.added(request.id)
        # It takes no memory: `look` or the next call looks at that.
        self._check(is_part=True)

    def look(self) -> None:
        """Look at everything, unless that was done since the last call."""
        if self._is_unseen:
            self._check()

    def schedule(self) -> Any:
        """One step's decision, held against every rule that a batch obeys. An empty batch is not outstanding. None where so many batches
        are out that one more has to be refused."""
        from paged.errors import TooManyOutstanding

        before = batch_oracles.observe(self)
        self._note("schedule")
        evicted = self._num_evicted()
        self.proposed = self._guesses() if self.world.drafts else {}
        drafts = {"drafts": self.proposed} if self.proposed else {}
        is_full = len(self.flights) >= self.world.max_outstanding
        self.retentions.begin()
        try:
            with self._blaming(TooManyOutstanding):
                batch = self.scheduler.schedule(now=self.now, **drafts)
            self._contents.clear()
            self.hints.expire(self.now)
        except TooManyOutstanding:
            self._fail_on([] if is_full else [f"{len(self.flights)} batches are out, and yet they are too many"])
            self.events["too many outstanding"] += 1
            self._check()
            return None
        self._fail_on([f"{len(self.flights)} batches were out; one more was scheduled"] if is_full else [])
        self._note_saving()
        self._record(batch)
        self._note_pressure(batch, evicted)
        for id, kind in batch.preempted:
            self.events[f"preempted by {kind}"] += 1
            self.preempted[id] += 1
            self.events["preempted in flight"] += self.in_flight(id)
            self._forget_progress(id)
        self.figures.scheduled(batch)
        flight = self._flight_of(batch)
        self._fail_on(batch_oracles.violations(self, before, flight) + self.retentions.scheduled(batch, flight))
        for row, first, block in batch.loads.tolist():
            id = self.scheduler.id_of(row)
            flight.loading.append(id)
            if id not in self.loads:
                most = self.books[id].request.num_computed
                if self.world.elsewhere:
                    most = first + self.world.exists_elsewhere(id, first)[0]
                    self.events["load what was asked for"] += 1
                most = min(most, len(self.known(id, 0)[1]) - 1)
                self.loads[id] = Loading(self.asked.pop(id, most - first))
            self.loads[id].blocks.append((first, block))
            self.events["load"] += 1
        self.events["follow"] += bool(
            set(batch.admitted) - {id for id, _ in batch_oracles.keys_of(batch)} - self.loads.keys()
        )
        if self.carries_moves and len(batch.moves):
            # While such a group waits, a batch makes no moves of its own.
            del self.carried[0]
        if not batch.is_empty:
            self.flights.append(flight)
        self.events["several outstanding"] += len(self.flights) > 1
        self.events["drafts"] += flight.has_drafts
        self.events["computes unknown tokens"] += bool(flight.rests_on())
        self._check()
        return batch

    def run(self, index: int = 0) -> None:
        """The engine reaches outstanding batch `index`, after those before it: moves, then the forward pass, of each."""
        self._note("run", index)
        for flight in self.flights[: index + 1]:
            self._move(flight)
            if not flight.has_run:
                self._compute(flight)
        self._poison_free()

    def _compute(self, flight: Flight) -> None:
        """The forward pass, with tables that are kept from the batches' changes alone."""
        flight.apply_changes(self.mirror)
        found, tables = flight.mirrored(self.mirror, self.world.block_size)
        self._fail_on(found)
        seen = flight.views if self.world.groups else tables
        found, flight.attended = self.shadow.run(flight.batch, seen, flight.known)
        self._fail_on(found)
        flight.has_run = True
        later = self.flights[self.flights.index(flight) + 1 :]
        for place, (_, sequence) in enumerate(flight.keys):
            if flight.batch.samples[place]:
                flight.right[place] = self._right(flight, place, sequence)
                token = flight.sampled[place] = flight.right[place][0]
                for other in later:
                    other.learn((flight.number, place), token)

    def _right(self, flight: Flight, place: int, sequence: int) -> list[int]:
        """The drafts of a place that the model would have said, up to the first that it would not, and what it says after them."""
        held, num_drafts = flight.attended[place].tolist(), flight.drafts(place)
        last = int(flight.batch.query_start_loc[place + 1])
        drafts = flight.batch.token_ids[last - num_drafts : last].tolist()
        right: list[int] = []
        for behind in range(num_drafts, -1, -1):
            context = held[: len(held) - behind]
            right.append(self.shadow.contents.next_token(context, sequence, self.world.vocabulary))
            if behind and right[-1] != drafts[num_drafts - behind]:
                break
        return right

    def _flight_of(self, batch: Any) -> Flight:
        """A batch that has just been scheduled, with all that its rows will know when those before it have run."""
        sampled = {(flight.number, place): token for flight in self.flights for place, token in flight.sampled.items()}
        keys = batch_oracles.keys_of(batch)
        plans: dict[Key, tuple[object, list[int | Source]]] = {}
        for key in keys:
            if key[0] in self.books:
                tokens = [
                    token if isinstance(token, int) else sampled.get(token, token) for token in self.foreseen(key)
                ]
                plans[key] = (self.books[key[0]].namespace, tokens)
        tables = {row: batch.block_tables[row].astype(np.int64) for row in batch.rows.tolist()}
        flight = Flight(batch, keys, tables, [], plans)
        if self.world.groups:
            flight.views = views_of(batch, self.world.groups)
        for place, key in enumerate(keys):
            if (num_drafts := flight.drafts(place)) and key in plans:
                last = int(batch.query_start_loc[place + 1])
                plans[key][1].extend(batch.token_ids[last - num_drafts : last].tolist())
        return flight

    def _guesses(self) -> dict[Key, list[int]]:
        """What comes next of the sequences that run, as far as the caller can tell; of some the last guess is wrong."""
        found: dict[Key, list[int]] = {}
        contents, vocabulary = self.shadow.contents, self.world.vocabulary
        for id in self.live:
            if self.scheduler.status(id) != "running":
                continue
            for number, sequence in enumerate(self.books[id].sequences):
                count = (int(self.now) + len(found)) % (self.world.drafts + 1)
                if sequence.reason is not None or not count:
                    continue
                namespace, tokens = self.known(id, number)
                held = contents.path(namespace, tokens).tolist()
                coming: list[int] = []
                num_unknown = len(self.foreseen((id, number))) - len(tokens)
                for _ in range(num_unknown + count):
                    coming.append(contents.next_token(held, number, vocabulary))
                    held.append(contents.extend(held[-1], coming[-1]))
                guess = coming[num_unknown:]
                if int(self.now) % 3 == 0:
                    guess[-1] = (guess[-1] + 1) % vocabulary
                found[id, number] = guess
        return found

    def update(self, counts: Sequence[int] = ()) -> dict[Key, Delivery]:
        """End the oldest batch: `counts[i % len]` sampled tokens for its i-th sampling row, one each without `counts`."""
        if not self.flights:
            return {}
        if not self.flights[0].has_run:
            self.run(0)
        self._note("update", tuple(counts))
        flight = self.flights.pop(0)
        tokens, given, expected = self._sampled(flight, counts)
        live = set(self.manager.rows.live.tolist())
        before = {row: self.manager.table(row) for row in flight.tables if row in live}
        with self._blaming():
            sampled = np.array(tokens, np.int32), np.array(given, np.int64) if counts or flight.has_drafts else None
            outputs = self.scheduler.update(flight.batch, *sampled, now=self.now)
        self.figures.computed(flight)
        self.retentions.updated(flight)
        for index, key in enumerate(flight.keys):
            if not flight.stands(index) or not self.books[key[0]].is_live:
                continue
            self.computed[key] = flight.end(index)
            if flight.is_wrong(index) and has_states(self.world.groups):
                # Its states have seen the wrong ones: it goes back to before them.
                self.computed[key] = int(flight.batch.seq_lens[index] - flight.batch.num_tokens[index])
                self.events["set back by drafts"] += 1
            row = int(flight.batch.rows[index])
            if row in before and self.scheduler.id_of(row) == key[0] and row in self.manager.rows.live:
                self.events["switch"] += not np.array_equal(before[row], self.manager.table(row)[: len(before[row])])
        delivered = self._receive(list(outputs), expected)
        self._check()
        return delivered

    def cancel(self, moved: bool) -> None:
        """Take back the latest batch. `moved` says that its moves ran; its forward pass then stopped half way."""
        from paged.errors import BatchError

        if not self.flights:
            return
        moved = moved or self.flights[-1].has_moved
        if moved and len(self.flights) > 1 and not self.flights[-2].has_run:
            self.run(len(self.flights) - 2)
        self._note("cancel", moved)
        flight = self.flights.pop()
        self.figures.cancelled(flight.batch)
        self.retentions.disturbed |= {id for id, _ in flight.keys}
        if moved:
            self._move(flight)
            flight.apply_changes(self.mirror)
        if moved and self.world.groups:
            self.shadow.spoil(flight.batch, flight.views, flight.rewritten)
        elif moved:
            # Half a forward pass has written anything to the slots that it was given, before whatever came later.
            slots = flight.batch.slot_mapping
            is_its_own = ~np.isin(slots // self.world.block_size, list(flight.rewritten))
            self.shadow.device.reshape(-1)[slots[is_its_own]] = POISON
        self.events["cancel with full blocks"] += bool((flight.batch.seq_lens >= self.world.block_size).any())
        if flight.number < self.last_moved and len(flight.batch.moves):
            # Those of a later batch ran, so its own did: they cannot be carried over.
            self._refused(
                BatchError, lambda: self.scheduler.cancel(flight.batch, moved=False), "a cancel without moves"
            )
        with self._blaming():
            self.scheduler.cancel(flight.batch, moved=moved)
        self.events["cancel behind another"] += len(self.flights) > 0
        if moved:
            self.last_moved = max(self.last_moved, flight.number)
        if not moved and len(flight.batch.moves):
            self.carried.insert(0, None)
        for id in dict.fromkeys(flight.loading):
            # A request that lost what it shared of this batch waits again, without a row, and asks anew, perhaps for more.
            is_loading = self.scheduler.status(id) == "loading"
            if moved and is_loading:
                continue
            load = self.loads.pop(id, None)
            if load is not None and is_loading:
                self.asked[id] = load.num_tokens
        for index, key in enumerate(flight.keys):
            start = int(flight.batch.seq_lens[index] - flight.batch.num_tokens[index])
            if start and has_states(self.world.groups):
                # Its states are unknown now: the request begins anew.
                self.events["cancel of states"] += key in self.computed
                self._forget_progress(key[0])
            elif start > (self.progress(key) or 0):
                # It began behind what it shared, which may be gone.
                self.computed.pop(key, None)
        self._check()

    def abort(self, id: str) -> None:
        """The client is gone. Idempotent in every state; one last output, and nothing of that id after it."""
        from paged.errors import UnknownRequest

        self._note("abort", id)
        book = self.books.get(id)
        # Ended by a step whose outputs have not been delivered yet.
        is_over = book is not None and self.scheduler.status(id) in life_oracles.ENDED
        try:
            with self._blaming(UnknownRequest):
                output = self.scheduler.abort(id)
        except UnknownRequest:
            was_submitted = book is not None or id in self.past
            self._fail_on([f"{id} was submitted, and yet is unknown to abort"] if was_submitted else [])
            return
        if book is not None and book.is_live and not is_over:
            self.events["abort in flight" if self.is_held(id) else f"abort {self.statuses.get(id)}"] += 1
            is_last = output is not None and output.id == id and output.finish_reason == "abort"
            self._fail_on([] if is_last else [f"abort of live {id} returned {output}"])
            book.end("abort")
            book.is_aborted = True
            self._make_void(id, range(len(book.sequences)))
            self.loads.pop(id, None)
            self.asked.pop(id, None)
        elif output is not None:
            self._fail_on([f"abort of ended {id} returned {output}"])
        self._check()

    def finish(self, id: str, sequence: int = 0) -> None:
        """The engine ends one sequence, in flight or not: its last output comes at once, and nothing of it after that."""
        self._note("finish", id, sequence)
        book = self.books[id]
        was_live = book.sequences[sequence].reason is None and self.scheduler.status(id) not in life_oracles.ENDED
        output = self.scheduler.finish(id, sequence)
        if was_live:
            self.events["finish"] += 1
            found = output is not None and (output.id, output.sequence, output.finish_reason)
            self._fail_on([] if found == (id, sequence, "stop") else [f"finish of {id}/{sequence} returned {output}"])
            book.sequences[sequence].reason = "stop"
            book.was_steered = True
            self._make_void(id, [sequence])
            if not book.is_live:
                self.loads.pop(id, None)
                self.asked.pop(id, None)
            self._fail_on([] if (output.usage is None) == book.is_live else [f"usage of {id} with {output}"])
        elif output is not None:
            self._fail_on([f"finish of ended {id}/{sequence} returned {output}"])
        self._check()

    def append(self, id: str, tokens: list[int], sequence: int = 0) -> None:
        """More known tokens for a live sequence: refused by type while the request is in flight."""
        from paged import PagedError
        from paged.errors import RequestInFlight

        self._note("append", id, tokens, sequence)
        state = self.books[id].sequences[sequence]
        try:
            with self._blaming(PagedError):
                self.scheduler.append(id, tokens, sequence)
        except RequestInFlight:
            self._fail_on([] if self.in_flight(id) else [f"{id} is not in flight, and yet append says so"])
        except PagedError as error:
            has_ended = state.reason is not None or self.scheduler.status(id) in life_oracles.ENDED
            self._fail_on([] if has_ended else [f"append to live {id}: {error}"])
        else:
            refuses = self.in_flight(id) or state.reason is not None
            self._fail_on([f"append to {id}/{sequence}, in flight or ended, was taken"] if refuses else [])
            book = self.books[id]
            book.append(sequence, tokens, self.world.limit_of(book.request))
            self.events["append"] += 1
        self._check()

    def hint(self, hint: Any) -> None:
        """Say what is known of content that is to come: answered as it has to be, and never in the way of what is to be done."""
        from paged.errors import UnknownRequest

        self._note("hint", hint)
        is_known = hint.action == "unpin" or hint.request in (None, *self.books, *self.past)
        before = self.hints.before(hint) if is_known else (0, 0, 0)
        try:
            with self._blaming(UnknownRequest):
                outcome = self.scheduler.hint(hint, now=self.now)
                self._contents.clear()
        except UnknownRequest:
            self._fail_on([f"{hint.request} was submitted, and yet is unknown to hint"] if is_known else [])
        else:
            self._fail_on(self.hints.carried_out(hint, outcome, before))
            self.retentions.hinted(hint, outcome, before[1])
        self._check()

    def fork(self, id: str, sequence: int = 0) -> None:
        """One more sequence of a request that runs, from where this one is: full blocks shared, the partial one copied."""
        from paged import PagedError
        from paged.errors import OutOfBlocks, RequestInFlight

        self._note("fork", id, sequence)
        book, policy = self.books[id], getattr(self.scheduler, "policy", None)
        is_live = book.sequences[sequence].reason is None
        can = is_live and self.scheduler.status(id) == "running"
        can &= policy is None or policy.reservation == "prompt"
        can &= book.request.reads_cache and book.request.writes_cache and not book.request.saves
        can &= self.num_running() < self.world.max_sequences
        before = self._table_of(id, sequence) if can else []
        tails = self._tails(id, sequence) if can else []
        try:
            with self._blaming(PagedError):
                number = self.scheduler.fork(id, sequence)
        except RequestInFlight:
            self._fail_on([] if self.in_flight(id) else [f"{id} is not in flight, and yet fork says so"])
        except OutOfBlocks as error:
            # After a cancel it is not known how far states are.
            num_computed = self.computed.get((id, sequence), 1 if has_states(self.world.groups) else 0)
            is_full = error.free < len(tails) and num_computed % self.world.block_size
            self._fail_on([] if is_full else [f"a fork of {id}/{sequence}: {error}"])
            self.events["fork refused for want of a block"] += 1
        except PagedError as error:
            self._fail_on([f"a fork of {id}/{sequence}, which runs: {error}"] if can else [])
        else:
            self._fail_on([] if can and not self.in_flight(id) else [f"{id}/{sequence} was forked; it may not be"])
            if (due := book.fork(sequence)) != number:
                self._fail_on([f"the fork of {id}/{sequence} is number {number}; {due} is the first that is free"])
            self.computed.pop((id, number), None)
            if (id, sequence) in self.computed:
                self.computed[id, number] = self.computed[id, sequence]
            self.figures.goes_on_as((id, number), (id, sequence))
            table, partial = self._table_of(id, number), self.computed.get((id, sequence), 0) % self.world.block_size
            # Where the hit of one that has computed nothing ended is not known.
            num_shared = len(before) - bool(partial or (id, sequence) not in self.computed)
            if table[:num_shared] != before[:num_shared] or len(table) != len(before):
                self._fail_on([f"the fork of {id}/{sequence} has table {table}, made of {before}"])
            if partial:
                self._fail_on(
                    [f"{id}/{sequence} and its fork both write {before[-1:]}"] if table[-1:] == before[-1:] else []
                )
            copies = self._tails(id, number)
            if partial or ((id, sequence) not in self.computed and copies != tails):
                self._carry(tails, copies)
            self.events["fork"] += 1
        self._check()

    def _tails(self, id: str, sequence: int) -> list[int]:
        """The pages of a sequence's last block, over all groups."""
        if not self.world.groups:
            return self._table_of(id, sequence)[-1:]
        row, pages = self._row_of(id, sequence), []
        for number, group in enumerate(self.world.groups):
            if group.kind != "state":
                pages += self.manager.group_pages(number, row)[-1:].reshape(-1).tolist()
        return pages

    def _carry(self, sources: list[int], copies: list[int]) -> None:
        """Copies for a fork are to run: with those that are to run already, unless one of them reads or writes what another one does."""
        pairs = dict(self.carried[-1] or {}) if self.carried else {}
        pairs |= {copy: pairs.get(source, source) for source, copy in zip(sources, copies, strict=True)}
        if self.carried and self.carried[-1] is not None and not pairs.keys() & set(pairs.values()):
            self.carried[-1] = pairs
        else:
            self.carried.append(dict(zip(copies, sources, strict=True)))

    def num_running(self) -> int:
        """Sequences of the requests that run."""
        running = [self.books[id] for id in self.live if self.scheduler.status(id) == "running"]
        return sum(sequence.reason is None for book in running for sequence in book.sequences)

    def _table_of(self, id: str, sequence: int) -> list[int]:
        """The blocks of a live sequence whose request has rows."""
        return list(self.manager.table(self._row_of(id, sequence)).tolist())

    def _row_of(self, id: str, sequence: int) -> int:
        live = [number for number, each in enumerate(self.books[id].sequences) if each.reason is None]
        return int(self.scheduler.rows_of(id)[live.index(sequence)])

    def loaded(self, id: str, num_tokens: int) -> None:
        """The KV that exists elsewhere has arrived: `num_tokens` of those that a loading request asked for, first ones first."""
        from paged.errors import RequestInFlight

        if id not in self.loads:
            return
        if self.scheduler.status(id) != "loading":
            # It ended meanwhile; what arrives has no use.
            del self.loads[id]
            return
        # KV arrives after the moves of the batch that named the blocks.
        if any(not flight.has_run for flight in self.flights):
            self.run(len(self.flights) - 1)
        load = self.loads[id]
        first, num_tokens = load.blocks[0][0], min(num_tokens, load.num_tokens)
        self._note("loaded", id, num_tokens)
        namespace, tokens = self.known(id, 0)
        contents, size = self.shadow.contents.path(namespace, tokens), self.world.block_size
        for start, block in load.blocks:
            arrived = contents[start : max(start, min(start + size, first + num_tokens))]
            self.shadow.device[block, : len(arrived)] = arrived
            for flight in self.flights:
                flight.rewritten.add(block)
        try:
            with self._blaming(RequestInFlight):
                self.scheduler.loaded(id, num_tokens)
        except RequestInFlight:
            # What it shares with the batch that asked for the load is still being computed; it is reported again later.
            self._fail_on([] if self.is_held(id) else [f"{id} is in no batch, and yet loaded says so"])
            return
        del self.loads[id]
        for flight in self.flights:
            # What has arrived is loaded by no batch any more.
            flight.loading = [other for other in flight.loading if other != id]
        if num_tokens:
            self.computed[id, 0] = first + num_tokens
        self._check()

    def saved(self, id: str) -> None:
        """The blocks of a request that has ended have been copied: until now nothing else was written to them."""
        from paged.errors import InvalidRequest

        if id not in self.saving:
            return
        self._note("saved", id)
        blocks, seen = self.saving.pop(id)
        self.was_saved.add(id)
        held = self.shadow.device[blocks].reshape(-1)[: len(seen)].tolist()
        self._fail_on([] if held == seen else [f"{id} ended with {seen} in blocks {blocks}, and {held} was saved"])
        with self._blaming():
            self.scheduler.saved(id)
        self.events["saved"] += 1
        self._refused(InvalidRequest, lambda: self.scheduler.saved(id), "a second save")
        self._check()

    def _note_saving(self) -> None:
        """Of requests that save and have ended since: which blocks are held, and what is in them."""
        for id, book in self.books.items():
            saves = book.request.saves and id not in self.saving and id not in self.was_saved
            if saves and self.scheduler.status(id) in life_oracles.ENDED:
                blocks = self.scheduler.saving_blocks(id).tolist()
                seen = self.shadow.device[blocks].reshape(-1)[: self.computed.get((id, 0), 0)].tolist()
                self.saving[id] = blocks, seen

    def drain(self) -> None:
        """No more requests: everything has to end within a bounded number of steps, and leave the pools as they were."""
        bound = life_oracles.drain_bound(self)
        for _ in range(bound):
            if not self.has_work:
                break
            self.step()
        self._fail_on([f"not drained after {bound} steps: {self.scheduler.counts()}"] if self.has_work else [])
        for hint in self.hints.unpin_all():
            self.hint(hint)
        self._wait_for_all()
        self._fail_on(life_oracles.at_rest(self))

    def step(self, counts: Sequence[int] = (), *, is_patient: bool = True, ahead: int | None = None) -> None:
        """One whole step: batches begun until `ahead` are out beside the oldest (None: as many as the world says), which is ended. Before it
        a patient engine has loaded all that is listed and fed all starving sequences; the other one lets them wait."""
        ahead = min(self.world.steps_ahead if ahead is None else ahead, self.world.max_outstanding - 1)
        batch: Any = None
        self._is_between = True
        if is_patient:
            self._wait_for_all()
        while len(self.flights) <= ahead and (batch is None or not batch.is_empty):
            batch = self.schedule()
        if ahead and not self.flights:
            # The first look may have taken a victim's blocks, and the second one finds who has room in them.
            batch = self.schedule()
        self._is_between = False
        if self.flights:
            self.update(counts)
            return
        with self._blaming():
            outputs = list(self.scheduler.update(batch, np.empty(0, np.int32), None, now=self.now))
        self._contents.clear()
        self._receive(outputs, {})
        self._check()

    def _wait_for_all(self) -> None:
        for id in list(self.saving):
            self.saved(id)
        for id in list(self.loads):
            self.loaded(id, self.loads[id].num_tokens)
        for id in self.live:
            for number, sequence in enumerate(self.books[id].sequences):
                if sequence.starves and sequence.reason is None and not self.in_flight(id):
                    self.append(id, [0], number)

    def root(self, namespace: object) -> bytes:
        """How the manager spells a request's namespace in `cached_contents`, learned from a manager of one block."""
        # 1 == True for Python's dictionaries; for a cache they are two tenants.
        key = typed(namespace)
        if key not in self._roots:
            probe = type(self.manager)(1, 1)
            row = probe.add([0], namespace=batch_oracles.content_namespace(namespace))
            probe.allocate([row], [1])
            probe.confirm()
            self._roots[key] = next(iter(probe.cached_contents()))[0]
            self._namespaces[self._roots[key]] = namespace
        return self._roots[key]

    def _restart_points(self) -> list[tuple[bytes, ...]]:
        """The content behind which prompts begin, of layers of several kinds, by lookups; all that they read there lies on some page."""
        found, paths = list[str](), list[tuple[bytes, ...]]()
        # Copies that are still to run bring content, too.
        has_run = not self.carries_moves and all(flight.has_run for flight in self.flights)
        for path in self.contents():
            tokens = np.frombuffer(b"".join(path[1:]), np.int32).tolist()
            namespace = self._namespaces[path[0]]
            if self.manager.lookup([*tokens, 0], batch_oracles.content_namespace(namespace)).num_tokens == len(tokens):
                paths.append(path)
                lacks = self.shadow.lacking(namespace, tokens) if has_run else []
                found += [f"16: a prompt may begin behind {tokens}, and no page has {each}" for each in lacks]
        self._fail_on(found)
        return paths

    def _move(self, flight: Flight) -> None:
        """The moves of a batch, once."""
        if flight.has_moved:
            return
        flight.has_moved = True
        moves = flight.batch.moves
        for earlier in self.flights:
            if earlier.number < flight.number:
                earlier.rewritten |= {*moves.host_to_device[:, 1].tolist(), *moves.device_to_device[:, 1].tolist()}
        self.events["copy on write"] += len(moves.device_to_device)
        self.events["swapped out"] += len(moves.device_to_host)
        self.events["swapped in"] += len(moves.host_to_device)
        if self.world.keeps_content_on_host:
            figures = self.manager.stats()
            self.events["content offloaded"] += figures.offloaded_blocks > 0
            self.events["content loaded"] += figures.loaded_blocks > 0
        self._fail_on(self.shadow.move(moves))

    def _sampled(self, flight: Flight, counts: Sequence[int]) -> tuple[list[int], list[int], dict[Key, Delivery]]:
        """What the model returns for a batch (tokens, how many a row), and what has to be delivered of it."""
        tokens: list[int] = []
        given: list[int] = []
        expected: dict[Key, Delivery] = {}
        num_sampling = 0
        rests_on = {source for later in self.flights for source in later.rests_on()}
        for index, (id, sequence) in enumerate(flight.keys):
            if not flight.batch.samples[index]:
                given.append(0)
                continue
            count = counts[num_sampling % len(counts)] if counts else 1
            if (flight.number, index) in rests_on and count > 1:
                # A later batch counts on one token.
                self._refuse_several(flight, index)
                count = 1
            num_sampling += 1
            held = flight.attended[index].tolist()
            sampled: list[int] = []
            if num_drafts := flight.drafts(index):
                # An engine may accept fewer than were right.
                sampled = flight.right[index][: count if counts else None]
                count = len(sampled)
                flight.accepted[index] = max(0, count - 1)
                self.events["drafts accepted"] += count > 1
                self.events["drafts rejected"] += count <= num_drafts
            for _ in range(count - len(sampled)):
                sampled.append(self.shadow.contents.next_token(held, sequence, self.world.vocabulary))
                held.append(self.shadow.contents.extend(held[-1], sampled[-1]))
            self.events["none sampled" if count == 0 else "several sampled"] += count != 1
            tokens += sampled
            given.append(count)
            if index not in flight.void:
                expected[id, sequence] = self.books[id].accept(sequence, sampled)
                accepted, reason = expected[id, sequence]
                self.figures.output_tokens += len(accepted)
                self.events["delivered elsewhere"] += index in flight.lost
                if reason is not None:
                    self._make_void(id, [sequence])
                elif count != 1:
                    is_void = self._make_void(id, [sequence], len(self.known(id, sequence)[1]))
                    if is_void and has_states(self.world.groups):
                        # The state has seen a token that there is not.
                        self.events["state is void"] += 1
                        self._forget_progress(id, sequence)
                        flight.lose(id, sequence)
        return tokens, given, expected

    def _refuse_several(self, flight: Flight, place: int) -> None:
        from paged.errors import WrongTokens

        counts = flight.batch.samples.astype(np.int64)
        counts[place] = 2
        tokens = np.zeros(int(counts.sum()), np.int32)
        self._refused(WrongTokens, lambda: self.scheduler.update(flight.batch, tokens, counts), "several tokens")

    def _receive(self, outputs: list[Any], expected: dict[Key, Delivery]) -> dict[Key, Delivery]:
        """Hold what `update` returned against the expectation: every token exactly once, and the right end."""
        delivered: dict[Key, Delivery] = {}
        found: list[str] = []
        for output in outputs:
            key = (output.id, output.sequence)
            if key in delivered:
                found.append(f"{key} is reported twice by one update")
            delivered[key] = (list(output.token_ids), output.finish_reason)
            if output.usage is not None and output.id in self.books:
                found += life_oracles.usage(self.books[output.id], output.usage)
        self.decisions.append(sorted(delivered.items()))
        for key, want in expected.items():
            got = delivered.get(key, ([], None))
            if got != want:
                found.append(f"{key}: delivered {got}, expected {want}")
        outside: dict[str, dict[int, Delivery]] = {}
        for id, sequence in sorted(delivered.keys() - expected.keys()):
            outside.setdefault(id, {})[sequence] = delivered[id, sequence]
        for id, outputs_of_id in outside.items():
            found += life_oracles.ended_outside(self, id, outputs_of_id)
        self._fail_on(found)
        return delivered

    def _make_void(self, id: str, sequences: Iterable[int], beyond: int = 0) -> bool:
        """What batches that are out compute of these sequences past their first `beyond` tokens counts for nothing. Returns whether there is
        any."""
        keys, num_void = [(id, sequence) for sequence in sequences], 0
        for flight in self.flights:
            before = len(flight.void)
            flight.make_void(keys, beyond)
            num_void += len(flight.void) > before
        self.events["void"] += num_void
        return num_void > 0

    def _poison_free(self) -> None:
        """Once nothing is between decision and execution, blocks without content are poisoned, as a debug build would."""
        is_between = all(flight.has_run for flight in self.flights) and not self.carries_moves
        if is_between and not self.loads:
            self.shadow.poison((self.manager.device.states == 0).nonzero()[0].tolist())

    def _forget_progress(self, id: str, only: int | None = None) -> None:
        self.retentions.disturbed.add(id)
        for sequence in range(len(self.books[id].sequences)) if only is None else [only]:
            self.computed.pop((id, sequence), None)
        for flight in self.flights:
            flight.lose(id, only)

    def _num_evicted(self) -> int:
        """Blocks of content that have left the device, where that is asked for: while copies wait, and the host would take it."""
        return self.manager.stats().evicted_blocks if self.carries_moves and self.world.keeps_content_on_host else 0

    def _note_pressure(self, batch: Any, evicted: int) -> None:
        """Count what goes on at once in a step that is short of memory; `evicted`: `_num_evicted` before it."""
        events, policy = self.events, getattr(self.scheduler, "policy", None)
        events["evicted while copies wait"] += self._num_evicted() > evicted
        waits = {id for id in self.live if any(s.starves and s.reason is None for s in self.books[id].sequences)}
        events["preempted while it waits"] += any(id in waits for id, _ in batch.preempted)
        computes = {id for id, _ in batch_oracles.keys_of(batch)}
        events["recomputed while it waits in part"] += any(self.preempted[id] for id in waits & computes)
        bound = None if policy is None else policy.max_preemptions
        if bound is not None:
            running = [id for id in self.live if self.preempted[id] >= bound and self.scheduler.status(id) == "running"]
            events["several at their last preemption"] += len(running) > 1

    def _record(self, batch: Any) -> None:
        columns = (batch.rows, batch.num_tokens, batch.token_ids, batch.slot_mapping, batch.table_blocks)
        moves = (batch.moves.device_to_host, batch.moves.host_to_device, batch.moves.device_to_device)
        self.decisions.append(b"|".join(column.tobytes() for column in (*columns, *moves)))

    def _note(self, verb: str, *arguments: Any) -> None:
        self._contents.clear()
        if verb != "add":
            # Requests that come in a row come at the same time: their number decides.
            self.now += 1.0
        self.calls.append((verb, arguments))

    def _check(self, *, is_part: bool = False) -> None:
        """Look at the requests' states, and at everything else unless this is a part of what ends with another look."""
        with self._blaming(Violation):
            self._note_saving()
            is_part |= self._is_between
            self._fail_on(life_oracles.states(self, is_part=is_part))
            self._fail_on(self.retentions.look(is_part=is_part))
            self._is_unseen = is_part
            if is_part:
                return
            self.num_looks += 1
            found = self.hints.look() + life_oracles.violations(self)
            settled = [id for id, book in self.books.items() if not book.is_live and not self.is_held(id)]
            for id in settled:
                found += life_oracles.received(self, self.books[id])
            # Full layers alone have none, and without them it is not known which content there is.
            has_some = len({group.kind == "full" for group in self.world.groups}) == 2
            found += self.events_read.look(self._restart_points if has_some else None)
        self._fail_on(found)
        # So that thousands can pass through.
        for id in settled:
            self._forget_progress(id)
            self.figures.forget(id)
            self.preempted.pop(id, None)
            self.passed.pop(id, None)
            del self.books[id], self.statuses[id]
            self.past.add(id)

    def _refused(self, error: type[Exception], call: Callable[[], Any], what: str) -> None:
        """The call has to raise this, and change nothing that can be seen."""
        try:
            with self._blaming(error):
                call()
        except error:
            self.events[f"{what} refused"] += 1
        else:
            self._fail_on([f"{what} was taken"])

    def _fail_on(self, found: list[str]) -> None:
        if found:
            self.has_failed = True
            raise Violation(found, self.program)

    @contextmanager
    def _blaming(self, *expected: type[Exception]) -> Iterator[None]:
        """What the subject raises in here, other than `expected`, is a violation with its program."""
        try:
            yield
        except expected:
            raise
        except Exception as error:
            self.has_failed = True
            raise Violation([sentence_of(error)], self.program) from error
