"""Our router among Ray's replicas, without Ray: what it takes from reports and events, and what is refused before Ray is loaded."""

import asyncio
import pickle
import sys
from collections import Counter
from contextlib import closing, contextmanager
from importlib.metadata import PackageNotFoundError
from itertools import count
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from paged import LayerGroup
from paged.cli import app
from paged.engine.routing import ReplicaLoad
from paged.errors import UnsupportedRay
from paged.integrations.ray import needed, routing as replica_routing
from paged.integrations.ray.asked import Asked, Prompt
from paged.integrations.ray.routing import Report, Routing, longest_noted, note
from paged.integrations.ray.scaling import LOAD, by_load
from paged.serving.front import Call
from paged.serving.kv_events import KvEventPublisher
from paged.serving.kv_subscriber import KvSubscriber
from paged.serving.settings import KvEventsConfig

from .tiny_engine import TinyEngine  # noqa: TID252

SIZE, PROMPT = 4, list(range(40, 73))


def asked(*tokens, tenant=None):
    call = Call("x", "y", "/v1/completions", 0.0, "somebody", tenant, b"{}")
    return Asked(call, "POST", b"", [], 0.0, Prompt(np.array(tokens, np.int32), None))


def told(at=1.0, load=None, **where):
    """What a replica reports, as Ray hands it on."""
    return msgspec.to_builtins(Report(at, load or ReplicaLoad(token_s=0.001), SIZE, 100, **where))


def sent(routing, stats, num=8):
    """How many of so many requests that share nothing go to each replica."""
    ids = [f"r{i}" for i in range(num)]
    return Counter(routing.ranked(id, asked(*range(10 * i, 10 * i + 8)), stats)[0] for i, id in enumerate(ids))


def test_what_a_router_is_told_of_a_prompt_is_not_sent_to_the_replica():
    found = pickle.loads(pickle.dumps(asked(1, 2, 3)))
    assert found.prompt is None and found.call == asked().call


def test_a_request_goes_out_with_its_number_by_which_the_report_that_counts_it_is_known():
    routing, request = Routing(), asked(*range(2000))
    assert routing.ranked("a", request, {"x": told()}) == ["x"]
    found = pickle.loads(pickle.dumps(request))
    assert found.routed == request.routed and found.routed[1] == 1
    counted = ReplicaLoad(token_s=0.001, received=dict([found.routed]))
    for at, load, first in ((2.0, None, "y"), (3.0, counted, "x")):
        stats = {"x": told(at, load), "y": told(at, ReplicaLoad(token_s=0.001, begin_s=0.5))}
        assert routing.ranked(f"of {first}", asked(9), stats)[0] == first
    # Ranked again it is another one to the replica.
    routing.ranked("a", request, {"x": told(4.0)})
    assert request.routed[1] > found.routed[1]


def test_equal_replicas_are_asked_alike_and_one_that_takes_no_requests_comes_last_until_it_reports_again():
    assert sent(Routing(), {"x": told(), "y": told()}) == {"x": 4, "y": 4}
    routing = Routing()
    assert set(routing.ranked("a", asked(1, 2), {"x": {}, "y": {}})) == {"x", "y"}, "neither has reported"
    away = msgspec.to_builtins(Report(2.0))
    assert sent(routing, {"x": told(), "y": away}) == {"x": 8}
    assert sent(routing, {"x": told(), "y": told(3.0)})["y"] > 0


def test_the_latest_report_counts_whether_ray_or_an_answer_brought_it():
    routing, busy = Routing(), ReplicaLoad(token_s=0.001, begin_s=9.0)
    routing.ranked("a", asked(1, 2), {"n1": {}, "n2": {}})
    note("n1", told(5.0, busy))
    assert sent(routing, {"n1": told(1.0), "n2": told(1.0)}) == {"n2": 8}
    assert sent(routing, {"n1": told(6.0), "n2": told(6.0, busy)}) == {"n1": 8}


def test_a_replica_that_is_gone_is_forgotten_with_its_requests():
    routing = Routing()
    sent(routing, {"x": told(), "y": told()})
    assert routing.ranked("b", asked(1, 2), {"y": told()}) == ["y"]
    routing.completed("r0")
    assert sent(routing, {"x": told(1.0), "y": told(2.0)})["x"] > 0
    # One that went before it reported.
    assert len(routing.ranked("c", asked(1, 2), {"y": told(2.0), "z": {}})) == 2
    assert routing.ranked("d", asked(1, 2), {"y": told(2.0)}) == ["y"]


def test_what_a_replica_says_that_is_gone_is_passed_over():
    routing, before = Routing(), longest_noted()
    for stats in ({"n3": told(), "n4": told()}, {"n3": told()}):
        routing.ranked("a", asked(1, 2), stats)
    note("n4", {**told(), "max_model_len": 10**12})
    assert longest_noted() == before


