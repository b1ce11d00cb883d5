"""Changes of block tables in tables that outgrow the room that new ones have. Smaller ones, whatever is called, the state machine follows."""

import numpy as np
import pytest

from paged.block_manager import BlockManager
from paged.scheduler import Request, Scheduler


class Mirror:
    """A copy of the block tables that knows of them by the batches' changes only."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.tables = np.full((64, 256), -1, np.int64)

    def step(self):
        """Take a step, hold the tables of all rows against the copy, and return the entries that were told: (row, column, block)."""
        batch = self.scheduler.schedule()
        entries = batch.table_rows, batch.table_columns, batch.table_blocks
        told = list(zip(*(column.tolist() for column in entries), strict=True))
        for row, column, block in told:
            self.tables[row, column] = block
        for row in self.scheduler.manager.rows.live.tolist():
            table = self.scheduler.manager.table(row).tolist()
            assert self.tables[row, : len(table)].tolist() == table
        self.scheduler.update(batch, [7] * int(batch.samples.sum()))
        return told


def mirror_of(lengths, num_sequences=1):
    scheduler = Scheduler(BlockManager(256, 1))
    for token, length in enumerate(lengths):
        scheduler.add(Request(id=str(token), prompt=[token] * length, max_tokens=12, num_sequences=num_sequences))
    return Mirror(scheduler)


@pytest.mark.parametrize(("lengths", "num_sequences"), [((60, 100), 1), ((64, 64), 1), ((60, 61), 2)])
def test_replaying_what_is_told_once_gives_the_tables(lengths, num_sequences):
    mirror, told = mirror_of(lengths, num_sequences), []
    while mirror.scheduler.has_unfinished:
        told += mirror.step()
    assert len(told) == len(set(told))


def test_changes_of_a_cancelled_batch_come_again_before_those_of_the_next():
    mirror = mirror_of((60, 100))
    mirror.scheduler.cancel(mirror.scheduler.schedule())
    mirror.step()


def test_a_hit_is_told_with_the_blocks_that_are_drawn():
    mirror = Mirror(Scheduler(BlockManager(10, 2)))
    mirror.scheduler.add(Request(id="a", prompt=[1, 2, 3], max_tokens=9))
    assert mirror.step() == [(0, 0, 0), (0, 1, 1)]
    assert mirror.step() == []
    mirror.scheduler.add(Request(id="b", prompt=[1, 2, 4], max_tokens=9))
    assert mirror.step() == [(1, 0, 0), (0, 2, 2), (1, 1, 3)]
