"""Our router among Ray's replicas, by their reports once a second, and by their events, read in a thread for each replica.

    Replica ──record_routing_stats, by Ray──> loads, addresses ──┐
            ──KV events, by ZeroMQ──> a thread ──> what it has ──┴──> paged.engine.routing.Router

A router with missing or wrong information may send a request to a replica that computes it anew. That costs time, and never an
answer.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from threading import Thread
from typing import Any
from uuid import uuid4

import msgspec
import zmq

from paged.engine.replica_index import DEVICE, HOST, NO_KEYS, RESTART
from paged.engine.routing import Prompt, ReplicaLoad, Router, RoutingRules
from paged.errors import EventsLost
from paged.integrations.ray.asked import Asked
from paged.serving.kv_subscriber import KvSubscriber
from paged.serving.kv_wire import (
    MEDIA,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    RestartPointRemoved,
    RestartPointStored,
    int_hash,
)

_SILENCE_S = 1.0
"""After which a reader asks a silent publisher for missed events."""
_AGAIN_S = 5.0
"""After which a reader tries a bad address again."""
_PLACES = {None: DEVICE, MEDIA["device"]: DEVICE, MEDIA["host"]: HOST}
_MOST_TOKENS = 2**31
_FULL = ReplicaLoad(is_full=True)


class Report(msgspec.Struct, frozen=True):
    """A replica's report, at a time of its own clock: its load (None while it takes no requests), its block size and longest sequence in tokens, and the
    addresses of its events and of their replay."""

    at: float
    load: ReplicaLoad | None = None
    block_size: int = 0
    max_model_len: int = 0
    kv_endpoint: str = ""
    kv_replay_endpoint: str = ""


_noted: dict[str, dict[str, Any]] = {}
"""By replica of a router, the report of its latest answer in this process, if any: Ray's are up to some seconds old."""


def note(replica: str, report: dict[str, Any]) -> None:
    """Note a replica's report with an answer for the routers of this process, unless the replica is gone."""
    if replica in _noted:
        _noted[replica] = report


def longest_noted() -> int:
    """Return the longest sequence, in tokens, of the replicas that have answered; before that, more than there can be."""
    # Routers may add replicas meanwhile, in a thread of Ray's.
    return max((report.get("max_model_len", 0) for report in list(_noted.values())), default=0) or _MOST_TOKENS


