"""The ordinary request's short way in: who takes it, what it draws at once, and that it counts as the long way does."""

import pytest

from paged.block_manager import BlockManager, Memory
from paged.block_manager.pool import Pool
from paged.scheduler import Request, Scheduler


def test_what_the_draw_evicts_is_computed_once_for_all_who_come_with_it():
    scheduler = Scheduler(BlockManager(3, 4), policy="vllm")
    for token in (1, 2, 3):
        scheduler.add(Request(id=str(token), prompt=[token] * 4, max_tokens=1))
        scheduler.update(scheduler.schedule(), [9])
    scheduler.add(Request(id="a", prompt=[1] * 4, max_tokens=1))
    scheduler.add(Request(id="b", prompt=[1] * 4 + [2], max_tokens=1))
    assert scheduler.schedule().num_tokens.tolist() == [4, 1]


@pytest.mark.parametrize("is_ordinary", [True, False])
def test_either_way_draws_alike_and_counts_a_request_once_and_the_short_one_is_for_ordinary_requests_alone(
    monkeypatch, is_ordinary
):
    short, admit = [], Memory.admit
    monkeypatch.setattr(
        Memory, "admit", lambda self, *known, **more: short.append(known) or admit(self, *known, **more)
    )
    # Four blocks: "b" gives its own up for the ninth token of "a", and comes in again.
    scheduler = Scheduler(BlockManager(4, 4), policy="fastgen", max_chunk=3)
    for name in "ab":
        scheduler.add(Request(id=name, prompt=[ord(name)] * 7, max_tokens=6, reads_cache=is_ordinary))
    slots = []
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        slots.append(batch.slot_mapping.tolist())
        scheduler.update(batch, [9] * int(batch.samples.sum()))
    assert slots[:2] == [[0, 1, 2, 4, 5, 6], [3, 8, 9, 7, 12, 13]]
    stats = scheduler.stats()
    assert (stats.admitted, stats.prompt_tokens, stats.preemptions) == (2, 14, 1)
    assert bool(short) == is_ordinary


def test_prompts_of_which_nothing_exists_elsewhere_get_their_blocks_with_one_draw_a_step(desk, monkeypatch):
    draws, draw = [], Pool.draw
    monkeypatch.setattr(Pool, "draw", lambda self, *wanted: draws.append(wanted) or draw(self, *wanted))
    desk = desk(12, 2, elsewhere=lambda *_: (0, True))
    for token in (1, 2, 3):
        desk.add([token] * 5, num_computed=4)
    assert (desk.step().num_tokens.tolist(), draws) == ([5, 5, 5], [(9, 1)])


def test_a_prompt_does_not_find_what_rows_before_it_in_the_step_evict(desk):
    desk = desk(12)
    desk.serve([1] * 3)
    desk.serve([2] * 6)
    desk.add([9, 9], max_tokens=8, writes_cache=False)
    while desk.manager.device.num_free:
        desk.step()
    desk.add([1, 1, 1, 5])
    desk.step()
    assert (desk.scheduler.stats().hit_tokens, desk.on_device([2] * 6)) == (2, 4)
