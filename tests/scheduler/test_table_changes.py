"""Changes of block tables in tables that outgrow the room that new ones have. Smaller ones, whatever is called, the state machine follows."""

import numpy as np
import pytest

from paged.block_manager import BlockManager
from paged.scheduler import Request, Scheduler


@pytest.mark.parametrize(("lengths", "num_sequences"), [((60, 100), 1), ((64, 64), 1), ((60, 61), 2)])
def test_replaying_what_is_told_once_gives_the_tables(lengths, num_sequences):
    manager = BlockManager(256, 1)
    scheduler = Scheduler(manager)
    for token, length in enumerate(lengths):
        scheduler.add(Request(id=str(token), prompt=[token] * length, max_tokens=12, num_sequences=num_sequences))
    copy, told = np.full((64, 256), -1, np.int64), []
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        for row, column, block in zip(batch.table_rows, batch.table_columns, batch.table_blocks, strict=True):
            told.append((int(row), int(column), int(block)))
            copy[row, column] = block
        for row in manager.rows.live.tolist():
            table = manager.table(row).tolist()
            assert copy[row, : len(table)].tolist() == table
        scheduler.update(batch, [7] * int(batch.samples.sum()))
    assert len(told) == len(set(told))
