"""What the acceptance tests share: managers and schedulers that are checked when a test ends, and an engine of numbers."""

from contextlib import contextmanager
from types import MappingProxyType

import numpy as np
import pytest

from paged import BlockManager, Request, Scheduler
from paged.testing.shadow_kv import ShadowKV
from paged.testing.snapshots import snapshot


@pytest.fixture
def make_manager():
    """Builds managers; each one must be free of violations when the test ends."""
    made = []

    def make(num_blocks, block_size=4, **options):
        made.append(BlockManager(num_blocks, block_size, **options))
        return made[-1]

    yield make
    for manager in made:
        assert manager.check() == []


def requests_of(request_of, wishes):
    """Requests by their ids: each a prompt as `request_of` takes it, or (prompt, max_tokens)."""
    return [request_of(id, *(wish if isinstance(wish, tuple) else (wish,))) for id, wish in wishes.items()]


@pytest.fixture
def make_scheduler(request_of):
    """Builds schedulers on managers of their own, with these requests; each must be free of violations when the test ends."""
    made = []

    def make(num_blocks, block_size=4, requests=MappingProxyType({}), **options):
        of_memory = options.keys() & {"host_blocks", "prefix_caching", "host_caching", "groups"}
        manager = BlockManager(num_blocks, block_size, **{name: options.pop(name) for name in of_memory})
        made.append(Scheduler(manager, **options))
        for request in requests_of(request_of, requests):
            made[-1].add(request)
        return made[-1]

    yield make
    for scheduler in made:
        assert scheduler.check() == []


@pytest.fixture
def unchanged():
    """`with unchanged(subject):` whatever happens within leaves this manager, or scheduler, as it was."""

    def state_of(subject):
        if isinstance(subject, BlockManager):
            return snapshot(subject)
        return snapshot(subject.manager), subject.counts(), subject.waiting_ids(), subject.running_ids()

    @contextmanager
    def unchanged(subject):
        before = state_of(subject)
        yield
        assert state_of(subject) == before

    return unchanged


@pytest.fixture
def compute():
    """Takes a row's known tokens from unconfirmed to confirmed: what one step of a model would do to it."""

    def compute(manager, row, count=None):
        if count is None:
            count = int(manager.rows.num_tokens[row] - manager.rows.num_computed[row])
        moves = manager.allocate([row], [count])
        manager.confirm()
        return moves

    return compute


@pytest.fixture
def fill(compute):
    """Opens a row for tokens and computes all of them; returns the row."""

    def fill(manager, tokens, namespace=None):
        row = manager.add(tokens, namespace=namespace)
        compute(manager, row)
        return row

    return fill


@pytest.fixture
def serve(compute):
    """Computes a prompt and ends it; the moves of what that took."""

    def serve(manager, tokens, **how):
        row = manager.add(tokens, **how)
        moves = compute(manager, row)
        manager.free([row])
        return moves

    return serve


@pytest.fixture
def filled(make_manager, fill):
    """Builds a manager whose one row has computed these tokens; returns both."""

    def filled(num_blocks, block_size, tokens, **options):
        manager = make_manager(num_blocks, block_size, **options)
        return manager, fill(manager, tokens)

    return filled


@pytest.fixture
def request_of():
    """Builds a request from a prompt, or from a prompt's length: then its tokens are nobody else's."""
    next_token = 1000

    def build(id, prompt, max_tokens=1000, **options):
        nonlocal next_token
        if isinstance(prompt, int):
            prompt, next_token = list(range(next_token, next_token + prompt)), next_token + prompt
        return Request(id=id, prompt=prompt, max_tokens=max_tokens, **options)

    return build


class Step:
    """One step that was run: the batch, and the outputs of its update by request id (one sequence each)."""

    def __init__(self, batch, outputs):
        self.batch = batch
        self.outputs = {output.id: output for output in outputs}

    @property
    def tokens(self):
        """Tokens scheduled, by request id."""
        return tokens_of(self.batch)


def tokens_of(batch):
    counts = {}
    for id, count in zip(batch.ids, batch.num_tokens, strict=True):
        counts[id] = counts.get(id, 0) + int(count)
    return counts


