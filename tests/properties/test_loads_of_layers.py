"""Prompts of layers of several kinds that begin with what exists elsewhere, in random worlds.

What lies elsewhere is random. A load fills what each group keeps of it, or fails; meanwhile requests come and are ended, batches are
cancelled, memory is short. Every read of the model has to find what belongs there, and `check()` says nothing.
"""

import random
from collections import Counter
from itertools import product

import numpy as np
import pytest

from paged import BlockManager, LayerGroup, PagedError, Request, Scheduler
from paged.testing.shadow_groups import ShadowGroups, views_of

SIZE, PAGES, HOST = 2, 60, 30
WORLDS = (
    (LayerGroup("full"), LayerGroup("state", pages=2)),
    (LayerGroup("full", pages=2), LayerGroup("window", 3)),
    (LayerGroup("full"), LayerGroup("window", 4), LayerGroup("chunk", 6), LayerGroup("state", pages=3)),
    (LayerGroup("window", 5, 2),),
)


class Run:
    """An engine whose memory is a shadow. `stored` prompts begin, up to some length, elsewhere."""

    def __init__(self, chance, groups, seen):
        self.chance, self.groups, self.seen = chance, groups, seen
        host = HOST * chance.randint(0, 1)
        self.manager = BlockManager(PAGES, SIZE, groups=groups, host_blocks=host, host_caching=host > 0)
        self.scheduler = Scheduler(
            self.manager, elsewhere=self.elsewhere, max_tokens_per_step=7, max_chunk=chance.choice([None, 3])
        )
        self.shadow = ShadowGroups(groups, PAGES, SIZE, host)
        self.known, self.stops, self.listed, self.number, self.carries = {}, {}, [], 0, False

    def elsewhere(self, id, have):
        self.stops[id] = have + self.chance.choice([0, 0, 1, 2, 3, 4, 6, 8])
        return self.stops[id] - have, True

    def add(self):
        self.number += 1
        prompt = [0] * self.chance.randint(0, 9) + [self.chance.randint(0, 1) for _ in range(self.chance.randint(1, 9))]
        id = f"r{self.number}"
        try:
            self.scheduler.add(
                Request(id=id, prompt=prompt, max_tokens=self.chance.randint(1, 5), num_computed=len(prompt) - 1)
            )
        except PagedError:
            return
        self.known[id] = prompt

    def fill(self, id):
        """Write what each group keeps of what the request loads."""
        row, path = (
            self.scheduler.row_of(id),
            self.shadow.contents.path(None, self.known[id][: self.stops[id]]).tolist(),
        )
        for number, group in enumerate(self.groups):
            of_state = [(slot, path[-1]) for slot in range(SIZE)]
            for column, pages in enumerate(self.manager.group_pages(number, row).tolist()):
                its = of_state if group.kind == "state" else enumerate(path[column * SIZE : (column + 1) * SIZE])
                for (slot, content), (part, page) in product(its, enumerate(pages)):
                    self.shadow.pages[page, slot] = self.shadow.value(content, number, part)

    def load(self):
        """Let a load end: most often all of it has come."""
        # The copies of a cancelled batch may still read the blocks that it lists: another batch lists them again.
        if listed := [id for id in self.listed if id in self.known]:
            id = self.chance.choice(listed)
            self.listed.remove(id)
            stop = self.stops[id]
            self.fill(id)
            num = self.chance.choice([stop, stop, stop, 0, stop - 1])
            self.scheduler.loaded(id, num)
            self.seen["whole load" if num == stop else "failed load"] += 1

    def step(self):
        batch = self.scheduler.schedule()
        if batch.is_empty:
            return
        views, rows = views_of(batch, self.groups), set(batch.loads[:, 0].tolist())
        loading = [id for id in self.known if rows.intersection(self.scheduler.rows_of(id))]
        if self.chance.random() < 0.15:
            self.scheduler.cancel(batch)
            self.carries = True
            self.seen["cancelled"] += 1
            return
        self.seen["preempted"] += len(batch.preempted)
        self.carries = False
        assert self.shadow.move(batch.moves) == []
        found, held = self.shadow.run(batch, views, lambda id, _: (None, self.known[id]))
        assert found == []
        tokens = [
            self.shadow.contents.next_token(held[at].tolist(), 0, 2) for at in batch.samples.nonzero()[0].tolist()
        ]
        self.take(self.scheduler.update(batch, np.array(tokens, np.int64)))
        self.listed += loading

    def take(self, outputs):
        for output in outputs:
            self.known[output.id].extend(output.token_ids)
            if output.finish_reason is not None:
                del self.known[output.id]

    def abort(self):
        if self.known:
            id = self.chance.choice(sorted(self.known))
            self.seen["aborted while it loads"] += self.scheduler.status(id) == "loading"
            if (output := self.scheduler.abort(id)) is not None:
                self.take([output])

    def poison(self):
        # A cancelled batch's copies still read what is free.
        if not self.carries:
            self.shadow.poison((self.manager.device.states == 0).nonzero()[0].tolist())


def test_every_read_behind_a_load_finds_what_belongs_there():
    seen = Counter()
    for seed in range(40):
        run = Run(random.Random(seed), WORLDS[seed % len(WORLDS)], seen)
        for _ in range(40):
            run.chance.choice([run.add, run.step, run.step, run.step, run.load, run.abort, run.poison])()
            assert run.scheduler.check() == [] and run.manager.check() == [], seed
        for _ in range(400):
            if run.scheduler.has_unfinished:
                run.load()
                run.step()
        assert not run.known and run.manager.device.num_used == 0, seed
    assert min(seen[each] for each in ("whole load", "failed load", "cancelled", "aborted while it loads")) > 5, seen


@pytest.mark.parametrize("groups", WORLDS)
def test_what_is_loaded_stays_held_after_an_abort_until_the_batch_that_lists_it_has_ended(groups):
    manager = BlockManager(PAGES, SIZE, groups=groups)
    scheduler = Scheduler(manager, elsewhere=lambda _, have: (4 - have, True))
    scheduler.add(Request(id="a", prompt=[1] * 5, num_computed=4))
    batch = scheduler.schedule()
    row = scheduler.row_of("a")
    pages = {page for number in range(len(groups)) for page in manager.group_pages(number, row).ravel().tolist()}
    scheduler.abort("a")
    assert set((manager.device.states == 2).nonzero()[0].tolist()) == pages and scheduler.check() == []
    scheduler.update(batch, [])
    assert manager.device.num_used == 0 and scheduler.check() == []


def test_full_layers_of_several_pages_a_block_go_on_behind_what_is_cached():
    manager = BlockManager(PAGES, SIZE, groups=[LayerGroup("full", pages=2)])
    scheduler = Scheduler(manager, elsewhere=lambda _, have: (6 - have, True))
    for id, listed, num in (("a", [0, 2, 4], 6), ("b", [], 0)):
        scheduler.add(Request(id=id, prompt=[1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1, num_computed=8))
        batch = scheduler.schedule()
        assert batch.loads[:, 1].tolist() == listed
        scheduler.update(batch, [1] * int(batch.samples.sum()))
        if num:
            scheduler.loaded(id, num)
            scheduler.update(scheduler.schedule(), [1])
        assert not scheduler.has_unfinished and scheduler.check() == []
