"""The arrays of a decided step are the engine's own. What is in them: the kit looks at each one (paged.testing.batch_oracles)."""

import msgspec

from paged.scheduler import Scheduler
from paged.testing import random_program
from paged.testing.world import build_scheduler

ARRAYS = (
    "rows", "num_tokens", "query_start_loc", "token_ids", "positions", "slot_mapping", "seq_lens", "samples",
    "source_batches", "source_places", "num_drafts", "table_rows", "table_columns", "table_blocks", "loads",
)  # fmt: skip


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
