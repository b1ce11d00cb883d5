"""What sessions leave and show. Blocks have one token, so numbers are blocks and tokens. Which content goes, and when: tests/properties/test_naive_sessions.py."""

import pytest

from paged import LayerGroup
from paged.errors import UnknownSession
from paged.scheduler.sessions import FEWEST, GUESS, PATIENCE, Gaps, Session


def train(desk, waits_for, gap, start):
    """A session "of WAITS_FOR" that has shown enough gaps of this length; it has ended by the time that is returned."""
    now, name = start, f"of {waits_for}"
    for _ in range(FEWEST + 1):
        desk.serve([9], name, now)
        desk.hint("retain", now, session=name, waits_for=waits_for)
        now += gap
    desk.hint("end", now, session=name)
    return now


@pytest.mark.parametrize(("first", "second"), [("tool", "person"), ("person", "tool")])
def test_the_end_of_the_session_whose_next_turn_is_expected_last_goes_first(desk, first, second):
    desk = desk(8)
    now = train(desk, "person", 300.0, train(desk, "tool", 5.0, 0.0))
    for name, waits_for, token in (("a", first, 1), ("b", second, 2)):
        desk.serve([token] * 4, name, now)
        desk.hint("retain", now, session=name, waits_for=waits_for)
    # 5 seconds are expected for a tool and 300 for a person, whichever was used last.
    assert [desk.scheduler.session(name).expected_at - now for name in "ab"] == [
        {"tool": 5.0, "person": 300.0}[each] for each in (first, second)
    ]
    desk.serve([3, 3], now=now)
    kept = {"tool": 4, "person": 2}
    assert (desk.on_device([1] * 4), desk.on_device([2] * 4)) == (kept[first], kept[second])


@pytest.mark.parametrize("waits", [("tool", "person"), ("person", "tool")])
@pytest.mark.parametrize("sides", [[LayerGroup("window", 6)], [LayerGroup("state", pages=3)]])
@pytest.mark.parametrize("has_full", [True, False])
def test_of_sessions_of_several_kinds_of_layers_the_one_expected_last_goes_first_whole(desk, has_full, sides, waits):
    desk = desk(
        90 if has_full else 45, 4, groups=[LayerGroup("full" if has_full else "window", 0 if has_full else 9), *sides]
    )
    now = train(desk, "person", 300.0, train(desk, "tool", 5.0, 0.0))
    turns = {wait: list(range(token, token + 30)) for wait, token in zip(waits, (0, 100), strict=True)}
    for wait, turn in turns.items():
        desk.serve(turn, wait, now)
        desk.hint("retain", now, session=wait, waits_for=wait)
    goes_on = {wait: [*turn, 7, 8, 9] for wait, turn in turns.items()}
    length = desk.manager.lookup(goes_on["tool"]).num_tokens
    assert length == 28 if sides[0].kind == "window" else 30
    others = iter(range(200, 220))
    while desk.manager.lookup(goes_on["person"]).num_tokens:
        assert desk.manager.lookup(goes_on["tool"]).num_tokens == length
        desk.serve([token := next(others)] * 30, f"{token}", now)
        desk.hint("retain", now, session=f"{token}", priority=2)


def test_what_was_kept_too_long_does_not_stand_in_for_what_is_kept(desk):
    desk = desk(10)
    now = train(desk, "person", 300.0, train(desk, "tool", 5.0, 0.0))
    desk.serve([1, 1], "over", now)
    desk.hint("retain", now, session="over", waits_for="person", lasts=1.0)
    for name, waits_for, token in (("soon", "tool", 2), ("late", "person", 3)):
        desk.serve([token] * 4, name, now)
        desk.hint("retain", now, session=name, waits_for=waits_for)
    # Two blocks of the session that is over, and two of the one that waits for a person.
    desk.serve([4] * 4, now=now + 2)
    assert [desk.on_device([token] * 4) for token in (1, 2, 3)] == [0, 4, 2]


def test_a_session_whose_prefix_a_turn_of_another_one_used_goes_first_again_afterwards(desk):
    desk = desk(9, policy="vllm")
    now = train(desk, "person", 300.0, train(desk, "tool", 5.0, 0.0))
    desk.serve([1, 1], "soon", now)
    desk.hint("retain", now, session="soon", waits_for="tool")
    desk.serve([2, 2], "late", now)
    desk.hint("retain", now, session="late", waits_for="person")
    # While the other one lives, what it uses cannot go.
    desk.add([2, 2, 5], now=now, max_tokens=4)
    desk.step(now)
    desk.add([3] * 4, now=now)
    desk.step(now)
    assert (desk.on_device([1, 1]), desk.on_device([2, 2])) == (1, 2)
    desk.run(now)
    # Six blocks are of a lower level.
    desk.serve([6] * 8, now=now)
    assert (desk.on_device([1, 1]), desk.on_device([2, 2])) == (1, 0)


