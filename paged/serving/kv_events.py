"""KV events: published over ZeroMQ in vLLM's wire form, numbered, and replayed to readers that missed some.

    engine's thread    take_events ──> queue ──┐                           PUB     topic, number, payload
    publisher's thread                         └──> number, encode, keep ──┤
    a late reader      "from 7 on" ───────────────> the journal ───────────┴─ ROUTER  the same, and an end

The engine's thread takes and reads the events and their hashes, since the memory layer is live. Another thread does all else: it
owns the sockets, and waits for no reader. While the queue is full, events stay in the memory layer, which adds up
the changes: the engine never waits, and no event is lost.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from contextlib import suppress
from threading import Thread
from typing import Any

import zmq

from paged import BlockManager
from paged.block_manager import Event
from paged.errors import PublisherFailed, UnusableEndpoint
from paged.serving.kv_journal import Journal
from paged.serving.kv_wire import END_SEQ, SEQ_BYTES
from paged.serving.settings import KvEventsConfig

_LINGER_MS = 500
"""How long a closed socket may go on sending."""
_CLOSING_S = 5.0
_MOST_AT_ONCE = 64
"""Batches sent to each reader before new ones are published again."""
_MOST_READERS = 64
"""Readers of replays at a time; further ones wait."""
_MOST_OWED = 100_000
"""A reader that is still to get so many batches is refused further ones."""
_FULL_POLL_MS = 5
_PATIENCE_S = 10.0
"""A reader of a replay that takes nothing for so long gets no more of it."""
_LARGEST_REQUEST = 256
"""Bytes of a frame; a reader that sends more is disconnected."""
_YIELD_S = 5e-5
"""Long enough for the engine's thread to take the interpreter's lock."""

_Message = tuple[bytes, ...]


class KvEventPublisher:
    """Publishes the blocks that a manager stores and removes. `rank` is added to ports, as in vLLM: tcp://*:5557 is 5558 for rank 1.

    endpoint, replay_endpoint  as they are bound, with the port that was found for `*`

    `publish` and `close` are called by the engine's thread; all other methods run in the publisher's, which owns the sockets and the journal.
    Raises UnusableEndpoint.
    """

    def __init__(self, manager: BlockManager, config: KvEventsConfig, rank: int = 0) -> None:
        self._manager, self._topic = manager, config.topic.encode()
        self._restart_points, self._max_queue_size = config.restart_points, config.max_queue_size
        self._queue: deque[tuple[float, list[Event]]] = deque()
        self._journal = Journal(
            manager.block_size,
            config.buffer_steps,
            rank,
            use_int_block_hashes=config.use_int_block_hashes,
            restart_points=config.restart_points and not manager.layout.is_plain,
            yield_thread=lambda: time.sleep(_YIELD_S),
        )
        self._has_begun = self._is_stopping = False
        # By reader, the rest of its replay; and since when it has taken nothing.
        self._answers: dict[bytes, deque[_Message]] = {}
        self._full_since: dict[bytes, float] = {}
        # Its own context: destroying it frees the addresses.
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._pub.linger = _LINGER_MS
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self.endpoint = _opened(self._pub, of_rank(config.endpoint, rank))
            self.replay_endpoint: str | None = None
            if config.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.linger = _LINGER_MS
                self._replay.maxmsgsize = _LARGEST_REQUEST
                # Raises when a reader is full or gone; by default it drops messages.
                self._replay.router_mandatory = True
                self.replay_endpoint = _opened(self._replay, of_rank(config.replay_endpoint, rank), binds=True)
        except UnusableEndpoint:
            self._context.destroy(0)
            raise
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._failure: Exception | None = None
        self._thread = Thread(target=self._run, name="paged-kv-events", daemon=True)
        self._thread.start()

    def publish(self, now: float) -> None:
        """Send the changes since the last call; the first call sends all content. `now`: seconds since the epoch.

        Takes about 2 µs where nothing happened. Raises PublisherFailed when nothing can be sent any more.
        """
        if not self._thread.is_alive():
            raise PublisherFailed("KV events are published no more.") from self._failure
        if len(self._queue) >= self._max_queue_size:
            return
        # Here, since they are read from the memory layer's tables.
        events = self._manager.take_events(restart_points=self._restart_points)
        if events or not self._has_begun:
            self._has_begun = True
            self._queue.append((now, events))
            self._wake()

    def close(self) -> None:
        """Publish the queue, and stop. Calling it again does nothing."""
        if self._waker.fileno() >= 0:
            self._is_stopping = True
            self._wake()
            self._thread.join(_CLOSING_S)
            self._waker.close()

    def _wake(self) -> None:
        # Its buffer may be full, and the thread may have ended.
        with suppress(OSError):
            self._waker.send(b"\0")

    def _run(self) -> None:
        try:
            while self._work():
                pass
        except Exception as error:
            self._failure = error  # `publish` raises it.
        finally:
            self._woken.close()
            self._context.destroy()

    def _work(self) -> bool:
        """Wait for work, and do it. Return False after `close`."""
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None and len(self._answers) < _MOST_READERS:
            poller.register(self._replay, zmq.POLLIN)
        are_all_full = len(self._full_since) == len(self._answers)
        timeout = None if not self._answers else _FULL_POLL_MS if are_all_full else 0
        ready = dict(poller.poll(timeout))
        is_last = self._is_stopping
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
        while self._queue:
            seq, payload = self._journal.add(*self._queue.popleft())
            # A reader that is full loses it, and requests a replay.
            self._pub.send_multipart(_numbered(self._topic, seq, payload), zmq.NOBLOCK)
        if self._replay is not None:
            if self._replay in ready:
                self._take_request(self._replay)
            self._answer(self._replay)
        return not is_last

    def _take_request(self, replay: zmq.Socket[bytes]) -> None:
        """Receive a message; if it is a request, add to its reader's replay."""
        reader, *frames = replay.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 2 or frames[0] or len(frames[1]) != SEQ_BYTES:
            return
        answer = self._answers.setdefault(reader, deque())
        if len(answer) < _MOST_OWED:
            batches = self._journal.since(int.from_bytes(frames[1], "big"))
            answer.extend(_numbered(self._topic, seq, payload) for seq, payload in batches)
            answer.append((b"", END_SEQ, b""))

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send up to _MOST_AT_ONCE batches of each reader's replay."""
        now = time.monotonic()
        for reader, answer in list(self._answers.items()):
            try:
                for _ in range(min(_MOST_AT_ONCE, len(answer))):
                    replay.send_multipart((reader, b"", *answer[0]), zmq.NOBLOCK)
                    answer.popleft()
                    self._full_since.pop(reader, None)
            except zmq.Again:
                if now - self._full_since.setdefault(reader, now) > _PATIENCE_S:
                    answer.clear()
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                answer.clear()
            if not answer:
                del self._answers[reader]
                self._full_since.pop(reader, None)


