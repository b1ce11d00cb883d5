"""Recorded sessions: how they are read, and what becomes of them on the real scheduler, in worlds that can be counted by hand."""

import json
import random

import numpy as np
import pytest

from paged.study.report import write_sessions_html
from paged.study.report.sessions_page import plot_of
from paged.study.simulator import Device, SessionRun, StepTime, Tiers
from paged.study.simulator.session_orders import blocks_if_all_kept, blocks_offline
from paged.study.simulator.sessions import KEEPS
from paged.study.traces import Begun, draw_sessions, open_sessions, read_sessions

SECOND_A_TOKEN = StepTime(weights_ms=0.0, context_us=0.0, token_us=1e6, swap_us=0.0)


def request(at, blocks, think=0.0, stop="tool_use", tokens=None, **more):
    """A request of blocks of 4 tokens and one more token."""
    count = sum(stop - first for first, stop in blocks)
    fields = {"t": at, "in": tokens or 4 * count + 1, "out": 1, "blocks": blocks, "api_s": 1.0, "think_s": think}
    return fields | {"stop": stop, "type": "n"} | more


def agent(at, *requests):
    return {"t": at, "in": None, "out": None, "blocks": [], "think_s": None, "type": "subagent", "requests": requests}


@pytest.fixture
def sessions_of(tmp_path):
    """sessions_of([request, …], …): what is read of a file with a session for each list."""

    def read(*sessions):
        lines = [
            {"id": f"s{n}", "block_size": 4, "requests": requests, "tool_tokens": 0}
            for n, requests in enumerate(sessions)
        ]
        path = tmp_path / "sessions.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return read_sessions(path)

    return read


@pytest.fixture
def begun_of(sessions_of):
    """begun_of({second: [request, …], …}): sessions that begin then."""
    return lambda requests: [Begun(*pair) for pair in zip(sessions_of(*requests.values()), requests, strict=True)]


def turns_at(*times):
    """Turns of three blocks each, which share all."""
    return [request(at, [[0, 3]], think=max(0, at - 1)) for at in times]


def test_a_turn_has_the_blocks_of_its_ranges(sessions_of):
    (session,) = sessions_of([request(0, [[0, 2]]), request(5, [[0, 2], [7, 9]], think=4.0, stop="end_turn")])
    (line,) = session.lines
    assert [turn.blocks.tolist() for turn in line.turns] == [[0, 1], [0, 1, 7, 8]]
    assert [turn.think_s for turn in line.turns] == [0.0, 4.0]
    assert [turn.stop for turn in line.turns] == ["tool_use", "end_turn"]
    assert session.num_ids == 9


def test_a_sub_agent_is_a_line_that_begins_after_the_turn_before_it(sessions_of):
    inner = agent(3, request(0, [[5, 6]]), request(2, [[5, 7]], think=1.0))
    (session,) = sessions_of([request(0, [[0, 1]]), inner, request(9, [[0, 2]], think=8.0)])
    own, child = session.lines
    assert (len(own.turns), child.parent, child.after, child.delay_s) == (2, 0, 0, 2.0)
    assert [turn.at_s for turn in child.turns] == [3.0, 5.0]
    assert session.turns == [(0, 0), (1, 0), (1, 1), (0, 1)]


@pytest.mark.parametrize(("api_s", "think", "pause"), [(1.0, None, 8.0), (None, 30.0, 9.0)])
def test_a_pause_that_is_not_recorded_is_the_rest_of_the_gap_and_none_is_longer(sessions_of, api_s, think, pause):
    (session,) = sessions_of([request(0, [[0, 1]], api_s=api_s), request(9, [[0, 1]], think=think)])
    assert session.lines[0].turns[1].think_s == pause


def test_the_sessions_that_ship_share_most_of_their_prompts():
    sessions = open_sessions("agents")
    assert (len(sessions), {session.block_size for session in sessions}) == (12, {64})
    assert sum(len(session.lines) > 1 for session in sessions) == 1


def test_what_is_drawn_depends_on_the_seed_alone(sessions_of):
    sessions = sessions_of(*[turns_at(0)] * 9)
    first, again, other = (draw_sessions(sessions, 4, random.Random(seed), spread_s=60) for seed in (1, 1, 2))
    assert [each.begins_s for each in first] == [each.begins_s for each in again]
    assert [each.begins_s for each in first] != [each.begins_s for each in other]


