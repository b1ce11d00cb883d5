"""A replica: the server's paths and its engine, in a Ray actor without a socket.

Its gate works as that of a server with one engine. Once a second it reports to routers (its load, and the addresses of its
events) and to Ray's autoscaling (its number of requests).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import msgspec
import ray
from ray import serve

from paged import POLICIES
from paged.base.extras import leave_torch_out
from paged.engine.routing import ReplicaLoad
from paged.errors import EngineAway
from paged.integrations.ray.asked import BEGUN, ENDED, TAKEN, Asked
from paged.integrations.ray.routing import Report
from paged.integrations.ray.scaling import LOAD
from paged.serving.front import Call
from paged.serving.settings import KvEventsConfig, Settings


class _Exchange:
    """The exchange of ASGI messages of one call with the server's paths."""

    def __init__(self, body: bytes) -> None:
        self.has_gone = asyncio.Event()
        self._incoming = [{"type": "http.request", "body": body, "more_body": False}]
        self._messages: list[dict[str, Any]] = []
        self._has_news = asyncio.Event()
        self._has_ended = False

    async def receive(self) -> dict[str, Any]:
        """Return the body, and then that the client has gone."""
        if self._incoming:
            return self._incoming.pop()
        await self.has_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Take a message of the answer."""
        self._messages.append(dict(message))
        self._has_news.set()

    def begin(self) -> None:
        """Note that the engine begins with the request."""
        self._messages.append({"type": BEGUN})
        self._has_news.set()

    def end(self, _: Any) -> None:
        """Note that nothing more is sent."""
        self._has_ended = True
        self._has_news.set()

    async def take(self) -> list[dict[str, Any]]:
        """Return the messages since the last call: at least one, or none at the end."""
        while not self._messages and not self._has_ended:
            self._has_news.clear()
            await self._has_news.wait()
        found, self._messages = self._messages, []
        return found


def _scope(asked: Asked, call: Call) -> dict[str, Any]:
    """Return ASGI's scope of a call that has passed the guard."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "root_path": "",
        "query_string": asked.query,
        "headers": asked.headers,
        "client": None,
        "server": None,
        "state": {"call": call},
    }


class Replica:
    """The class of Ray's deployment. `settings` are a server's, of which those for sockets are not used; `policies_of` are modules that register
    policies."""

    # Ray awaits it.
    async def __init__(self, settings: Settings, policies_of: list[str]) -> None:  # type: ignore[misc]
        leave_torch_out()
        self._name = serve.get_replica_context().replica_id.unique_id
        for module in policies_of:
            import_module(module)
        host = ray.util.get_node_ip_address()
        here = f"tcp://{f'[{host}]' if ':' in host else host}:*"
        events = KvEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=here, replay_endpoint=here, restart_points=True
        )
        settings = msgspec.structs.replace(settings, kv_events=events)
        from paged.serving.app import paths_of
        from paged.serving.front import Front

        self._front = Front(settings)
        self._paths = paths_of(self._front)
        await self._front.start()
        await self._front.engine.wait_until_ready()

    async def answer(self, asked: Asked) -> AsyncIterator[list[dict[str, Any]]]:
        """Answer a call: yield lists of the ASGI messages that are there."""
        exchange, now = _Exchange(asked.call.body), self._front.clock()
        call = replace(asked.call, arrived=now - asked.waited, on_begun=exchange.begin, routed=asked.routed)
        task = asyncio.create_task(self._paths(_scope(asked, call), exchange.receive, exchange.send))
        task.add_done_callback(exchange.end)
        try:
            yield [{"type": TAKEN, "replica": self._name, "report": self.record_routing_stats()}]
            while messages := await exchange.take():
                yield messages
            yield [{"type": ENDED, "report": self.record_routing_stats()}]
        finally:
            # The client has gone, or has read to the end.
            exchange.has_gone.set()
            await asyncio.wait([task])
            # Paths answer their own errors before they raise them.
            task.exception()

    async def ready(self) -> bytes:
        """Return what its engine has, as JSON of Ready. Raises EngineAway before it has begun."""
        if self._front.engine.ready is None:
            raise EngineAway("the engine has not begun.", None)
        return msgspec.json.encode(self._front.engine.ready)

    def check_health(self) -> None:
        """Raise EngineAway if the engine is gone for good; Ray then replaces the replica."""
        if self._front.engine.state in ("dead", "closed"):
            self._front.engine.must_take()

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the report for routers, as a Report's fields."""
        front, ready = self._front, self._front.engine.ready
        now, report = front.clock(), Report(at=front.clock())
        if front.engine.state == "ready" and ready is not None:
            figures = front.engine.figures
            # Its speed is not known before the first step.
            load, age = (ReplicaLoad(), 0.0) if figures is None else (figures.load, now - figures.now)
            load = msgspec.structs.replace(
                load,
                begin_s=max(0.0, load.begin_s - age),
                is_fair=ready.policy in POLICIES and POLICIES[ready.policy].order == "fair",
                is_full=not front.gate.all.has_room(1, 1, is_kept=False),
                cache_tokens=ready.cache_tokens,
            )
            endpoints = ready.kv_endpoint or "", ready.kv_replay_endpoint or ""
            report = Report(now, load, ready.block_size, ready.max_model_len, *endpoints)
        return dict(msgspec.to_builtins(report))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for Ray's autoscaling."""
        return {LOAD: float(self._front.engine.num_alive)}

    async def __del__(self) -> None:
        """End the engine. Ray calls it at a replica's end, after its requests."""
        if hasattr(self, "_front"):
            await self._front.close()
