"""The prefix cache: what is a hit, what a hit costs, and what is forgotten first."""

import pytest

from paged import Admission
from paged.errors import OutOfBlocks
from paged.testing.snapshots import snapshot


def test_E1_a_shared_prefix_takes_one_new_block(make_manager, compute):
    # Blocks count from 0 here, from 1 in the source.
    manager = make_manager(10, 16)
    shared = list(range(48))
    first = manager.add([*shared, *range(100, 107)])
    assert manager.rows.num_computed[first] == 0
    compute(manager, first)
    assert manager.table(first).tolist() == [0, 1, 2, 3]
    second = manager.add([*shared, *range(200, 205)])
    assert manager.rows.num_computed[second] == 48
    compute(manager, second)
    assert (manager.table(second).tolist(), manager.device.num_available) == ([0, 1, 2, 4], 5)


def test_E3_a_hit_on_free_blocks_takes_them_out_of_the_free_list(make_manager, fill):
    manager = make_manager(10, 16)
    shared = list(range(48))
    rows = [fill(manager, [*shared, *range(100, 107)]), fill(manager, [*shared, *range(200, 205)])]
    manager.free(rows)
    third = manager.add([*shared, *range(300, 306)])
    assert (manager.rows.num_computed[third], manager.device.num_available) == (48, 7)
    manager.allocate([third], [6])
    manager.confirm()
    assert manager.device.num_available == 6


