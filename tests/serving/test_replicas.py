"""Two replicas on Ray, started as users start them: `paged serve --replicas 2`, asked by OpenAI's client, one of them killed, and ended by Ctrl-C.

The tests run in this order: the last one ends the server.
"""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from threading import Event

import pytest

pytest.importorskip("openai")
if find_spec("ray") is None:
    pytest.skip("Ray is not installed: the extra `ray` brings it", allow_module_level=True)

from openai import APIError, OpenAI

from ..driving import wait_until  # noqa: TID252
from .http_client import asked, got  # noqa: TID252
from .serving_process import END_S, started  # noqa: TID252

pytestmark = pytest.mark.slow
NUM, SEATS = 24, 2
PATIENCE_S = 240.0
"""For any answer; a request that takes longer hangs."""


@pytest.fixture(scope="module")
def server():
    with started("--replicas", "2", "--max-sequences", str(SEATS)) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def below(pid):
    """Processes that this one began, and those that they began, by id: what each calls itself."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, new = {}, {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new}
        found |= {child: named(child) for child in new}
    return found


def named(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def replicas(server):
    return [pid for pid, name in below(server.process.pid).items() if name.startswith("ray::ServeReplica")]


def test_openais_client_is_answered_whole_in_a_stream_and_in_a_conversation(client):
    whole = client.completions.create(model="paged", prompt="Once upon a time", max_tokens=8, temperature=0)
    pieces = client.completions.create(
        model="paged", prompt="Once upon a time", max_tokens=8, temperature=0, stream=True
    )
    said = client.chat.completions.create(model="paged", messages=[{"role": "user", "content": "Hello"}], max_tokens=4)
    assert whole.usage.completion_tokens == 8
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert said.choices[0].message.role == "assistant"


def test_a_prompt_goes_to_the_replica_that_has_it(client):
    def cached(prompt):
        answer = client.completions.create(model="paged", prompt=prompt, max_tokens=1)
        return answer.usage.prompt_tokens_details.cached_tokens

    prompts = [[3 + i, *range(20, 340)] for i in range(4)]
    assert [cached(prompt) for prompt in prompts] == [0] * 4
    # Their events have come by now, or will.
    wait_until(lambda: all(cached(prompt) == 320 for prompt in prompts))
    assert [cached(prompt) for prompt in prompts * 4] == [320] * 16


@pytest.mark.parametrize("body", [{"prompt": 5}, {"prompt": [1, 2], "max_tokens": 10**6}])
def test_what_is_wrong_is_refused_by_a_replica_as_by_a_server_of_one_engine(server, body):
    heard = asked(server, body)
    assert heard.status == 400 and heard.error["param"] in ("prompt", "max_tokens")


@pytest.mark.parametrize("path", ["/metrics", "/sessions", "/sessions/a", "/v1/kv_hints", "/explain"])
def test_a_path_that_is_of_one_engine_says_that_there_are_several(server, path):
    hint = {"action": "end", "session_id": "a"}
    heard = asked(server, hint, path) if path in ("/v1/kv_hints", "/explain") else got(server, path)
    assert heard.status == 501 and "several replicas" in heard.error["message"]


def test_a_turn_of_a_session_and_its_hints_go_to_the_replica_that_answers(server):
    action = {"action_id": "a1", "action_type": "kv.retain", "action_version": "1.0", "payload": {"priority": 50}}
    hints = {"protocol_version": "0.1", "message_id": "m1", "actions": [action]}
    more = {"prompt": [*range(400, 480)], "max_tokens": 2, "session_id": "a", "kv_hints": hints}
    heard = asked(server, more)
    assert heard.status == 200 and heard.body["kv_hint_outcomes"][0]["status"] == "accepted"


def test_of_a_replica_that_is_killed_under_load_what_had_begun_ends_with_an_error_and_the_rest_is_answered(
    server, client
):
    have_begun = [Event() for _ in range(NUM)]

    def ask(number):
        """What was answered: "length", or what the error says."""
        try:
            pieces = client.completions.create(
                model="paged", prompt=[5 + number, 7, 9], max_tokens=300, stream=True, extra_body={"ignore_eos": True}
            )
            for piece in pieces:
                have_begun[number].set()
                reason = piece.choices[0].finish_reason
            return reason
        except APIError as error:
            return error.code

    before = replicas(server)
    assert len(before) == 2
    with ThreadPoolExecutor(NUM) as threads:
        answers = [threads.submit(ask, number) for number in range(NUM)]
        # Some run on each, and most wait.
        wait_until(lambda: sum(each.is_set() for each in have_begun) >= 2 * SEATS)
        os.kill(before[0], signal.SIGKILL)
        found = [answer.result(PATIENCE_S) for answer in answers]
    died = [reason for reason in found if reason != "length"]
    # One may have ended there whose last piece was not out.
    assert set(died) == {"engine_died"} and len(died) <= SEATS + 1, found
    assert ask(NUM - 1) == "length"


def test_ctrl_c_lets_a_request_end_and_leaves_no_process(server, client):
    began = below(server.process.pid)
    engines = [pid for pid, name in began.items() if "paged.serving.engine_process" in name]
    assert engines
    pieces = client.completions.create(
        model="paged", prompt="a", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
    )
    first = next(iter(pieces))
    server.process.send_signal(signal.SIGINT)
    assert [first, *pieces][-1].choices[0].finish_reason == "length"
    assert server.process.wait(END_S) == 130
    wait_until(lambda: not any(named(pid) == name for pid, name in began.items()))
    assert "Traceback" not in server.said
