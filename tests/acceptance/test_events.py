"""What the cache stored and removed, for whoever keeps an index of it: replayed from empty, it is exactly what the cache holds."""

import hashlib

import numpy as np
import pytest

from paged import Cleared, LayerGroup, RestartPoint, Stored

A, B = list(range(8)), list(range(100, 108))
HYBRID = [LayerGroup("full"), LayerGroup("state", pages=2)]


def replay(events, contents=None):
    """(tier, hash) of all that is there after the events."""
    contents = set() if contents is None else contents
    for event in events:
        if isinstance(event, Cleared):
            contents.clear()
        elif isinstance(event, Stored):
            contents |= {(event.tier, key) for key in event.hashes}
        else:
            contents -= {(event.tier, key) for key in event.hashes}
    return contents


def test_a_reading_that_fails_half_way_is_made_again_whole(make_manager, serve, monkeypatch):
    manager = make_manager(8, 4)
    manager.take_events()
    serve(manager, A)
    serve(manager, B)
    made, calls = np.frombuffer, []

    def failing(*given):
        calls.append(given)
        if len(calls) == 2:
            raise MemoryError
        return made(*given)

    with monkeypatch.context() as patch:
        patch.setattr(np, "frombuffer", failing)
        with pytest.raises(MemoryError):
            manager.take_events()
    assert len(replay(manager.take_events())) == 4


def test_a_computed_prompt_is_stored_with_its_tokens_parent_and_hashes(make_manager, serve):
    manager = make_manager(4, 4)
    serve(manager, A)
    (event,) = manager.take_events()
    root = hashlib.sha256(event.namespace).digest()
    first = hashlib.sha256(root + np.array(A[:4], np.int32).tobytes()).digest()
    second = hashlib.sha256(first + np.array(A[4:], np.int32).tobytes()).digest()
    assert isinstance(event, Stored)
    assert (event.tier, event.hashes, event.parent, event.tokens.tolist()) == ("device", (first, second), None, A)
    assert manager.take_events() == []


def test_events_that_are_read_late_say_what_they_said_when_they_were_taken(make_manager, serve):
    readers = []
    for reads_at_once in (True, False):
        manager = make_manager(6, 4, host_blocks=2, host_caching=True)
        taken = []
        for tokens in (A, [*A, *B], B, [*B, *A], [7] * 9):
            serve(manager, tokens)
            taken.append(manager.take_events())
            if reads_at_once:
                len(taken[-1])
        readers.append([[(type(event), event.tier, event.hashes) for event in events] for events in taken])
    assert readers[0] == readers[1]
    assert sum(map(len, readers[0])) > 8


def test_what_the_host_forgets_of_a_row_that_still_runs_is_told(make_manager, compute):
    manager = make_manager(6, 4, host_blocks=2)
    first = manager.add(A[:4])
    compute(manager, first)
    second = manager.add([*A[:4], 50])
    manager.swap_out([second])
    manager.free([second])
    told = list(manager.take_events())
    assert ("host", manager.block_hashes(first)[0]) in replay(told)
    other = manager.add(B)
    compute(manager, other)
    manager.swap_out([other])
    contents = replay(manager.take_events(), replay(told))
    assert ("host", manager.block_hashes(first)[0]) not in contents
    manager.free([first, other])


def points(events):
    """Lengths that were told, and whether a prompt can begin there."""
    return [(event.length, event.is_stored) for event in events if isinstance(event, RestartPoint)]


def test_full_layers_alone_tell_of_blocks_alone(make_manager, compute):
    manager = make_manager(8, 4, groups=HYBRID[:1])
    compute(manager, manager.add(range(17)))
    assert [type(event) for event in manager.take_events(restart_points=True)] == [Stored]


def test_a_prompt_can_begin_where_the_last_group_s_part_came_and_not_where_the_first_went(make_manager, compute):
    manager = make_manager(40, 4, groups=HYBRID)
    row = manager.add(range(17), keep_at=(8,))
    compute(manager, row, 8)
    # The state after 8 tokens is the row's own, and is overwritten; it is content when the next share was computed.
    assert points(manager.take_events(restart_points=True)) == []
    compute(manager, row, 9)
    events = manager.take_events(restart_points=True)
    assert RestartPoint(manager.block_hashes(row)[1], 8, tuple(HYBRID), True) in events and len(points(events)) == 1
    manager.free([row])
    manager.reset_cache()
    assert [type(event) for event in manager.take_events(restart_points=True)] == [Cleared]


def test_where_prompts_can_begin_is_told_to_those_who_ask_counted_from_the_root(make_manager, compute):
    manager = make_manager(60, 4, groups=HYBRID)
    rows = [manager.add(range(17), keep_at=(8,))]
    compute(manager, rows[0], 8)
    compute(manager, rows[0], 9)
    assert points(manager.take_events()) == []
    assert points(manager.take_events(restart_points=True)) == [(8, True)]
    rows.append(manager.add([*range(8), *range(90, 99)]))
    compute(manager, rows[1], 8)
    compute(manager, rows[1], 1)
    assert points(manager.take_events()) == [(16, True)]
    manager.free(rows)