@pytest.mark.parametrize(("length", "hit"), [(48, 32), (49, 48), (47, 32), (16, 0), (17, 16), (1, 0)])
def test_E5_at_least_one_token_is_always_computed(make_manager, fill, length, hit):
    manager = make_manager(10, 16)
    fill(manager, range(64))
    assert manager.lookup(range(length)).num_tokens == hit
    row = manager.add(range(length))
    assert manager.rows.num_computed[row] == hit
    assert manager.table(row).tolist() == manager.lookup(range(length)).blocks.tolist() == list(range(hit // 16))


def test_E6_eviction_takes_contentless_and_never_used_blocks_then_tails_of_the_least_recently_used(fill, filled):
    manager, first = filled(10, 16, range(87))
    second = fill(manager, range(1000, 1048))
    assert manager.device.num_available == 1
    manager.free([first])
    manager.free([second])
    assert (manager.device.num_free, manager.device.num_cached) == (2, 8)
    third = fill(manager, range(35))
    assert (manager.stats().hit_tokens, manager.table(third).tolist()) == (32, [0, 1, 5])
    assert manager.device.num_available == 7
    # What is left, in the order in which it goes: never used, then each freed row from its tail.
    order = [manager.table(fill(manager, [2000 + i])).tolist()[0] for i in range(7)]
    assert order == [9, 4, 3, 2, 8, 7, 6]


def test_E8_a_reused_block_has_lost_its_content(make_manager, fill):
    manager = make_manager(1, 16)
    manager.free([fill(manager, range(16))])
    assert manager.lookup(range(17)).num_tokens == 16
    fill(manager, range(100, 115))
    assert (manager.cached_contents(), manager.lookup(range(17)).num_tokens) == (set(), 0)


def test_E10_without_prefix_caching_nothing_is_a_hit(compute, filled):
    manager, row = filled(4, 4, range(10), prefix_caching=False)
    assert manager.rows.num_blocks[row] == 3
    manager.free([row])
    row = manager.add(range(16))
    assert manager.rows.num_computed[row] == 0
    compute(manager, row)
    assert manager.rows.num_blocks[row] == 4
    assert manager.admission(1) is Admission.LATER
    refused = manager.add(range(4))
    with pytest.raises(OutOfBlocks):
        manager.allocate([refused], [4])
    assert (manager.cached_contents(), manager.device.num_cached) == (set(), 0)


def test_E11_the_cache_is_reset_only_while_no_block_is_used(fill, filled):
    manager, row = filled(8, 4, range(16))
    before = snapshot(manager)
    assert manager.reset_cache() is False
    assert (snapshot(manager), manager.lookup(range(17)).num_tokens) == (before, 16)
    manager.free([row])
    assert manager.reset_cache() is True
    assert (manager.lookup(range(17)).num_tokens, manager.cached_contents()) == (0, set())
    assert (manager.device.num_free, manager.device.num_cached) == (8, 0)
    assert manager.block_hashes(fill(manager, range(3))) == []


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 6, 8, 10])
@pytest.mark.parametrize("share", [0, 0.3, 0.5, 0.7, 1])
def test_E13_a_second_sequence_is_admitted_iff_what_is_not_shared_fits(make_manager, fill, block_size, length, share):
    blocks = -(-length // block_size)
    num_blocks = -(-3 * blocks // 2)
    manager = make_manager(num_blocks, block_size)
    first = list(range(length))
    fill(manager, first)
    num_shared = int(length * share)
    second = first[:num_shared] + [1000 + token for token in range(length - num_shared)]
    hit = manager.lookup(second).num_tokens // block_size
    # One token is always computed, so a prompt that is shared whole still takes a block of its own.
    assert hit == min(num_shared, length - 1) // block_size
    fits = 2 * blocks - hit <= num_blocks
    assert manager.admission(blocks - hit) is (Admission.OK if fits else Admission.LATER)


@pytest.mark.parametrize("num_outputs", [1, 5, 9, 11])
def test_E15_of_two_identical_requests_the_second_shares_what_the_first_computes(
    make_scheduler, request_of, step, run, num_outputs
):
    # A peer computes both prompts (16, then 18); here the second takes the full blocks that the first computes in that step.
    scheduler, history, computed = make_scheduler(100, 4), [], []
    for number in range(10):
        cached, prompt = max(0, len(history) - 1) // 4 * 4, [*history, *range(100 * number, 100 * number + 8)]
        for name in ("one", "two"):
            scheduler.add(request_of(f"{name}{number}", prompt, max_tokens=num_outputs))
        tokens = step(scheduler).tokens
        assert tokens == {
            f"one{number}": len(prompt) - cached,
            f"two{number}": len(prompt) - (len(prompt) - 1) // 4 * 4,
        }
        computed.append(sum(tokens.values()))
        run(scheduler)
        history = [*prompt, *[7] * num_outputs]
    assert computed[0] == 12 and (computed[1] == 10 or num_outputs % 4 != 1)


def test_E16_only_full_blocks_are_hits(make_scheduler, request_of, step):
    # A peer reuses a partial block (8, then 1 token); here both compute 8.
    scheduler = make_scheduler(10, 32)
    for name in ("first", "second"):
        scheduler.add(request_of(name, list(range(8)), max_tokens=1))
        assert step(scheduler).batch.num_scheduled_tokens == 8
    assert not scheduler.has_unfinished


def test_E17_children_go_before_their_parents(make_manager, fill):
    manager = make_manager(4, 4)
    manager.free([fill(manager, range(16))])
    hits = []
    for content in range(4):
        fill(manager, [100 + content])
        hits.append(manager.lookup(range(17)).num_tokens)
    assert hits == [12, 8, 4, 0]


def test_E17_a_used_child_keeps_its_parent(fill, filled):
    manager, parent = filled(4, 4, range(8))
    child = manager.add(range(13))
    manager.free([parent])
    # Both hit blocks are used by the child alone now.
    assert (manager.device.num_used, manager.device.num_available) == (2, 2)
    for content in range(2):
        fill(manager, [100 + content])
    blocked = manager.add([7])
    with pytest.raises(OutOfBlocks):
        manager.allocate([blocked], [1])
    assert (manager.lookup(range(13)).num_tokens, manager.rows.num_computed[child]) == (8, 8)


def test_E18_the_oldest_of_three_cached_blocks_is_reused_and_the_others_still_hit(make_manager, fill):
    manager = make_manager(3, 4)
    prompts = [[content] * 4 for content in (1, 2, 3)]
    for prompt in prompts:
        manager.free([fill(manager, prompt)])
    row = fill(manager, [9, 9])
    assert manager.table(row).tolist() == [0]
    assert [manager.lookup([*prompt, 0]).num_tokens for prompt in prompts] == [0, 4, 4]
    assert len(manager.cached_contents()) == 2


@pytest.mark.parametrize("count", [2, 3, 10])
def test_E20_other_content_of_the_same_size_replaces_the_old_and_the_cache_keeps_its_size(make_manager, serve, count):
    manager = make_manager(count, 4)
    serve(manager, range(4 * count))
    old = manager.cached_contents()
    serve(manager, range(1000, 1000 + 4 * count))
    new = manager.cached_contents()
    assert (len(old), len(new), old & new) == (count, count, set())


def test_E21_a_block_that_fills_with_known_content_switches_to_the_known_block(make_manager, fill, compute):
    # Ours deduplicates.
    manager = make_manager(8, 4)
    first, second = fill(manager, range(6)), fill(manager, range(6))
    assert (manager.table(first).tolist(), manager.table(second).tolist()) == ([0, 1], [0, 2])
    for row in (first, second):
        manager.append(row, [6, 7])
        compute(manager, row)
    assert manager.table(second).tolist() == [0, 1]
    assert (manager.device.num_used, manager.device.num_free) == (2, 6)
    manager.free([first])
    assert manager.device.num_used == 2


def test_E22_a_pending_block_is_shared_in_the_step_that_computes_it(make_scheduler, request_of, step):
    scheduler = make_scheduler(20, 4)
    for name in ("one", "two", "three"):
        scheduler.add(request_of(name, [*range(16), ord(name[0]), ord(name[1])], max_tokens=4))
    first = step(scheduler)
    assert first.tokens == {"one": 18, "two": 2, "three": 2}
    assert scheduler.stats().shared_in_flight_tokens == 32
    # Four shared blocks and three tails.
    assert scheduler.manager.device.num_used == 7


def test_E23_a_cancelled_step_withdraws_its_pending_content(make_manager):
    manager = make_manager(8, 4)
    row = manager.add(range(10))
    manager.allocate([row], [10])
    manager.cancel()
    assert (manager.lookup(range(10)).num_tokens, manager.cached_contents()) == (0, set())
    assert (manager.device.num_free, manager.rows.num_computed[row]) == (8, 0)


def test_what_a_row_computes_past_a_branch_is_shared_while_it_is_in_flight(fill, compute, filled):
    manager, row = filled(8, 4, range(4))
    fill(manager, [*range(4), *range(100, 104)])
    manager.append(row, range(200, 204))
    manager.next_batch()
    manager.allocate([row], [4])
    assert manager.lookup([*range(4), *range(200, 204), 0]).num_tokens == 8
    manager.cancel()
    assert manager.lookup([*range(4), *range(200, 204), 0]).num_tokens == 4
    compute(manager, row)
    assert manager.lookup([*range(4), *range(200, 204), 0]).num_tokens == 8
    assert manager.lookup([*range(4), *range(100, 104), 0]).num_tokens == 8


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_came_from_elsewhere_is_found_though_another_batch_computes_a_part_of_it(make_manager, is_cancelled):
    manager = make_manager(11, 2)
    computing = manager.add([0, 1, 0, 1])
    manager.allocate([computing], [3])
    manager.confirm()
    arriving = manager.add([0, 1, 0, 1, 0, 1])
    manager.reserve([arriving], [3])
    manager.next_batch()
    manager.allocate([computing], [1])
    manager._memory.set_computed(arriving, 6)
    assert manager.lookup([0, 1, 0, 1, 0, 1, 9]).num_tokens == 6
    if is_cancelled:
        manager.cancel()
        manager.allocate([computing], [1])
    manager.confirm()
    assert manager.lookup([0, 1, 0, 1, 0, 1, 9]).num_tokens == 6
    assert manager.table(computing).tolist() == manager.table(arriving)[:2].tolist()
    manager.free([computing, arriving])
    assert manager.lookup([0, 1, 0, 1, 0, 1, 9]).num_tokens == 6


def test_what_the_host_has_behind_a_block_that_is_still_computed_is_not_found(make_manager):
    manager = make_manager(6, 2, host_blocks=6, host_caching=True)
    manager.allocate([manager.add([1, 2, 9])], [2])
    arriving = manager.add([1, 2, 3, 4, 5, 6])
    manager.reserve([arriving], [3])
    manager._memory.set_computed(arriving, 6)
    manager.free([arriving])
    manager.reserve([manager.add([8])], [5])
    assert manager.host.num_used == 2
    found = manager.lookup([1, 2, 3, 4, 5, 6, 7])
    assert (found.num_tokens, found.host_tokens) == (2, 0)


def test_requests_that_keep_to_themselves(make_scheduler, request_of, run):
    scheduler, a, b = make_scheduler(8, 4), range(9), range(100, 109)
    for id, prompt, wish, found in (
        ("a", a, {}, 0),
        ("b", a, {"reads_cache": False}, 0),
        ("c", b, {"writes_cache": False}, 0),
        ("d", b, {}, 0),
        ("e", a, {}, 8),
    ):
        scheduler.add(request_of(id, prompt, 1, **wish))
        assert run(scheduler)[-1].outputs[id].usage.hit_tokens == found
