"""A serving engine around a scheduler, with a stand-in for the device and every oracle of the kit watching.

Each public method is one thing that an engine does: add, schedule, run, update, cancel, abort, finish, append,
loaded. It runs at once, compares what came back with the books, the shadow KV and the invariants, and raises
`Violation` with the program that led there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from paged import errors
from paged.scheduler import Hint, Request
from paged.testing import batch_oracles, life_oracles
from paged.testing.books import ExpectedRequest, Figures
from paged.testing.cache_view import CacheView, content_namespace
from paged.testing.conformance import held_to
from paged.testing.event_reader import EventWatch
from paged.testing.flight import Flight, Key, Source
from paged.testing.naive_hints import NaiveHints
from paged.testing.naive_layers import has_states
from paged.testing.naive_retentions import NaiveRetentions
from paged.testing.rig import NotThere, Rig
from paged.testing.rig_device import RigDevice
from paged.testing.shadow_groups import views_of
from paged.testing.world import Builder, World, build_scheduler

Delivery = tuple[list[int], str | None]
"""What an output says of a sequence: its new tokens, and why it ended."""


@dataclass
class Loading:
    """The KV that a request waits for: the number of its tokens, and the blocks for it with the first token of each."""

    num_tokens: int
    blocks: list[tuple[int, int]] = field(default_factory=list)


class SchedulerRig(Rig):
    """Drives one scheduler in one `World`; every method checks before it returns. Raises InvalidProgram, before the
    scheduler is called, for a request or a sequence that there is not."""

    kind = "SchedulerRig"

    def __init__(self, world: World, build: Builder = build_scheduler) -> None:
        super().__init__(world)
        self.scheduler: Any = held_to("StepScheduler", build(world))
        self.manager: Any = self.scheduler.manager
        self.device = RigDevice(world, self.manager, self.events)
        self.flights, self.shadow = self.device.flights, self.device.shadow
        self.cache = CacheView(self.manager)
        self.contents = self.cache.contents
        self.events_read = EventWatch(self.manager, world.event_stride, self.contents)
        self.books: dict[str, ExpectedRequest] = {}
        self.loads: dict[str, Loading] = {}
        # Blocks of requests that have ended and save, and what their computed tokens were then.
        self.saving: dict[str, tuple[list[int], list[int]]] = {}
        # The state of each request when it was last looked at, and the ids of those that are gone.
        self.statuses: dict[str, str] = {}
        self.past: set[str] = set()
        self.figures = Figures()
        # The drafts of each sequence that the latest batch could choose from.
        self.proposed: dict[Key, list[int]] = {}
        self.num_added = self.num_looks = 0
        self.hints = NaiveHints(self)
        self.retentions = NaiveRetentions(self)
        # Within `step`, which waits for others and begins a batch before it ends one.
        self._is_between = False
        # Whether a call came since everything was looked at.
        self._is_unseen = False
        self.now = 0.0
        # What every batch held and every update delivered: the same calls give the same list.
        self.decisions: list[Any] = []

    # -- what is known of the requests

    @property
    def live(self) -> list[str]:
        """Ids of the requests that have not ended, in the order in which they were added."""
        return [id for id, book in self.books.items() if book.is_live]

    @property
    def has_work(self) -> bool:
        """Whether anything is left to do or to report."""
        return bool(self.live or self.flights or self.scheduler.has_unfinished)

    @property
    def carries_moves(self) -> bool:
        """Whether moves that were decided before the next batch are still to run."""
        return bool(self.device.carried)

    def in_flight(self, id: str) -> bool:
        """Whether a batch that is out computes for this request, void or not."""
        return any(key[0] == id for flight in self.flights for key in flight.keys)

    def is_held(self, id: str) -> bool:
        """Whether the id is taken: a batch that is out computes or loads for it, or its blocks are being saved."""
        return self.in_flight(id) or id in self.saving or any(id in flight.loading for flight in self.flights)

    @property
    def taken_ids(self) -> list[str]:
        """Ids of requests that have ended and are still held."""
        return [id for id, book in self.books.items() if not book.is_live and self.is_held(id)]

    def known(self, id: str, sequence: int) -> tuple[object, list[int]]:
        """Namespace and all tokens of a sequence, from the books."""
        book = self.books[id]
        return book.namespace, book.sequences[sequence].tokens

    def foreseen(self, key: Key) -> list[int | Source]:
        """All tokens of a sequence; of those that batches which are out sample, the batch and the place in it."""
        tokens: list[int | Source] = list(self.known(*key)[1])
        return tokens + [source for flight in self.flights for source in flight.sources(key)]

    def is_undecided(self, key: Key) -> bool:
        """Whether a batch that is out has drafts of the sequence."""
        return any(flight.is_undecided(key) for flight in self.flights)

    def progress(self, key: Key) -> int | None:
        """Tokens of a sequence that are computed, or will be when all batches that are out have ended; None: its blocks
        hold nothing of it."""
        ends = [self.books[key[0]].sequences[key[1]].computed, *(flight.end_of(key) for flight in self.flights)]
        return max((end for end in ends if end is not None), default=None)

    def num_running(self) -> int:
        """Sequences of the requests that run."""
        running = [self.books[id] for id in self.live if self.scheduler.status(id) == "running"]
        return sum(sequence.reason is None for book in running for sequence in book.sequences)

    # -- the calls of clients

    def add(self, request: Any) -> None:
        """Submit a request. One that no empty pool could hold has to be refused by `NeverFits`, and no other may be."""
        if not isinstance(request, Request):
            raise errors.InvalidProgram(f"{request!r} is no Request.")
        self._note("add", request)
        id, waiting = request.id, self.scheduler.waiting_ids()
        most = math.inf if self.world.max_waiting is None else self.world.max_waiting
        is_taken = id in self.books and (self.books[id].is_live or self.is_held(id))
        # Those that wait for tokens from the caller take no place among the waiting.
        num_ready = sum(not self.books[each].is_idle for each in waiting)
        try:
            self.scheduler.add(request, now=self.now)
        except errors.NeverFits:
            self._expect(not is_taken, f"{id} is taken, and was refused as never fitting, not as a duplicate")
            self._expect(not self.world.can_hold(request), f"{id} was refused, and an empty pool holds it")
            # The id now stands for the refused request, whichever had it before.
            self.books.pop(id, None)
            self.past.add(id)
            self.num_added += 1
            self.events["refused"] += 1
        except errors.DuplicateRequest:
            self._expect(is_taken, f"{id} is free again, and yet refused as a duplicate")
            self.events["duplicate refused"] += 1
        except errors.WaitingFull:
            self._expect(len(waiting) >= most, f"{len(waiting)} wait, limit {most}: not full")
            self.events["waiting full"] += 1
        else:
            self._expect(not is_taken, f"{id} was taken twice")
            self._expect(self.world.can_hold(request), f"{id} was taken and can never fit")
            self._expect(num_ready < most, f"{id} was taken, and {num_ready} waited already: no more may")
            self._begin(ExpectedRequest(request, self.world.limit_of(request), self.now))
        # It takes no memory: `look` or the next call looks at that.
        self._check(is_part=True)

    def _begin(self, book: ExpectedRequest) -> None:
        """A request was taken. A used id comes last again: the order of the books is the order of arrival."""
        for by_id in (self.books, self.statuses, self.loads):
            by_id.pop(book.id, None)
        self.books[book.id] = book
        self.past.discard(book.id)
        self.num_added += 1
        self.hints.begin(book.request)
        self.retentions.added(book.id)
        if self.world.groups:
            self.cache.root(book.namespace)

    def abort(self, id: str) -> None:
        """The client is gone. Idempotent in every state; one last output, and nothing of that id after it."""
        self._note("abort", id)
        book = self.books.get(id)
        # Ended by a step whose outputs have not been delivered yet.
        is_over = book is not None and self.scheduler.status(id) in life_oracles.ENDED
        try:
            output = self.scheduler.abort(id)
        except errors.UnknownRequest:
            was_submitted = book is not None or id in self.past
            self._expect(not was_submitted, f"{id} was submitted, and yet is unknown to abort")
            return
        if book is not None and book.is_live and not is_over:
            self.events["abort in flight" if self.is_held(id) else f"abort {self.statuses.get(id)}"] += 1
            said = output and (output.id, list(output.token_ids), output.finish_reason)
            self._expect(said == (id, [], "abort"), f"abort of live {id} returned {output}")
            self._fail_on(life_oracles.usage(book, output))
            book.end("abort")
            book.is_aborted = True
            self._make_void(id, range(len(book.sequences)))
            self.loads.pop(id, None)
        else:
            self._expect(output is None, f"abort of ended {id} returned {output}")
        self._check()

    def finish(self, id: str, sequence: int = 0) -> None:
        """The engine ends one sequence, in flight or not: its last output comes at once, and no other after it."""
        book = self._book(id, sequence)
        self._note("finish", id, sequence)
        was_live = book.sequences[sequence].reason is None and self.scheduler.status(id) not in life_oracles.ENDED
        output = self.scheduler.finish(id, sequence)
        if was_live:
            self.events["finish"] += 1
            said = output and (output.id, output.sequence, list(output.token_ids), output.finish_reason)
            self._expect(said == (id, sequence, [], "stop"), f"finish of {id}/{sequence} returned {output}")
            book.sequences[sequence].reason = "stop"
            book.was_steered = True
            self._make_void(id, [sequence])
            if not book.is_live:
                self.loads.pop(id, None)
            says_usage = getattr(output, "usage", None) is not None
            self._expect(says_usage != book.is_live or not hasattr(output, "usage"), f"usage of {id} with {output}")
            self._fail_on(life_oracles.usage(book, output))
        else:
            self._expect(output is None, f"finish of ended {id}/{sequence} returned {output}")
        self._check()

    def append(self, id: str, tokens: list[int], sequence: int = 0) -> None:
        """More known tokens for a live sequence: refused by type while the request is in flight."""
        book = self._book(id, sequence)
        self._note("append", id, tokens, sequence)
        has_ended = book.sequences[sequence].reason is not None
        try:
            self.scheduler.append(id, tokens, sequence)
        except errors.RequestInFlight:
            self._expect(self.in_flight(id), f"{id} is not in flight, and yet append says so")
        except errors.PagedError as error:
            has_ended |= self.scheduler.status(id) in life_oracles.ENDED
            self._expect(has_ended, f"append to live {id}: {error}")
        else:
            refuses = self.in_flight(id) or has_ended
            self._expect(not refuses, f"append to {id}/{sequence}, in flight or ended, was taken")
            book.append(sequence, tokens, self.world.limit_of(book.request))
            self.events["append"] += 1
        self._check()

    def hint(self, hint: Any) -> None:
        """Say what is known of content that is to come. The answer has to be right, and nothing may wait for it."""
        if not isinstance(hint, Hint):
            raise errors.InvalidProgram(f"{hint!r} is no Hint.")
        self._note("hint", hint)
        is_known = hint.action == "unpin" or hint.request in (None, *self.books, *self.past)
        before = self.hints.before(hint) if is_known else (0, 0, 0)
        try:
            outcome = self.scheduler.hint(hint, now=self.now)
        except errors.UnknownRequest:
            self._expect(not is_known, f"{hint.request} was submitted, and yet is unknown to hint")
        else:
            self._expect(is_known, f"{hint.request} was never submitted, and hint answers {outcome}")
            self.cache.forget()
            self._fail_on(self.hints.carried_out(hint, outcome, before))
            self.retentions.hinted(hint, outcome, before[1])
        self._check()

    def fork(self, id: str, sequence: int = 0) -> None:
        """Begin one more sequence of a request where this one is: it shares full blocks and copies the partial one."""
        book, policy = self._book(id, sequence), getattr(self.scheduler, "policy", None)
        self._note("fork", id, sequence)
        source = book.sequences[sequence]
        can = source.reason is None and self.scheduler.status(id) == "running"
        can &= policy is None or policy.reservation == "prompt"
        can &= book.request.reads_cache and book.request.writes_cache and not book.request.saves
        can &= self.num_running() < self.world.max_sequences
        table, tails = (self._table_of(id, sequence), self._tails(id, sequence)) if can else ([], [])
        try:
            number = self.scheduler.fork(id, sequence)
        except errors.RequestInFlight:
            self._expect(self.in_flight(id), f"{id} is not in flight, and yet fork says so")
        except errors.OutOfBlocks as error:
            # After a cancel it is not known how far states are.
            num_computed = (1 if has_states(self.world.groups) else 0) if source.computed is None else source.computed
            is_full = error.free < len(tails) and num_computed % self.world.block_size
            self._expect(is_full, f"a fork of {id}/{sequence}: {error}")
            self.events["fork refused for want of a block"] += 1
        except errors.PagedError as error:
            self._expect(not can, f"a fork of {id}/{sequence}, which runs: {error}")
        else:
            self._expect(can and not self.in_flight(id), f"{id}/{sequence} was forked; it may not be")
            due, what = book.fork(sequence), f"the fork of {id}/{sequence} is number {number}"
            self._expect(due == number, f"{what}; {due} is the first that is free")
            self._look_at_fork((id, sequence), number, table, tails)
            self.events["fork"] += 1
        self._check()

    def _look_at_fork(self, key: Key, number: int, before: list[int], tails: list[int]) -> None:
        """Compare the table of a new fork with its source's, and carry the copies of its last block's pages."""
        id, sequence = key
        computed, table = self.books[id].sequences[sequence].computed, self._table_of(id, number)
        filled = (computed or 0) % self.world.block_size
        # Where the hit of one that has computed nothing ended is not known.
        num_shared = len(before) - bool(filled or computed is None)
        is_alike = table[:num_shared] == before[:num_shared] and len(table) == len(before)
        self._expect(is_alike, f"the fork of {id}/{sequence} has table {table}, made of {before}")
        is_copied = not filled or table[-1:] != before[-1:]
        self._expect(is_copied, f"{id}/{sequence} and its fork both write {before[-1:]}")
        copies = self._tails(id, number)
        if filled or (computed is None and copies != tails):
            self.device.carry(tails, copies)

    def _tails(self, id: str, sequence: int) -> list[int]:
        """The pages of a sequence's last block, over all groups."""
        if not self.world.groups:
            return self._table_of(id, sequence)[-1:]
        row, pages = self._row_of(id, sequence), []
        for number, group in enumerate(self.world.groups):
            if group.kind != "state":
                pages += self.manager.group_pages(number, row)[-1:].reshape(-1).tolist()
        return pages

    def _table_of(self, id: str, sequence: int) -> list[int]:
        """The blocks of a live sequence whose request has rows."""
        return list(self.manager.table(self._row_of(id, sequence)).tolist())

    def _row_of(self, id: str, sequence: int) -> int:
        live = [number for number, each in enumerate(self.books[id].sequences) if each.reason is None]
        return int(self.scheduler.rows_of(id)[live.index(sequence)])

    def _book(self, id: str, sequence: int) -> ExpectedRequest:
        book = self.books.get(id)
        if book is None or not 0 <= sequence < len(book.sequences):
            there = "the request is unknown or has ended" if book is None else f"it has {len(book.sequences)}"
            raise NotThere(f"{id} has no sequence {sequence}: {there}.")
        return book

    # -- the calls of the engine

    def schedule(self) -> Any:
        """Schedule a batch, and hold it against every rule that a batch obeys. Returns it; an empty batch is not
        outstanding. None where one more than may be out had to be refused."""
        self._note("schedule")
        before = batch_oracles.observe(self)
        self.proposed = self._guesses() if self.world.drafts else {}
        drafts = {"drafts": self.proposed} if self.proposed else {}
        is_full, could_copy = len(self.flights) >= self.world.max_outstanding, not (self.flights or self.carries_moves)
        self.retentions.begin()
        try:
            batch = self.scheduler.schedule(now=self.now, **drafts)
        except errors.TooManyOutstanding:
            self._expect(is_full, f"{len(self.flights)} batches are out, and yet they are too many")
            self.events["too many outstanding"] += 1
            self._check()
            return None
        self.cache.forget()
        self._expect(not is_full, f"{len(self.flights)} batches were out; one more was scheduled")
        self._note_saving()
        columns = (batch.rows, batch.num_tokens, batch.token_ids, batch.slot_mapping, batch.table_blocks)
        moves = (batch.moves.device_to_host, batch.moves.host_to_device, batch.moves.device_to_device)
        self.decisions.append(b"|".join(column.tobytes() for column in (*columns, *moves)))
        for id, kind in batch.preempted:
            self.events[f"preempted by {kind}"] += 1
            self.events["preempted in flight"] += self.in_flight(id)
            self.figures.preempted(self.books[id])
            self._forget_progress(id)
        flight = self._flight_of(batch)
        self._fail_on(batch_oracles.violations(self, before, flight) + self.retentions.scheduled(batch, flight))
        self._fail_on(self.hints.scheduled(flight, could_copy=could_copy))
        self._note_loads(flight)
        self.events["follow"] += bool(set(batch.admitted) - {id for id, _ in flight.keys} - self.loads.keys())
        if self.carries_moves and len(batch.moves):
            # While such a group waits, a batch makes no moves of its own.
            del self.device.carried[0]
        if not batch.is_empty:
            self.flights.append(flight)
        self.events["several outstanding"] += len(self.flights) > 1
        self.events["drafts"] += flight.has_drafts
        self.events["computes unknown tokens"] += bool(flight.rests_on())
        self._check()
        return batch

    def _flight_of(self, batch: Any) -> Flight:
        """A batch that has just been scheduled, with all that its rows will know when those before it have run."""
        sampled = {(flight.number, place): token for flight in self.flights for place, token in flight.sampled.items()}
        tables = {row: batch.block_tables[row].astype(np.int64) for row in batch.rows.tolist()}
        views = views_of(batch, self.world.groups) if self.world.groups else []
        flight = Flight(batch, batch_oracles.keys_of(batch), tables, views)
        for place, key in enumerate(flight.keys):
            if key[0] in self.books:
                tokens = [sampled.get(each, each) if isinstance(each, tuple) else each for each in self.foreseen(key)]
                flight.plans[key] = (self.books[key[0]].namespace, [*tokens, *flight.drafted(place)])
        return flight

    def _guesses(self) -> dict[Key, list[int]]:
        """What comes next of the sequences that run, as far as the caller can tell; some last guesses are wrong."""
        found: dict[Key, list[int]] = {}
        for id in self.live:
            if self.scheduler.status(id) != "running":
                continue
            for number, sequence in enumerate(self.books[id].sequences):
                count = (int(self.now) + len(found)) % (self.world.drafts + 1)
                if sequence.reason is not None or not count:
                    continue
                num_unknown = len(self.foreseen((id, number))) - len(sequence.tokens)
                guess = self.device.coming(*self.known(id, number), number, num_unknown + count)[num_unknown:]
                if int(self.now) % 3 == 0:
                    guess[-1] = (guess[-1] + 1) % self.world.vocabulary
                found[id, number] = guess
        return found

    def _note_loads(self, flight: Flight) -> None:
        """Note the blocks that a batch lists for KV from elsewhere, and what the requests asked for."""
        for row, first, block in flight.batch.loads.tolist():
            id = self.scheduler.id_of(row)
            flight.loading.append(id)
            if id not in self.loads:
                book = self.books[id]
                most = book.request.num_computed
                if self.world.elsewhere:
                    most = first + self.world.exists_elsewhere(id, first)[0]
                    self.events["load what was asked for"] += 1
                most = min(most, len(self.known(id, 0)[1]) - 1)
                self.loads[id] = Loading(most - first if book.asked is None else book.asked)
                book.asked = None
            self.loads[id].blocks.append((first, block))
            self.events["load"] += 1

    def run(self, index: int = 0) -> None:
        """The device reaches batch `index` of those that are out: it runs moves, then forward pass, of each."""
        if not 0 <= index < len(self.flights):
            raise NotThere(f"{len(self.flights)} batches are out; {index} is none of them.")
        self._note("run", index)
        self._fail_on(self.device.run(index))
        if not self.loads:
            self.device.poison_free()

    def update(self, counts: Sequence[int] = ()) -> dict[Key, Delivery]:
        """End the oldest batch: its i-th sampling row gets `counts[i % len]` tokens; without `counts` each gets one."""
        if not self.flights:
            return {}
        if not self.flights[0].has_run:
            self.run(0)
        self._note("update", tuple(counts))
        flight = self.flights.pop(0)
        tokens, given, expected = self._sampled(flight, counts)
        live = set(self.manager.rows.live.tolist())
        before = {row: self.manager.table(row) for row in flight.tables if row in live}
        given_or_none = np.array(given, np.int64) if counts or flight.has_drafts else None
        outputs = list(self.scheduler.update(flight.batch, np.array(tokens, np.int32), given_or_none, now=self.now))
        self.figures.computed(flight, self.books)
        self.retentions.updated(flight)
        for place, (id, sequence) in enumerate(flight.keys):
            if not flight.stands(place):
                continue
            state = self.books[id].sequences[sequence]
            state.computed = flight.end(place)
            if flight.is_wrong(place) and has_states(self.world.groups):
                # Its states have seen the wrong ones: it goes back to before them.
                state.computed = flight.start(place)
                self.events["set back by drafts"] += 1
            row = int(flight.batch.rows[place])
            if row in before and self.scheduler.id_of(row) == id and row in self.manager.rows.live:
                self.events["switch"] += not np.array_equal(before[row], self.manager.table(row)[: len(before[row])])
        delivered = self._receive(outputs, expected)
        self._check()
        return delivered

    def _sampled(self, flight: Flight, counts: Sequence[int]) -> tuple[list[int], list[int], dict[Key, Delivery]]:
        """What the model returns for a batch (tokens, how many a row), and what has to be delivered of it."""
        tokens: list[int] = []
        given = [0] * len(flight.keys)
        expected: dict[Key, Delivery] = {}
        rests_on = {source for later in self.flights for source in later.rests_on()}
        for number, place in enumerate(flight.batch.samples.nonzero()[0].tolist()):
            id, sequence = flight.keys[place]
            count = counts[number % len(counts)] if counts else 1
            if (flight.number, place) in rests_on and count > 1:
                # A later batch counts on one token.
                two = flight.batch.samples.astype(np.int64)
                two[place] = 2
                update = partial(self.scheduler.update, flight.batch, np.zeros(int(two.sum()), np.int32), two)
                self._refused(errors.WrongTokens, "several tokens", update)
                count = 1
            if num_drafts := flight.drafts(place):
                # An engine may accept fewer than were right.
                sampled = flight.right[place][: count if counts else None]
                count = len(sampled)
                flight.accepted[place] = max(0, count - 1)
                self.events["drafts accepted"] += count > 1
                self.events["drafts rejected"] += count <= num_drafts
            else:
                sampled = self.device.words(flight, place, count)
            self.events["none sampled" if count == 0 else "several sampled"] += count != 1
            tokens += sampled
            given[place] = count
            if place not in flight.void:
                expected[id, sequence] = self._accepted(flight, place, sampled)
        return tokens, given, expected

    def _accepted(self, flight: Flight, place: int, sampled: list[int]) -> Delivery:
        """Enter the tokens of one sampling row in the books. Returns what has to be delivered of them."""
        id, sequence = flight.keys[place]
        accepted, reason = self.books[id].accept(sequence, sampled)
        self.figures.output_tokens += len(accepted)
        self.events["delivered elsewhere"] += place in flight.lost
        if reason is not None:
            self._make_void(id, [sequence])
        elif len(sampled) != 1:
            is_void = self._make_void(id, [sequence], len(self.known(id, sequence)[1]))
            if is_void and has_states(self.world.groups):
                # The state has seen a token that there is not.
                self.events["state is void"] += 1
                self._forget_progress(id, sequence)
                flight.lose(id, sequence)
        return accepted, reason

    def _receive(self, outputs: list[Any], expected: dict[Key, Delivery]) -> dict[Key, Delivery]:
        """Hold what `update` returned against the expectation: every token exactly once, and the right end."""
        delivered: dict[Key, Delivery] = {}
        found: list[str] = []
        for output in outputs:
            key = (output.id, output.sequence)
            if key in delivered:
                found.append(f"{key} is reported twice by one update")
            delivered[key] = (list(output.token_ids), output.finish_reason)
            if output.id in self.books:
                found += life_oracles.usage(self.books[output.id], output)
        self.decisions.append(sorted(delivered.items()))
        for key, want in expected.items():
            if (got := delivered.get(key, ([], None))) != want:
                found.append(f"{key}: delivered {got}, expected {want}")
        outside: dict[str, dict[int, Delivery]] = {}
        for id, sequence in sorted(delivered.keys() - expected.keys()):
            outside.setdefault(id, {})[sequence] = delivered[id, sequence]
        for id, outputs_of_id in outside.items():
            found += life_oracles.ended_outside(self, id, outputs_of_id)
        self._fail_on(found)
        return delivered

    def cancel(self, moved: bool) -> None:
        """Take back the latest batch. `moved` says that its moves ran; its forward pass then stopped half way."""
        if not self.flights:
            return
        moved = moved or self.flights[-1].has_moved
        if moved and len(self.flights) > 1 and not self.flights[-2].has_run:
            self.run(len(self.flights) - 2)
        self._note("cancel", moved)
        flight = self.flights.pop()
        batch = flight.batch
        self.figures.cancelled(batch)
        self.retentions.disturbed |= {id for id, _ in flight.keys}
        if moved:
            self._fail_on(self.device.stop_within(flight))
        self.events["cancel with full blocks"] += bool((batch.seq_lens >= self.world.block_size).any())
        if flight.number < self.device.last_moved and len(batch.moves):
            # Those of a later batch ran, so its own did: they cannot be carried over.
            cancel = partial(self.scheduler.cancel, batch, moved=False)
            self._refused(errors.BatchError, "a cancel without moves", cancel)
        self.scheduler.cancel(batch, moved=moved)
        self.events["cancel behind another"] += len(self.flights) > 0
        if not moved and len(batch.moves):
            self.device.carried.insert(0, None)
        for id in dict.fromkeys(flight.loading):
            # A request that lost what it shared of this batch waits again, without a row, and asks anew.
            is_loading = self.scheduler.status(id) == "loading"
            load = None if moved and is_loading else self.loads.pop(id, None)
            if load is not None and is_loading:
                self.books[id].asked = load.num_tokens
        for place, key in enumerate(flight.keys):
            start, state = flight.start(place), self.books[key[0]].sequences[key[1]]
            if start and has_states(self.world.groups):
                # Its states are unknown now: the request begins anew.
                self.events["cancel of states"] += state.computed is not None
                self._forget_progress(key[0])
            elif start > (self.progress(key) or 0):
                # It began behind what it shared, which may be gone.
                state.computed = None
        self._check()

    def loaded(self, id: str, num_tokens: int) -> None:
        """The first `num_tokens` of the tokens that a loading request asked for have arrived from elsewhere."""
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
        contents, size = self.shadow.contents.path(*self.known(id, 0)), self.world.block_size
        for start, block in load.blocks:
            self.device.load(block, contents[start : max(start, min(start + size, first + num_tokens))])
        try:
            self.scheduler.loaded(id, num_tokens)
        except errors.RequestInFlight:
            # What it shares with the batch that asked for the load is still being computed; it is reported again later.
            self._expect(self.is_held(id), f"{id} is in no batch, and yet loaded says so")
            return
        del self.loads[id]
        for flight in self.flights:
            # What has arrived is loaded by no batch any more.
            flight.loading = [other for other in flight.loading if other != id]
        if num_tokens:
            self.books[id].sequences[0].computed = first + num_tokens
        self._check()

    def saved(self, id: str) -> None:
        """The blocks of a request that has ended have been copied: until now nothing else was written to them."""
        if id not in self.saving:
            return
        self._note("saved", id)
        blocks, seen = self.saving.pop(id)
        self.books[id].was_saved = True
        held = self.shadow.device[blocks].reshape(-1)[: len(seen)].tolist()
        self._expect(held == seen, f"{id} ended with {seen} in blocks {blocks}, and {held} was saved")
        self.scheduler.saved(id)
        self.events["saved"] += 1
        self._refused(errors.InvalidRequest, "a second save", partial(self.scheduler.saved, id))
        self._check()

    def _note_saving(self) -> None:
        """Of requests that save and have ended since: note which blocks are held, and what is in them."""
        for id, book in self.books.items():
            saves = book.request.saves and id not in self.saving and not book.was_saved
            if saves and self.scheduler.status(id) in life_oracles.ENDED:
                blocks = self.scheduler.saving_blocks(id).tolist()
                seen = self.shadow.device[blocks].reshape(-1)[: book.sequences[0].computed or 0].tolist()
                self.saving[id] = blocks, seen

    def step(self, counts: Sequence[int] = (), *, is_patient: bool = True, ahead: int | None = None) -> None:
        """One whole step: begin batches until `ahead` are out beside the oldest (None: as many as the world says), and
        end that one. A patient engine has loaded before all that is listed, and fed all starving sequences."""
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
        outputs = list(self.scheduler.update(batch, np.empty(0, np.int32), None, now=self.now))
        self.cache.forget()
        self._receive(outputs, {})
        self._check()

    def drain(self) -> None:
        """No more requests: all have to end within a bounded number of steps, and every block has to come back."""
        bound = life_oracles.drain_bound(self)
        for _ in range(bound):
            if not self.has_work:
                break
            self.step()
        self._expect(not self.has_work, f"not drained after {bound} steps: {self.scheduler.counts()}")
        for hint in self.hints.unpin_all():
            self.hint(hint)
        self._wait_for_all()
        self._fail_on(life_oracles.at_rest(self))

    def _wait_for_all(self) -> None:
        for id in list(self.saving):
            self.saved(id)
        for id in list(self.loads):
            self.loaded(id, self.loads[id].num_tokens)
        for id in self.live:
            for number, sequence in enumerate(self.books[id].sequences):
                if sequence.starves and sequence.reason is None and not self.in_flight(id):
                    self.append(id, [0], number)

    # -- what is forgotten, and what is looked at

    def _make_void(self, id: str, sequences: Iterable[int], beyond: int = 0) -> bool:
        """What batches that are out compute of these sequences past their first `beyond` tokens counts for nothing.
        Returns whether there is any."""
        keys, num_void = [(id, sequence) for sequence in sequences], 0
        for flight in self.flights:
            before = len(flight.void)
            flight.make_void(keys, beyond)
            num_void += len(flight.void) > before
        self.events["void"] += num_void
        return num_void > 0

    def _forget_progress(self, id: str, only: int | None = None) -> None:
        """A request, or one sequence of it, gave up its blocks."""
        self.retentions.disturbed.add(id)
        for number, sequence in enumerate(self.books[id].sequences):
            if only in (None, number):
                sequence.computed = None
        for flight in self.flights:
            flight.lose(id, only)

    def _note(self, verb: str, *arguments: Any) -> None:
        self.cache.forget()
        if verb != "add":
            # Requests that come in a row come at the same time: their number decides.
            self.now += 1.0
        self.calls.append((verb, arguments))

    def _refused(self, error: type[Exception], what: str, call: Callable[[], Any]) -> None:
        """The call has to raise this error."""
        try:
            call()
        except error:
            self.events[f"{what} refused"] += 1
        else:
            self._fail_on([f"{what} was taken"])

    def look(self) -> None:
        """Look at everything, unless that was done since the last call."""
        if self._is_unseen:
            self._check()

    def _check(self, *, is_part: bool = False) -> None:
        """Look at the requests' states, and at everything else unless this is a part of what ends with another look."""
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
        self._fail_on(found + self.events_read.look(self._restart_points if has_some else None))
        # So that thousands can pass through.
        for id in settled:
            del self.books[id], self.statuses[id]
            self.past.add(id)

    def _restart_points(self) -> list[tuple[bytes, ...]]:
        """The content behind which prompts of layers of several kinds begin, by lookups. All that they read behind it
        has to lie on some page."""
        found, paths = list[str](), list[tuple[bytes, ...]]()
        # Copies that are still to run bring content, too.
        has_run = not self.carries_moves and all(flight.has_run for flight in self.flights)
        for path in self.contents():
            tokens, namespace = np.frombuffer(b"".join(path[1:]), np.int32).tolist(), self.cache.namespace_of(path[0])
            if self.manager.lookup([*tokens, 0], content_namespace(namespace)).num_tokens == len(tokens):
                paths.append(path)
                lacks = self.shadow.lacking(namespace, tokens) if has_run else []
                found += [f"16: a prompt may begin behind {tokens}, and no page has {each}" for each in lacks]
        self._fail_on(found)
        return paths
