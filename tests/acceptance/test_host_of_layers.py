"""Layers of several kinds on the host: states and windows go there page by page with the full blocks that they are of, and a hit brings
back what it needs of each, where copying that costs less than computing."""

import math

import pytest

from paged import Costs, LayerGroup, Retention

from ..driving import steps_of  # noqa: TID252

FULL, STATE, WINDOW = LayerGroup("full"), LayerGroup("state", pages=3), LayerGroup("window", 5, pages=2)
A, B, C = (list(range(first, first + 8)) for first in (0, 100, 200))
FREE, A_TOKEN_A_PAGE = (
    Costs(seconds_per_swapped_block=seconds, seconds_per_token=1.0, attention_knee=math.inf) for seconds in (0.0, 1.0)
)


@pytest.fixture
def make(make_scheduler):
    def build(num_blocks, groups, *, costs=FREE, host_blocks=30):
        sizes = {"host_blocks": host_blocks, "host_caching": True, "groups": groups}
        return make_scheduler(num_blocks, 4, costs=costs, **sizes)

    return build


@pytest.fixture
def serve(request_of):
    """Serve a prompt to its end, with one token: where it began, and the copies of all its batches, by kind."""

    def run(scheduler, prompt, **fields):
        scheduler.add(request_of(f"r{scheduler.counts()['submitted']}", prompt, max_tokens=1, **fields))
        batches, kinds = steps_of(scheduler), ("device_to_host", "host_to_device", "device_to_device")
        copies = {kind: sum(len(getattr(batch.moves, kind)) for batch in batches) for kind in kinds}
        return next(int(each.seq_lens[0] - each.num_tokens[0]) for each in batches if len(each.rows)), copies

    return run


def on_host(scheduler):
    return [each.on_host for each in scheduler.manager.stats().groups]


def test_a_state_and_the_full_blocks_before_it_come_back_together(make, serve):
    scheduler = make(9, [FULL, STATE])
    serve(scheduler, A)
    # Of A there are two full blocks, and the states after 4 tokens and 8. B has as many, and one page was free: one full block stays.
    _, copies = serve(scheduler, B)
    assert (copies["device_to_host"], on_host(scheduler)) == (7, [1, 6])
    serve(scheduler, C)
    assert scheduler.manager.lookup([*A, 9]).host_tokens == 8
    # The two full blocks, and the state of three pages after them.
    start, copies = serve(scheduler, [*A, 9])
    assert (start, copies["host_to_device"]) == (8, 5)
    assert scheduler.stats().host_hit_tokens == 8


def test_pages_of_full_blocks_and_windows_that_the_device_has_too_go_first_on_the_host(make, serve):
    scheduler = make(10, [FULL, WINDOW], host_blocks=16)
    a, b, c, d = (list(range(first, first + 12)) for first in (0, 100, 200, 300))
    for prompt in (a, b, c, [*a, 9], d):
        serve(scheduler, prompt)
    # For what D drives out pages of A made room on the host, which the device had; B, which was used before, is whole.
    found = [scheduler.manager.lookup([*prompt, 9]) for prompt in (a, b, c, d)]
    assert [(hit.num_tokens, hit.host_tokens) for hit in found] == [(0, 12), (0, 12), (0, 12), (12, 0)]


def test_what_a_window_passed_and_kept_while_pages_were_free_does_not_go_to_the_host(make, serve):
    scheduler = make(10, [FULL, WINDOW])
    serve(scheduler, [*A, 8, 9, 10, 11])
    assert [each.cached for each in scheduler.manager.stats().groups] == [3, 6]
    for prompt in (B, C):
        serve(scheduler, [*prompt, 8, 9, 10, 11])
    # Of A and B: what the window needs after 8 tokens and after 12, one block each, and not the one before.
    assert on_host(scheduler)[1] == 8