@pytest.fixture
def scheduled():
    """The tokens that a batch schedules, by request id, in the batch's order."""
    return tokens_of


@pytest.fixture
def step():
    """Runs one step in which every row that samples gets the same token; nothing may be violated after it."""

    def step(scheduler, token=7, now=0.0):
        batch = scheduler.schedule(now=now)
        outputs = []
        if not batch.is_empty:
            outputs = list(scheduler.update(batch, np.full(int(batch.samples.sum()), token), now=now))
        assert scheduler.check() == []
        return Step(batch, outputs)

    return step


@pytest.fixture
def run(step):
    """Steps a scheduler until nothing is unfinished; a hang is a failure. Returns the steps."""

    def run(scheduler, token=7, max_steps=2000):
        steps = []
        while scheduler.has_unfinished:
            assert len(steps) < max_steps, f"no end after {max_steps} steps: {scheduler.counts()}"
            steps.append(step(scheduler, token))
        return steps

    return run


class NumberEngine:
    """A model of the kit's: what a slot of its memory holds depends on every token before it, and so does the next token.

    Every slot that a row attends to is compared with what its tokens give, every slot mapping with the tables that the batches' changes
    make, and every token id with the request's own.
    """

    def __init__(self, scheduler, vocabulary=50):
        manager = scheduler.manager
        self.scheduler, self.vocabulary = scheduler, vocabulary
        self.shadow = ShadowKV(manager.num_blocks, manager.block_size, manager.num_host_blocks)
        self.known, self.tables, self.outputs = {}, {}, {}

    def add(self, request, now=0.0):
        self.scheduler.add(request, now=now)
        for sequence in range(request.num_sequences):
            self.known[request.id, sequence] = [int(token) for token in request.prompt]

    def load(self, batch, id):
        """Put what was computed elsewhere into the blocks that the batch names for it."""
        contents = self.shadow.contents.path(None, self.known[id, 0])
        for _, first, block in batch.loads:
            part = contents[first : first + self.shadow.block_size]
            self.shadow.device[block, : len(part)] = part

    def move(self, moves):
        assert self.shadow.move(moves) == []

    def see_tables(self, batch):
        for row, column, block in zip(batch.table_rows, batch.table_columns, batch.table_blocks, strict=True):
            self.tables.setdefault(int(row), np.full(len(self.shadow.device), -1))[column] = block

    def forward(self, batch):
        """Write what the batch computes, attend, and return a token for each row that samples."""
        self.see_tables(batch)
        self.move(batch.moves)
        found, held = self.shadow.run(batch, self.tables, lambda id, sequence: (None, self.known[id, sequence]))
        assert found == []
        places = batch.samples.nonzero()[0].tolist()
        return [self.next_token(held[i], int(batch.sequences[i])) for i in places]

    def next_token(self, held, sequence=0):
        return self.shadow.contents.next_token(held.tolist(), sequence, self.vocabulary)

    def alone(self, prompt, count):
        """So many tokens after a prompt, computed without other requests and without memory."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.next_token(self.shadow.contents.path(None, tokens)))
        return tokens[len(prompt) :]

    def update(self, batch, tokens, now=0.0):
        outputs = list(self.scheduler.update(batch, np.array(tokens, np.int64), now=now))
        for output in outputs:
            self.known[output.id, output.sequence].extend(output.token_ids)
            self.outputs.setdefault(f"{output.id}/{output.sequence}", []).extend(output.token_ids)
        return outputs

    def step(self, now=0.0):
        batch = self.scheduler.schedule(now=now)
        if not batch.is_empty:
            self.update(batch, self.forward(batch), now)
        assert self.scheduler.check() == []
        return batch

    def run(self, max_steps=2000):
        """Step until nothing is unfinished; the output tokens by "id/sequence"."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished:
                return self.outputs
            self.step()
        raise AssertionError(f"no end after {max_steps} steps: {self.scheduler.counts()}")


@pytest.fixture
def make_engine(request_of):
    """Puts a NumberEngine around a scheduler, and adds these requests."""

    def make(scheduler, requests=MappingProxyType({})):
        engine = NumberEngine(scheduler)
        for request in requests_of(request_of, requests):
            engine.add(request)
        return engine

    return make
