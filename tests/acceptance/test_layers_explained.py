"""What is told of layers of several kinds: pages by group, tokens that a group lost, and of a request why its hit ended and where it can restart."""

import numpy as np
import pytest

from paged import LayerGroup
from paged.block_manager.content_key import root_prefix

from ..driving import steps_of  # noqa: TID252

FULL, STATE = LayerGroup("full"), LayerGroup("state")


def serve(scheduler, *requests):
    """Each request to its end, one after the other."""
    for request in requests:
        scheduler.add(request)
        steps_of(scheduler)


def begun(scheduler, request):
    """The request in its first batch."""
    scheduler.add(request)
    return scheduler.schedule()


def told(scheduler, figure):
    """One figure of each group."""
    return [getattr(each, figure) for each in scheduler.manager.stats().groups]


def test_pages_are_counted_by_the_group_that_has_them(make_scheduler, request_of):
    groups = [FULL, LayerGroup("window", 5, pages=2), LayerGroup("state", pages=3)]
    scheduler = make_scheduler(60, 4, groups=groups)
    assert [each.group for each in scheduler.manager.stats().groups] == groups
    prompt = list(range(24))
    batch = begun(scheduler, request_of("a", prompt, max_tokens=3))
    # A chunk ends at 20, where a state is wanted; its window has passed nothing before the update.
    assert told(scheduler, "used") == [5, 5 * 2, 3]
    scheduler.update(batch, [])
    # Token 20 reads from 16 on. Of the blocks before, only the last window's are wanted, and pages are free.
    assert (told(scheduler, "used"), told(scheduler, "passed")) == ([5, 2, 3], [0, 4 * 2, 0])
    assert told(scheduler, "cached") == [0, 4 * 2, 0]
    steps_of(scheduler)
    # States were kept at 20, at the prompt's end, and where it ended, with its partial blocks.
    assert (told(scheduler, "used"), told(scheduler, "cached")) == ([0, 0, 0], [7, 7 * 2, 3 * 3])
    batch = begun(scheduler, request_of("b", [*prompt[:20], 90]))
    # Of 5 found blocks its window takes the last; the state at 20 is read until the batch has ended, and another one written.
    assert (told(scheduler, "used"), told(scheduler, "cached")) == ([6, 2 * 2, 2 * 3], [2, 6 * 2, 2 * 3])
    scheduler.update(batch, [7])
    assert (told(scheduler, "used"), told(scheduler, "cached")) == ([6, 2 * 2, 3], [2, 6 * 2, 3 * 3])


def test_figures_of_groups_add_up_to_those_of_the_pool(make_scheduler, request_of, step):
    groups = [LayerGroup("window", 6, pages=2), FULL, LayerGroup("state", pages=3), LayerGroup("chunk", 8)]
    scheduler = make_scheduler(44, 4, groups=groups, max_chunk=8)
    for number in range(9):
        scheduler.add(request_of(f"r{number}", [*range(18 - number), 90 + number], max_tokens=12))
    while scheduler.has_unfinished:
        step(scheduler)
        device = scheduler.manager.device
        assert sum(told(scheduler, "used")) == device.num_used == np.count_nonzero(device.states == 2)
        assert sum(told(scheduler, "cached")) == device.num_cached == np.count_nonzero(device.states == 1)
    assert scheduler.manager.stats().evicted_blocks > 0 < sum(told(scheduler, "passed"))


def test_tokens_that_a_hit_loses_are_those_of_the_group_that_allows_least(make_scheduler, request_of):
    scheduler = make_scheduler(60, 4, groups=[FULL, LayerGroup("window", 5, pages=2), STATE], max_chunk=8)
    prompt = list(range(30))
    serve(scheduler, request_of("a", prompt, max_tokens=1))
    assert told(scheduler, "lost_tokens") == [0, 0, 0]
    # Full layers and the window have 20 of its tokens. States were kept where chunks ended, at 8 and 16.
    serve(scheduler, request_of("b", [*prompt[:20], 90, 91], max_tokens=1))
    assert told(scheduler, "lost_tokens") == [0, 0, 4]
    # Where b parted from a, a state was kept.
    serve(scheduler, request_of("c", [*prompt[:20], 92, 93], max_tokens=1))
    assert told(scheduler, "lost_tokens") == [0, 0, 4]