@pytest.mark.parametrize("keeps", KEEPS)
def test_within_the_bounds_a_memory_that_holds_all_hits_what_was_seen(begun_of, keeps):
    found = SessionRun(
        begun_of({0: turns_at(0, 5, 9), 1: turns_at(0, 7)}), Tiers(device_blocks=20), None, keeps=keeps
    ).run()
    # 5 prompts of 3 blocks; the first of each session misses.
    assert (found.prompt_blocks, found.hit, found.kept, found.offline) == (15, 9 / 15, 9 / 15, 9 / 15)
    assert found.computed_twice == 0


def test_use_alone_forgets_the_session_that_comes_next(begun_of):
    # A memory of 7 blocks, and a prompt wants 4: three sessions in turn are one too many.
    begun = begun_of({at: turns_at(0, 10, 20) for at in (0, 1, 2)})
    found = SessionRun(begun, Tiers(device_blocks=7), None, keeps="lru").run()
    assert found.hit == 0
    assert found.computed_twice == 6 * 3 * 4
    assert found.kept == 18 / 27
    # Offline the third session is cut to a block each time, and the others hit whole: 3 + 3 + 1, twice.
    assert found.offline == 14 / 27


def test_what_an_ended_session_left_goes_first_where_a_hint_says_so(begun_of):
    # "long" is there first and comes back last; between them "once" ends, and three more blocks are needed.
    begun = begun_of({0: turns_at(0, 30), 1: turns_at(0), 2: turns_at(0)})
    lru, hints = (SessionRun(begun, Tiers(device_blocks=8), None, keeps=keeps).run().hit for keeps in ("lru", "hints"))
    assert (lru, hints) == (1 / 12, 3 / 12)


def test_a_prompt_that_the_device_cannot_hold_is_shortened_and_its_end_counts_as_missed(begun_of):
    begun = begun_of({0: [request(0, [[0, 9]]), request(5, [[0, 9]])]})
    found = SessionRun(begun, Tiers(device_blocks=6), None, keeps="lru").run()
    assert (found.shortened, found.prompt_blocks) == (2, 18)
    assert found.hit == found.reachable == 4 / 18
    assert found.kept == 9 / 18


def test_what_left_the_device_hits_on_the_host(begun_of):
    begun = begun_of({at: turns_at(0, 10, 20) for at in (0, 1, 2)})
    found = SessionRun(begun, Tiers(device_blocks=8, host_blocks=12), None, keeps="lru").run()
    assert (found.device + found.host, found.disk) == (18 / 27, 0)
    assert found.host > 0


def test_what_memory_forgot_hits_on_the_disk_as_far_as_that_has_room(begun_of):
    begun = begun_of({at: turns_at(0, 10, 20) for at in (0, 1, 2)})
    all_of_it, less = (
        SessionRun(begun, Tiers(device_blocks=7, disk_blocks=disk), None, keeps="lru").run() for disk in (9, 8)
    )
    assert (all_of_it.device, all_of_it.disk, all_of_it.computed_twice) == (0, 18 / 27, 0)
    assert 0 < less.disk < 18 / 27


@pytest.mark.parametrize(("longest", "pause"), [(1800.0, 4), (0.5, 0.5)])
def test_a_turn_begins_its_pause_which_may_be_cut_when_the_last_one_has_ended(begun_of, longest, pause):
    # 13 tokens take 13 s. The next turn comes 4 s after them, and computes the one token behind its three blocks.
    begun = begun_of({2: [request(0, [[0, 3]]), request(5, [[0, 3]], think=4.0)]})
    run = SessionRun(begun, Tiers(device_blocks=20), SECOND_A_TOKEN, keeps="lru", longest_pause_s=longest)
    assert run.run().makespan_s == 2 + 13 + pause + 1
    assert run.ttft_of_each().tolist() == [13.0, 1.0]


@pytest.mark.parametrize(
    ("after", "ttft", "makespan"),
    [
        # The parent's turn ends at 5 s. Its agent begins 2 s later, its own next turn 1 s later.
        ([agent(3, request(0, [[5, 6]])), request(2, [[0, 1]], think=1.0)], [5.0, 1.0, 5.0], 12.0),
        # The agent has no turn of its own; its own agent begins at 5 + 2 + 2 s, and computes 9 tokens.
        ([agent(3, agent(2, request(0, [[5, 7]])))], [5.0, 9.0], 18.0),
        # The agent begins at 7 s, and its agent at 9 s, while that computes 5 tokens.
        ([agent(3, agent(2, request(0, [[7, 8]])), request(0, [[5, 6]]))], [5.0, 5.0, 8.0], 17.0),
    ],
)
def test_agents_run_beside_their_parents_and_begin_after_the_pauses_of_all(begun_of, after, ttft, makespan):
    begun = begun_of({0: [request(0, [[0, 1]]), *after]})
    run = SessionRun(begun, Tiers(device_blocks=20), SECOND_A_TOKEN)
    found = run.run()
    assert (found.turns, run.ttft_of_each().tolist(), found.makespan_s) == (len(ttft), ttft, makespan)