def test_an_address_that_is_none_is_said_once_and_tried_again(monkeypatch, caplog):
    class Subscriber(KvSubscriber):
        def __init__(self, *where):
            tried.append(where)
            super().__init__(*where)

    async def run():
        Routing().ranked("a", asked(1, 2), {"x": told(kv_endpoint="nowhere", kv_replay_endpoint="nowhere")})
        for _ in range(1000):
            if len(tried) > 2:
                return
            await asyncio.sleep(0.01)

    tried = []
    monkeypatch.setattr(replica_routing, "KvSubscriber", Subscriber)
    monkeypatch.setattr(replica_routing, "_AGAIN_S", 0.01)
    asyncio.run(run())
    assert len(tried) > 2
    assert [record.getMessage() for record in caplog.records] == [
        "events of a replica cannot be read at nowhere: Invalid argument (addr='nowhere')"
    ]


def test_tokens_that_no_replica_takes_are_sent_to_one_which_says_so():
    assert Routing().ranked("a", asked(-1, 2, 3, 4, 5), {"x": told()}) == ["x"]


def test_a_request_counts_where_ray_sent_it():
    routing, stats = Routing(), {"x": told(), "y": told()}
    routing.ranked("a", asked(1, 2), stats)
    best = routing.ranked("b", asked(3, 4), stats)[0]
    for id in ("a", "b"):
        routing.routed(id, asked(1, 2), best)
    assert routing.ranked("c", asked(5, 6), stats)[0] != best


@contextmanager
def replica_with(block_size=SIZE, groups=()):
    """A replica that has PROMPT: what it reports."""
    engine = TinyEngine(num_blocks=40, block_size=block_size, groups=groups)
    here = dict.fromkeys(("endpoint", "replay_endpoint"), "tcp://127.0.0.1:*")
    with closing(KvEventPublisher(engine.manager, KvEventsConfig(restart_points=True, **here))) as publisher:
        engine.serve(PROMPT)
        publisher.publish(1.0)
        yield {"kv_endpoint": publisher.endpoint, "kv_replay_endpoint": publisher.replay_endpoint}


async def best_of(routing, stats, num):
    """Where each of so many requests goes that have PROMPT. By their clock they come long after one another."""
    found = []
    for _ in range(num):
        found.append(routing.ranked("a", asked(*PROMPT), stats)[0])
        routing.completed("a")
        await asyncio.sleep(0.01)
    return found


@pytest.mark.parametrize("groups", [(), (LayerGroup("full"), LayerGroup("window", 6))], ids=["plain", "window"])
def test_a_prompt_goes_to_the_replica_whose_events_say_that_it_has_it(groups):
    async def run(where):
        routing, stats = Routing(clock=count(step=10.0).__next__), {"x": told(**where), "y": told(), "z": told()}
        for _ in range(1000):
            if await best_of(routing, stats, 12) == ["x"] * 12:
                return
        raise AssertionError("its events did not count")

    with replica_with(groups=groups) as where:
        asyncio.run(run(where))


def test_events_of_another_block_size_are_passed_over_and_it_is_said_once(caplog):
    async def run(where):
        routing, stats = Routing(clock=count(step=10.0).__next__), {"y": told(), "x": told(**where)}
        while not caplog.records:
            await best_of(routing, stats, 1)
        assert set(await best_of(routing, stats, 50)) == {"x", "y"}

    with replica_with(block_size=2) as where:
        asyncio.run(run(where))
    assert [record.getMessage() for record in caplog.records] == [
        "replica x has blocks of 2 tokens, others of 4: what it has cached is not known."
    ]


def test_a_number_of_replicas_is_as_many_as_hold_the_load():
    def wanted(*loads, most=8):
        limits = {"capacity_adjusted_min_replicas": 1, "capacity_adjusted_max_replicas": most}
        asked = {"current_num_replicas": 3, "config": SimpleNamespace(target_ongoing_requests=10.0)}
        metrics = {LOAD: {f"r{i}": load for i, load in enumerate(loads)}} if loads else {}
        return by_load(SimpleNamespace(**limits, **asked, aggregated_metrics=metrics))[0]

    assert wanted() == 3
    assert wanted(0.0, 0.0) == 1
    assert wanted(10.0, 10.0) == 2 and wanted(10.0, 11.0) == 3
    assert wanted(1000.0, most=4) == 4


@pytest.mark.parametrize("found", [None, "2.59.3", "1.13.0"])
def test_without_a_ray_that_is_new_enough_it_is_said_what_to_install(monkeypatch, capsys, found):
    def version(_):
        if found is None:
            raise PackageNotFoundError("ray")
        return found

    monkeypatch.setattr(needed, "version", version)
    with pytest.raises(UnsupportedRay, match=rf"Ray 2\.60 or newer, and {found or 'none'} is installed; .*\[ray\]"):
        needed.must_fit()
    # As if it was never imported.
    monkeypatch.delitem(sys.modules, "paged.integrations.ray.local", raising=False)
    monkeypatch.delattr("paged.integrations.ray.local", raising=False)
    assert app.run(["serve", "--replicas", "2"]) == 2
    said = capsys.readouterr().err.strip()
    assert "Ray 2.60 or newer" in said and "Traceback" not in said
