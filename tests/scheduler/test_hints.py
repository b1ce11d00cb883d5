"""Hints: what each is answered, and what becomes of content. Blocks have one token, so numbers are blocks and tokens."""

import math

import pytest

from paged import Hint, LayerGroup, Retention
from paged.errors import NeverFits

from ..shown import assert_refused, shown_in  # noqa: TID252


def said(outcome):
    return outcome.status, outcome.num_tokens


def test_a_higher_priority_goes_after_a_lower_one_and_a_time_ends_it(desk):
    desk = desk(6)
    for token, priority, lasts in ((1, 2, 10.0), (2, 1, None)):
        desk.serve([token] * 3)
        assert said(desk.hint("retain", tokens=[token] * 3, priority=priority, lasts=lasts)) == ("accepted", 3)
    desk.serve([3, 3], now=9.0)
    assert (desk.on_device([1] * 3), desk.on_device([2] * 3)) == (3, 1)
    # From 10 on the first one is as any other.
    desk.serve([4] * 5, now=10.0)
    assert (desk.on_device([1] * 3), desk.on_device([2] * 3)) == (0, 1)


def test_what_is_demoted_goes_first_whatever_retained_it(desk):
    desk = desk(6)
    desk.serve([1, 1])
    desk.serve([1, 1, 1], "s")
    desk.hint("retain", session="s", priority=3)
    desk.serve([2, 2, 2])
    assert said(desk.hint("demote", tokens=[1, 1, 1])) == ("accepted", 3)
    desk.serve([3, 3])
    assert (desk.on_device([1] * 3), desk.on_device([2] * 3)) == (1, 3)


def test_only_the_end_that_nothing_goes_on_behind_is_demoted(desk):
    desk = desk(8)
    desk.serve([1, 1, 1, 2])
    desk.serve([1, 1, 3, 3])
    assert said(desk.hint("demote", tokens=[1, 1, 1, 2])) == ("accepted", 2)
    assert said(desk.hint("demote", tokens=[1, 1])) == ("rejected", 0)
    desk.serve([4] * 4)
    assert (desk.on_device([1, 1, 1, 2]), desk.on_device([1, 1, 3, 3])) == (2, 4)
    # Nor is what a request holds.
    desk.add([5, 5], max_tokens=3)
    desk.step()
    assert said(desk.hint("demote", tokens=[5, 5])) == ("rejected", 0)


def test_what_comes_before_an_end_that_is_demoted_stays_retained(desk):
    desk = desk(6)
    desk.serve([1, 1, 1, 2])
    desk.hint("retain", tokens=[1, 1, 1, 2])
    desk.serve([1, 1, 3])
    assert said(desk.hint("demote", tokens=[1, 1, 1, 2])) == ("accepted", 2)
    desk.serve([4] * 4)
    desk.serve([5] * 2)
    assert (desk.on_device([1, 1, 1, 2]), desk.on_device([4] * 4)) == (2, 2)


def test_what_is_said_of_a_live_request_is_done_when_it_finishes(desk):
    desk = desk(6)
    id = desk.add([1, 1, 1])
    assert desk.hint("retain", request=id, priority=2).status == "deferred"
    desk.run()
    desk.serve([2, 2, 2])
    desk.serve([3, 3, 3])
    assert desk.on_device([1, 1, 1]) == 3
    assert desk.hint("retain", request=id).status == "missing"


def test_what_is_said_of_a_live_turn_of_a_session_counts_from_its_end(desk):
    desk = desk(6)
    desk.add([1, 1, 1], "s")
    assert desk.hint("retain", session="s", priority=2, lasts=5.0, waits_for="tool").status == "deferred"
    desk.run(now=3.0)
    view = desk.scheduler.session("s")
    assert (view.waits_for, view.priority, view.retained_until) == ("tool", 2, 8.0)


def test_a_copy_on_the_host_that_is_demoted_does_not_take_what_the_device_keeps_for_those_behind_it(desk):
    desk = desk(6, host_blocks=8)
    desk.serve([1, 1], "s")
    desk.serve([2] * 5, writes_cache=False)
    desk.serve([1, 1, 3, 3], "s")
    assert desk.on_device([1, 1, 3, 3]) == 4
    # On the device a request holds all of it; the host has the second token's block alone.
    id = desk.add([1, 1, 3, 3], max_tokens=2)
    desk.step()
    assert desk.hint("demote", session="s").status == "rejected"
    desk.scheduler.abort(id)
    desk.serve([4] * 4)
    assert desk.on_device([1, 1, 3, 3]) == 2