@pytest.mark.parametrize(
    ("groups", "prompt", "num_tokens", "alone", "why", "says"),
    [
        ([FULL, STATE], 30, 28, (28,), "whole", "at 28 tokens, all that can be found of its prompt."),
        # It goes on where the other one ended, within a block.
        ([FULL, STATE], 40, 30, (30,), "not cached", "at 30 tokens, where the cached part of its prompt ends."),
        (
            [FULL, LayerGroup("window", 5), STATE], 20, 8, (12, 8), "not kept",
            "at 8 tokens: of 12 cached tokens window layers of 5 allow 12, state layers allow 8; state layers kept nothing "
            "after that.",
        ),
    ],
)  # fmt: skip
def test_a_request_is_told_where_its_hit_ended(
    make_scheduler, request_of, groups, prompt, num_tokens, alone, why, says
):
    scheduler = make_scheduler(90, 4, groups=groups, max_chunk=8)
    tokens = list(range(40))
    serve(scheduler, request_of("a", tokens[:30], max_tokens=1))
    asked = {20: [*tokens[:14], *range(90, 96)], 30: tokens[:30], 40: tokens}[prompt]
    scheduler.add(request_of("b", asked, max_tokens=9))
    before = scheduler.explain("b")
    assert before.layers.says == f" It would begin {says}"
    scheduler.schedule()
    hit = scheduler.explain("b").layers.hit
    assert (hit.num_tokens, hit.alone, hit.why) == (num_tokens, alone, why)
    assert f" Its hit ended {says}" in str(scheduler.explain("b"))
    assert (scheduler.request("b").hit_tokens, hit) == (num_tokens, before.layers.hit)


def test_what_was_evicted_is_said_to_have_been(make_scheduler, request_of):
    # 5 blocks and 2 states of the first, 4 blocks and 1 state of the second: its states had to go, its first blocks did not.
    scheduler = make_scheduler(11, 2, groups=[FULL, STATE], max_chunk=4)
    first = list(range(1, 10))
    serve(scheduler, request_of("a", first, max_tokens=1))
    scheduler.add(request_of("b", [*first[:6], 90], max_tokens=1))
    assert scheduler.explain("b").layers.hit.why == "not kept"
    scheduler.abort("b")
    serve(scheduler, request_of("other", 7, max_tokens=1))
    scheduler.add(request_of("c", [*first[:6], 90, 91, 92], max_tokens=1))
    layers = scheduler.explain("c").layers
    assert (layers.hit.num_tokens, layers.hit.confirmed, layers.hit.why) == (0, 6, "evicted")
    assert layers.says.endswith("state layers allow 0; state layers had more, which was evicted.")
    # It computes 4 of these tokens, and looks again: its hit ended where it began.
    for _ in range(2):
        scheduler.update(scheduler.schedule(), [])
        assert scheduler.explain("c").layers.hit == layers.hit


def test_what_was_evicted_in_front_of_the_window_that_is_lacking_is_not_why_a_hit_ended(make_manager):
    manager = make_manager(9, 4, groups=[FULL, LayerGroup("window", 5)])
    row, *others = manager.add(range(26), keep_at=(8,)), *[manager.add([8], writes=False) for _ in range(2)]
    # Its window passes block 0, which goes as the row goes on; block 1, which stays; and block 2, when no page is free.
    for its, count, done in ((row, 8, ()), (others, [1, 1], others[:1]), (row, 4, ()), (row, 4, ())):
        manager.allocate(its, count)
        manager.confirm()
        manager.free(list(done))
    hit = manager._memory.content.hit_end(np.array([*range(12), 9, 9], np.int32), root_prefix(None))
    assert (hit.num_tokens, hit.confirmed, hit.why) == (8, 12, "not kept")


def test_what_is_still_being_computed_is_said_to_be(make_scheduler):
    scheduler = make_scheduler(40, 2, {"a": ([1, 2, 3, 4, 5], 1), "b": ([1, 2, 3, 4, 5], 1)}, groups=[FULL, STATE])
    scheduler.schedule()
    hit = scheduler.explain("b").layers.hit
    assert (hit.num_tokens, hit.confirmed, hit.found, hit.why) == (0, 0, 4, "pending")
    assert "at 0 tokens: of 4 cached tokens state layers allow 0; what comes next was still being computed." in str(
        scheduler.explain("b")
    )