@pytest.mark.parametrize("side", [STATE, WINDOW])
def test_what_is_retained_on_the_host_stays_before_what_is_not(make, serve, side):
    scheduler = make(10, [FULL, side], host_blocks=10)
    serve(scheduler, A, retention=Retention(priority=2))
    for prompt in (B, C, B, C):
        serve(scheduler, prompt)
    hit = scheduler.manager.lookup([*A, 9])
    assert hit.num_tokens + hit.host_tokens == 8
    for prompt in (B, C):
        serve(scheduler, prompt, retention=Retention(priority=2))
    serve(scheduler, list(range(300, 308)))
    hit = scheduler.manager.lookup([*A, 9])
    assert hit.num_tokens + hit.host_tokens < 8


@pytest.mark.parametrize(("pages", "start"), [(3, 8), (5, 8), (6, 0), (7, 0)])
def test_a_length_is_loaded_where_its_pages_cost_less_than_its_tokens(make, serve, pages, start):
    # Two full blocks and a state, at a token's time a page, against eight tokens.
    scheduler = make(3 + 2 * pages, [FULL, LayerGroup("state", pages=pages)], costs=A_TOKEN_A_PAGE)
    for prompt in (A, B, C):
        serve(scheduler, prompt)
    assert serve(scheduler, [*A, 9])[0] == start


def test_a_request_is_told_what_came_from_the_host_and_what_did_not(make, serve, request_of):
    dear = "the host has more, but copying it costs more than computing it, or there is no room for it."
    for costs, says in (
        (FREE, "at 8 tokens (8 of them from the host), all that can be found of its prompt."),
        (A_TOKEN_A_PAGE, f"at 0 tokens: of 8 cached tokens state layers allow 8; {dear}"),
    ):
        scheduler = make(17, [FULL, LayerGroup("state", pages=7)], costs=costs)
        for prompt in (A, B, C):
            serve(scheduler, prompt)
        scheduler.add(request_of("r", [*A, 9], max_tokens=1))
        assert f"It would begin {says}" in scheduler.explain("r").layers.says
        scheduler.schedule()
        assert f"Its hit ended {says}" in scheduler.explain("r").layers.says


def test_the_end_of_a_row_within_a_block_goes_to_the_host_and_comes_back(make, serve):
    scheduler = make(10, [FULL, STATE])
    for prompt in (A, B, C):
        serve(scheduler, [*prompt, 8])
    start, copies = serve(scheduler, [*A, 8, 9, 10])
    # Two full blocks, the partial one, and its state; the partial block is copied before it is written.
    assert (start, copies["host_to_device"], copies["device_to_device"]) == (9, 6, 1)


def test_a_row_that_holds_blocks_takes_what_comes_next_from_the_host_with_its_window(make_manager, fill):
    manager = make_manager(15, 4, groups=[FULL, LayerGroup("window", 5)], host_blocks=30, host_caching=True)
    manager.free([fill(manager, range(9))])
    row = manager.add(range(17))
    manager.free([fill(manager, range(16))])
    manager.free([fill(manager, range(100, 124))])
    # Two full blocks, and a block of the window.
    assert [manager._memory.sharing.extend_hit(row, room=room) for room in (1, 3)] == [0, 8]
    assert (manager.rows.num_computed[row], manager.group_pages(1, row)[:3].tolist()) == (16, [[-1]] * 3)


def test_a_window_stays_on_the_host_with_its_full_block_though_one_before_that_is_lost(make_manager, compute):
    manager = make_manager(14, 4, groups=[FULL, LayerGroup("window", 5)], host_blocks=3, host_caching=True)
    row = manager.add(range(16))
    for _ in range(4):
        compute(manager, row, 4)
    manager.free([row])
    manager.reserve([manager.add(range(100, 140), writes=False)], [6])
    manager.take_moves()
    # The first two full blocks are on the device still. The host has the fourth, and lacked room for the third.
    assert [(each.cached, each.on_host) for each in manager.stats().groups] == [(2, 1), (0, 1)]