def test_what_the_host_has_behind_a_lost_block_is_nothing_of_a_session(desk):
    desk = desk(4, host_blocks=1)
    desk.serve([1, 1])
    desk.serve([1, 1, 2], "s")
    # The host has room for the last block alone, and the one before it is lost.
    desk.serve([3] * 3)
    view = desk.scheduler.session("s")
    assert (view.blocks, view.device_blocks, view.host_blocks, desk.manager.host.num_cached) == (3, 1, 0, 1)


def test_what_neither_tier_has_behind_what_the_host_has_is_nothing_of_a_session(desk):
    desk = desk(4, host_blocks=1)
    desk.serve([1, 1])
    desk.serve([1, 1, 2], "s")
    desk.hint("retain", session="s", lasts=1.0)
    desk.serve([3] * 2, now=2.0)
    desk.serve([4], now=3.0)
    assert (desk.scheduler.session("s").device_blocks, desk.scheduler.session("s").host_blocks) == (1, 1)


def test_what_is_pinned_is_never_evicted_and_counts_as_used_until_it_is_unpinned(desk):
    desk = desk(8, max_pinned=3)
    desk.serve([1] * 3)
    assert said(desk.hint("pin", tokens=[1] * 3)) == ("accepted", 3)
    for token in range(2, 9):
        desk.serve([token] * 4)
    assert (desk.on_device([1] * 3), desk.manager.device.num_used) == (3, 3)
    assert not desk.manager.reset_cache()
    assert said(desk.hint("unpin", tokens=[1] * 3)) == ("accepted", 3)
    assert desk.manager.device.num_used == 0
    # The last block goes first.
    desk.serve([8] * 4)
    desk.serve([9] * 2)
    assert desk.on_device([1] * 3) == 2


def test_a_pin_ends_when_its_time_is_over(desk):
    desk = desk(8, max_pinned=3)
    desk.serve([1] * 3, "s")
    desk.hint("pin", now=1.0, session="s", lasts=4.0)
    assert desk.scheduler.session("s").pinned_blocks == 3
    desk.serve([2], now=4.9)
    assert desk.manager.device.num_used == 3
    desk.serve([3], now=5.0)
    assert (desk.manager.device.num_used, desk.scheduler.session("s").pinned_blocks) == (0, 0)


@pytest.mark.parametrize(
    ("caps", "status"),
    [({"max_pinned": 4}, "rejected"), ({"max_pinned": 6, "max_pinned_per_tenant": 3}, "accepted")],
    ids=["of all", "of a tenant"],
)
def test_a_pin_over_a_cap_is_refused_with_numbers_and_changes_nothing(desk, caps, status):
    desk = desk(13, **caps)
    for token in (1, 2, 3):
        desk.serve([token] * 3)
    desk.hint("pin", tokens=[1] * 3, tenant="a")
    outcome = desk.hint("pin", tokens=[2] * 3, tenant="a")
    assert said(outcome) == ("rejected", 0)
    name, most = list(caps.items())[-1]
    assert outcome.reason == f"3 blocks beside 3 pinned ones exceed {name} ({most})."
    assert desk.manager.device.num_used == 3
    assert desk.hint("pin", tokens=[3] * 3, tenant="b").status == status


def test_a_pin_that_is_made_anew_takes_the_place_of_the_old_one(desk):
    desk = desk(10, max_pinned=4)
    desk.serve([1, 1], "s")
    desk.hint("pin", session="s")
    desk.serve([1, 1, 2, 2], "s")
    assert said(desk.hint("pin", session="s")) == ("accepted", 4)
    assert (desk.scheduler.session("s").pinned_blocks, desk.manager.device.num_used) == (4, 4)
    desk.hint("end", session="s")
    assert desk.manager.device.num_used == 0


def test_a_pin_of_a_live_request_holds_what_it_leaves_until_it_is_unpinned_by_that_id(desk):
    desk = desk(8, max_pinned=3)
    id = desk.add([1, 1, 1])
    # It can be taken back while it waits, too.
    statuses = [desk.hint(action, request=id).status for action in ("pin", "unpin", "unpin", "pin")]
    assert statuses == ["deferred", "accepted", "missing", "deferred"]
    desk.run()
    assert desk.manager.device.num_used == 3
    assert said(desk.hint("unpin", request=id)) == ("accepted", 3)
    assert desk.manager.device.num_used == 0


