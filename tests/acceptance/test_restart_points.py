"""Where prompts can begin, of layers of several kinds: told beside blocks, when the last group's part comes and when the first one goes."""

import numpy as np
import pytest

from paged import Cleared, LayerGroup, RestartPoint, Stored

FULL, WINDOW, STATE = LayerGroup("full"), LayerGroup("window", 12), LayerGroup("state", pages=2)
A = list(range(17))


def points(events):
    """Lengths that were told, and whether a prompt can begin there."""
    return [(event.length, event.is_stored) for event in events if isinstance(event, RestartPoint)]


def there_after(events, there):
    for event in events:
        if isinstance(event, Cleared):
            there.clear()
        elif isinstance(event, RestartPoint):
            assert event.is_stored != ((event.length, event.hash) in there)
            (there.add if event.is_stored else there.discard)((event.length, event.hash))
    return there


def test_full_layers_alone_tell_of_blocks_alone(make_manager, compute):
    manager = make_manager(8, 4, groups=[FULL])
    compute(manager, manager.add(A))
    assert [type(event) for event in manager.take_events(restart_points=True)] == [Stored]


def test_a_prompt_can_begin_where_the_last_group_s_part_came_and_not_where_the_first_went(make_manager, compute):
    manager = make_manager(40, 4, groups=[FULL, STATE])
    row = manager.add(A, keep_at=(8,))
    compute(manager, row, 8)
    # The state after 8 tokens is the row's own, and is overwritten; it is content when the next share was computed.
    assert points(manager.take_events(restart_points=True)) == []
    compute(manager, row, 9)
    events = manager.take_events(restart_points=True)
    assert RestartPoint(manager.block_hashes(row)[1], 8, (FULL, STATE), True) in events and len(points(events)) == 1
    manager.free([row])
    manager.reset_cache()
    assert [type(event) for event in manager.take_events(restart_points=True)] == [Cleared]


@pytest.mark.parametrize("groups", [[FULL, WINDOW], [FULL, STATE], [FULL, WINDOW, STATE], [WINDOW, STATE]])
def test_what_was_told_is_where_lookups_end(make_manager, compute, groups):
    manager = make_manager(44, 4, groups=groups, row_ends=False)
    draw, there, told, hashes = np.random.default_rng(3), set(), [], {}
    for number in range(24):
        prompt = [number % 3, *draw.integers(0, 2, 23).tolist()]
        row = manager.add(prompt)
        while (left := len(prompt) - int(manager.rows.num_computed[row])) > 0:
            compute(manager, row, min(left, int(draw.integers(1, 9))))
            hashes |= {tuple(prompt[: 4 * n]): each for n, each in enumerate(manager.block_hashes(row), 1)}
            events = manager.take_events(restart_points=True)
            told += points(events)
            there_after(events, there)
            for prefix, each in hashes.items():
                found = manager.lookup([*prefix, 99]).num_tokens
                assert (found == len(prefix)) == ((len(prefix), each) in there)
        manager.free([row])
    there_after(manager.take_events(restart_points=True), there)
    late = there_after(manager.events_snapshot(), set())
    assert {is_stored for _, is_stored in told} == {True, False} and late == there
