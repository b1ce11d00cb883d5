"""Sessions and hints over HTTP: a turn's content is kept, pinned and let go; each action has an outcome, and no answer is lost over one."""

import json

import pytest

from ..shown import shown_in  # noqa: TID252
from .http_client import CHAT, LONG, TEXT, asked, got, key, streaming  # noqa: TID252

SAID = "Explain what the with statement of Python does when its body raises an exception. " * 6
BODY = {"prompt": SAID, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
HINTS = "/v1/kv_hints"


def envelope(kind, payload, version="1.0"):
    action = {"action_id": "a1", "action_type": kind, "action_version": version, "payload": payload}
    return {"protocol_version": "0.1", "message_id": "m1", "actions": [action]}


@pytest.fixture
def server(usual_server):
    return usual_server


@pytest.mark.parametrize(("path", "body"), [(TEXT, BODY), (CHAT, {"messages": [{"role": "user", "content": SAID}]})])
@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_says_what_became_of_its_hints_and_its_session_what_is_kept(server, path, body, stream):
    name = f"turn {path} {stream}"
    retain = {"directives": [{"end": 32, "priority": 80}, {"start": 32, "priority": 50}], "waits_for": "tool"}
    more = {"session_id": name, "kv_hints": envelope("kv.retain", retain), "max_tokens": 4, "stream": stream}
    heard = asked(server, {**body, **more}, path)
    assert heard.is_whole
    (outcome,) = heard.parts[-1]["kv_hint_outcomes"]
    assert (outcome["action_id"], outcome["status"]) == ("a1", "accepted")
    assert not any("kv_hint_outcomes" in part for part in heard.parts[:-1])
    view = got(server, f"/sessions/{name.replace(' ', '%20')}").body
    assert (view["id"], view["live"], view["waits_for"], view["priority"]) == (name, 0, "tool", 2)
    assert view["device_blocks"] == view["blocks"] == outcome["num_tokens"] // 16
    assert view["ended_at"] < view["expected_at"] < view["retained_until"]
    assert [each["id"] for each in got(server, "/sessions?limit=1").body["sessions"]] == [name]


def test_a_session_is_pinned_retained_and_ended_outside_of_a_request(server):
    asked(server, BODY | {"session_id": "outside"})
    hints = [
        ({"action": "pin", "session_id": "outside", "lasts": 60}, "accepted"),
        ({"action": "retain", "session_id": "outside", "priority": 2, "waits_for": "person"}, "accepted"),
        ({"action": "unpin", "session_id": "outside"}, "accepted"),
        ({"action": "unpin", "session_id": "outside"}, "missing"),
        ({"action": "prefetch", "prompt": SAID}, "accepted"),
        ({"action": "retain", "prompt": SAID * 2}, "clipped"),
    ]
    for hint, status in hints:
        heard = asked(server, hint, HINTS)
        assert (heard.status, heard.body["status"]) == (200, status), heard.body
    assert got(server, "/sessions/outside").body["waits_for"] == "person"
    heard = asked(server, envelope("kv.pin", {"session_id": "outside"}), HINTS)
    assert heard.body["kv_hint_outcomes"][0]["status"] == "accepted"
    assert 'paged:blocks{engine="0",model_name="paged",state="pinned"}' in got(server, "/metrics").body
    first, second = (got(server, "/sessions/outside", method="DELETE") for _ in range(2))
    assert (first.status, first.body["status"]) == (200, "accepted")
    assert second.status == got(server, "/sessions/outside").status == 404


@pytest.mark.parametrize(("wanted", "shown"), shown_in("serving/refused_hints.txt", "POST"))
def test_a_wrong_hint_is_refused_by_its_field_and_its_request_is_not_begun(server, wanted, shown):
    path, _, raw = wanted.partition(" ")
    heard = asked(server, raw.encode() if path == HINTS else BODY | json.loads(raw), path)
    assert f"{heard.status} at {heard.error['param']}\n" == shown


@pytest.mark.parametrize(
    ("kind", "payload", "status", "words"),
    [
        ("kv.demote", {"session_id": "never was"}, "missing", 'No session "never was" is known.'),
        ("kv.new", {}, "rejected", "there is no action kv.new"),
        ("kv.pin", {}, "rejected", "exceed max_pinned (20)"),
    ],
)
def test_what_cannot_be_done_has_an_outcome_and_the_request_an_answer(server, kind, payload, status, words):
    long = {"prompt": SAID * 3, "session_id": "long"}
    heard = asked(server, BODY | long | {"kv_hints": envelope(kind, payload)})
    (outcome,) = heard.body["kv_hint_outcomes"]
    assert heard.is_whole and outcome["status"] == status
    assert words in outcome["reason"]


def test_of_a_request_whose_client_left_nothing_is_carried_out(server):
    body = LONG | {"session_id": "left", "kv_hints": envelope("kv.pin", {}), "max_tokens": 300}
    asked(server, body, leave_after=2)
    server.wait_until(lambda: got(server, "/sessions/left").body["live"] == 0)
    assert got(server, "/sessions/left").body["pinned_blocks"] == 0


def test_what_a_running_request_holds_is_not_let_go(server):
    def told(action, **named):
        return asked(server, {"action": action, **named}, HINTS).body

    body = LONG | {"prompt": SAID, "session_id": "runs", "max_tokens": 600}
    with streaming(server.port, body, {"x-request-id": "the-one-that-runs"}) as (answer, first):
        demoted, ended = told("demote", prompt=SAID), told("end", session_id="runs")
        # By its X-Request-Id, and by the id of its answer.
        deferred = [told("retain", request_id=name)["status"] for name in ("the-one-that-runs", first["id"])]
        story = got(server, f"/requests/{first['id']}").body
        rest = answer.read()
    assert b'"finish_reason":"length"' in rest and rest.endswith(b"data: [DONE]\n\n")
    assert (demoted["status"], deferred) == ("rejected", ["deferred", "deferred"])
    assert (ended["status"], "1 turn of it live" in ended["reason"]) == ("clipped", True)
    assert story["id"] == f"{first['id']}-0"
    assert told("retain", request_id="the-one-that-runs")["status"] == "missing"


def test_why_a_prompt_is_in_the_cache_no_further_is_told(server):
    assert "kv_hint_outcomes" not in asked(server, BODY).body
    heard = asked(server, {"prompt": SAID}, "/explain")
    assert heard.status == 200 and heard.body["device_tokens"] == heard.body["num_tokens"] // 16 * 16
    never = asked(server, {"prompt": "Nothing of this kind was ever asked of this server by anyone."}, "/explain")
    assert "was never computed here" in never.body["says"]
    assert asked(server, {"messages": [{"role": "user", "content": "a"}]}, "/explain").status == 200
    assert asked(server, {}, "/explain").error["param"] == "prompt"


@pytest.mark.parametrize(("path", "more"), [(HINTS, {"action": "prefetch"}), ("/explain", {})])
def test_a_prompt_that_no_request_can_have_is_hinted_of_and_explained_as_little(server, path, more):
    for prompt in ("a " * 400_000, "a " * 3000, [1] * 1025):
        error = asked(server, {"prompt": prompt, **more}, path).error
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    heard = asked(server, {"messages": [{"role": "user", "content": "a " * 3000}]}, "/explain")
    assert (heard.status, heard.error["param"]) == (400, "messages")


def test_tenants_see_pin_and_end_their_own_sessions_alone(tenants_server):
    server, same = tenants_server, {"session_id": "same"}
    for name in ("key-a", "key-b"):
        assert asked(server, BODY | same, headers=key(name)).status == 200
    assert asked(server, {"action": "end", **same}, HINTS, headers=key("key-a")).body["status"] == "accepted"
    assert got(server, "/sessions/same", key("key-a")).status == 404
    assert got(server, "/sessions/same", key("key-b")).body["id"] == "same"
    # Other tests have left sessions of its own there.
    assert "same" not in [each["id"] for each in got(server, "/sessions", key("right")).body["sessions"]]
    missing = asked(server, {"action": "pin", **same}, HINTS, headers=key("key-a")).body
    assert missing["reason"] == 'no session "same" is known.'
    # Why another's prompt is there would say that it is.
    assert asked(server, {"prompt": SAID}, "/explain", headers=key("key-a")).status == 403
    of_tenant = asked(server, {"prompt": SAID, "tenant": "b"}, "/explain", headers=key("right"))
    assert of_tenant.body["device_tokens"] > 0
    assert got(server, "/sessions").status == 401
