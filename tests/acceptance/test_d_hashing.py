"""Content keys and hashes: what tells two blocks apart, and what must not."""

import ast

import pytest


def test_D2_a_repeated_block_hashes_differently_because_its_parent_does(fill, filled):
    manager, row = filled(8, 4, [1, 2, 3, 4, 1, 2, 3, 4])
    first, second = manager.block_hashes(row)
    assert first != second
    # The first has no parent: it is the hash of the same block alone.
    assert manager.block_hashes(fill(manager, [1, 2, 3, 4])) == [first]


def test_D3_a_hash_is_the_same_whenever_it_is_asked_for(make_manager, fill, compute, filled):
    manager, row = filled(10, 4, [1, 2, 3, 4])
    # Asked for a row that goes on otherwise, while the first one has just the block that both share.
    manager.block_hashes(fill(manager, [1, 2, 3, 4, 5, 6, 7, 8]))
    manager.append(row, [9, 9, 9, 9, 9])
    compute(manager, row)
    alone = make_manager(10, 4)
    assert manager.block_hashes(row) == alone.block_hashes(fill(alone, [1, 2, 3, 4, 9, 9, 9, 9]))


HASH_PROGRAM = """
from paged import BlockManager
manager = BlockManager(4, 4)
row = manager.add(range(12), namespace=("tenant", 3))
manager.allocate([row], [12])
manager.confirm()
print([digest.hex() for digest in manager.block_hashes(row)])
"""


def test_D4_two_processes_compute_the_same_hashes(run_python):
    first, second = (run_python("-c", HASH_PROGRAM, env={"PYTHONHASHSEED": seed}).stdout for seed in "12")
    assert first == second and len(ast.literal_eval(first)) == 3


def test_D5_a_salt_separates_the_whole_prefix(make_manager, fill):
    manager = make_manager(20, 16)
    shared = list(range(48))
    fill(manager, [*shared, *range(100, 111)], namespace="salt")
    prompt = [*shared, *range(200, 211)]
    assert manager.lookup(prompt, namespace="salt").num_tokens == 48
    assert (manager.lookup(prompt, namespace="other").num_tokens, manager.lookup(prompt).num_tokens) == (0, 0)


def test_D5_the_salt_enters_the_first_blocks_key_only(make_manager, fill):
    manager = make_manager(8, 4)
    for namespace in ("salt", "other"):
        fill(manager, range(12), namespace=namespace)
    paths = manager.cached_contents()
    assert len(paths) == 6
    # Two paths for each length, which differ in what comes before the first block.
    for length in (1, 2, 3):
        pair = [path for path in paths if len(path) == length + 1]
        assert (len(pair), pair[0][1:]) == (2, pair[1][1:])
        assert pair[0][0] != pair[1][0]


def test_D7_the_fourth_hash_appears_exactly_when_the_block_fills(compute, filled):
    manager, row = filled(8, 16, range(59))
    three = manager.block_hashes(row)
    assert len(three) == 3
    for token in range(59, 63):
        manager.append(row, [token])
        compute(manager, row)
        assert manager.block_hashes(row) == three
    manager.append(row, [63])
    assert manager.block_hashes(row) == three
    manager.allocate([row], [1])
    assert manager.block_hashes(row) == three, "in flight is not confirmed"
    manager.confirm()
    assert (len(manager.block_hashes(row)), manager.block_hashes(row)[:3]) == (4, three)
    assert len(manager.cached_contents()) == 4


@pytest.mark.parametrize(("one", "two"), [(-1, -2), (0, 2**61 - 1), (1, 2**61), (5, 5 + 2 * (2**61 - 1))])
def test_D9_a_collision_of_pythons_own_hash_serves_nobody_elses_tokens(make_manager, fill, one, two):
    assert hash(one) == hash(two)
    manager = make_manager(8, 4)
    fill(manager, range(8), namespace=one)
    assert manager.lookup(range(9), namespace=two).num_tokens == 0
    fill(manager, range(8), namespace=two)
    assert len(manager.cached_contents()) == 4


def test_D9_a_hit_is_equality_of_tokens(make_manager):
    # Every prompt of 4 blocks of 1 over 3 token ids, in one cache: each finds exactly what was stored before it.
    manager = make_manager(200, 1)
    stored: set[tuple[int, ...]] = set()
    for number in range(81):
        tokens = [number // 27 % 3, number // 9 % 3, number // 3 % 3, number % 3]
        expected = max(length for length in range(4) if length == 0 or tuple(tokens[:length]) in stored)
        row = manager.add(tokens)
        assert manager.rows.num_computed[row] == expected
        manager.allocate([row], [4 - expected])
        manager.confirm()
        stored |= {tuple(tokens[:length]) for length in range(1, 5)}
        assert manager.check() == []
        manager.free([row])
    assert len(manager.cached_contents()) == 3 + 9 + 27 + 81
