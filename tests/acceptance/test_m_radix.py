"""The prefix cache as a tree of content: what an insertion finds, what a holder protects, and where every block is."""

import pytest


def found_before(manager, fill, tokens):
    """Tokens of it that the cache held before it was computed and given back, its last one included."""
    held = manager.lookup([*tokens, 99]).num_tokens
    manager.free([fill(manager, tokens)])
    return held


@pytest.mark.parametrize(
    ("block_size", "inserted", "found"),
    [
        (1, [[0, 1, 2], [0, 1, 2], [1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5, 6, 7]], [0, 3, 0, 3, 4]),
        (2, [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3, 4], [*range(6)], [0, 1, 3, 4, 5, 6, 7, 8]], [0, 4, 0, 4, 2]),
    ],
)
def test_M1_M2_an_insertion_finds_the_longest_prefix_of_whole_blocks(make_manager, fill, block_size, inserted, found):
    manager = make_manager(40, block_size)
    assert [found_before(manager, fill, tokens) for tokens in inserted] == found


def test_M4_what_was_computed_twice_is_kept_once(make_manager):
    manager = make_manager(9, 1)
    # Both look their prompt up before either is in a batch: neither can share the other's blocks.
    first, second = manager.add([0, 1, 2, 3]), manager.add([0, 1, 2, 3])
    manager.allocate([first], [4])
    manager.next_batch()
    manager.allocate([second], [4])
    manager.confirm()
    manager.confirm()
    manager.free([first, second])
    assert manager.lookup([0, 1, 2, 3, 9]).num_tokens == 4
    assert (manager.device.num_cached, manager.device.num_free) == (4, 5)


def test_M6_whoever_holds_content_protects_it(make_manager, fill):
    manager = make_manager(8, 1)
    manager.free([fill(manager, [0, 1, 2])])
    evictable, protected = manager.device.num_cached, manager.device.num_used
    row = manager.add([0, 1, 2, 3])
    assert (manager.device.num_cached - evictable, manager.device.num_used - protected) == (-3, 3)
    manager.free([row])
    assert (manager.device.num_cached, manager.device.num_used) == (evictable, protected)


@pytest.mark.parametrize(("block_size", "length", "found"), [(1, 5, 5), (2, 5, 4), (4, 6, 4)])
def test_M7_a_hit_ends_with_a_block(make_manager, fill, block_size, length, found):
    assert found_before(make_manager(8, block_size), fill, range(length)) == 0
    manager = make_manager(8, block_size)
    manager.free([fill(manager, range(length))])
    assert manager.lookup([*range(length), 99]).num_tokens == found


def test_M9_every_block_is_free_cached_or_used(make_manager, fill):
    manager = make_manager(8, 1)

    def states():
        return manager.device.num_free, manager.device.num_cached, manager.device.num_used

    manager.free([fill(manager, [0, 1])])
    assert states() == (6, 2, 0)
    row = fill(manager, [10, 11, 12, 13, 14, 15])
    assert states() == (0, 2, 6)
    other = fill(manager, [20])
    assert states() == (0, 1, 7)
    manager.free([row, other])
    assert states() == (0, 8, 0)