def test_who_found_nothing_and_who_does_not_look_are_told_apart(make_scheduler, request_of):
    scheduler = make_scheduler(60, 4, groups=[FULL, STATE])
    # Who had the row before found something.
    serve(scheduler, *[request_of(id, range(9), max_tokens=1) for id in ("before", "again")])
    begun(scheduler, request_of("a", 9, max_tokens=5))
    assert " Its hit ended at 0 tokens: nothing of its prompt was cached. " in str(scheduler.explain("a"))
    begun(scheduler, request_of("b", 9, max_tokens=5, reads_cache=False))
    assert "hit" not in scheduler.explain("b").layers.says
    uncached = make_scheduler(60, 4, groups=[FULL, STATE], prefix_caching=False)
    begun(uncached, request_of("c", 9, max_tokens=5))
    assert uncached.explain("c").layers.says == (
        " It holds 3 pages of full layers, 1 page of state layers. It can stand at 9 tokens, and begin again at 0 with what is cached."
    )


@pytest.mark.parametrize(
    ("groups", "restarts"),
    [
        # Of 30 computed tokens the next one's window reaches back to 25, in the block that begins at 24.
        ([FULL, LayerGroup("window", 6)], (29, 30)),
        ([FULL, LayerGroup("chunk", 12)], (24, 30)),
        # A state stands at one length.
        ([FULL, STATE], (30, 30)),
        ([LayerGroup("full", pages=2), LayerGroup("window", 6), STATE], (30, 30)),
    ],
)
def test_a_running_request_is_told_where_it_can_restart(make_scheduler, request_of, groups, restarts):
    scheduler = make_scheduler(200, 4, groups=groups, prefix_caching=False)
    batch = begun(scheduler, request_of("a", 30))
    scheduler.update(batch, [7])
    layers = scheduler.explain("a").layers
    assert (layers.restarts, dict(layers.pages)["full layers"]) == (restarts, 8 * groups[0].pages)
    lengths = " to ".join(map(str, sorted(set(restarts))))
    assert f"It can stand at {lengths} tokens, and begin again at 0 with what is cached." in layers.says


def test_pages_wasted_by_rounding_are_told_of_each_group(make_manager, compute):
    groups = [FULL, LayerGroup("window", 6, pages=2), LayerGroup("state", pages=3), LayerGroup("chunk", 8, pages=4)]
    manager = make_manager(60, 4, groups=groups, prefix_caching=False)
    row = manager.add(list(range(22)))
    manager.allocate([row], [22])
    # Six blocks of each, and no token is computed.
    assert [each.wasted for each in manager.stats().groups] == [6, 6 * 2, 0, 6 * 4]
    manager.confirm()
    # 22 of 24 slots; of 17 to 21, in the blocks from 16 on, 5 of 8 slots; of 16 to 21, 6 of 8.
    assert [each.wasted for each in manager.stats().groups] == [2 / 4, 2 * 3 / 4, 0, 4 * 2 / 4]
    # A fork holds the same blocks.
    child = manager.fork(row)
    assert [each.wasted for each in manager.stats().groups] == [2 / 4, 2 * 3 / 4, 0, 4 * 2 / 4]
    manager.free([row, child])
    assert [each.wasted for each in manager.stats().groups] == [0, 0, 0, 0]


def test_what_a_window_gives_back_on_the_host_is_counted_as_passed(make_manager, compute):
    manager = make_manager(20, 4, groups=[FULL, LayerGroup("window", 4, pages=2)], host_blocks=40, prefix_caching=False)
    row = manager.add(list(range(12)))
    compute(manager, row, 4)
    manager.allocate([row], [8])
    manager.swap_out([row])
    assert (manager.stats().groups[1].passed, manager.host.num_used) == (0, 3 + 3 * 2)
    # Token 12 reads from 9 on: two of three blocks went, of two pages each.
    manager.confirm()
    assert (manager.stats().groups[1].passed, manager.host.num_used) == (2 * 2, 3 + 2)
