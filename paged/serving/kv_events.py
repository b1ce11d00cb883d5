"""KV events: published over ZeroMQ in vLLM's wire form, numbered, and sent again to readers that missed some.

    engine's thread    take_events ──> queue ──┐                           PUB     topic, number, payload
    publisher's thread                         └──> number, encode, keep ──┤
    a late reader      "from 7 on" ───────────────> the journal ───────────┴─ ROUTER  the same, and an end

The engine's thread takes and reads the events, hashes included, since the memory layer is live; all else is the
work of the other thread, which owns the sockets and waits for no reader. When the queue is full nothing is taken from the
memory layer, which adds up the changes meanwhile: the engine never waits and no event is lost.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from contextlib import suppress
from threading import Thread
from typing import Any

import msgspec
import zmq

from paged import BlockManager
from paged.block_manager import Event
from paged.errors import PublisherFailed, UnusableEndpoint
from paged.serving.kv_config import KvEventsConfig
from paged.serving.kv_journal import Journal
from paged.serving.kv_wire import END_SEQ, SEQ_BYTES

_LINGER_MS = 500
"""How long a socket that is closed may go on sending."""
_CLOSING_S = 5.0
_BATCHES_A_TURN = 64
"""Of replays; then what is new is published."""
_MOST_READERS = 64
"""Readers that are answered at a time; further ones wait."""
_MOST_OWED = 100_000
"""Batches that a reader is still to get when it asks again, and is passed over."""
_FULL_POLL_MS = 5
_PATIENCE_S = 10.0
"""For a reader that asked and reads nothing."""
_LARGEST_REQUEST = 256
"""Bytes of a frame; a reader that sends more is disconnected."""
_BREATH_S = 5e-5
"""Long enough that the engine's thread goes on, where it waits for the interpreter."""

_Message = tuple[bytes, ...]


class KvEventPublisher:
    """Publishes the blocks that a manager stores and removes. A port counts on by `rank`, as vLLM's do: tcp://*:5557 is 5558 for rank 1.

    endpoint, replay_endpoint  as they are bound: where a port was left open, with the one that was found

    Raises UnusableEndpoint.
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        endpoint: str,
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        topic: str = "",
        rank: int = 0,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        use_int_block_hashes: bool = True,
        restart_points: bool = False,
    ) -> None:
        self._manager, self._restart_points = manager, restart_points
        self._queue: deque[tuple[float, list[Event]]] = deque()
        self._max_queue_size = max_queue_size
        journal = Journal(
            manager.block_size,
            buffer_steps,
            rank,
            use_int_block_hashes=use_int_block_hashes,
            restart_points=restart_points and not manager.layout.is_plain,
            breathe=lambda: time.sleep(_BREATH_S),
        )
        self._has_begun = False
        # Its own, which ends with it: then its addresses are free.
        context = zmq.Context()
        pub = context.socket(zmq.PUB)
        pub.set_hwm(hwm)
        pub.linger = _LINGER_MS
        replay: zmq.Socket[bytes] | None = None
        try:
            self.endpoint = _opened(pub, of_rank(endpoint, rank))
            self.replay_endpoint: str | None = None
            if replay_endpoint is not None:
                replay = context.socket(zmq.ROUTER)
                replay.linger = _LINGER_MS
                replay.maxmsgsize = _LARGEST_REQUEST
                # Says when a reader is full or gone, where it would lose a part of its answer without a word.
                replay.router_mandatory = True
                self.replay_endpoint = _opened(replay, of_rank(replay_endpoint, rank), binds=True)
        except UnusableEndpoint:
            context.destroy(0)
            raise
        self._thread = _Thread(self._queue, journal, topic.encode(), context, pub, replay)
        self._thread.start()

    def publish(self, now: float) -> None:
        """Send the changes since the last call; the first call sends all content. `now`: seconds since the epoch.

        Takes about 2 µs where nothing happened. Raises PublisherFailed when nothing can be sent any more.
        """
        if not self._thread.is_alive():
            raise PublisherFailed("KV events are published no more.") from self._thread.failure
        if len(self._queue) >= self._max_queue_size:
            return
        # Made here and now: it is read from the memory layer's tables.
        events = self._manager.take_events(restart_points=self._restart_points)
        if events or not self._has_begun:
            self._has_begun = True
            self._queue.append((now, events))
            self._thread.wake()

    def close(self) -> None:
        """Send what is in the queue, and stop. Calling it again does nothing."""
        self._thread.stop()


def configured_publisher(
    config: KvEventsConfig | None, manager: BlockManager, rank: int = 0
) -> KvEventPublisher | None:
    """Return a publisher of this manager's events, None if none is configured. Raises UnusableEndpoint."""
    if config is None or not config.enable_kv_cache_events or config.publisher == "null":
        return None
    options = msgspec.structs.asdict(config)
    del options["enable_kv_cache_events"], options["publisher"]
    return KvEventPublisher(manager, rank=rank, **options)


