"""Content that leaves the device stays on the host and comes back on a hit, where that costs less than computing it."""

import numpy as np
import pytest

from paged import Costs
from paged.errors import InvalidConfig

A, B = list(range(12)), list(range(100, 112))


def test_what_is_evicted_goes_to_the_host_in_the_call_that_needs_its_blocks(make_manager, serve):
    manager = make_manager(3, 4, host_blocks=6, host_caching=True)
    serve(manager, A)
    moves = serve(manager, B)
    assert sorted(moves.device_to_host[:, 0].tolist()) == [0, 1, 2]
    assert len(set(moves.device_to_host[:, 1].tolist())) == 3
    assert (manager.device.num_cached, manager.host.num_cached) == (3, 3)


def test_a_hit_on_the_host_brings_its_blocks_back(make_manager, serve):
    manager = make_manager(4, 4, host_blocks=8, host_caching=True)
    serve(manager, A)
    serve(manager, [*B, 1, 2, 3, 4])
    assert manager.lookup([*A, 1]).host_tokens == 12
    row = manager.add([*A, 1])
    moves = manager.take_moves()
    assert manager.rows.num_computed[row] == 12
    assert moves.host_to_device[:, 1].tolist() == manager.table(row).tolist()
    assert (manager.stats().hit_tokens, manager.stats().host_hit_tokens) == (12, 12)
    manager.free([row])


def test_what_costs_more_to_load_than_to_compute_is_computed(make_scheduler, request_of, step):
    dear = Costs(seconds_per_swapped_block=1.0, seconds_per_token=1e-6)
    for costs, loaded in ((None, 8), (dear, 0)):
        scheduler = make_scheduler(4, 4, host_blocks=8, costs=costs, host_caching=True)
        for name, prompt in (("a", A), ("b", [*B, 1]), ("a again", A)):
            scheduler.add(request_of(name, prompt, max_tokens=1))
            while scheduler.has_unfinished:
                step(scheduler)
        assert scheduler.stats().host_hit_tokens == loaded


def test_moves_of_content_come_with_the_batch_and_before_its_tokens_are_written(make_scheduler, request_of, step):
    scheduler = make_scheduler(4, 4, host_blocks=8, host_caching=True)
    for name, prompt in (("a", A), ("b", [*B, 1])):
        scheduler.add(request_of(name, prompt, max_tokens=1))
        while scheduler.has_unfinished:
            step(scheduler)
    scheduler.add(request_of("c", [*A, 7], max_tokens=1))
    batch = scheduler.schedule()
    assert (batch.token_ids.tolist(), len(batch.moves.host_to_device)) == ([7], 3)
    scheduler.update(batch, np.array([1], np.int32))


@pytest.mark.parametrize("options", [{"host_blocks": 0}, {"host_blocks": 4, "prefix_caching": False}])
def test_a_host_cache_needs_a_host_and_a_cache(make_manager, options):
    with pytest.raises(InvalidConfig, match="host_caching keeps content in host blocks"):
        make_manager(4, 4, host_caching=True, **options)


def test_a_pool_of_other_blocks_is_refused(make_manager):
    class Tensors:
        num_blocks, block_size, num_host_blocks = 8, 4, 4

    manager = make_manager(8, 4, host_blocks=4)
    manager.must_fit(Tensors())
    for name, value, sentence in (
        ("host_block_size", 8, "host blocks hold 8 tokens and device blocks 4"),
        ("num_host_blocks", 5, "num_host_blocks 5; the manager counts 4"),
        ("block_size", 2, "block_size 2; the manager counts 4"),
    ):
        other = type("Other", (Tensors,), {name: value})()
        with pytest.raises(InvalidConfig, match=sentence):
            manager.must_fit(other)


def test_what_comes_back_without_an_eviction_changes_no_copy_that_was_planned_before(make_manager, serve, compute):
    manager = make_manager(9, 4, host_blocks=12, host_caching=True)
    of_a, of_b, of_c = ([first + at for at in range(12)] for first in (100, 200, 300))
    for tokens in (of_b, of_a, of_c):
        serve(manager, tokens)
    private = manager.add([7] * 12, writes=False)
    compute(manager, private)
    loaded = manager.add([*of_b, 1])
    # A went to make room for B, and comes back into blocks that held nothing.
    manager.free([private])
    again = manager.add([*of_a, 1])
    targets = manager.take_moves().host_to_device[:, 1].tolist()
    assert targets == [*manager.table(loaded).tolist(), *manager.table(again).tolist()]
    manager.free([loaded, again])


