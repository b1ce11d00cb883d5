"""Sliding windows and chunks: what lies before them goes back by computed tokens, and the table keeps its length."""

from collections import Counter

import numpy as np
import pytest

from paged import LayerGroup
from paged.errors import OutOfBlocks


def given_back(manager, row, group=0):
    """Columns in front that the group gave back; behind them every block is there."""
    is_there = (manager.group_pages(group, row) >= 0).all(axis=1)
    count = len(is_there) - int(is_there.sum())
    assert is_there.tolist() == [False] * count + [True] * (len(is_there) - count)
    return count


@pytest.mark.parametrize(
    ("group", "computed", "dropped"),
    [
        (LayerGroup("window", 4), [0, 4, 5, 6, 7, 11], [0, 0, 1, 1, 2, 4]),
        (LayerGroup("chunk", 4), [0, 4, 6, 12], [0, 2, 2, 6]),
    ],
    ids=["F1, Q1", "Q2"],
)
def test_F1_Q1_Q2_a_front_goes_back_and_the_table_keeps_its_length(make_manager, group, computed, dropped):
    manager = make_manager(11, 2, groups=[group], prefix_caching=False)
    row = manager.add(range(22))
    manager.reserve(row, 11)
    found = []
    for before, after in zip([0, *computed], computed, strict=False):
        if after > before:
            manager.allocate(row, after - before)
            manager.confirm()
        found.append(given_back(manager, row))
        assert manager.group_pages(0, row).shape == (11, 1)
        assert manager.device.num_free == found[-1]
    assert found == dropped


def test_F4_a_prompt_in_chunks_holds_a_bounded_number_of_blocks(make_manager):
    manager = make_manager(8, 16, groups=[LayerGroup("window", 64)], prefix_caching=False)
    row = manager.add(range(400))
    held = []
    for _ in range(8):
        manager.allocate(row, 50)
        held.append(manager.device.num_used)
        manager.confirm()
    assert (held, len(manager.table(row))) == ([4, 7, 8, 8, 8, 8, 8, 8], 25)


def test_F4_a_prompt_goes_through_a_pool_that_holds_its_window_and_two_blocks(make_scheduler, run):
    # 63 tokens before the next one lie in 5 blocks at most; 6 hold them and what is computed.
    scheduler = make_scheduler(6, 16, {"long": (400, 2)}, groups=[LayerGroup("window", 64)], prefix_caching=False)
    lengths = [step.tokens["long"] for step in run(scheduler, max_steps=100)]
    assert (sum(lengths), scheduler.manager.device.num_free) == (401, 6)


@pytest.mark.parametrize("pages", [1, 2])
def test_F6_Q5_what_is_said_to_be_lacking_is_what_is_drawn(make_manager, pages):
    groups = [LayerGroup("full"), LayerGroup("window", 8, pages)]
    manager = make_manager(20 * (1 + pages), 2, groups=groups, prefix_caching=False)
    row, other = manager.add(range(16)), manager.add([1])
    for length in (4, 8, 12, 16):
        # Somebody else leaves less than the two blocks that come take.
        manager.reserve(other, manager.device.num_free // (1 + pages) - 1)
        left = manager.device.num_free
        assert left < 2 * (1 + pages)
        with pytest.raises(OutOfBlocks) as refused:
            manager.allocate(row, 4)
        assert (refused.value.wanted, refused.value.free) == (2 * (1 + pages), left)
        manager.truncate(other, 0)
        before = manager.device.num_free
        manager.allocate(row, 4)
        assert before - manager.device.num_free == refused.value.wanted
        manager.confirm()
        assert manager.rows.num_computed[row] == length


# (100 - 15) // 16, and 96 // 16
@pytest.mark.parametrize(
    ("group", "dropped"), [(LayerGroup("window", 16), 5), (LayerGroup("chunk", 32), 6)], ids=["Q3", "Q4"]
)
def test_Q3_Q4_a_step_ahead_frees_nothing_until_the_prompts_update(make_scheduler, group, dropped):
    scheduler = make_scheduler(20, 16, {"r": (100, 5)}, groups=[group], prefix_caching=False)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert (first.num_tokens.tolist(), second.num_tokens.tolist()) == ([100], [1])
    (row,) = second.rows.tolist()
    found = [given_back(scheduler.manager, row)]
    scheduler.update(first, np.array([7]))
    found.append(given_back(scheduler.manager, row))
    scheduler.update(second, np.array([7]))
    found.append(given_back(scheduler.manager, row))
    assert found == [0, dropped, dropped]


def test_a_cancel_gives_nothing_of_a_window_back_that_its_row_still_reads(make_scheduler):
    scheduler = make_scheduler(8, 2, {"r": (8, 5)}, groups=[LayerGroup("window", 4)], prefix_caching=False)
    batch = scheduler.schedule()
    scheduler.update(batch, np.array([7]))
    (row,) = batch.rows.tolist()
    before = scheduler.manager.group_pages(0, row).tolist()
    for _ in range(3):
        scheduler.cancel(scheduler.schedule())
        assert scheduler.manager.group_pages(0, row).tolist() == before
    assert given_back(scheduler.manager, row) == 2


@pytest.mark.parametrize("window", [5, 8, 13])
@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize(("chunk", "own"), [(4, 1), (8, 5)])
def test_a_prompt_that_another_one_computes_is_computed_once(
    make_scheduler, request_of, step, window, late, chunk, own
):
    groups = [LayerGroup("full"), LayerGroup("window", window)]
    scheduler = make_scheduler(200, groups=groups, max_tokens_per_step=64, max_chunk=chunk)
    scheduler.add(request_of("leads", [*range(60), 100], 1))
    computed = Counter()
    for number in range(20):
        if number == late:
            scheduler.add(request_of("shares", [*range(60), 200], 1))
        computed.update(step(scheduler).tokens)
    # The last token, and what the other one computes in the same step: there is no full block of it before.
    assert computed == {"leads": 61, "shares": own}