def test_a_session_shows_what_its_last_turn_left_and_when_the_next_one_is_expected(desk):
    desk = desk(8)
    # The session goes on by one block from what another one left.
    desk.serve([1, 1])
    desk.serve([1, 1, 1], "s", now=10.0)
    view = desk.scheduler.session("s")
    assert (view.live, view.blocks, view.device_blocks, view.host_blocks, view.ended_at) == (0, 3, 3, 0, 10.0)
    assert (view.expected_at, view.retained_until) == (10.0 + GUESS, 10.0 + PATIENCE)
    desk.add([1, 1, 1, 1], "s", now=12.0)
    view = desk.scheduler.session("s")
    assert (view.live, view.blocks, view.expected_at) == (1, 3, None)
    desk.run(12.0)
    desk.serve([2], now=12.0 + PATIENCE)
    assert desk.scheduler.session("s").retained_until is None


def test_a_turn_that_is_aborted_leaves_what_the_last_one_left(desk):
    desk = desk(8)
    desk.serve([1, 1], "s")
    id = desk.add([1, 1, 2, 2], "s", max_tokens=3)
    desk.step()
    desk.scheduler.abort(id)
    view = desk.scheduler.session("s")
    assert (view.live, view.blocks) == (0, 2)
    desk.scheduler.abort(id)
    assert desk.scheduler.session("s").live == 0


def test_two_turns_of_a_session_may_live_at_once_and_the_last_one_that_ends_counts(desk):
    desk = desk(8)
    desk.add([1, 1], "s", max_tokens=2)
    desk.add([2, 2, 2], "s")
    assert desk.scheduler.session("s").live == 2
    # It cannot end before they do.
    assert desk.hint("end", session="s").status == "clipped"
    desk.run()
    assert (desk.scheduler.session("s").live, desk.scheduler.session("s").blocks) == (0, 3)


def test_a_request_that_never_fits_begins_no_session(desk):
    desk = desk(4)
    with pytest.raises(Exception, match="needs 6 blocks"):
        desk.add([1] * 5, "s")
    with pytest.raises(UnknownSession) as error:
        desk.scheduler.session("s")
    assert error.value.session_id == "s"


def test_sessions_are_listed_those_whose_turns_ended_last_first(desk):
    desk = desk(8)
    for number, name in enumerate(["a", "b", "c", "a"]):
        desk.serve([number], name, now=float(number))
    assert [view.id for view in desk.scheduler.sessions(2)] == ["a", "c"]
    assert desk.scheduler.sessions(0) == []


def test_of_sessions_the_latest_are_remembered_and_what_the_others_left_goes_next(desk, monkeypatch):
    monkeypatch.setattr("paged.scheduler.sessions.REMEMBERED", 2)
    desk = desk(10)
    for token, name in enumerate([None, "a", "b", "c"]):
        desk.serve([token] * 2, name)
    assert [view.id for view in desk.scheduler.sessions(9)] == ["c", "b"]
    desk.serve([9] * 3)
    assert [desk.on_device([token] * 2) for token in range(4)] == [2, 1, 2, 2]


def test_the_pace_of_a_session_is_what_it_has_shown(desk):
    desk, now = desk(40), 0.0
    for gap, token, turns in ((2.0, 1, 3 * FEWEST), (40.0, 2, FEWEST + 2)):
        for _ in range(turns):
            desk.serve([token] * 4, f"of {gap}", now)
            now += gap
    for gap, token in ((2.0, 1), (40.0, 2)):
        desk.serve([token] * 4, f"of {gap}", now)
    # Of all gaps most are short.
    assert [desk.scheduler.session(f"of {gap}").expected_at - now for gap in (2.0, 40.0)] == [2.0, 40.0]


def test_gaps_are_guessed_from_those_of_their_kind_that_were_longer():
    gaps, kind = Gaps(), ("tool", 0, 3)
    assert (gaps.left(kind, 0.0), gaps.left(kind, 100.0)) == (GUESS, 100.0)
    for gap in range(1, 2 * FEWEST + 1):
        gaps.note(kind, float(gap))
    # Of 1 to 16: the median of all, and of the nine that are longer than 7.
    assert (gaps.left(kind, 0.0), gaps.left(kind, 7.0)) == (FEWEST + 1.0, 12.0 - 7.0)
    # Another pace of the same kind is guessed from all; another kind from nothing.
    assert gaps.left(("tool", 0, 5), 0.0) == FEWEST + 1.0
    assert gaps.left(("person", 0, 3), 0.0) == GUESS
    # A pace with enough gaps of its own is guessed from these alone, the quickest, too.
    for _ in range(FEWEST):
        gaps.note(("tool", 0, 1), 100.0)
    assert gaps.left(("tool", 0, 1), 0.0) == 100.0


def test_a_turn_is_expected_until_98_of_100_gaps_are_over_and_for_half_an_hour():
    gaps = Gaps()
    for number in range(1, 101):
        gaps.note(("tool", 0, 3), 100.0 * number)
    assert [gaps.latest((waits_for, 5, 5)) for waits_for in ("tool", "person")] == [9900.0, PATIENCE]


def test_outputs_are_classes_of_double_length():
    session, classes = Session("s"), []
    for session.num_output in (0, 127, 128, 255, 256, 10**6):
        classes.append(session.kind[1])
    assert classes == [0, 0, 1, 1, 2, 5]


def test_gaps_that_are_long_ago_are_forgotten():
    gaps, kind = Gaps(), ("tool", 0, 3)
    for number in range(3000):
        gaps.note(kind, 5.0 if number < 2000 else 7.0)
    assert gaps.left(kind, 0.0) == 7.0
