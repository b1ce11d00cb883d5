"""Names of requests: a client's own is for logs, and the server's is unique."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from .http_client import ask, get  # noqa: TID252
from .serving_process import served  # noqa: TID252

PATH = "/v1/completions"
USUAL = {"prompt": "The with statement", "max_tokens": 8, "temperature": 0}
NAMED = {"x-request-id": "mine"}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def key(name):
    return {"authorization": f"Bearer {name}"}


@pytest.fixture
def server(usual_server):
    return usual_server


@pytest.mark.parametrize("streams", [False, True])
def test_requests_of_one_x_request_id_at_a_time_are_all_answered(server, streams):
    async def go():
        body = USUAL | {"stream": streams, "max_tokens": 100, "ignore_eos": True}
        return await asyncio.gather(*(ask(server.port, PATH, body, headers=NAMED) for _ in range(8)))

    heard = run(go())
    assert [each.status for each in heard] == [200] * 8
    assert all(each.is_whole for each in heard)
    assert len({each.text for each in heard}) == 1
    assert {each.headers["x-request-id"] for each in heard} == {"mine"}
    ids = {each.pieces[0][1]["id"] if streams else each.body["id"] for each in heard}
    assert len(ids) == 8


def test_a_request_is_found_by_its_x_request_id_whoever_chose_it(server):
    named = run(ask(server.port, PATH, USUAL, headers=NAMED))
    other = run(ask(server.port, PATH, USUAL))
    for heard in (named, other):
        story = run(get(server.port, f"/requests/{heard.headers['x-request-id']}")).body
        assert story["id"] == f"{heard.body['id']}-0"


def test_an_id_that_is_no_id_is_not_taken(server):
    heard = run(ask(server.port, PATH, USUAL, headers={"x-request-id": "a b"}))
    assert heard.status == 200
    assert heard.headers["x-request-id"] != "a b"


def test_a_tenant_that_names_anothers_id_touches_nothing_of_it(tmp_path):
    config = tmp_path / "serve.toml"
    config.write_text('tenants = [{name = "a", keys = ["key-a"]}, {name = "b", keys = ["key-b"]}]\n')

    async def go(server):
        body = USUAL | {"max_tokens": 400, "ignore_eos": True, "stream": True}
        first = asyncio.create_task(ask(server.port, PATH, body, headers=key("key-a") | NAMED))
        while not (await get(server.port, "/load")).body["server_load"]:
            await asyncio.sleep(0.01)
        # It goes after a piece, which ends its own request.
        gone = await ask(server.port, PATH, body, headers=key("key-b") | NAMED, leave_after=1)
        engine_id = gone.pieces[0][1]["id"]
        again = await ask(server.port, PATH, USUAL, headers=key("key-b") | {"x-request-id": f"{engine_id}-0"})
        stories = [(await get(server.port, "/requests/mine", headers=shown)).status for shown in ({}, key("key-b"))]
        return await first, again, stories

    with served(config=config) as server:
        first, again, stories = run(go(server))
        assert first.is_whole and first.finish_reason == "length"
        assert again.is_whole
        # Nobody is an admin here, so nobody sees anybody's request.
        assert stories == [401, 403]


def test_with_keys_and_without_an_admin_key_the_servers_own_keys_see_its_requests():
    with served(api_key="right") as server:
        assert run(ask(server.port, PATH, USUAL, headers=key("right") | NAMED)).status == 200
        for shown, status in (({}, 401), (key("wrong"), 403), (key("right"), 200)):
            assert run(get(server.port, "/requests/mine", headers=shown)).status == status
        lines = [line for line in server.said.splitlines() if '"id":"mine"' in line]
    assert json.loads(lines[0])["status"] == 200
