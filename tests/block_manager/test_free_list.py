"""The order in which free blocks are handed out, against two plain lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from paged.block_manager.free_list import FreeList

HELD = 7  # What the state of a block in somebody's hands looks like: anything above 0.


class Desk:
    """A free list with its column, and the caller's part of the bargain: who takes a block changes its state."""

    def __init__(self, num_blocks: int) -> None:
        self.state = np.zeros(num_blocks, np.int64)
        self.free_list = FreeList(self.state)

    def draw(self, count: int) -> list[int]:
        blocks = self.free_list.take_plain(count)
        self.state[blocks] = HELD
        return blocks.tolist()

    def evict(self, count: int) -> list[int]:
        parts = [blocks for blocks, *_ in self.free_list.take_cached(count)]
        blocks = np.concatenate([np.empty(0, np.int64), *parts])
        self.state[blocks] = HELD
        return blocks.tolist()

    def hit(self, blocks: list[int]) -> None:
        self.state[blocks] = HELD
        self.free_list.take_out(len(blocks))

    def cache(self, blocks: list[int]) -> None:
        self.free_list.put_cached(np.array(blocks, np.int64))

    def free(self, blocks: list[int]) -> None:
        self.state[blocks] = 0
        self.free_list.put_plain(np.array(blocks, np.int64))

    @property
    def num_entries(self) -> int:
        return sum(
            len(blocks)
            for queue in (self.free_list._queues[0]._swept, self.free_list._queues[0]._segments)
            for _, blocks, *_ in queue
        )


@pytest.fixture
def desk():
    """Six blocks, all of them in somebody's hands."""
    desk = Desk(6)
    desk.draw(6)
    return desk


def test_never_used_blocks_come_in_rising_order():
    assert Desk(4).draw(4) == [0, 1, 2, 3]


def test_the_block_freed_last_comes_first(desk):
    desk.free([3, 5])
    desk.free([1])
    assert desk.draw(3) == [1, 5, 3]


def test_freed_blocks_come_before_never_used_ones():
    desk = Desk(4)
    desk.draw(2)
    desk.free([0])
    assert desk.draw(3) == [0, 2, 3]


def test_the_oldest_content_is_evicted_first(desk):
    desk.cache([4, 2])
    desk.cache([0])
    assert desk.evict(3) == [4, 2, 0]


def test_a_segment_can_be_evicted_in_parts(desk):
    desk.cache([4, 2, 0])
    assert (desk.evict(1), desk.evict(2)) == ([4], [2, 0])


def test_nothing_is_taken_when_nothing_is_wanted(desk):
    assert desk.evict(0) == []


def test_a_hit_takes_a_block_out_of_the_middle(desk):
    desk.cache([0, 1, 2])
    desk.hit([1])
    assert desk.free_list.cached().tolist() == [0, 2]


def test_a_block_that_was_hit_and_freed_again_is_the_youngest(desk):
    desk.cache([0, 1, 2])
    desk.hit([0])
    desk.cache([0])
    assert desk.evict(3) == [1, 2, 0]


def test_a_segment_of_stale_entries_only_is_skipped(desk):
    desk.cache([0, 1])
    desk.cache([2])
    desk.hit([0, 1])
    assert desk.evict(1) == [2]


def test_the_counters_follow(desk):
    desk.cache([0, 1, 2])
    desk.free([3])
    desk.hit([1])
    assert (desk.free_list.num_plain, desk.free_list.num_cached) == (1, 2)


def test_what_is_listed_is_a_copy(desk):
    desk.free([3, 5])
    desk.free_list.plain()[:] = 0
    assert desk.draw(2) == [5, 3]


@pytest.mark.parametrize("length", [1, 3, 50])
def test_stale_entries_do_not_pile_up_over_hits_of_one_length(length):
    desk = Desk(length)
    desk.draw(length)
    blocks = list(range(length))
    most = 0
    for _ in range(1000):
        desk.cache(blocks)
        most = max(most, desk.num_entries)
        desk.hit(blocks)
    assert most <= 2 * length + 64 + length


def test_stale_entries_do_not_pile_up_behind_many_live_segments():
    """A hundred blocks that nobody asks for again, each released by itself, and a prompt of a hundred that comes and goes."""
    desk = Desk(200)
    desk.draw(200)
    for block in range(100):
        desk.cache([block])
    prompt = list(range(100, 200))
    most = 0
    for _ in range(1000):
        desk.cache(prompt)
        most = max(most, desk.num_entries)
        desk.hit(prompt)
    assert most <= 2 * 200 + 64 + 2 * 100


def test_sweeping_keeps_the_order():
    desk = Desk(13)
    desk.draw(13)
    for block in range(3):
        desk.cache([block])
    for _ in range(100):
        desk.cache(list(range(3, 13)))
        desk.hit(list(range(3, 13)))
    desk.cache([7])
    assert desk.evict(4) == [0, 1, 2, 7]


NUM_BLOCKS = 12
CALLS = st.sampled_from(["draw", "evict", "hit", "hit", "cache", "cache", "free"])


@settings(max_examples=100, derandomize=True)
@given(
    st.lists(st.tuples(CALLS, st.integers(0, NUM_BLOCKS), st.randoms(use_true_random=False)), min_size=20, max_size=120)
)
def test_it_is_a_stack_and_a_queue(calls):
    desk = Desk(NUM_BLOCKS)
    stack, queue, held = list(reversed(range(NUM_BLOCKS))), [], []
    for call, wanted, random in calls:
        if call == "draw":
            drawn = [stack.pop() for _ in range(min(wanted, len(stack)))]
            assert desk.draw(len(drawn)) == drawn
            held += drawn
        elif call == "evict":
            count = min(wanted, len(queue))
            evicted, queue = queue[:count], queue[count:]
            assert desk.evict(count) == evicted
            held += evicted
        elif call == "hit":
            chosen = random.sample(queue, min(wanted, len(queue)))
            desk.hit(chosen)
            queue = [block for block in queue if block not in chosen]
            held += chosen
        else:
            chosen = random.sample(held, min(wanted, len(held)))
            held = [block for block in held if block not in chosen]
            if chosen and call == "cache":
                desk.cache(chosen)
                queue += chosen
            elif chosen:
                desk.free(chosen)
                stack += chosen
        assert desk.free_list.plain().tolist() == stack[::-1]
        assert desk.free_list.cached().tolist() == queue
        assert (desk.free_list.num_plain, desk.free_list.num_cached) == (len(stack), len(queue))