def test_content_of_several_pins_stays_until_the_last_one_ends(desk):
    desk = desk(12, max_pinned=8)
    desk.serve([1, 1, 1], "s")
    session, a, b = {"session": "s"}, {"tokens": [1, 1, 1], "tenant": "a"}, {"tokens": [1, 1], "tenant": "b"}
    for what, num in ((session, 3), (a, 3), (b, 2)):
        assert said(desk.hint("pin", **what)) == ("accepted", num)
    assert desk.hint("unpin", **{**a, "tenant": "c"}).status == "missing"
    left = []
    for what in (session, a, b):
        assert desk.hint("unpin", **what).status == "accepted"
        left.append(desk.manager.device.num_used)
    assert left == [3, 2, 0]


def test_a_prompt_that_is_retained_often_is_retained_once(desk):
    desk = desk(8)
    desk.serve([1, 1, 1])
    for priority in (3, 2, 1):
        desk.hint("retain", tokens=[1, 1, 1], priority=priority)
    [run] = desk.manager._memory.index.runs.values()
    assert list(run.retained.values()) == [([(0, 0, 3)], 1)]


def test_what_may_be_pinned_counts_as_taken_from_the_start(desk):
    desk = desk(8, max_pinned=3)
    desk.serve([1] * 4)
    with pytest.raises(NeverFits) as error:
        desk.add([1] * 5)
    assert (error.value.blocks_needed, error.value.num_blocks) == (6, 5)
    assert "the pool has 5 without 3 that may be pinned. Raise num_blocks to 9" in str(error.value)


def test_what_is_reserved_for_later_leaves_out_what_may_still_be_pinned(desk):
    desk = desk(8, max_pinned=2, policy="trtllm-guaranteed-no-evict")
    desk.serve([1, 1])
    for token in (2, 3):
        desk.add([token] * 2, max_tokens=2, id=str(token))
    desk.step()
    # Each becomes four blocks: eight are free, of which a pin may take two.
    assert (desk.scheduler.status("2"), desk.scheduler.status("3")) == ("running", "waiting")
    assert "it needs 4 blocks; 2 are free" in desk.scheduler.explain("3").reason
    assert desk.hint("pin", tokens=[1, 1]).status == "accepted"
    desk.run()
    for token in (4, 5):
        desk.add([token], max_tokens=2, id=str(token))
    desk.step()
    # What is pinned already is not left out twice.
    assert (desk.scheduler.status("4"), desk.scheduler.status("5")) == ("running", "running")
    desk.run()
    assert (desk.scheduler.stats().preemptions_recompute, desk.on_device([1, 1])) == (0, 2)


def test_a_session_whose_content_was_reset_has_nothing_left_and_takes_hints(desk):
    desk = desk(8, max_pinned=2)
    desk.serve([1, 1], "s")
    assert desk.manager.reset_cache()
    view = desk.scheduler.session("s")
    assert (view.blocks, view.device_blocks) == (2, 0)
    assert [desk.hint(action, session="s").status for action in ("pin", "demote", "prefetch")] == ["missing"] * 3
    assert said(desk.hint("retain", session="s")) == ("clipped", 0)
    desk.serve([1, 1], "s")
    assert desk.scheduler.session("s").device_blocks == 2


def test_what_only_the_host_has_is_brought_to_free_blocks_of_the_device(desk):
    desk = desk(6, host_blocks=8)
    desk.serve([1] * 4, "s")
    desk.serve([2] * 4, writes_cache=False)
    assert (desk.on_device([1] * 4), desk.on_host([1] * 4)) == (2, 2)
    assert not desk.scheduler.has_unfinished
    assert said(desk.hint("prefetch", session="s")) == ("accepted", 4)
    assert desk.scheduler.has_unfinished
    moves = desk.step().moves
    assert len(moves.host_to_device) == 2 and desk.on_device([1] * 4) == 4
    assert not desk.scheduler.has_unfinished
    # It goes before what comes before it.
    desk.serve([3] * 4)
    assert (desk.on_device([1] * 4), desk.on_host([1] * 4)) == (2, 2)