class Routing:
    """A router of the given replicas. Belongs to one event loop."""

    def __init__(self, *, num_untold: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._rules = RoutingRules(num_untold=num_untold)
        self._clock = clock
        # None until a replica has reported its block size.
        self._router: Router | None = None
        # By replica, the time of its latest report.
        self._seen: dict[str, float] = {}
        self._readers: dict[str, _Reader] = {}

    def ranked(self, request_id: str, asked: Any, stats: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Rank the replicas for a request, which counts as sent to the best. `stats` has the last report of each replica."""
        self._see(stats)
        router, now = self._router, self._clock()
        if router is None:
            return random.sample(list(stats), len(stats))
        # A request that no replica took is ranked again.
        router.withdraw(request_id, now)
        prompt = _prompt(request_id, asked, router.block_size)
        choice = router.choose(prompt, now, list(stats))
        # Noted at once, so that requests that come before Ray has sent this one count it.
        made = router.routed(prompt, choice.replicas[0], now, choice.depth)
        if isinstance(asked, Asked):
            asked.routed = made.router, made.number
        return choice.replicas

    def routed(self, request_id: str, asked: Any, replica: str) -> None:
        """Note that a replica took a request; it may be another one than the best, which was full."""
        router, now = self._router, self._clock()
        if router is not None and replica in router.replicas and router.replica_of(request_id) != replica:
            router.routed(_prompt(request_id, asked, router.block_size), replica, now)

    def completed(self, request_id: str) -> None:
        """Note that a request has ended."""
        if self._router is not None:
            self._router.completed(request_id, self._clock())

    def _see(self, stats: Mapping[str, Mapping[str, Any]]) -> None:
        """Take in the current replicas and their new reports."""
        added = [] if self._router is None else self._router.replicas
        for name in {*added, *self._seen} - stats.keys():
            self._forget(name)
        for name, reported in stats.items():
            found = max(reported, _noted.setdefault(name, {}), key=lambda each: each.get("at", 0.0))
            if found and found["at"] > self._seen.get(name, 0.0):
                self._report(name, msgspec.convert(found, Report))
                self._seen[name] = found["at"]
        if self._router is not None:
            # A replica without a report may take requests, too.
            for name in stats.keys() - set(self._router.replicas):
                self._router.add(name)

    def _report(self, name: str, report: Report) -> None:
        now = self._clock()
        if self._router is None and report.load is not None:
            self._router = Router(report.block_size, self._rules, name=uuid4().hex, draw=random.random)
        router, reader = self._router, self._readers.get(name)
        if router is None:
            return
        if name not in router.replicas:
            router.add(name)
        router.report(name, report.load or _FULL, now)
        if report.kv_endpoint and (reader is None or reader.endpoint != report.kv_endpoint):
            if reader is not None:
                reader.stop()
            self._readers[name] = _Reader(report, partial(self._apply, name))

    def _apply(self, name: str, batch: EventBatch) -> None:
        """Take in a replica's events."""
        router = self._router
        if router is None or name not in router.index:
            return
        index = router.index
        for event in batch.events:
            if isinstance(event, BlockStored):
                if event.block_size == router.block_size:
                    index.store(name, map(int_hash, event.block_hashes), _PLACES.get(event.medium, HOST))
                else:
                    self._misfits(name, event.block_size)
            elif isinstance(event, BlockRemoved):
                index.drop(name, map(int_hash, event.block_hashes), _PLACES.get(event.medium, HOST))
            elif isinstance(event, AllBlocksCleared):
                index.clear(name)
            elif isinstance(event, RestartPointStored):
                index.store(name, map(int_hash, event.block_hashes), RESTART)
            elif isinstance(event, RestartPointRemoved):
                index.drop(name, map(int_hash, event.block_hashes), RESTART)

    def _misfits(self, name: str, block_size: int) -> None:
        reader = self._readers[name]
        if not reader.has_warned:
            reader.has_warned = True
            logging.warning(
                "replica %s has blocks of %d tokens, others of %d: what it has cached is not known.",
                name,
                block_size,
                self._router.block_size if self._router is not None else 0,
            )

    def _forget(self, name: str) -> None:
        reader = self._readers.pop(name, None)
        _noted.pop(name, None)
        self._seen.pop(name, None)
        if reader is not None:
            reader.stop()
        if self._router is not None and name in self._router.replicas:
            self._router.remove(name)


class _Reader:
    """Reads a replica's events in a thread, and passes them to the event loop in which it was made."""

    def __init__(self, report: Report, apply: Callable[[EventBatch], None]) -> None:
        self.endpoint = report.kv_endpoint
        # Once, of blocks of another size or of a bad address.
        self.has_warned = False
        self._replay_endpoint = report.kv_replay_endpoint
        self._apply = apply
        self._loop = asyncio.get_running_loop()
        self._is_stopping = False
        Thread(target=self._read, name="paged-replica-events", daemon=True).start()

    def stop(self) -> None:
        """Pass no more events on."""
        self._is_stopping = True

    def _read(self) -> None:
        while not self._is_stopping and not self._loop.is_closed():
            try:
                with KvSubscriber(self.endpoint, self._replay_endpoint) as subscriber:
                    self._hand_over(subscriber)
            except zmq.ZMQError as error:
                if not self.has_warned:
                    self.has_warned = True
                    logging.warning("events of a replica cannot be read at %s: %s", self.endpoint, error)
                time.sleep(_AGAIN_S)
            except RuntimeError:
                # The loop has been closed.
                return

    def _hand_over(self, subscriber: KvSubscriber) -> None:
        """Read until the reader is stopped. Raises ZMQError, and RuntimeError if the loop is closed."""
        while not self._is_stopping and not self._loop.is_closed():
            try:
                found = subscriber.take(_SILENCE_S)
            except EventsLost:
                # The subscriber asks for everything again.
                continue
            for _, batch in found:
                self._loop.call_soon_threadsafe(self._hand_on, batch)

    def _hand_on(self, batch: EventBatch) -> None:
        if not self._is_stopping:
            self._apply(batch)


def _prompt(request_id: str, asked: Any, block_size: int) -> Prompt:
    """Return a request for the router; one that computes nothing has no tokens."""
    if not isinstance(asked, Asked) or asked.prompt is None:
        return Prompt(request_id, NO_KEYS, 0)
    prompt = asked.prompt
    return Prompt(request_id, prompt.keys(block_size), len(prompt.tokens), asked.call.tenant or "")