@pytest.mark.parametrize(("bytes_per_s", "disk", "waits"), [(24.0, 2 / 9, 0.25 + 8 / 24 + 1.0), (0.5, 0, 9.0)])
def test_the_disk_takes_its_latency_and_its_bytes_and_is_not_read_where_computing_is_faster(
    begun_of, bytes_per_s, disk, waits
):
    # The other session leaves one block of three on the device. Two blocks of 4 tokens of 1 byte at 24 bytes/s, and 0.25 s before them.
    begun = begun_of({0: [request(0, [[0, 3]]), request(90, [[0, 3]], think=90.0)], 20: turns_at(0)})
    tiers = Tiers(device_blocks=5, disk_blocks=9, disk_latency_s=0.25, disk_bytes_per_s=bytes_per_s)
    run = SessionRun(begun, tiers, SECOND_A_TOKEN, keeps="lru", token_bytes=1)
    found = run.run()
    assert (found.device, found.disk) == (1 / 9, disk)
    assert run.ttft_of_each() == pytest.approx([13.0, waits, 13.0])


def test_what_waits_at_the_end_counts_for_as_long_as_it_has(begun_of):
    begun = begun_of({0: turns_at(0), 1: turns_at(0)})
    run = SessionRun(begun, Tiers(device_blocks=6), SECOND_A_TOKEN, keeps="lru", until_s=10.0)
    found = run.run()
    assert (found.turns, run.ttft_of_each().tolist()) == (1, [13.0, 12.0])


def test_who_finds_most_cached_may_come_first(begun_of):
    # Two sessions, of which the device holds one. In order of arrival each turn evicts the other's.
    turns = [request(5 * n, [[0, 3]], think=0.0) for n in range(3)]
    begun = begun_of({0: turns, 1: turns})
    found = {
        policy: SessionRun(begun, Tiers(device_blocks=6), SECOND_A_TOKEN, keeps="lru", policy=policy).run()
        for policy in ("paged", "paged-cached")
    }
    assert found["paged"].hit < found["paged-cached"].hit


@pytest.mark.parametrize("keeps", ["lru", "hints"])
def test_sessions_that_ship_break_no_rule_in_three_tiers(keeps):
    begun = draw_sessions(open_sessions("agents"), 3, random.Random(2), spread_s=30)
    model = Device(model="llama-3.1-8b", device="h100").cost_model()
    tiers = Tiers(device_blocks=1300, host_blocks=400, disk_blocks=2000)
    found = SessionRun(begun, tiers, model, keeps=keeps, until_s=25, max_tokens_per_step=8192, check=True).run()
    assert found.violations == 0
    assert 0 < found.hit <= found.kept


def test_the_page_of_a_run_draws_what_hit_and_when_the_first_tokens_came(begun_of, tmp_path):
    pytest.importorskip("plotly")
    begun, names = begun_of({0: turns_at(0, 9)}), {}
    for step in (None, SECOND_A_TOKEN):
        found = SessionRun(begun, Tiers(device_blocks=9), step, keeps="hints").run()
        names[step] = [trace["name"] for trace in plot_of([found])["data"]]
        write_sessions_html(tmp_path / "page.html", [found])
        assert "turns: 2; full blocks in their prompts: 6." in (tmp_path / "page.html").read_text()
    assert names[None] == ["device", "host", "disk", "kept", "offline"]
    assert names[SECOND_A_TOKEN] == [*names[None], "TTFT, hints"]


def test_everything_kept_hits_up_to_the_first_block_that_is_new():
    prompts = [(0, np.array([1, 2, 3])), (0, np.array([1, 9, 3])), (0, np.array([1, 2, 3]))]
    assert blocks_if_all_kept(prompts, 10) == 0 + 1 + 3


def test_the_offline_order_cuts_the_session_that_comes_last():
    a, b = np.array([1, 2, 3]), np.array([4, 5, 6])
    # 4 blocks. After the first b, one of a stays, as b comes first; after the second b all of a's three would miss but one.
    assert blocks_offline([(0, a), (1, b), (1, b), (0, a)], 4) == 0 + 0 + 3 + 1
