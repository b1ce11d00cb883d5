"""The ingress of replicas, in front of a stand-in for Ray's handle: what a client gets when a replica dies, takes nothing, or is left.

A stand-in answers call by call as its program says: messages, an error that Ray would raise, or "never".
"""

import asyncio
import json
import os
import warnings
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from types import SimpleNamespace

import pytest
from msgspec import convert
from msgspec.structs import replace

if find_spec("ray") is None:
    pytest.skip("Ray is not installed: the extra `ray` brings it", allow_module_level=True)

with warnings.catch_warnings():
    # Its own use of pydantic.
    warnings.simplefilter("ignore")
    import ray.serve
from ray.exceptions import ActorDiedError, RayTaskError

from paged.engine.routing import ReplicaLoad
from paged.errors import ServerFailed
from paged.integrations.ray import asked, build, ingress as ingresses
from paged.integrations.ray.application import INGRESS, REPLICA
from paged.integrations.ray.ingress import Ingress, asking_of
from paged.integrations.ray.replica import Replica
from paged.integrations.ray.router import PrefixRouter
from paged.serving.settings import Settings

from ..shown import assert_refused, shown_in  # noqa: TID252

REPORT = {"at": 1.0, "load": None, "block_size": 16, "max_model_len": 100}
TAKEN = {"type": asked.TAKEN, "replica": "r", "report": REPORT}
BEGUN, ENDED = {"type": asked.BEGUN}, {"type": asked.ENDED, "report": REPORT}
DIED = ActorDiedError()
SETTINGS = Settings()


def start(kind):
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}


def piece(body, more):
    return {"type": "http.response.body", "body": body, "more_body": more}


WHOLE = [TAKEN, BEGUN, start(b"application/json"), piece(b"{}", False), ENDED]
STREAM = [TAKEN, BEGUN, start(b"text/event-stream"), piece(b"data: 1\n\n", True)]


class Handle:
    """Ray's handle, whose calls go as the programs say, one a call."""

    def __init__(self, *programs):
        self._programs = list(programs)
        self.num_cancelled, self.waited = 0, []

    def options(self, **_):
        return self

    def remote(self, sent):
        self.sent, self._program = sent, self._programs.pop(0)
        self.waited.append(sent.waited)
        return self

    def cancel(self):
        self.num_cancelled += 1

    async def __aiter__(self):
        for step in self._program:
            if step == "never":
                await asyncio.Event().wait()
            if isinstance(step, Exception):
                raise step
            yield [step]


def answered(handle, path="/v1/completions", leaves=False, ends=False, **options):
    """Status, headers and body that a client gets, which may leave at once, or whose server may end."""
    sent = []

    async def run():
        messages = [{"type": "http.request", "body": b'{"prompt": [1, 2, 3]}', "more_body": False}]

        async def receive():
            if not messages:
                await (asyncio.sleep(0.01) if leaves else asyncio.Event().wait())
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": path, "query_string": b"", "http_version": "1.1",
            "headers": [(b"host", b"a")], "client": ("1", 1),
        }  # fmt: skip
        ingress = Ingress(SETTINGS, asking_of(SETTINGS), handle, **options)
        answer = asyncio.create_task(ingress(scope, receive, send))
        if ends:
            await asyncio.sleep(0.01)
            await ingress.drain(0.0)
        await answer

    asyncio.run(run())
    if not sent:
        return None
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(message["body"] for message in sent[1:])


def test_what_a_replica_sends_is_sent_on_with_its_name():
    handle = Handle(WHOLE)
    status, headers, body = answered(handle)
    assert (status, headers[b"x-paged-replica"], body) == (200, b"r", b"{}")
    assert handle.sent.prompt.tokens.tolist() == [1, 2, 3] and handle.num_cancelled == 0


@pytest.mark.parametrize("before", [[], [TAKEN]])
def test_a_request_that_had_not_begun_is_sent_to_another_replica(before):
    assert answered(Handle([*before, DIED], WHOLE))[0] == 200


@pytest.mark.parametrize("programs", [[[TAKEN, BEGUN, DIED]], [[TAKEN, DIED], [TAKEN, DIED]]])
def test_one_that_had_begun_or_lost_two_replicas_ends_with_an_error_that_says_so(programs):
    status, _, body = answered(Handle(*programs))
    assert status == 503 and json.loads(body)["error"]["code"] == "engine_died"


def test_a_stream_that_has_begun_ends_with_the_error_as_its_last_event():
    status, _, body = answered(Handle([*STREAM, DIED]))
    *_, first, error, done, rest = body.split(b"\n\n")
    assert (status, first, done, rest) == (200, b"data: 1", b"data: [DONE]", b"")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_died"


def test_an_error_of_a_replicas_own_is_not_tried_again():
    status, _, body = answered(Handle([TAKEN, RayTaskError("f", "traceback", ValueError("secret"))], WHOLE))
    assert status == 500 and b"secret" not in body


