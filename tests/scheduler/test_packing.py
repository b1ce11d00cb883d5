"""A decided step as arrays, by hand: "a" decodes while the prompt of "b" comes in chunks.

pool of blocks of 4   | 0: a | 1: b | 2: b | 3: a, from its fifth token on |
"""

import msgspec
import pytest

from paged.block_manager import BlockManager
from paged.scheduler import Request, Scheduler
from paged.testing import random_program
from paged.testing.world import build_scheduler

ARRAYS = (
    "rows", "num_tokens", "query_start_loc", "token_ids", "positions", "slot_mapping", "seq_lens", "samples",
    "source_batches", "source_places", "num_drafts", "table_rows", "table_columns", "table_blocks", "loads",
)  # fmt: skip


@pytest.fixture
def scheduler() -> Scheduler:
    """ "a" has sampled its first token, 50; "b" has just come with eight tokens, and a step may have six."""
    scheduler = Scheduler(BlockManager(16, 4), policy="fastgen", max_tokens_per_step=6)
    scheduler.add(Request(id="a", prompt=[1, 2, 3]))
    scheduler.update(scheduler.schedule(), [50])
    scheduler.add(Request(id="b", prompt=[10, 11, 12, 13, 14, 15, 16, 17]))
    return scheduler


@pytest.fixture
def batch(scheduler):
    """One decode and the first five tokens of a prompt."""
    return scheduler.schedule()


@pytest.fixture
def last(scheduler, batch):
    """One decode and the last three tokens of a prompt."""
    scheduler.update(batch, [51])
    return scheduler.schedule()


def test_decodes_stand_before_chunks_and_a_prompt_that_goes_on_does_not_sample(batch):
    assert (batch.rows.tolist(), batch.ids.tolist(), batch.sequences.tolist()) == ([0, 1], ["a", "b"], [0, 0])
    assert (batch.num_tokens.tolist(), batch.query_start_loc.tolist()) == ([1, 5], [0, 1, 6])
    assert batch.token_ids.tolist() == [50, 10, 11, 12, 13, 14]
    assert (batch.positions.tolist(), batch.slot_mapping.tolist()) == ([3, 0, 1, 2, 3, 4], [3, 4, 5, 6, 7, 8])
    assert (batch.seq_lens.tolist(), batch.samples.tolist()) == ([4, 5], [True, False])


def test_a_chunk_goes_on_in_the_middle_of_a_block_and_samples_where_the_prompt_ends(last):
    assert (last.token_ids.tolist(), last.positions.tolist()) == ([51, 15, 16, 17], [4, 5, 6, 7])
    assert (last.slot_mapping.tolist(), last.samples.tolist()) == ([12, 9, 10, 11], [True, True])
    changes = (last.table_rows.tolist(), last.table_columns.tolist(), last.table_blocks.tolist())
    assert changes == ([0], [1], [3])


def test_decodes_alone_are_one_token_each(scheduler, last):
    scheduler.update(last, [52, 60])
    batch = scheduler.schedule()
    assert (batch.token_ids.tolist(), batch.positions.tolist()) == ([52, 60], [5, 8])
    assert (batch.query_start_loc.tolist(), batch.slot_mapping.tolist()) == ([0, 1, 2], [13, 16])
    assert (batch.seq_lens.tolist(), batch.samples.tolist()) == ([6, 9], [True, True])
    # Those that later steps may share are read-only.
    shared = "num_tokens", "query_start_loc", "samples", "ids", "sequences", "block_tables"
    assert not any(getattr(batch, name).flags.writeable for name in shared)


class Scribbled(Scheduler):
    """Gives copies of its batches away, and overwrites what a careless engine could have of its own, before they come back."""

    def __init__(self, *arguments, **limits):
        super().__init__(*arguments, **limits)
        self.made = {}

    def schedule(self, *arguments, **named):
        batch = super().schedule(*arguments, **named)
        self.made[batch.number] = batch
        copies = {name: getattr(batch, name).copy() for name in ARRAYS}
        for name in ARRAYS:
            array = getattr(batch, name)
            if array.flags.writeable:
                array[...] = 0
        return msgspec.structs.replace(batch, **copies)

    def update(self, batch, *arguments, **named):
        return super().update(self.made[batch.number], *arguments, **named)

    def cancel(self, batch, **named):
        return super().cancel(self.made[batch.number], **named)


def test_an_engine_that_scribbles_over_batches_changes_nothing_later():
    for seed in range(4):
        random_program(seed, 60, lambda world: build_scheduler(world, Scribbled)).drain()
