"""A decided step as arrays, by hand: "a" decodes while the prompt of "b" comes in chunks.

pool of blocks of 4   | 0: a | 1: b | 2: b | 3: a, from its fifth token on |
"""

from __future__ import annotations

import numpy as np
import pytest

from paged.block_manager import BlockManager
from paged.scheduler import Batch, Request, Scheduler

ARRAYS = (
    "rows", "num_tokens", "query_start_loc", "token_ids", "positions", "slot_mapping", "seq_lens", "samples",
    "source_batches", "source_places", "num_drafts", "table_rows", "table_columns", "table_blocks", "loads",
)  # fmt: skip


def build() -> Scheduler:
    """ "a" has sampled its first token, 50; "b" has just come with eight tokens, and a step may have six."""
    scheduler = Scheduler(BlockManager(16, 4), policy="fastgen", max_tokens_per_step=6)
    scheduler.add(Request(id="a", prompt=[1, 2, 3]))
    scheduler.update(scheduler.schedule(), [50])
    scheduler.add(Request(id="b", prompt=[10, 11, 12, 13, 14, 15, 16, 17]))
    return scheduler


@pytest.fixture
def scheduler():
    return build()


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


def test_dtypes_are_those_promised(batch):
    dtypes = {name: getattr(batch, name).dtype for name in ARRAYS}
    int64, int32 = np.dtype(np.int64), np.dtype(np.int32)
    assert dtypes == {
        **dict.fromkeys(ARRAYS, int64),
        **dict.fromkeys(("token_ids", "table_blocks", "loads"), int32),
        "samples": np.dtype(np.bool_),
    }


def test_a_batch_without_anything_has_empty_arrays():
    batch = Scheduler(BlockManager(4, 4)).schedule()
    assert (batch.is_empty, batch.query_start_loc.tolist(), len(batch.token_ids), len(batch.rows)) == (True, [0], 0, 0)


def scribble(batch: Batch) -> None:
    """What a careless engine may do to every array that it can write to."""
    for name in ARRAYS:
        array = getattr(batch, name)
        if array.flags.writeable:
            array[...] = 0


def as_values(batch: Batch) -> dict[str, list[int]]:
    return {name: getattr(batch, name).tolist() for name in ARRAYS}


def chunk_beside_decode(spoil):
    scheduler, told = build(), []
    for token_ids in ([51], [52, 60], [53, 61], [54, 62]):
        batch = scheduler.schedule()
        told.append(as_values(batch))
        spoil(batch)
        told.append(scheduler.check())
        scheduler.update(batch, token_ids)
    return told


def one_decode(spoil):
    scheduler, told = Scheduler(BlockManager(16, 4)), []
    scheduler.add(Request(id="a", prompt=[1, 2, 3]))
    for token in (50, 51, 52):
        batch = scheduler.schedule()
        told.append(as_values(batch))
        spoil(batch)
        scheduler.update(batch, [token])
    return told


def drafts_of_a_group(spoil):
    scheduler, told = Scheduler(BlockManager(16, 4)), []
    scheduler.add(Request(id="g", prompt=[1, 2, 3], num_sequences=2))
    scheduler.update(scheduler.schedule(), [50, 60])
    for _ in range(3):
        # Of the first sequence one of two is right, of the other none.
        batch = scheduler.schedule(drafts={("g", 0): [7, 8], ("g", 1): [9]})
        told.append(as_values(batch))
        spoil(batch)
        outputs = scheduler.update(batch, [7, 70, 71], counts=[2, 1])
        told.append([(output.sequence, output.token_ids) for output in outputs])
    return told, scheduler.stats()


def loads_that_a_cancel_carries(spoil):
    scheduler, told = Scheduler(BlockManager(8, 2), policy="fastgen"), []
    scheduler.add(Request(id="a", prompt=[1, 2, 3, 4, 5], num_computed=4))
    for _ in range(2):
        batch = scheduler.schedule()
        told.append(as_values(batch))
        spoil(batch)
        scheduler.cancel(batch)
    return told


@pytest.mark.parametrize("run", [chunk_beside_decode, one_decode, drafts_of_a_group, loads_that_a_cancel_carries])
def test_an_engine_that_scribbles_over_batches_changes_nothing_later(run):
    assert run(scribble) == run(lambda batch: None)


@pytest.mark.parametrize("name", ["num_tokens", "query_start_loc", "samples", "ids", "sequences", "block_tables"])
def test_arrays_that_may_be_shared_are_read_only_in_a_step_of_decodes(scheduler, last, name):
    scheduler.update(last, [52, 60])
    assert not getattr(scheduler.schedule(), name).flags.writeable