def test_what_a_fork_drives_out_between_two_steps_goes_to_the_host(make_scheduler, make_engine, request_of):
    scheduler = make_scheduler(3, 2, host_blocks=1, host_caching=True)
    engine = make_engine(scheduler, {"r": ([4], 50)})
    batch = scheduler.schedule()
    engine.forward(batch)
    scheduler.update(batch, [], [0])
    engine.add(request_of("a", [1, 1, 1], max_tokens=1))
    engine.step()
    for _ in range(2):
        scheduler.fork("r")
    assert scheduler.schedule().moves.device_to_host[:, 1].tolist() == [0]
    assert scheduler.manager.lookup([1, 1, 1]).host_tokens == 2


def test_copies_that_nobody_has_taken_yet_hold_what_they_read(make_manager, serve):
    manager = make_manager(3, 4, host_blocks=4, host_caching=True)
    serve(manager, A)
    serve(manager, B)
    row = manager.add([*A, 1])
    assert (manager.host.num_used, manager.check()) == (4, [])
    manager.take_moves()
    assert (manager.host.num_used, manager.check()) == (0, [])
    manager.free([row])


def test_what_left_in_a_call_and_comes_back_in_the_next_is_copied_from_where_it_was(make_manager, serve):
    manager = make_manager(6, 4, host_blocks=12, host_caching=True)
    of_a, of_b, of_c = ([first + at for at in range(12)] for first in (100, 200, 300))
    for tokens in (of_b, of_a, of_c):
        serve(manager, tokens)
    # A is what is evicted for B, and comes back while neither copy has run.
    before = [manager.lookup([*tokens, 1]).blocks.tolist() for tokens in (of_a, of_c)]
    rows = [manager.add([*tokens, 1]) for tokens in (of_b, of_a)]
    moves = manager.take_moves()
    assert sorted(moves.device_to_host[:, 0].tolist()) == sorted(before[0] + before[1])
    assert moves.host_to_device[:, 1].tolist() == [block for row in rows for block in manager.table(row).tolist()]
    manager.free(rows)


@pytest.fixture
def sixfold():
    """Six prompts of three blocks, which share nothing."""
    return [[first + at for at in range(12)] for first in range(100, 700, 100)]


def there(manager, tokens):
    hit = manager.lookup([*tokens, 1])
    return hit.num_tokens, hit.host_tokens


def load(manager, tokens):
    """Bring these tokens back from the host, and let them go."""
    row = manager.add([*tokens, 1])
    moves = manager.take_moves()
    manager.free([row])
    return moves


def test_device_and_host_together_hold_as_many_different_blocks_as_they_have(make_manager, serve, sixfold):
    manager = make_manager(6, 4, host_blocks=9, host_caching=True)
    a, b, c, d, e, _ = sixfold
    for tokens in (a, b, c, d):
        serve(manager, tokens)
    load(manager, a)
    # The device has A and D, the host A, B and C. D goes there now, in place of A, which was used last.
    serve(manager, e)
    assert [there(manager, tokens) for tokens in (a, b, c, d, e)] == [(12, 0), (0, 12), (0, 12), (0, 12), (12, 0)]


def test_what_the_device_lets_go_is_not_copied_again_and_counts_as_used_then(make_manager, serve, sixfold):
    manager = make_manager(3, 4, host_blocks=9, host_caching=True)
    a, b, c, d, e, _ = sixfold
    for tokens in (a, b, c):
        serve(manager, tokens)
    load(manager, a)
    assert len(serve(manager, d).device_to_host) == 0
    serve(manager, e)
    assert [there(manager, tokens) for tokens in (a, b, c, d, e)] == [(0, 12), (0, 0), (0, 12), (0, 12), (12, 0)]


def test_raised_content_whose_copy_has_left_the_host_is_raised_there_when_it_comes_back(make_manager, serve, sixfold):
    manager = make_manager(6, 4, host_blocks=9, host_caching=True)
    a, b, c, d, e, f = sixfold
    for tokens in (a, b, c, d):
        serve(manager, tokens)
    manager.retain(a, priority=2)
    load(manager, a)
    assert manager.host.levels.max() == 0
    serve(manager, e)
    serve(manager, [*f, *range(12)])
    assert (there(manager, a), np.count_nonzero(manager.host.levels == 2)) == ((0, 12), 3)
    for first in range(1_000, 1_700, 100):
        serve(manager, [first + at for at in range(12)])
    assert there(manager, a) == (0, 12)


def test_content_that_is_computed_again_goes_first_on_the_host_from_then_on(make_manager, serve, sixfold):
    manager = make_manager(6, 4, host_blocks=9, host_caching=True)
    a, b, c, d, e, _ = sixfold
    manager.load_where(lambda start, stop: False)
    for tokens in (a, b, c, d, b):
        serve(manager, tokens)
    # The device has D and B, the host A, B and C.
    serve(manager, e)
    assert [there(manager, tokens) for tokens in (a, b, c, d, e)] == [(0, 12), (12, 0), (0, 12), (0, 12), (12, 0)]