def test_a_prefetch_evicts_nothing(desk):
    desk = desk(6, host_blocks=8)
    desk.serve([1] * 4)
    desk.serve([2] * 4)
    outcome = desk.hint("prefetch", tokens=[1] * 4)
    assert outcome.status == "rejected" and "no block of the device is free" in outcome.reason
    desk.step()
    assert desk.on_device([2] * 4) == 4


def test_a_prefetch_takes_as_much_as_is_free_when_its_step_comes(desk):
    desk = desk(6, host_blocks=8)
    desk.serve([1] * 4)
    desk.serve([2] * 5, writes_cache=False)
    assert (desk.on_device([1] * 4), desk.on_host([1] * 4)) == (1, 3)
    desk.hint("prefetch", tokens=[1] * 4)
    # Others come first, and leave it one block.
    desk.add([3] * 4)
    desk.step()
    assert desk.on_device([1] * 4) == 2


def test_the_prompt_of_a_waiting_request_is_prefetched(desk):
    desk = desk(6, host_blocks=8)
    desk.serve([1] * 4)
    desk.serve([2] * 4, writes_cache=False)
    id = desk.add([1] * 5)
    assert said(desk.hint("prefetch", request=id)) == ("clipped", 4)
    desk.run()
    assert desk.on_device([1] * 5) == 5


def test_one_step_brings_all_that_was_to_be_prefetched(desk):
    desk = desk(6, host_blocks=8)
    for token in (1, 2):
        desk.serve([token] * 2)
    desk.serve([3] * 5, writes_cache=False)
    for token in (1, 2):
        desk.hint("prefetch", tokens=[token] * 2)
    desk.step()
    assert (desk.on_device([1] * 2), desk.on_device([2] * 2)) == (2, 2)


FULL, WINDOW, STATE = LayerGroup("full"), LayerGroup("window", 6), LayerGroup("state", pages=3)
SEVERAL = pytest.mark.parametrize(
    "groups", [(FULL, WINDOW), (FULL, STATE), (WINDOW, STATE), (LayerGroup("full", pages=2), WINDOW, STATE)]
)


def found(desk, prompt):
    """Tokens of a prompt that a request would find on the device, and on the host beside them."""
    hit = desk.manager.lookup(prompt)
    return hit.num_tokens, hit.host_tokens


@SEVERAL
def test_what_is_pinned_of_layers_of_several_kinds_is_found_whole_however_much_comes_after_it(desk, groups):
    desk = desk(100, 4, groups=groups, max_pinned=60)
    turn = list(range(30))
    desk.serve(turn, "s")
    # Where there are states, a prompt begins where the turn ended, within a block.
    before = found(desk, [*turn, 7, 8, 9])
    assert before == (30 if STATE in groups else 28, 0)
    assert said(desk.hint("pin", session="s")) == ("accepted", 28)
    assert desk.manager.device.num_used == desk.scheduler.num_pinned > 4
    for token in range(100, 112):
        desk.serve([token] * 40)
    assert found(desk, [*turn, 7, 8, 9]) == before
    desk.serve([*turn, 7, 8, 9], "s")
    assert said(desk.hint("unpin", session="s")) == ("accepted", 28)
    assert desk.manager.device.num_used == 0


def test_what_is_unpinned_goes_windows_and_states_first_and_then_last_blocks_first(desk):
    desk = desk(40, 4, groups=(FULL, WINDOW, STATE), max_pinned=12)
    turn = list(range(14))
    desk.serve(turn, "s")
    # Full blocks, a window and a state: the end of the row counts only where the session is named.
    for what, num_pages in (({"tokens": turn}, 3 + 2 + 3), ({"session": "s"}, 4 + 3 + 3)):
        desk.hint("pin", **what)
        assert desk.scheduler.num_pinned == num_pages
        desk.hint("unpin", **what)
    for token in (8, 9):
        desk.add([token] * (9 + token), writes_cache=False, max_tokens=60)
    full, left = 4, set()
    while full > 2:
        desk.step()
        full, *others = [each.cached for each in desk.manager.stats().groups]
        left.add((full, any(others)))
    assert left == {(4, True), (4, False), (3, False), (2, False)}


def test_a_window_that_a_running_request_will_pass_stays_where_it_is_pinned(desk):
    desk = desk(60, 4, groups=(FULL, WINDOW), max_pinned=20)
    known = [1, 2, 3, 4] + [0] * 24
    desk.add(known[:4], max_tokens=60)
    for _ in range(26):
        desk.step()
    # As far as it has come is where no prompt is known to begin: what the window passes is free.
    assert said(desk.hint("pin", tokens=known)) == ("accepted", 28)
    for token in range(100, 104):
        desk.add([token] * 20, max_tokens=20)
    desk.run()
    assert found(desk, [*known, 1]) == (28, 0)


