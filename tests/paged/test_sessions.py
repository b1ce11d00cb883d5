"""Recorded sessions: how they are read, and what becomes of them on the real scheduler, in worlds that can be counted by hand."""
# ruff: noqa: F401  # the calls of the file take them from here

import json
import random

import numpy as np
import pytest

from paged.study.report import write_sessions_html
from paged.study.report.validation_page import plot_of
from paged.study.simulator import Device, SessionRun, StepTime, Tiers
from paged.study.simulator.sessions import KEEPS, blocks_if_all_kept, blocks_offline
from paged.study.traces import Begun, draw_sessions, open_sessions, read_sessions

from .files_of_others import assert_by_hand, by_hand_in  # noqa: TID252

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


def test_what_is_drawn_depends_on_the_seed_alone(sessions_of):
    sessions = sessions_of(*[turns_at(0)] * 9)
    first, again, other = (draw_sessions(sessions, 4, random.Random(seed), spread_s=60) for seed in (1, 1, 2))
    assert [each.begins_s for each in first] == [each.begins_s for each in again]
    assert [each.begins_s for each in first] != [each.begins_s for each in other]


@pytest.mark.parametrize("keeps", ["lru", "hints"])
def test_sessions_that_ship_break_no_rule_in_three_tiers(keeps):
    begun = draw_sessions(open_sessions("agents"), 3, random.Random(2), spread_s=30)
    model = Device(model="llama-3.1-8b", device="h100").cost_model()
    tiers = Tiers(device_blocks=1300, host_blocks=400, disk_blocks=2000)
    found = SessionRun(begun, tiers, model, keeps=keeps, until_s=25, max_tokens_per_step=8192, check=True).run()
    assert found.violations == 0
    assert 0 < found.hit <= found.kept


def test_sessions_of_a_model_with_states_hit_where_one_is_kept(begun_of):
    groups = Device(model="qwen3-next-80b", device="h100").groups(4)
    assert {group.kind for group in groups} == {"full", "state"}
    for again, hit in (([[0, 3]], 0.5), ([[0, 2], [7, 8]], 0.0)):
        turns = [request(0, [[0, 3]]), request(5, again)]
        found = SessionRun(begun_of({0: turns}), Tiers(device_blocks=9000), None, check=True, groups=groups).run()
        assert (found.hit, found.violations) == (hit, 0)


def test_the_page_of_a_run_draws_what_hit_and_when_the_first_tokens_came(begun_of, tmp_path):
    begun, names = begun_of({0: turns_at(0, 9)}), {}
    for step in (None, SECOND_A_TOKEN):
        found = SessionRun(begun, Tiers(device_blocks=9), step, keeps="hints").run()
        names[step] = [trace["name"] for trace in plot_of([found])["data"]]
        write_sessions_html(tmp_path / "page.html", [found])
        assert "turns: 2; full blocks in their prompts: 6." in (tmp_path / "page.html").read_text()
    assert names[None] == ["device", "host", "disk", "kept", "offline"]
    assert names[SECOND_A_TOKEN] == [*names[None], "TTFT, hints"]


WITH_AGENT = (
    request(0, [[0, 1]]),
    agent(3, request(0, [[5, 6]]), request(2, [[5, 7]], think=1.0)),
    request(9, [[0, 2]], think=8.0),
)
IN_TURN = {at: turns_at(0, 10, 20) for at in (0, 1, 2)}
PAUSED = [request(0, [[0, 3]]), request(5, [[0, 3]], think=4.0)]
LONG_PAUSE = {0: [request(0, [[0, 3]]), request(90, [[0, 3]], think=90.0)], 20: turns_at(0)}
CLOSE = [request(5 * n, [[0, 3]], think=0.0) for n in range(3)]
A, B = np.array([1, 2, 3]), np.array([4, 5, 6])


@pytest.mark.parametrize(("call", "by_hand"), by_hand_in("sessions.txt"))
def test_what_becomes_of_sessions_is_what_it_is_by_hand(sessions_of, begun_of, call, by_hand):
    def recorded(*requests):
        (session,) = sessions_of(requests)
        return session

    def run_of(requests, step, options):
        tiers = {name: options.pop(name) for name in Tiers.__struct_fields__ if name in options}
        return SessionRun(begun_of(requests), Tiers(**tiers), step, **options)

    def ran(requests, step=None, **options):
        return run_of(requests, step, options).run()

    def timed(requests, **options):
        run = run_of(requests, SECOND_A_TOKEN, options)
        found = run.run()
        return run.ttft_of_each().tolist(), found.makespan_s

    assert_by_hand(call, by_hand, globals() | locals())
