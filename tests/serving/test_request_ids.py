"""Names of requests: a client's own is for logs, and the server's is unique. Whose request it is decides who sees it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from .http_client import LONG, asked, got, key, num_open, streaming  # noqa: TID252

NAMED = {"x-request-id": "mine"}


@pytest.mark.parametrize("streams", [False, True])
def test_requests_of_one_x_request_id_at_a_time_are_all_answered(usual_server, streams):
    body = LONG | {"stream": streams, "max_tokens": 100}
    with ThreadPoolExecutor(8) as threads:
        heard = list(threads.map(lambda _: asked(usual_server, body, headers=NAMED), range(8)))
    assert all(each.is_whole for each in heard)
    assert len({each.text for each in heard}) == 1
    assert {each.headers["x-request-id"] for each in heard} == {"mine"}
    assert len({each.parts[0]["id"] for each in heard}) == 8


@pytest.mark.parametrize(
    "headers", [NAMED, {}, {"x-request-id": "a b"}], ids=["named", "not named", "by what is no id"]
)
def test_a_request_is_found_by_its_x_request_id_whoever_chose_it(usual_server, headers):
    heard = asked(usual_server, headers=headers)
    assert heard.headers["x-request-id"] != "a b"
    story = got(usual_server, f"/requests/{heard.headers['x-request-id']}").body
    assert story["id"] == f"{heard.body['id']}-0"


@pytest.mark.parametrize("path", ["/health", "/metrics", "/dashboard", "/nothing"])
def test_every_answer_has_an_x_request_id(usual_server, path):
    assert got(usual_server, path, NAMED).headers["x-request-id"] == "mine"


def test_a_tenant_that_names_anothers_id_touches_nothing_of_it(tenants_server):
    server, body = tenants_server, LONG | {"max_tokens": 400}
    with streaming(server.port, body, key("key-a") | NAMED) as (answer, _):
        # It goes after a piece, which ends its own request.
        gone = asked(server, body, headers=key("key-b") | NAMED, leave_after=1)
        server.wait_until(lambda: num_open(server) == 1)
        hint = {"action": "retain", "request_id": "mine"}
        hinted = [asked(server, hint, "/v1/kv_hints", headers=key(f"key-{name}")).body for name in "ab"]
        assert [each["status"] for each in hinted] == ["deferred", "missing"]
        assert asked(server, headers=key("key-b") | {"x-request-id": f"{gone.parts[0]['id']}-0"}).is_whole
        # A tenant is no admin, and sees no request.
        assert [got(server, "/requests/mine", shown).status for shown in ({}, key("key-b"))] == [401, 403]
        rest = answer.read()
    assert b'"finish_reason":"length"' in rest and rest.endswith(b"data: [DONE]\n\n")


def test_keys_are_needed_where_there_are_any_and_an_admins_for_requests(odd_server):
    assert asked(odd_server, headers=key("sk-right") | NAMED).status == 200
    for path, statuses in {
        "/v1/models": {None: 401, "wrong": 401, "sk-right": 200, "sk-admin": 401},
        "/requests/mine": {None: 401, "wrong": 403, "sk-right": 403, "sk-admin": 200},
        "/requests/nobodys": {"sk-admin": 404},
        "/health": {None: 200},
        "/metrics": {None: 200},
    }.items():
        assert {name: got(odd_server, path, key(name)).status for name in statuses} == statuses
    assert [each["id"] for each in got(odd_server, "/v1/models", key("sk-right")).body["data"]] == ["a", "b"]
    # A wrong key gets no hint.
    refused, wrong = (asked(odd_server, headers=headers) for headers in ({}, key("sk-r")))
    assert (refused.status, refused.body) == (wrong.status, wrong.body) and wrong.status == 401


def test_with_keys_and_without_an_admins_the_servers_own_keys_see_its_requests(tenants_server):
    server = tenants_server
    assert asked(server, headers=key("right") | {"x-request-id": "ours"}).status == 200
    assert [got(server, "/requests/ours", key(name)).status for name in (None, "wrong", "right")] == [401, 403, 200]
