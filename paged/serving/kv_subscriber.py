"""A reader of KV events over ZeroMQ: batches of one publisher in order, without gaps, even if messages are lost or late.

`KvFollower` decides what to request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import zmq
import zmq.utils.monitor

from paged.base.fields import Finite, converted
from paged.errors import EventsLost, UnreadableBatch
from paged.serving.kv_wire import END_SEQ, SEQ_BYTES, AllBlocksCleared, EventBatch, decoded

Numbered = tuple[int, EventBatch]


class KvFollower:
    """One reader of one publisher. `wants` is the number to request a replay from; None: nothing is in doubt. It begins with 0."""

    def __init__(self) -> None:
        self.wants: int | None = 0
        self._last: Numbered | None = None

    def doubt(self) -> None:
        """Note that something may have been missed."""
        if self.wants is None:
            self.wants = self._last[0] if self._last else 0

    def see(self, seq: int, batch: EventBatch) -> list[Numbered]:
        """Take a published batch while nothing is in doubt. Return what to apply: the batch, or nothing.

        A batch that raises a doubt is skipped, since the replay has it.
        """
        assert self.wants is None, "a replay comes first"
        next_seq, ts = (self._last[0] + 1, self._last[1].ts) if self._last else (0, 0.0)
        if seq > next_seq or (seq < next_seq and batch.ts > ts):
            self.doubt()
        if seq != next_seq:
            return []
        self._last = seq, batch
        return [(seq, batch)]

    def hear(self, answer: Sequence[Numbered]) -> list[Numbered]:
        """Take a whole replay from `wants` on. Return what to apply; `wants` says whether to request another.

        Raises EventsLost, after which `wants` is 0.
        """
        asked, last = self.wants, self._last
        assert asked is not None, "a replay was requested"
        self.wants, self._last = 0, None
        if last is not None and not (answer and (_are_same(answer[0], last) or answer[0][1].begins_anew)):
            if answer and answer[0][0] > asked:
                raise EventsLost(answer[0][0], asked)
            return []  # A new publisher: it has no such number yet, or another batch under it.
        follows = answer[0][0] if answer and last is not None else 0
        for seq, batch in answer:
            if seq != follows and not batch.begins_anew:
                raise EventsLost(seq, asked)
            follows = seq + 1
        self.wants, self._last = None, answer[-1] if answer else None
        if last is not None:
            return list(answer[1:] if _are_same(answer[0], last) else answer)
        return [(seq, batch if seq else _cleared(batch)) for seq, batch in answer]


def _cleared(batch: EventBatch) -> EventBatch:
    """Return a publisher's first batch with AllBlocksCleared at its beginning, which vLLM's lacks: there may have been another publisher."""
    if batch.begins_anew:
        return batch
    return EventBatch(batch.ts, [AllBlocksCleared(), *batch.events], batch.data_parallel_rank)


def _are_same(one: Numbered, other: Numbered) -> bool:
    return one[0] == other[0] and one[1].ts == other[1].ts


class KvSubscriber:
    """Reads one publisher's events, which publishes at `endpoint` under `topic`, and replays at `replay_endpoint`.

    `patience` is how many seconds an answer may pause before it is requested again. Raises InvalidConfig if it is no number
    above 0, and zmq.ZMQError for an address that is none.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, *, topic: str = "", patience: float = 5.0) -> None:
        self._follower = KvFollower()
        self._patience = converted("patience", patience, Finite)
        self._replay_endpoint = replay_endpoint
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.linger = 0
        # No limit: messages wait while a replay is read.
        self._sub.set_hwm(0)
        self._sub.subscribe(topic)
        self._connections = self._sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._dealer: zmq.Socket[bytes] | None = None
        try:
            self._sub.connect(endpoint)
            self._connect_dealer()
        except zmq.ZMQError:
            self.close()
            raise

    def __enter__(self) -> KvSubscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_current(self) -> bool:
        """Whether nothing is known to be missing."""
        return self._follower.wants is None

    def take(self, timeout: float) -> list[Numbered]:
        """Return the next batches in order, with their numbers. After `timeout` seconds without any it requests a replay once.

        The list is empty if there is nothing new, or no replay came. A batch that begins with AllBlocksCleared may have any number; what
        came before it does not matter. Raises EventsLost.
        """
        follower = self._follower
        found = self._new(timeout) if self.is_current else []
        while not found and (start := follower.wants) is not None:
            answer = self._answer(start)
            if answer is None:
                break
            found = follower.hear(answer)
        return found

    def close(self) -> None:
        """Close all sockets. Calling it again does nothing."""
        self._sub.disable_monitor()
        self._connections.close()
        self._sub.close()
        self._close_dealer()

    def _new(self, timeout: float) -> list[Numbered]:
        """Return the next published batch; nothing at the first doubt, and after `timeout` seconds."""
        follower, until = self._follower, time.monotonic() + timeout
        poller = zmq.Poller()
        poller.register(self._sub, zmq.POLLIN)
        poller.register(self._connections, zmq.POLLIN)
        while follower.wants is None:
            if not poller.poll(max(0, round((until - time.monotonic()) * 1000))):
                follower.doubt()
                break
            message = self._sub.recv_multipart(zmq.NOBLOCK) if self._sub.poll(0) else None
            # After the message: one of a new connection comes after its monitor event.
            if self._connections.poll(0):
                zmq.utils.monitor.recv_monitor_message(self._connections)
                follower.doubt()
            elif (batch := _numbered(message or [])) is not None and (found := follower.see(*batch)):
                return found
        return []

    def _answer(self, start: int) -> list[Numbered] | None:
        """Request a replay, and return all of it; None if it does not come."""
        dealer = self._dealer or self._connect_dealer()
        dealer.send_multipart((b"", start.to_bytes(SEQ_BYTES, "big")))
        found: list[Numbered] = []
        while dealer.poll(round(self._patience * 1000)):
            _, *message = dealer.recv_multipart()
            if len(message) == 3 and message[1] == END_SEQ:
                return found
            if (batch := _numbered(message)) is not None:
                found.append(batch)
        # A late rest would be taken for the next replay.
        self._close_dealer()
        return None

    def _connect_dealer(self) -> zmq.Socket[bytes]:
        dealer = self._dealer = self._context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.set_hwm(0)
        dealer.connect(self._replay_endpoint)
        return dealer

    def _close_dealer(self) -> None:
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None


def _numbered(message: list[bytes]) -> Numbered | None:
    """Return number and batch of (topic, number, payload); None for anything else."""
    if len(message) != 3 or len(message[1]) != SEQ_BYTES:
        return None
    try:
        return int.from_bytes(message[1], "big"), decoded(message[2])
    except UnreadableBatch:
        return None
