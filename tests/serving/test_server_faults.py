"""What goes wrong around a server: nonsense that is asked, clients that go, a clock that jumps. Each has an answer of its own, and no other client notices."""

import http.client
import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from urllib.request import Request, urlopen

import pytest

from .http_client import DRAWN, LONG, asked, got, num_open, streaming  # noqa: TID252
from .serving_process import END_S, flags, imported_first, started  # noqa: TID252


def is_served(server) -> bool:
    """Whether the usual request gets the usual answer."""
    heard = asked(server)
    return heard.status == 200 and heard.text == " is used to wrap the execu"


def told(**fields):
    return json.dumps({"prompt": "a", **fields}).encode()


DEEP = b"[" * 50_000 + b"]" * 50_000
BAD_BODIES = {
    "truncated": b'{"prompt": "abc',
    "no JSON at all": b"\xff\xfe\x00",
    "deep nesting": b'{"prompt": ' + DEEP + b"}",
    "deep nesting in a field that nobody knows": b'{"prompt": "a", "x": ' + DEEP + b"}",
    "an integer of 5,000 digits": b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}",
    "a stop string that is too long": told(stop="x" * 20_000),
    "a grammar that cannot be read": told(structured_outputs={"regex": "(" * 3000}),
    "ten million characters": told(prompt="a" * 10_000_000),
    "a prompt that no context holds": told(prompt="ab " * 2_000_000),
    "too many prompts": told(prompt=["a"] * 1000),
}


@pytest.mark.parametrize("what", BAD_BODIES)
def test_a_body_that_is_wrong_gets_an_error_of_openais_form(usual_server, what):
    heard = asked(usual_server, BAD_BODIES[what])
    status = 413 if what == "ten million characters" else 400
    assert (heard.status, set(heard.error)) == (status, {"message", "type", "param", "code"})
    assert len(heard.error["message"]) < 1200


def test_a_body_that_is_no_object_a_wrong_method_and_a_wrong_address_say_what_is_right(usual_server):
    said = "the body has to be a JSON object, sent with Content-Type: application/json"
    assert asked(usual_server, b"[]").error["message"] == asked(usual_server, b"").error["message"] == said
    for path, status, said in (
        ("/v1/completions", 405, "/v1/completions does not take GET; it takes POST."),
        ("/v1/complet", 404, "/v1/complet is no address of this server; GET / lists them."),
    ):
        heard = got(usual_server, path)
        assert (heard.status, heard.error["message"]) == (status, said)


@pytest.mark.parametrize(
    ("odd", "statuses"),
    [
        ({"prompt": "a\0b"}, [200]),
        ({"stop": "x" * 10_000}, [200]),
        ({"structured_outputs": {"regex": "((a{1,1000}){1,1000}){1,1000}"}}, [200, 400]),
        ({"structured_outputs": {"grammar": 'start: start start | "a"'}}, [200]),
    ],
    ids=["a NUL", "a long stop string", "a grammar that explodes", "a grammar that begins with itself"],
)
def test_what_is_odd_and_not_wrong_is_answered(usual_server, odd, statuses):
    heard = asked(usual_server, {"prompt": "a", "max_tokens": 4} | odd)
    assert heard.status in statuses, heard.body
    assert is_served(usual_server)


@pytest.mark.parametrize("more", [LONG | {"deadline_s": 0.001}, DRAWN | {"deadline_s": 0.2}], ids=["before", "after"])
def test_a_deadline_ends_a_request_before_and_after_its_first_token(usual_server, more):
    heard = asked(usual_server, more)
    assert heard.error["code"] == "deadline"
    assert not heard.is_whole


JUMPS = """
import itertools, time
real, jumps = time.time, itertools.cycle((0.0, 86400.0, -86400.0))
time.time = lambda: real() + next(jumps)
"""


@pytest.fixture(scope="module")
def pressed_server(tmp_path_factory):
    """One in which nothing waits for long, and whose time of day jumps. The tests with it run in this order: the last one ends it."""
    options = flags({"max_queue_s": 2, "request_timeout_s": 60})
    with started(*options, env=imported_first(tmp_path_factory.mktemp("jumps"), JUMPS)) as found:
        yield found


def test_a_clock_that_jumps_by_a_day_ends_nothing_before_its_time(pressed_server):
    server = pressed_server
    assert is_served(server)
    begun = time.monotonic()
    assert asked(server, DRAWN | {"deadline_s": 0.2}).error["code"] == "deadline"
    assert time.monotonic() - begun > 0.2
    assert is_served(server)

    def ended():
        return [line for line in server.lines if "e2e_s" in line]

    # A line is written after its answer, by a thread.
    server.wait_until(lambda: len(ended()) >= 3)
    times = [datetime.fromisoformat(line["time"]).timestamp() for line in ended()]
    assert max(times) - min(times) > 3600, "the clock did not jump"
    assert all(0 <= line["e2e_s"] < 3600 for line in ended())


def test_no_prompt_answer_salt_or_key_is_in_the_log_the_metrics_the_picture_or_a_story(odd_server):
    server, salt = odd_server, "salt-of-a-client"
    keys = {"authorization": "Bearer sk-right", "x-request-id": "silent"}
    admins = {"authorization": "Bearer sk-admin"}
    body = {"prompt": "A secret prompt is", "max_tokens": 20, "temperature": 0, "cache_salt": salt, "stop": "zebra"}
    heard = asked(server, body, headers=keys)
    wrong = asked(server, body | {"prompt": {"secret": 1}}, headers=keys)
    refused = asked(server, body, headers={"authorization": "Bearer sk-wrong-key"})
    assert (heard.status, wrong.status, refused.status) == (200, 400, 401)
    with urlopen(Request(f"{server.url}/dashboard/feed", headers=admins)) as feed:
        picture = feed.readline().decode()
    assert picture.startswith("data: {")
    seen = [got(server, "/metrics").body, json.dumps(got(server, "/requests/silent", admins).body), picture]
    server.wait_until(lambda: '"id":"silent"' in server.said)
    said = server.said + "".join(seen)
    for secret in ("sk-right", "sk-admin", salt, "secret prompt", "zebra", heard.text.strip(), "sk-wrong-key"):
        assert secret not in said


def test_a_client_that_reads_nothing_is_gone_after_a_while(impatient_server):
    body = json.dumps(DRAWN).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    server = impatient_server
    with socket.socket() as connection:
        # Little fits on the way, so that the server's own buffer fills.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head % len(body) + body)
        server.wait_until(lambda: num_open(server))
        server.wait_until(lambda: not num_open(server))
        assert is_served(server)


def test_a_request_that_waits_for_too_long_is_told_when_to_come_again(pressed_server):
    with ThreadPoolExecutor(5) as threads:
        # The eight answers to each of them take all seats.
        heard = list(threads.map(lambda number: asked(pressed_server, DRAWN | {"prompt": f"{number}"}), range(5)))
    late = [each for each in heard if each.status == 429]
    assert late
    assert {each.error["code"] for each in late} <= {"queue_timeout", "overloaded"}
    assert all(int(each.headers["retry-after"]) >= 1 for each in late)
    assert all(each.is_whole for each in heard if each.status == 200)


def test_a_second_signal_ends_it_at_once(pressed_server):
    server = pressed_server
    with streaming(server.port) as (answer, _):
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: got(server, "/ready").status == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(END_S) == 1
        with pytest.raises((http.client.HTTPException, ConnectionError, ValueError)):
            answer.read()
    assert "Traceback" not in server.said