class _Thread(Thread):
    """Owns the sockets and the journal."""

    def __init__(
        self,
        queue: deque[tuple[float, list[Event]]],
        journal: Journal,
        topic: bytes,
        context: zmq.Context[Any],
        pub: zmq.Socket[bytes],
        replay: zmq.Socket[bytes] | None,
    ) -> None:
        super().__init__(name="paged-kv-events", daemon=True)
        self._queue = queue
        self._journal = journal
        self._topic = topic
        self._context = context
        self._pub = pub
        self._replay = replay
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._is_stopping = False
        # What each reader that asked is still to get, who is next coming first; and when one was last found to be full.
        self._answers: dict[bytes, deque[_Message]] = {}
        self._full_since: dict[bytes, float] = {}
        self.failure: Exception | None = None

    def wake(self) -> None:
        """Wake the thread to read the queue."""
        # It may be full of calls that were not heard yet, and the thread may have ended.
        with suppress(OSError):
            self._waker.send(b"\0")

    def stop(self) -> None:
        """Send what is in the queue, and end."""
        if self._waker.fileno() >= 0:
            self._is_stopping = True
            self.wake()
            self.join(_CLOSING_S)
            self._waker.close()

    def run(self) -> None:
        """Until `stop`."""
        try:
            while self._turn():
                pass
        except Exception as error:
            self.failure = error  # `publish` tells.
        finally:
            self._woken.close()
            self._context.destroy()

    def _turn(self) -> bool:
        """Wait for work, and do it. Return False after the last time."""
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
            self._publish(*self._queue.popleft())
        if self._replay is not None:
            if self._replay in ready:
                self._hear(self._replay)
            self._answer(self._replay)
        return not is_last

    def _publish(self, ts: float, events: list[Event]) -> None:
        seq, payload = self._journal.add(ts, events)
        # A reader that is full loses it, and asks.
        self._pub.send_multipart(_numbered(self._topic, seq, payload), zmq.NOBLOCK)

    def _hear(self, replay: zmq.Socket[bytes]) -> None:
        """Take one request, if the message is one."""
        reader, *frames = replay.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 2 or frames[0] or len(frames[1]) != SEQ_BYTES:
            return
        answer = self._answers.setdefault(reader, deque())
        if len(answer) < _MOST_OWED:
            batches = self._journal.since(int.from_bytes(frames[1], "big"))
            answer.extend(_numbered(self._topic, seq, payload) for seq, payload in batches)
            answer.append((b"", END_SEQ, b""))

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send some of the batches that readers still wait for."""
        now = time.monotonic()
        for reader, answer in list(self._answers.items()):
            try:
                for _ in range(min(_BATCHES_A_TURN, len(answer))):
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


def of_rank(endpoint: str, rank: int) -> str:
    """Return a replica's own address, so that all can share one setting: the port of tcp plus `rank`, another address with `_dp<rank>` behind it."""
    if not rank:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}" if port.isdecimal() and int(port) else endpoint


def _numbered(topic: bytes, seq: int, payload: bytes) -> _Message:
    return topic, seq.to_bytes(SEQ_BYTES, "big"), payload


def bound_to(one: zmq.Socket[Any]) -> str:
    """The address of a socket, with the port that was found for it."""
    return bytes(one.last_endpoint).rstrip(b"\0").decode()  # type: ignore[arg-type]


def _opened(one: zmq.Socket[Any], endpoint: str, binds: bool = False) -> str:
    """Bind or connect, and say where. Raises UnusableEndpoint."""
    binds = binds or "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")
    if endpoint.startswith("inproc://"):
        raise UnusableEndpoint(endpoint, "this process alone could read that")
    try:
        one.ipv6 = "[" in endpoint
        if not binds:
            one.connect(endpoint)
            return endpoint
        one.bind(endpoint)
        return bound_to(one) if endpoint.startswith("tcp://") else endpoint
    except zmq.ZMQError as error:
        raise UnusableEndpoint(endpoint, zmq.strerror(error.errno or 0)) from None
