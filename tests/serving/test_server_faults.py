"""What goes wrong around a server, one fault a test: clients that send too much, too slowly or nonsense, clients that go, an engine that is killed, a full disk, a signal in
the middle. Each has an answer of its own, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from datetime import datetime

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from .http_client import Heard, ask, get  # noqa: TID252
from .serving_process import served, started  # noqa: TID252

# A busy machine is slow: a limit here only ends a wait for what never comes.
LIMIT_S = 600.0
PATH = "/v1/completions"
USUAL = {"prompt": "The with statement", "max_tokens": 8, "temperature": 0}
LONG = {"prompt": "The with statement", "max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server():
    with served(max_sequences=8, header_timeout_s=1.5, body_timeout_s=1.5) as found:
        yield found


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def engine_of(server) -> int:
    """The process id of the server's engine."""
    found = subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True, check=True).stdout
    return int(found.split()[0])


def is_served(server) -> bool:
    """Whether the usual request gets the usual answer."""
    heard = run(ask(server.port, PATH, USUAL))
    return heard.status == 200 and heard.text == " is used to wrap the execu"


BAD_BODIES = {
    "truncated": (b'{"prompt": "abc', 400),
    "no JSON at all": (b"\xff\xfe\x00", 400),
    "nothing": (b"", 400),
    "a list": (b"[]", 400),
    "deep nesting": (b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
    "deep nesting in a field that nobody knows": (b'{"prompt": "a", "x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
    "a wrong type": (b'{"prompt": {"a": 1}}', 400),
    "half of a surrogate pair": (b'{"prompt": "a\\ud800b"}', 400),
    "an integer of 5,000 digits": (b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}", 400),
    "no number": (b'{"prompt": "a", "temperature": NaN}', 400),
    "a stop string that is too long": (json.dumps({"prompt": "a", "stop": "x" * 20_000}).encode(), 400),
    "nothing that may be said": (
        b'{"prompt": "a", "allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2, "max_tokens": 3}',
        400,
    ),
    "a token that there is not": (b'{"prompt": [1, 2, 999999]}', 400),
    "no tokens": (b'{"prompt": []}', 400),
    "no text": (b'{"prompt": ""}', 400),
    "more than the context": (b'{"prompt": "a", "max_tokens": 5000}', 400),
    "a model that there is not": (b'{"prompt": "a", "model": "gpt-9"}', 404),
    "a grammar that cannot be read": (
        json.dumps({"prompt": "a", "structured_outputs": {"regex": "(" * 3000}}).encode(),
        400,
    ),
    "ten million characters": (json.dumps({"prompt": "a" * 10_000_000}).encode(), 413),
    "a prompt that no context holds": (json.dumps({"prompt": "ab " * 2_000_000}).encode(), 400),
    "too many prompts": (json.dumps({"prompt": ["a"] * 1000}).encode(), 400),
    "too many answers": (b'{"prompt": "a", "n": 1000}', 400),
    "a penalty that no logit stands": (b'{"prompt": "a", "repetition_penalty": 1e-38}', 400),
}


@pytest.mark.parametrize("what", BAD_BODIES)
def test_a_body_that_is_wrong_gets_an_error_of_openais_form(server, what):
    body, status = BAD_BODIES[what]
    heard = run(ask(server.port, PATH, body))
    assert heard.status == status
    assert set(heard.error) == {"message", "type", "param", "code"}
    assert len(heard.error["message"]) < 1200


GOOD_BODIES = {
    "NUL bytes": {"prompt": "a\0b", "max_tokens": 2},
    "a stop string of 10,000 characters": {"prompt": "a", "max_tokens": 4, "stop": "x" * 10_000},
    "a grammar that explodes": {
        "prompt": "a",
        "max_tokens": 4,
        "structured_outputs": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    },
    "a grammar that begins with itself": {
        "prompt": "a",
        "max_tokens": 4,
        "structured_outputs": {"grammar": 'start: start start | "a"'},
    },
}


@pytest.mark.parametrize("what", GOOD_BODIES)
def test_what_is_odd_and_not_wrong_is_answered(server, what):
    heard = run(ask(server.port, PATH, GOOD_BODIES[what]))
    assert heard.status in (200, 400), heard.body
    if what != "a grammar that explodes":
        assert heard.status == 200
    assert is_served(server)


def talk(server, data: bytes, *, then_s: float = 0.0) -> bytes:
    """What a connection gets back for these bytes, until it is closed."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S) as connection:
        connection.sendall(data)
        if then_s:
            time.sleep(then_s)
        found = b""
        while part := connection.recv(65536):
            found += part
        return found


def test_a_flood_of_headers_is_refused(server):
    flood = b"".join(b"x-%d: %s\r\n" % (number, b"y" * 100) for number in range(2000))
    assert talk(server, b"GET /health HTTP/1.1\r\n" + flood).startswith(b"HTTP/1.1 431")


def test_what_is_no_http_is_refused(server):
    assert talk(server, b"\x00\x01garbage\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_a_head_that_comes_too_slowly_is_not_waited_for(server):
    assert talk(server, b"POST /v1/completions HTTP/1.1\r\nx-a: ").startswith(b"HTTP/1.1 408")


def test_a_connection_on_which_nothing_comes_is_not_kept(server):
    assert talk(server, b"").startswith(b"HTTP/1.1 408")


def test_a_body_that_comes_too_slowly_is_not_waited_for(server):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    assert talk(server, head).startswith(b"HTTP/1.1 408")


def test_a_thousand_clients_that_go_leave_nothing_behind(server):
    async def go():
        room = asyncio.Semaphore(100)

        async def one(number: int):
            async with room:
                await ask(
                    server.port, PATH, LONG | {"prompt": f"{number}"}, leave_after=number % 4 + 1, leave_at_s=60.0
                )

        await asyncio.gather(*(one(number) for number in range(1000)))
        until = time.monotonic() + LIMIT_S
        while (await get(server.port, "/load")).body["server_load"]:
            assert time.monotonic() < until, "calls are still open"
            await asyncio.sleep(0.05)

    run(go())
    assert is_served(server)


def test_a_deadline_ends_a_request_before_and_after_its_first_token(server):
    async def go():
        before = await ask(server.port, PATH, LONG | {"deadline_s": 0.001})
        after = await ask(server.port, PATH, LONG | {"deadline_s": 0.2, "max_tokens": 1000, "n": 8, "temperature": 1.0})
        return before, after

    before, after = run(go())
    assert before.error["code"] == "deadline"
    assert after.error["code"] == "deadline"
    assert not after.is_whole


def test_a_clock_that_jumps_by_a_day_ends_nothing_before_its_time(tmp_path):
    # Front and engine both import it before anything else.
    (tmp_path / "sitecustomize.py").write_text(
        "import itertools, time\n"
        "real, jumps = time.time, itertools.cycle((0.0, 86400.0, -86400.0))\n"
        "time.time = lambda: real() + next(jumps)\n"
    )
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    with served(request_timeout_s=60, max_queue_s=30, env={"PYTHONPATH": path}) as server:
        assert is_served(server)
        begun = time.monotonic()
        late = run(ask(server.port, PATH, LONG | {"deadline_s": 0.2, "max_tokens": 1000, "n": 8, "temperature": 1.0}))
        assert late.error["code"] == "deadline"
        assert time.monotonic() - begun > 0.2
        assert is_served(server)
        until, lines = time.monotonic() + LIMIT_S, []
        # A line is written after its answer, by a thread.
        while len(lines) < 3 and time.monotonic() < until:
            lines = [
                line
                for line in map(json.loads, filter(lambda line: line.endswith("}"), server.said.splitlines()))
                if "e2e_s" in line
            ]
            time.sleep(0.05)
    assert len(lines) == 3
    times = [datetime.fromisoformat(line["time"]).timestamp() for line in lines]
    assert max(times) - min(times) > 3600, "the clock did not jump"
    assert all(0 <= line["e2e_s"] < 3600 for line in lines)


def test_an_engine_that_is_killed_fails_what_it_had_begun_serves_what_waited_and_is_begun_again():
    async def go(server):
        async def one(number):
            return await ask(server.port, PATH, LONG | {"prompt": f"{number}"}, heard=heard[number])

        heard = [Heard() for _ in range(12)]
        tasks = [asyncio.create_task(one(number)) for number in range(12)]
        # All eight seats are taken, and their first tokens have come.
        while sum(bool(each.times) for each in heard) < 8:
            await asyncio.sleep(0.01)
        os.kill(engine_of(server), signal.SIGKILL)
        while (await get(server.port, "/ready")).status == 200:
            await asyncio.sleep(0.01)
        meanwhile = await ask(server.port, PATH, USUAL)
        return meanwhile, await asyncio.gather(*tasks)

    with served(max_sequences=8) as server:
        meanwhile, heard = run(go(server))
        assert meanwhile.status == 503
        assert int(meanwhile.headers["retry-after"]) >= 1
        died = [each for each in heard if each.error is not None]
        assert {each.error["code"] for each in died} == {"engine_died"}
        assert len(died) == 8
        assert all(each.is_whole for each in heard if each.error is None)
        assert is_served(server)
        assert run(get(server.port, "/health")).status == 200


def test_an_engine_that_dies_too_often_stays_away_and_the_server_says_so():
    with started("--max-restarts", "1") as server:
        for _ in range(2):
            before = engine_of(server)
            os.kill(before, signal.SIGKILL)
            until = time.monotonic() + LIMIT_S
            while run(get(server.port, "/ready")).status == 200:
                time.sleep(0.01)
            while run(get(server.port, "/ready")).status != 200 and run(get(server.port, "/health")).status == 200:
                assert time.monotonic() < until
                time.sleep(0.1)
        heard = run(ask(server.port, PATH, USUAL))
        assert (heard.status, heard.error["code"]) == (503, "engine_unavailable")
        assert "retry-after" not in heard.headers
        assert run(get(server.port, "/health")).status == 503
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(LIMIT_S)


def test_sigterm_under_load_lets_running_requests_end_and_takes_no_new_ones():
    async def go(server):
        tasks = [asyncio.create_task(ask(server.port, PATH, LONG | {"prompt": f"{number}"})) for number in range(16)]
        while (await get(server.port, "/load")).body["server_load"] < 16:
            await asyncio.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        while (await get(server.port, "/ready")).status == 200:
            await asyncio.sleep(0.01)
        late = await ask(server.port, PATH, USUAL)
        alive, is_ready = await get(server.port, "/health"), await get(server.port, "/ready")
        return late, alive.status, is_ready.status, await asyncio.gather(*tasks)

    with started("--max-sequences", "8") as server:
        late, alive, is_ready, heard = run(go(server))
        assert (late.status, late.error["code"]) == (503, "shutdown")
        assert (alive, is_ready) == (200, 503)
        assert all(each.is_whole for each in heard)
        assert server.process.wait(LIMIT_S) == 0
        assert "Traceback" not in server.said


def test_what_does_not_end_within_the_time_of_a_shutdown_is_told_so():
    async def go(server):
        task = asyncio.create_task(ask(server.port, PATH, LONG | {"max_tokens": 1000}))
        while not (await get(server.port, "/load")).body["server_load"]:
            await asyncio.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        return await task

    with started("--shutdown-timeout", "0.2") as server:
        heard = run(go(server))
        assert heard.error["code"] == "shutdown"
        assert server.process.wait(LIMIT_S) == 0


def test_a_server_that_is_killed_takes_its_engine_with_it():
    with started() as server:
        engine = engine_of(server)
        server.process.kill()
        server.process.wait(LIMIT_S)
        until = time.monotonic() + LIMIT_S
        while os.path.exists(f"/proc/{engine}"):
            assert time.monotonic() < until, "the engine outlives its server"
            time.sleep(0.02)


def test_no_prompt_answer_salt_or_key_is_in_the_log_the_metrics_the_picture_or_a_story():
    key, admin, salt = "sk-key-of-a-client", "sk-key-of-an-admin", "salt-of-a-client"
    keys = {"authorization": f"Bearer {key}", "x-request-id": "mine"}
    admins = {"authorization": f"Bearer {admin}"}

    async def go(server):
        body = {"prompt": "A secret prompt is", "max_tokens": 20, "temperature": 0, "cache_salt": salt, "stop": "zebra"}
        heard = await ask(server.port, PATH, body, headers=keys)
        wrong = await ask(server.port, PATH, body | {"prompt": {"secret": 1}}, headers=keys)
        refused = await ask(server.port, PATH, body, headers={"authorization": "Bearer sk-wrong-key"})
        page = (await get(server.port, "/metrics")).body
        story = (await get(server.port, "/requests/mine", headers=admins)).body
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"GET /dashboard/feed HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {admin}\r\n\r\n".encode())
        picture = await reader.readuntil(b"\n\n")
        writer.close()
        return heard, wrong, refused, page + json.dumps(story) + picture.decode()

    with served(api_key=key, admin_key=admin) as server:
        heard, wrong, refused, seen = run(go(server))
        assert (heard.status, wrong.status, refused.status) == (200, 400, 401)
        said = server.said + seen
    assert '"id":"mine"' in said
    for secret in (key, admin, salt, "secret prompt", "zebra", heard.text.strip(), "sk-wrong-key"):
        assert secret not in said


def test_keys_are_needed_where_there_are_any_and_a_wrong_one_gets_no_hint():
    with served(api_key="right", admin_key="admin") as server:

        async def go(path, key):
            shown = {} if key is None else {"authorization": f"Bearer {key}"}
            return (await get(server.port, path, headers=shown)).status

        for path, statuses in {
            "/v1/models": {None: 401, "wrong": 401, "right": 200, "admin": 401},
            "/requests/a": {None: 401, "wrong": 403, "right": 403, "admin": 404},
            "/health": {None: 200},
            "/metrics": {None: 200},
        }.items():
            assert {key: run(go(path, key)) for key in statuses} == statuses
        refused = [run(ask(server.port, PATH, USUAL, headers=shown)) for shown in ({}, {"authorization": "Bearer r"})]
        assert refused[0].body == refused[1].body


def test_a_full_disk_under_the_log_holds_up_nobody():
    with open("/dev/full", "w") as full, started(stderr=full) as server:
        assert is_served(server)
        assert is_served(server)
        page = run(get(server.port, "/metrics")).body
        server.process.terminate()
        assert server.process.wait(LIMIT_S) == 0
    lost = next(line for line in page.splitlines() if line.startswith("paged:log_lines_lost_total"))
    assert float(lost.rsplit(" ", 1)[1]) >= 1


def test_a_client_that_reads_nothing_is_gone_after_a_while():
    body = json.dumps(LONG | {"max_tokens": 1000, "n": 8, "temperature": 1.0}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with served(stall_timeout_s=1.0, max_sequences=32) as server:
        connections = []
        for _ in range(3):
            connection = socket.socket()
            # Little fits on the way, so that the server's own buffer fills.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(head % len(body) + body)
            connections.append(connection)
        until = time.monotonic() + LIMIT_S
        while run(get(server.port, "/load")).body["server_load"] < 3:
            assert time.monotonic() < until
        while run(get(server.port, "/load")).body["server_load"]:
            assert time.monotonic() < until, "calls are still open"
            time.sleep(0.1)
        assert is_served(server)
        for connection in connections:
            connection.close()


def test_a_request_that_waits_for_too_long_is_told_when_to_come_again():
    async def go(server):
        tasks = [
            asyncio.create_task(ask(server.port, PATH, LONG | {"prompt": f"{number}", "max_tokens": 1000}))
            for number in range(6)
        ]
        return await asyncio.gather(*tasks)

    with served(max_sequences=1, max_queue_s=0.5) as server:
        heard = run(go(server))
        late = [each for each in heard if each.status == 429]
        assert late
        assert {each.error["code"] for each in late} <= {"queue_timeout", "overloaded"}
        assert all(int(each.headers["retry-after"]) >= 1 for each in late)
        assert all(each.is_whole for each in heard if each.status == 200)
