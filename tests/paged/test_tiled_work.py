"""The tiles of a step are counted as the runner cuts them, for one batch and for a stretch of them alike."""

import numpy as np

from paged import BlockManager, Request, Scheduler
from paged.study.hardware import Profile, Tiling
from paged.study.simulator import Simulation, work_of
from paged.study.traces import Trace

SMALL = Tiling(places=4, piece=8)
PROFILE = Profile(
    seconds_per_step=1e-3, seconds_per_computed_token=0, seconds_per_sampled_row=1e-5,
    seconds_per_context_token=0, seconds_per_attended_pair=1e-7, seconds_per_moved_token=0,
    seconds_per_tile=7e-3, seconds_per_sampling_tile=3e-3, seconds_per_tile_position=1.3e-5, tiling=SMALL,
)  # fmt: skip


def batches(prompts, max_tokens=3, budget=9):
    """The batches of requests with prompts so long."""
    scheduler = Scheduler(BlockManager(64, 4, prefix_caching=False), max_tokens_per_step=budget)
    for number, length in enumerate(prompts):
        scheduler.add(Request(id=str(number), prompt=[1] * length, max_tokens=max_tokens))
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        yield batch
        scheduler.update(batch, np.zeros(int(batch.samples.sum()), np.int32))


def test_the_tiles_of_a_chunk_are_counted_by_hand():
    batch = next(batches([20]))
    work = work_of(batch, 4, SMALL)
    # Nine tokens of one prompt in tiles of 4, 4 and 1, which end at positions 4, 8 and 9; it goes on, so nothing samples.
    assert (work.tiles, work.sampling_tiles, work.tile_context) == (3, 0, 8 + 8 + 16)
    assert (work.computed_tokens, work.sampled_rows) == (9, 0)
    untiled = work_of(batch, 4)
    assert (untiled.tiles, untiled.sampling_tiles, untiled.tile_context) == (0, 0, 0)


def test_rows_fill_a_tile_one_after_the_other():
    work = work_of(next(batches([3, 2, 4])), 4, SMALL)
    # | 0 0 0 1 | 1 2 2 2 | 2 |: rows 0, 1 and 2 sample after their last tokens, each in another tile.
    assert (work.tiles, work.sampling_tiles, work.tile_context) == (3, 3, 24)


def test_a_simulation_by_tiles_has_the_same_clock_whether_it_takes_steps_at_once_or_not():
    rng = np.random.default_rng(0)
    trace = Trace.from_lengths(rng.uniform(0, 2, 40).cumsum(), rng.integers(1, 40, 40), rng.integers(1, 60, 40))

    def ends(fast_forward):
        scheduler = Scheduler(BlockManager(48, 4), max_tokens_per_step=32)
        simulation = Simulation(trace, scheduler, PROFILE, fast_forward=fast_forward)
        found = {number: step.now_s for step in simulation.steps() for number in step.ended}
        return found, simulation.num_skipped

    (at_once, skipped), (one_by_one, none) = ends(True), ends(False)
    assert at_once == one_by_one
    assert skipped > 100
    assert none == 0