@SEVERAL
def test_what_the_host_has_of_layers_of_several_kinds_is_brought_to_free_pages(desk, groups):
    desk = desk(26 if groups[0] is WINDOW else 40, 4, host_blocks=200, groups=groups)
    turn = list(range(30))
    desk.serve(turn, "s")
    length, _ = found(desk, [*turn, 7, 8, 9])
    for token in range(100, 108):
        desk.add([token] * 20, writes_cache=False, max_tokens=10)
    desk.run()
    here, there = found(desk, [*turn, 7, 8, 9])
    assert here < length == here + there
    assert said(desk.hint("prefetch", session="s")) == ("accepted", 28)
    assert len(desk.step().moves.host_to_device)
    assert found(desk, [*turn, 7, 8, 9]) == (length, 0)
    desk.serve([*turn, 7, 8, 9], "s")
    assert desk.scheduler.stats().hit_tokens == length


@SEVERAL
@pytest.mark.parametrize("host_blocks", [0, 200])
def test_what_is_demoted_of_layers_of_several_kinds_goes_before_what_is_older(desk, groups, host_blocks):
    desk = desk(90, 4, host_blocks=host_blocks, groups=groups)
    older, demoted = list(range(100, 130)), list(range(30))
    for turn, session in ((older, "o"), (demoted[:14], "s"), (demoted, "s")):
        desk.serve(turn, session)
    length, _ = found(desk, [*demoted, 7, 8, 9])
    assert desk.hint("retain", session="s", priority=2).status == "accepted"
    assert desk.hint("demote", session="s").status == "accepted"
    # Fresh ones fill what is free, and then take of what was demoted alone.
    fresh = 200
    while sum(found(desk, [*demoted, 7, 8, 9])) == length and not desk.manager.stats().offloaded_blocks:
        desk.serve([fresh] * 8)
        fresh += 1
    assert found(desk, [*older, 7, 8, 9]) == (length, 0)
    if host_blocks:
        # All of it comes to the host, windows and states, too.
        for token in range(300, 310):
            desk.serve([token] * 20)
        assert found(desk, [*demoted, 7, 8, 9]) == (0, length)


def test_the_end_of_a_row_that_its_request_retained_is_not_retained_once_it_is_demoted(desk):
    desk = desk(60, 4, groups=(FULL, STATE))
    desk.serve(list(range(30)), retention=Retention(priority=2))
    (end,) = desk.manager._memory.index.ends.values()
    assert list(end.retained.values()) == [([(0, 0, 1), (1, 0, 1)], 2)]
    desk.hint("demote", tokens=list(range(30)))
    assert end.retained == {}


def test_of_a_session_that_is_retained_the_states_of_earlier_turns_go_before_other_content(desk):
    desk = desk(300, 4, groups=(FULL, STATE))
    said_so_far = []
    for turn in range(12):
        said_so_far += [turn] * 11
        desk.serve(said_so_far, "s")
        desk.hint("retain", session="s", priority=2)
        said_so_far += [0]
    other, goes_on = [500] * 40, [*said_so_far, 7, 8, 9]
    desk.serve(other)
    assert desk.manager.stats().groups[1].cached > 60
    desk.add([9] * 3, writes_cache=False, max_tokens=5000)
    while desk.on_device(other) == 40:
        assert desk.step().seq_lens.any()
        assert desk.manager.lookup(goes_on).num_tokens == 143
    # Of its own, and one of the other content.
    assert desk.manager.stats().groups[1].cached <= 6