def configured_publisher(
    config: KvEventsConfig | None, manager: BlockManager, rank: int = 0
) -> KvEventPublisher | None:
    """Return a publisher of a manager's events; None if none is configured. Raises UnusableEndpoint."""
    if config is None or not config.enable_kv_cache_events or config.publisher == "null":
        return None
    return KvEventPublisher(manager, config, rank)


def of_rank(endpoint: str, rank: int) -> str:
    """Return a replica's address from the one that all replicas share: a tcp port plus `rank`, another address with `_dp<rank>` behind it."""
    if not rank:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}" if port.isdecimal() and int(port) else endpoint


def _numbered(topic: bytes, seq: int, payload: bytes) -> _Message:
    return topic, seq.to_bytes(SEQ_BYTES, "big"), payload


def bound_to(one: zmq.Socket[Any]) -> str:
    """Return the address of a socket, with the port that was found for it."""
    return bytes(one.last_endpoint).rstrip(b"\0").decode()  # type: ignore[arg-type]


def _opened(one: zmq.Socket[Any], endpoint: str, binds: bool = False) -> str:
    """Bind or connect a socket, and return its address. Raises UnusableEndpoint."""
    binds = binds or "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")
    if endpoint.startswith("inproc://"):
        raise UnusableEndpoint(endpoint, "only this process could read that")
    try:
        one.ipv6 = "[" in endpoint
        if not binds:
            one.connect(endpoint)
            return endpoint
        one.bind(endpoint)
        return bound_to(one) if endpoint.startswith("tcp://") else endpoint
    except zmq.ZMQError as error:
        raise UnusableEndpoint(endpoint, zmq.strerror(error.errno or 0)) from None
