"""Content that leaves the device stays on the host and comes back on a hit, where that costs less than computing it."""

from paged import Costs

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
    manager.load_where(lambda start, end: (start, end) != (0, 12))
    manager.free([row := manager.add([*A, 1])])
    assert not len(manager.take_moves())
    manager.load_where(lambda start, end: (start, end) == (0, 12))
    row = manager.add([*A, 1])
    moves = manager.take_moves()
    assert manager.rows.num_computed[row] == 12
    assert moves.host_to_device[:, 1].tolist() == manager.table(row).tolist()
    assert (manager.stats().hit_tokens, manager.stats().host_hit_tokens) == (12, 12)
    manager.free([row])


def test_what_costs_more_to_load_than_to_compute_is_computed(make_scheduler, request_of, run):
    dear = Costs(seconds_per_swapped_block=1.0, seconds_per_token=1e-6)
    for costs, loaded in ((None, 8), (dear, 0)):
        scheduler = make_scheduler(4, 4, host_blocks=8, costs=costs, host_caching=True)
        for name, prompt in (("a", A), ("b", [*B, 1]), ("a again", A)):
            scheduler.add(request_of(name, prompt, max_tokens=1))
            run(scheduler)
        assert scheduler.stats().host_hit_tokens == loaded


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


def test_what_is_retained_on_the_host_stays_before_what_is_not(make_manager, serve):
    manager = make_manager(3, 4, host_blocks=2, host_caching=True)
    serve(manager, A[:8])
    manager.retain([*A[:8], 0], priority=2)
    for tokens in (B, [*B[4:], *B[:4]]):
        serve(manager, tokens)
        assert manager.lookup([*A[:8], 0]).host_tokens == 8
    manager.retain([*B[4:], *B[:4], 0], priority=2)
    # Retained as long, and used later.
    serve(manager, [7] * 12)
    assert manager.lookup([*A[:8], 0]).host_tokens == 0