@SEVERAL
@pytest.mark.parametrize("outputs", [12, 13])
def test_what_a_prompt_ended_with_is_retained_beside_what_its_answer_did(desk, groups, outputs):
    # Of the first answers all are whole blocks: there no end of a row is kept.
    desk = desk(200, 4, groups=groups)
    prompt = list(range(41))
    desk.serve(prompt, "s", max_tokens=outputs)
    answered = desk.scheduler.session("s").blocks * 4
    for token in range(100, 126):
        desk.serve([token] * 41)
    assert [found(desk, [*prompt, *more, 99])[0] // 4 * 4 for more in ([98], [0] * outputs)] == [40, answered]


@pytest.mark.parametrize("session", [None, "s"])
def test_a_prompt_of_which_only_a_part_is_left_is_found_up_to_the_last_even_restart_in_it(desk, session, monkeypatch):
    # A state takes as much as a block, so one is kept after every 16 of them.
    monkeypatch.setattr("paged.block_manager.layout.LEAST_DISTANCE", 1)
    desk, prompt, left = desk(64, 1, groups=(FULL, LayerGroup("state"))), list(range(40)), []
    desk.serve(prompt, session)
    # What a prompt takes again counts as used, all of its even restarts with it.
    desk.serve([99] * 9, session and "other")
    desk.serve([*prompt, 41], session)
    for token in range(100, 105):
        desk.serve([token] * 9, session and str(token))
        left.append((desk.on_device([*prompt, 41]), found(desk, [*prompt, 41, 42])[0]))
    assert [hit for _, hit in left] == [max(end for end in (0, 16, 32, 41) if end <= num) for num, _ in left]
    assert {hit for _, hit in left} == {0, 16, 32, 41}


def test_what_a_live_turn_keeps_of_its_prompt_goes_no_sooner_than_what_other_sessions_left(desk):
    desk = desk(120, 4, groups=(FULL, STATE))
    for token in (100, 200):
        desk.serve([token] * 80, f"{token}")
    prompt = [1] * 41
    desk.add(prompt, "live", max_tokens=300)
    desk.add([9] * 9, writes_cache=False, max_tokens=300)
    desk.step()
    desk.step()
    while desk.on_device([100] * 80):
        desk.step()
        assert found(desk, [*prompt[:40], 7]) == (40, 0)


@pytest.mark.parametrize(("call", "shown"), shown_in("scheduler/refused_hints.txt", ">>>"))
def test_a_wrong_hint_is_refused_by_name_and_changes_nothing(desk, call, shown):
    served = desk(4)
    served.serve([1, 1], "s")
    before = served.scheduler.session("s")
    assert_refused(call, shown, {"desk": desk, "served": served, "Hint": Hint, "math": math, "several": (FULL, WINDOW)})
    assert served.scheduler.session("s") == before


def test_hints_of_what_is_unknown_are_missing(desk):
    desk = desk(4)
    assert [desk.hint(action, session="s").status for action in ("retain", "pin", "unpin", "end")] == ["missing"] * 4
    assert desk.hint("pin", tokens=[1, 1]).status == "missing"


def test_what_a_tenant_left_over_its_quota_goes_first_its_oldest_first_and_no_more_of_it(desk):
    desk = desk(10, max_cached_per_tenant=4)
    for token, tenant in ((2, "b"), (1, "a"), (3, "a")):
        desk.serve([token] * 3, tenant=tenant)
    # Of the six blocks of "a" two are over, and its third one is as any other.
    desk.serve([4] * 3, tenant="c")
    assert [desk.on_device([token] * 3) for token in (1, 2, 3)] == [1, 3, 3]
    desk.serve([5] * 2, tenant="d")
    assert [desk.on_device([token] * 3) for token in (1, 2, 3)] == [1, 1, 3]


def test_of_as_many_prompts_as_a_tenant_may_leave_blocks_the_oldest_goes_first(desk):
    desk = desk(10, max_cached_per_tenant=4)
    for token in range(5):
        desk.serve([token], tenant="a")
    desk.serve([9] * 6)
    assert [desk.on_device([token]) for token in range(5)] == [0, 1, 1, 1, 1]


def brought(desk, tokens, first=0):
    """How many blocks came, and what was to be filled: (start, number of blocks) of each call."""
    filled = []
    num = desk.scheduler.bring(
        Hint(action="prefetch", tokens=tokens), first, lambda start, blocks: filled.append((start, len(set(blocks))))
    )
    return num, filled


def test_what_is_brought_from_elsewhere_is_found_and_counts_for_nothing(desk):
    desk = desk(8, 2)
    assert brought(desk, [1, 2, 3, 4, 5]) == (2, [(0, 2)])
    assert (desk.manager.stats().queries, desk.manager.stats().hit_tokens, desk.manager.device.num_used) == (0, 0, 0)
    desk.serve([1, 2, 3, 4, 5])
    assert desk.scheduler.stats().hit_tokens == 4


def test_it_goes_on_behind_what_the_device_has_or_does_not_come(desk):
    desk = desk(8)
    desk.serve([1, 2, 3])
    assert brought(desk, [1, 2, 3, 4, 5], 3) == (2, [(0, 2)])
    assert desk.on_device([1, 2, 3, 4, 5]) == 5
    assert brought(desk, [6, 7, 8], 1) == (0, [])
    # What has come meanwhile is not written again, but for the last one, which is let go.
    assert brought(desk, [1, 2, 3, 4, 5], 3) == (2, [(1, 1)])
    assert desk.manager.device.num_free == 3


def test_it_takes_free_blocks_alone_and_a_request_that_needs_them_gets_them(desk):
    desk = desk(6)
    desk.serve([1] * 4)
    assert brought(desk, [2] * 4) == (2, [(0, 2)])
    assert (desk.on_device([1] * 4), desk.on_device([2] * 4)) == (4, 2)
    assert brought(desk, [3]) == (0, [])
    desk.serve([4] * 5)
    assert desk.on_device([4] * 5) == 5


def test_nothing_is_brought_while_a_batch_that_may_write_to_free_blocks_is_out_or_copies_wait(desk):
    desk = desk(6)
    id = desk.add([1] * 4, writes_cache=False)
    batch = desk.scheduler.schedule()
    desk.scheduler.abort(id)
    assert desk.manager.device.num_free == 6
    assert brought(desk, [2] * 4) == (None, [])
    desk.scheduler.update(batch, [0])
    assert brought(desk, [2] * 4) == (4, [(0, 4)])


def test_content_on_the_host_comes_first_and_is_not_loaded_for_what_is_brought(desk):
    desk = desk(6, host_blocks=8)
    desk.serve([1] * 4)
    desk.serve([2] * 5, writes_cache=False)
    assert (desk.on_device([1] * 4), desk.on_host([1] * 4)) == (1, 3)
    assert brought(desk, [1] * 5, 4) == (0, [])
    desk.hint("prefetch", tokens=[1] * 4)
    assert brought(desk, [1] * 5, 4) == (None, [])
    desk.step()
    assert brought(desk, [1] * 5, 4) == (1, [(0, 1)])
    assert (desk.on_device([1] * 5), desk.manager.stats().loaded_blocks) == (5, 3)


def test_a_fork_that_lets_content_come_from_the_host_lets_none_come_for_what_is_brought(desk):
    desk = desk(8, host_blocks=8)
    desk.serve([1] * 4)
    desk.serve([2] * 7, writes_cache=False)
    id = desk.add([3, 3], max_tokens=4)
    desk.step()
    desk.scheduler.fork(id)
    assert (desk.on_device([1] * 4), desk.on_host([1] * 4)) == (1, 3)
    assert brought(desk, [1] * 5, 4) == (0, [])
    desk.run()


def test_a_write_that_fails_leaves_nothing(desk):
    desk = desk(6)
    with pytest.raises(ZeroDivisionError):
        desk.scheduler.bring(Hint(action="prefetch", tokens=[1, 2]), 0, lambda start, blocks: 1 / 0)
    assert (desk.on_device([1, 2]), desk.manager.device.num_free) == (0, 6)


def test_nothing_is_brought_or_prefetched_while_copies_of_a_cancelled_batch_wait(desk):
    desk = desk(6, host_blocks=8)
    desk.serve([1] * 4)
    desk.serve([2] * 5, writes_cache=False)
    id = desk.add([1] * 3)
    batch = desk.scheduler.schedule()
    desk.scheduler.cancel(batch)
    desk.scheduler.abort(id)
    desk.hint("prefetch", tokens=[1] * 4)
    assert [(brought(desk, [3])[0], len(desk.step().moves.host_to_device)) for _ in range(2)] == [(None, 1), (None, 2)]
    assert brought(desk, [3])[0] == 1


def test_as_many_retentions_as_are_remembered_are_changed_by_the_next_word_on_their_target(desk, monkeypatch):
    monkeypatch.setattr("paged.scheduler.hints.REMEMBERED", 2)
    desk = desk(8)
    for token in (1, 2, 3):
        desk.serve([token] * 2)
    for token, lasts in ((1, 100.0), (2, 100.0), (1, 5.0)):
        assert desk.hint("retain", tokens=[token] * 2, lasts=lasts).status == "accepted"
    desk.serve([4] * 5, now=10.0)
    assert [desk.on_device([token] * 2) for token in (1, 2, 3)] == [1, 2, 0]
