"""Several batches out: a stand-in device runs them late and in order, from nothing but the batches, and every request gets its own words.

The device keeps its own block tables from the batches' changes alone, finds unknown tokens where a batch says that they come from, and
makes each token out of everything that its row attends to. So a wrong slot, table, source or move gives another token.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter

import numpy as np
import pytest

from paged import POLICIES, BlockManager, PagedError, Request, Scheduler
from paged.errors import DuplicateRequest, NeverFits, RequestInFlight, WrongTokens

VOCABULARY = 3


def mixed(before: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little"), before)


def chosen(contents: list[int]) -> int:
    return (zlib.crc32(np.array(contents, np.int64).tobytes()) >> 7) % VOCABULARY


def contents_of(tokens: list[int]) -> list[int]:
    contents: list[int] = []
    for token in tokens:
        contents.append(mixed(contents[-1] if contents else 1, token))
    return contents


class Book:
    """What one sequence knows, and what it has to get next."""

    def __init__(self, request: Request, max_total: int) -> None:
        self.request = request
        self.known = list(request.prompt)
        self.ends_with_output = False
        self.limit = min(len(self.known) + request.max_tokens, max_total)
        self.reason: str | None = None

    def take(self, tokens: list[int], reason: str | None) -> None:
        """New tokens, each of which has to be the one that follows from all before it."""
        assert self.reason is None, f"{self.request.id} has ended, and gets {tokens}"
        for token in tokens:
            assert self.expected() is None
            assert token == chosen(contents_of(self.known)), (self.request.id, self.known, tokens)
            self.known.append(token)
            self.ends_with_output = True
        expected = self.expected() if tokens else None
        # A sequence alone in the pool that outgrows it ends with length as well.
        assert reason == expected or reason in ("length", "rejected"), (self.request.id, reason, expected)
        self.reason = reason

    def expected(self) -> str | None:
        request = self.request
        if self.ends_with_output and self.known[-1] in request.stop_token_ids:
            return "stop"
        return "length" if len(self.known) >= self.limit else None


class LateDevice:
    """Runs batches in the order in which they come."""

    def __init__(self, num_blocks: int, block_size: int, host_blocks: int) -> None:
        self.device = np.full((num_blocks, block_size), -1, np.int64)
        self.host = np.full((host_blocks, block_size), -1, np.int64)
        self.tables: dict[tuple[int, int], int] = {}
        self.sampled: dict[tuple[int, int], int] = {}
        self.size = block_size

    def move(self, batch) -> None:
        moves = batch.moves
        for source, target, pairs in (
            (self.device, self.host, moves.device_to_host),
            (self.host, self.device, moves.host_to_device),
            (self.device, self.device, moves.device_to_device),
        ):
            target[pairs[:, 1]] = source[pairs[:, 0]]

    def run(self, batch) -> list[list[int]]:
        """The forward pass: what each row that samples gets, and what would follow, three tokens each."""
        for row, column, block in zip(
            batch.table_rows.tolist(), batch.table_columns.tolist(), batch.table_blocks.tolist(), strict=True
        ):
            self.tables[row, column] = block
        for i, row in enumerate(batch.rows.tolist()):
            start, stop = batch.query_start_loc[i : i + 2].tolist()
            for t in range(start, stop):
                position, token = int(batch.positions[t]), int(batch.token_ids[t])
                if batch.source_batches[t] >= 0:
                    assert token == -1
                    token = self.sampled[int(batch.source_batches[t]), int(batch.source_places[t])]
                slot = self.slot(row, position)
                assert slot == batch.slot_mapping[t]
                before = self.device.flat[self.slot(row, position - 1)] if position else 1
                self.device.flat[slot] = mixed(int(before) & 0xFFFFFFFF, token)
        sampled = []
        for i, row in enumerate(batch.rows.tolist()):
            if batch.samples[i]:
                drafts = int(batch.num_drafts[i])
                contents = [int(self.device.flat[self.slot(row, p)]) for p in range(int(batch.seq_lens[i]))]
                last = int(batch.query_start_loc[i + 1]) - 1
                tokens: list[int] = []
                for behind in range(drafts, -1, -1):
                    # What comes after each of the last tokens; a draft that is another one is the last to be looked at.
                    tokens.append(chosen(contents[: len(contents) - behind]))
                    if behind and tokens[-1] != batch.token_ids[last - behind + 1]:
                        break
                while not drafts and len(tokens) < 3:
                    contents.append(mixed(contents[-1] & 0xFFFFFFFF, tokens[-1]))
                    tokens.append(chosen(contents))
                sampled.append(tokens)
                self.sampled[batch.number, i] = tokens[0]
        return sampled

    def slot(self, row: int, position: int) -> int:
        return self.tables[row, position // self.size] * self.size + position % self.size


class World:
    """A scheduler, a device, and requests that come and go; `depth` batches are out at a time."""

    def __init__(self, seed: int, policy: str, depth: int) -> None:
        self.random = rng = random.Random(seed)
        size, num_blocks = rng.choice([1, 2, 4]), rng.randint(4, 14)
        host = rng.choice([0, num_blocks])
        caching = rng.random() < 0.8
        self.depth = depth
        self.scheduler = Scheduler(
            BlockManager(num_blocks, size, host_blocks=host, prefix_caching=caching),
            policy=policy,
            max_tokens_per_step=rng.randint(3, 16),
            max_sequences=rng.randint(2, 6),
        )
        self.capacity = num_blocks * size
        self.device = LateDevice(num_blocks, size, host)
        self.out: list[list] = []
        self.books: dict[tuple[str, int], Book] = {}
        self.num_added = 0
        # How often a row that samples gets no token, and has to wait for append().
        self.drafting = rng.random() < 0.5
        self.events: Counter[str] = Counter()
        self.dryness = rng.choice([0.0, 0.0, 0.1])

    def drafts(self) -> dict[tuple[str, int], list[int]]:
        """Guesses for some of those that run, most of them right."""
        guessed = {}
        for key in self.live:
            if self.scheduler.status(key[0]) == "running" and self.random.random() < 0.8:
                awaited = sum(
                    key in zip(e[0].ids[e[0].samples], e[0].sequences[e[0].samples], strict=True) for e in self.out
                )
                tokens = list(self.books[key].known)
                for _ in range(awaited + 4):
                    tokens.append(chosen(contents_of(tokens)))
                guess = tokens[len(self.books[key].known) + awaited :][: self.random.randint(0, 4)]
                if guess and self.random.random() < 0.3:
                    guess[self.random.randrange(len(guess))] ^= 1
                guessed[key] = guess
        return guessed

    @property
    def live(self) -> list[tuple[str, int]]:
        return [key for key, book in self.books.items() if book.reason is None]

    def add(self) -> None:
        rng = self.random
        self.num_added += 1
        prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, max(1, min(12, self.capacity // 2))))]
        request = Request(
            id=f"r{rng.randint(1, self.num_added)}",
            prompt=prompt,
            max_tokens=rng.randint(1, 10),
            stop_token_ids=rng.choice([(), (0,)]),
            num_sequences=min(rng.choice([1, 1, 1, 2, 3]), self.scheduler.limits.max_sequences),
            priority=rng.choice([0, 0, 1]),
        )
        try:
            self.scheduler.add(request)
        except NeverFits:
            for key in [key for key in self.books if key[0] == request.id]:
                del self.books[key]
            return
        except DuplicateRequest:
            held = {id for entry in self.out for id in entry[0].ids.tolist()}
            assert request.id in {id for id, _ in self.live} | held
            return
        for key in [key for key in self.books if key[0] == request.id]:
            assert self.books.pop(key).reason is not None
        most = self.scheduler._state.books.max_total_of(request.num_sequences)
        for sequence in range(request.num_sequences):
            self.books[request.id, sequence] = Book(request, most)

    def schedule(self) -> None:
        batch = self.scheduler.schedule(drafts=self.drafts() if self.drafting and self.random.random() < 0.7 else None)
        self.events["drafts"] += int(batch.num_drafts.sum())
        self.events["unknown"] += int((batch.source_batches >= 0).sum())
        self.checked()
        if not batch.is_empty:
            self.out.append([batch, None, False])

    def run(self) -> None:
        for entry in self.out:
            if entry[1] is None:
                if not entry[2]:
                    self.device.move(entry[0])
                entry[1:] = [self.device.run(entry[0]), True]
                return

    def update(self) -> None:
        if self.out[0][1] is None:
            self.run()
        batch, sampled, _ = self.out.pop(0)
        rng, counts = self.random, []
        rests_on = {
            (int(number), int(place))
            for entry in self.out
            for number, place in zip(entry[0].source_batches, entry[0].source_places, strict=True)
        }
        for i in range(len(batch.rows)):
            counts.append(0 if not batch.samples[i] or rng.random() < self.dryness else 1)
            if counts[-1] and batch.num_drafts[i]:
                # An engine may accept fewer than were right.
                right = len(sampled[int(batch.samples[:i].sum())])
                counts[-1] = right if rng.random() < 0.8 else rng.randint(1, right)
            elif counts[-1] and (batch.number, i) not in rests_on and self.dryness and rng.random() < 0.2:
                counts[-1] = rng.randint(1, 3)
        sampling = [count for count, samples in zip(counts, batch.samples, strict=True) if samples]
        tokens = [token for three, count in zip(sampled, sampling, strict=True) for token in three[:count]]
        try:
            outputs = self.scheduler.update(batch, tokens, counts)
        except WrongTokens:
            # A chunk of a later batch computes the sample of a row that was dropped.
            one = [count if drafts else min(count, 1) for count, drafts in zip(counts, batch.num_drafts, strict=True)]
            sampling = [count for count, samples in zip(one, batch.samples, strict=True) if samples]
            tokens = [token for three, count in zip(sampled, sampling, strict=True) for token in three[:count]]
            outputs = self.scheduler.update(batch, tokens, one)
        for output in outputs:
            self.books[output.id, output.sequence].take(output.token_ids, output.finish_reason)
        self.checked()

    def cancel(self, how_many: int) -> None:
        """The latest batches fail: the first of them may have moved, or stopped in the middle of its pass."""
        failed = self.out[-how_many:]
        self.out = self.out[:-how_many]
        if all(entry[1] is not None for entry in self.out) and self.random.random() < 0.5:
            first = failed[0]
            if not first[2]:
                self.device.move(first[0])
                first[2] = True
            self.device.device.flat[first[0].slot_mapping] = -7
        for batch, _, has_moved in reversed(failed):
            self.scheduler.cancel(batch, moved=has_moved)
        self.checked()

    def abort(self) -> None:
        if self.live:
            id = self.random.choice(self.live)[0]
            if self.scheduler.status(id) in ("finished", "rejected"):
                # It has ended, and nothing has been delivered of that yet.
                return
            assert self.scheduler.abort(id) is not None
            self.end(id)
            self.checked()

    def end(self, id: str) -> None:
        for (other, _), book in self.books.items():
            if other == id:
                book.reason = book.reason or "abort"

    def append(self) -> None:
        """The caller goes on where a sequence waits for it."""
        for id, sequence in self.live:
            if self.random.random() < 0.5:
                book = self.books[id, sequence]
                tokens = [self.random.randint(0, 1) for _ in range(self.random.randint(1, 3))]
                is_flying = any(id in entry[0].ids.tolist() for entry in self.out)
                try:
                    self.scheduler.append(id, tokens, sequence)
                except RequestInFlight:
                    assert is_flying
                    continue
                except PagedError:
                    # It has ended, and nothing has been delivered of that yet.
                    assert self.scheduler.status(id) in ("finished", "rejected")
                    continue
                book.known += tokens
                book.ends_with_output = False
                book.limit = min(
                    book.limit + len(tokens), self.scheduler._state.books.max_total_of(book.request.num_sequences)
                )
                self.checked()

    def checked(self) -> None:
        violations = self.scheduler.check()
        assert violations == [], violations

    def step(self, cancels: bool) -> None:
        draw = self.random.random()
        if draw < 0.15 and len(self.live) < 6:
            self.add()
        elif draw < 0.5:
            if len(self.out) < self.depth:
                self.schedule()
        elif draw < 0.65:
            self.run()
        elif draw < 0.9:
            if self.out:
                self.update()
        elif draw < 0.93:
            self.abort()
        elif draw < 0.95:
            self.append()
        elif cancels and self.out:
            self.cancel(self.random.randint(1, len(self.out)))

    def drain(self) -> None:
        self.dryness = 0.0
        for round_ in range(2000):
            if not self.scheduler.has_unfinished:
                break
            if round_ % 50 == 49:
                for id in {id for id, _ in self.live}:
                    # Those that wait for append() would wait for ever.
                    if self.scheduler.status(id) in ("waiting", "running", "paused", "swapped"):
                        self.scheduler.abort(id)
                        self.end(id)
            self.schedule()
            while self.out and (len(self.out) >= self.depth or not self.scheduler.has_unfinished):
                self.update()
            if self.out and self.random.random() < 0.3:
                self.update()
        else:
            raise AssertionError(f"no end: {self.scheduler.counts()}")
        while self.out:
            self.update()

    def judge(self) -> None:
        assert not self.live
        stats = self.scheduler.manager.stats()
        assert stats.used == 0 and stats.host_used == 0


def run(seed: int, policy: str, depth: int, *, cancels: bool = True, steps: int = 120) -> World:
    world = World(seed, policy, depth)
    for _ in range(steps):
        world.step(cancels)
    world.drain()
    world.judge()
    return world


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_request_gets_its_own_words_however_late_batches_run(policy, depth):
    for seed in range(12):
        run(seed, policy, depth)