def test_a_request_that_no_replica_takes_is_told_when_to_come_again(monkeypatch):
    monkeypatch.setattr(ingresses, "PATIENCE_S", 0.05)
    handle = Handle(["never"])
    status, headers, body = answered(handle)
    assert status == 503 and json.loads(body)["error"]["code"] == "no_replica" and headers[b"retry-after"] == b"5"
    assert handle.num_cancelled == 1


def test_a_client_that_leaves_takes_its_request_with_it():
    handle = Handle([TAKEN, BEGUN, "never"])
    assert answered(handle, leaves=True) is None and handle.num_cancelled == 1


def test_what_is_not_finished_when_the_server_has_to_end_is_told_so():
    _, _, body = answered(Handle([*STREAM, "never"]), ends=True)
    assert b'"code":"shutdown"' in body and body.endswith(b"data: [DONE]\n\n")


def test_a_request_that_is_sent_again_has_waited_longer():
    handle = Handle([DIED], WHOLE)
    answered(handle, clock=count().__next__)
    assert handle.waited[0] < handle.waited[1]


@pytest.mark.parametrize("program", [[], [TAKEN], [TAKEN, BEGUN, ENDED], [*STREAM, ENDED]])
def test_a_replica_that_ends_without_its_whole_answer_is_an_error(program):
    status, _, body = answered(Handle(program))
    assert status == (200 if program[:4] == STREAM else 500) and b"without its answer" in body


def test_a_ray_that_does_not_begin_is_one_error_and_replicas_share_the_cores(monkeypatch):
    def init(**_):
        raise RuntimeError("no room")

    local = import_module("paged.integrations.ray.local")
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(local, "usable_cores", lambda: 7)
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.delenv("OMP_NUM_THREADS")
    with pytest.raises(ServerFailed, match="Ray did not begin: no room"), local.replicas(SETTINGS, 2):
        pass
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_a_replica_reports_the_load_of_its_engine_as_it_has_become_since():
    ready = {"policy": "paged-fair", "block_size": 16, "max_model_len": 100, "cache_tokens": 99}
    ready = SimpleNamespace(**ready, kv_endpoint=None, kv_replay_endpoint=None)
    counted = ReplicaLoad(begin_s=4.0, token_s=0.001, received={"r": 7}, queued={"": 5})
    engine = SimpleNamespace(state="ready", figures=SimpleNamespace(now=0.75, load=counted), ready=ready)
    gate = SimpleNamespace(all=SimpleNamespace(has_room=lambda *_, **__: False))
    front = SimpleNamespace(engine=engine, gate=gate, clock=lambda: 1.0)
    load = convert(Replica.record_routing_stats(SimpleNamespace(_front=front))["load"], ReplicaLoad)
    now = {"begin_s": 3.75, "is_fair": True, "is_full": True, "cache_tokens": 99}
    assert load == replace(counted, **now)


def test_where_replicas_cannot_be_ranked_ray_gets_all_of_them():
    def ranked(*_):
        return ["gone"]

    router = SimpleNamespace(_routing=SimpleNamespace(ranked=ranked))
    there = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats={}) for name in "xy"]
    request = SimpleNamespace(args=(), metadata=SimpleNamespace(internal_request_id="1"))
    found = asyncio.run(PrefixRouter.choose_replicas(router, there, request))
    assert found == [[each] for each in there]


def test_behind_rays_proxy_an_answer_has_one_id():
    answer = [TAKEN, {**start(b"a"), "headers": [(b"x-request-id", b"a")]}, piece(b"", False)]
    assert b"x-request-id" in answered(Handle(answer))[1]
    assert b"x-request-id" not in answered(Handle(answer), is_behind_ray=True)[1]


@pytest.mark.parametrize(("gpus", "each"), [({}, None), ({"GPU": 4.0}, 2), ({"GPU": 5.0}, 2), ({"GPU": 1.0}, 0.5)])
def test_replicas_of_one_machine_share_its_gpus(monkeypatch, gpus, each):
    local = import_module("paged.integrations.ray.local")
    monkeypatch.setattr(ray, "cluster_resources", lambda: gpus)
    assert local.resources(2).get("num_gpus") == each


def test_the_yaml_of_the_page_names_what_is_built(repository):
    yaml = pytest.importorskip("yaml")
    page = (repository / "docs/scaling.md").read_text(encoding="utf-8")
    application = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])["applications"][0]
    module, _, name = application["import_path"].partition(":")
    built = getattr(import_module(module), name)(application["args"])
    assert {each["name"] for each in application["deployments"]} == {INGRESS, REPLICA}
    assert isinstance(built, ray.serve.Application)


@pytest.mark.parametrize(("call", "shown"), shown_in("serving/refused_replicas.txt", ">>>"))
def test_what_cannot_be_built_is_refused_by_name(call, shown):
    assert_refused(call, shown, {"build": build})
