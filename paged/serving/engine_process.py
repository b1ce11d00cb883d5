"""The engine's process: takes requests as messages, runs steps, and sends the outputs, one message a step.

    stdin: a `Beginning`, one line       to: messages in       from: messages out

It never waits for its reader: ZeroMQ keeps messages until the front takes them. It ends when its standard
input is closed, so that no engine outlives its server.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from importlib import import_module
from queue import Queue, SimpleQueue
from threading import Thread, stack_size
from typing import Any

import msgspec
import zmq

from paged.block_manager import Stored
from paged.engine.engine import Engine
from paged.engine.forecast import forecast
from paged.engine.live_request import LiveRequest
from paged.engine.pace import Pace
from paged.engine.replica_load import REPORT_S, load_of
from paged.engine.results import Completion, EngineOutput
from paged.errors import EngineFailed, MissingExtra, PagedError, UnknownRequest, UnknownSession
from paged.scheduler import Batch, HintOutcome, Outlook
from paged.serving.block_map import groups_of
from paged.serving.kv_events import KvEventPublisher, configured_publisher
from paged.serving.kv_hints import KvAction
from paged.serving.request_log import divert, to_stderr
from paged.serving.watching import Watcher
from paged.serving.wire import (
    Abort,
    Add,
    Answered,
    Ask,
    Beginning,
    Failed,
    Figures,
    Hinted,
    Ready,
    Refused,
    Stepped,
    ToEngine,
)

FIGURES_SHARE = 0.01
"""While steps run, Figures take at most this share of the time, and come at most every REPORT_S."""
MORE = 64
"""Requests behind the queue in a forecast."""
MOST_FAILED = 3
"""So many steps in a row may raise; then the process ends, and the front starts another."""
READ, MOST_READ = "inproc://read", 32
"""Wakes the engine's thread when a form has been read. Fewer forms wait for it than the engine keeps, so that none is read twice."""
READER_STACK_BYTES = 256 * 2**20
"""Equal to form_probe.STACK_BYTES, whose module needs llguidance."""
UNRECOVERABLE = 70
"""Exit status after MOST_FAILED steps, or an EngineFailed."""


class EngineServer:
    """One engine, driven by messages."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        incoming: zmq.Socket[bytes],
        outgoing: zmq.Socket[bytes],
        publisher: KvEventPublisher | None = None,
    ) -> None:
        self.engine = engine
        self._in, self._out = incoming, outgoing
        self._publisher = publisher
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToEngine).decode
        self._pace = Pace()
        # Requests that were never admitted, and those that are answered whole.
        self._waiting: set[str] = set()
        self._whole: dict[str, LiveRequest] = {}
        self._begun: list[str] = []
        # By router, its number of the latest request that came from it.
        self._received: dict[str, int] = {}
        # Requests that came with hints; by action, the outcomes so far.
        self._hinted: dict[str, tuple[Add, list[list[HintOutcome]]]] = {}
        self._batch: Batch | None = None
        self._tokens = 0
        self.watcher = Watcher(engine, time.monotonic, model=name)
        # Moving mean over requests.
        self._prompt_len = 128.0
        self._next_figures = 0.0
        engine.on_batch = self._note_batch
        # Requests whose forms a thread reads; and what it has read, which is bounded.
        self._reading: dict[str, Add] = {}
        self._to_read: SimpleQueue[Add] = SimpleQueue()
        self._read: Queue[tuple[Add, Exception | None]] = Queue(MOST_READ)
        incoming.bind(READ)
        wake = incoming.context.socket(zmq.PUSH)
        wake.connect(READ)
        # The reader recurses into a nested form.
        usual = stack_size(READER_STACK_BYTES)
        Thread(target=self._read_forms, args=(wake,), daemon=True).start()
        stack_size(usual)

    def serve(self) -> None:
        """Take messages and run steps, until the process ends."""
        num_failed = 0
        while True:
            self._take_messages()
            if not self.engine.has_unfinished:
                continue
            try:
                self._step()
                num_failed = 0
            except Exception as error:
                logging.exception("a step failed")
                num_failed += 1
                if isinstance(error, EngineFailed) or num_failed >= MOST_FAILED:
                    os._exit(UNRECOVERABLE)

    def _take_messages(self) -> None:
        """Take all messages; wait for one if there is nothing to do."""
        if not self.engine.has_unfinished:
            self._pace.rest()
            self._in.poll()
        while True:
            try:
                raw = self._in.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._decode(raw) if raw else None
            if message is None:
                self._add_read(*self._read.get())
            elif isinstance(message, Add):
                self._add(message)
            elif isinstance(message, Abort):
                self._abort(message.ids)
            else:
                self._answer(message)

    def _read_forms(self, wake: zmq.Socket[bytes]) -> None:
        """Read forms one after the other, beside the steps."""
        while True:
            asked, error = self._to_read.get(), None
            try:
                form = asked.params.structured_outputs
                if form is not None and asked.id in self._reading:
                    self.engine.read_form(form)
            except Exception as found:
                error = found
            self._read.put((asked, error))
            wake.send(b"")

    def _add(self, asked: Add) -> None:
        if asked.routed is not None:
            router, number = asked.routed
            self._received[router] = max(number, self._received.get(router, 0))
        form = asked.params.structured_outputs
        try:
            is_read = form is None or self.engine.has_read(form)
        except PagedError as error:
            self._refuse(asked, error)
            return
        if is_read:
            self._take(asked)
        else:
            self._reading[asked.id] = asked
            self._to_read.put(asked)

    def _add_read(self, asked: Add, error: Exception | None) -> None:
        """Add a request whose form has been read, or refuse it if that failed. Its client may have gone meanwhile."""
        if self._reading.pop(asked.id, None) is None:
            return
        if error is None:
            self._take(asked)
        else:
            self._refuse(asked, error)

    def _refuse(self, asked: Add, error: Exception) -> None:
        self.watcher.refused(asked.id, asked.tenant or "", len(asked.prompt), str(error), time.monotonic())
        self._send(Refused(asked.id, type(error).__name__, str(error)))

    def _take(self, asked: Add) -> None:
        engine = self.engine
        try:
            engine.add_request(
                asked.prompt,
                asked.params,
                id=asked.id,
                arrival=asked.arrival,
                priority=asked.priority,
                salt=asked.salt,
                tenant=asked.tenant,
                session_id=asked.session_id,
            )
        except (PagedError, MissingExtra) as error:
            self._refuse(asked, error)
            return
        if asked.actions is not None:
            self._hinted[asked.id] = asked, [self._carry_out(each, asked, at_end=False) for each in asked.actions]
        self.watcher.came(asked.id, asked.tenant or "", len(asked.prompt), self._prefix_of(asked), time.monotonic())
        self._prompt_len += 0.05 * (len(asked.prompt) - self._prompt_len)
        self._waiting.add(asked.id)
        if not asked.streams:
            live = engine.live_request(asked.id)
            assert live is not None, "a request that was just added lives"
            self._whole[asked.id] = live

    def _carry_out(self, action: KvAction, asked: Add, *, at_end: bool) -> list[HintOutcome]:
        """Carry out an action's hints for the end of its request, or those for its beginning; return their outcomes."""
        outcomes = []
        for planned in action.hints:
            if planned.at_end is at_end:
                hint, prompt = planned.hint, asked.prompt
                if planned.prefix is not None:
                    limit = self.engine.model.rotary_limit
                    kept_apart = "long" if limit is not None and len(prompt) > limit else None
                    tokens = prompt[: planned.prefix]
                    hint = msgspec.structs.replace(hint, tokens=tokens, salt=asked.salt, extra_key=kept_apart)
                try:
                    outcomes.append(self.engine.hint(hint))
                except PagedError as error:
                    outcomes.append(HintOutcome("rejected", str(error)))
        return outcomes

    def _conclude_hints(self, last: EngineOutput) -> None:
        """Carry out the hints for the end of a request, and send all outcomes before its last output. Neither if it was aborted or failed."""
        asked, outcomes = self._hinted.pop(last.id)
        assert asked.actions is not None, "only requests with actions are in _hinted"
        if last.finish_reason not in ("stop", "length", "rejected"):
            return
        concluded = [
            action.undone(first, asked.tenant)
            if last.finish_reason == "rejected"
            else action.concluded([*first, *self._carry_out(action, asked, at_end=True)], asked.tenant)
            for action, first in zip(asked.actions, outcomes, strict=True)
        ]
        self._send(Hinted(last.id, concluded))

    def _abort(self, ids: list[str]) -> None:
        outputs = []
        for request_id in ids:
            if self._reading.pop(request_id, None) is not None:
                continue
            try:
                output = self.engine.abort(request_id)
            except UnknownRequest:
                # It has ended, or was refused; that message is on its way.
                continue
            if output is not None:
                outputs.append(output)
        if outputs:
            self._deliver(outputs, 0.0)

    def _prefix_of(self, asked: Add) -> str | None:
        """Return the dashboard's name for requests with an equal first block: a digest of it and the salt; None for a shorter prompt."""
        size = self.engine.manager.block_size
        if len(asked.prompt) < size:
            return None
        first = hashlib.blake2b((asked.salt or "").encode(), digest_size=4)
        first.update(struct.pack(f"<{size}i", *asked.prompt[:size]))
        return first.hexdigest()

    def _answer(self, asked: Ask) -> None:
        """Answer a question, with an error if the engine raised one."""
        try:
            answer = Answered(asked.number, msgspec.json.encode(_ANSWERS[asked.what](self, asked)))
        except (PagedError, MissingExtra) as error:
            is_unknown = asked.what in _OF_ONE and isinstance(error, UnknownRequest | UnknownSession)
            answer = Answered(asked.number, None, *(() if is_unknown else (type(error).__name__, str(error))))
        self._send(answer)

    def index(self) -> dict[str, list[str]]:
        """Return the hashes of the content of each tier, in hexadecimal digits."""
        held: dict[str, list[str]] = {"device": [], "host": []}
        for event in self.engine.manager.events_snapshot():
            if isinstance(event, Stored):
                held[event.tier] += [digest.hex() for digest in event.hashes]
        return held

    def _note_batch(self, batch: Batch) -> None:
        """Note a batch that ran, and which requests it admitted."""
        self._batch = batch
        self._tokens += batch.num_scheduled_tokens
        if self._waiting:
            for request_id in batch.admitted:
                if request_id in self._waiting:
                    self._waiting.discard(request_id)
                    self._begun.append(request_id)

    def _step(self) -> None:
        began = time.monotonic()
        outputs = self.engine.step()
        ended = time.monotonic()
        seconds = ended - began
        self._pace.note(self._tokens, began, ended)
        self._deliver(outputs, seconds)

    def _deliver(self, outputs: list[EngineOutput], seconds: float) -> None:
        self.watcher.stepped(self._batch, outputs, time.monotonic(), seconds)
        self._batch = None
        completions: list[Completion] = []
        for output in outputs if self._hinted else ():
            if output.finished and output.id in self._hinted:
                self._conclude_hints(output)
        if self._whole:
            outputs = self._split(outputs, completions)
        for output in outputs:
            if output.finished:
                self._waiting.discard(output.id)
        now = time.monotonic()
        figures = None
        if now >= self._next_figures or not self.engine.has_unfinished:
            figures = self._figures(now)
            took = time.monotonic() - now
            self._next_figures = now + max(REPORT_S, took / FIGURES_SHARE)
        self._send(Stepped(outputs, completions, self._begun, self._tokens, seconds, time.monotonic(), figures))
        self._begun, self._tokens = [], 0
        if self._publisher is not None:
            self._publisher.publish(time.time())

    def _split(self, outputs: list[EngineOutput], completions: list[Completion]) -> list[EngineOutput]:
        """Return the outputs of streamed requests; append the whole answers of others to `completions`."""
        streamed = []
        for output in outputs:
            if output.id not in self._whole:
                streamed.append(output)
            elif output.finished:
                self._waiting.discard(output.id)
                whole = self._whole.pop(output.id).completion()
                # The front has the prompt.
                completions.append(msgspec.structs.replace(whole, prompt=None, prompt_token_ids=[]))
        return streamed

    def _figures(self, now: float) -> Figures:
        engine = self.engine
        scheduler, manager = engine.scheduler, engine.manager
        ran, outlook = engine.stats(), scheduler.outlook()
        device, host, disk = manager.device, manager.host, engine.disk
        return Figures(
            now=now,
            requests=scheduler.counts(),
            blocks={
                "free": device.num_free,
                "cached": device.num_cached,
                "used": device.num_used,
                "shared": int((device.ref_counts > 1).sum()),
                "reserved": scheduler.num_reserved,
                "pinned": scheduler.num_pinned,
                "disk": 0 if disk is None else disk.store.stats().held,
                "host_free": host.num_free,
                "host_cached": host.num_cached,
                "host_used": host.num_used,
            },
            totals=msgspec.structs.asdict(scheduler.stats()),
            failed_steps=ran.failed_steps,
            host_s=ran.host_s,
            model_s=ran.model_s,
            forecast=self._forecast(outlook),
            groups=groups_of(manager),
            load=load_of(outlook, self._pace, received=self._received),
            disk_hit_tokens=0 if disk is None else disk.stats().loaded * manager.block_size,
            sessions=scheduler.num_sessions,
        )

    def _forecast(self, outlook: Outlook) -> list[float]:
        """Return in how many seconds each waiting request is admitted, then further ones behind them."""
        found = forecast(outlook, more=MORE, prompt_len=max(1, round(self._prompt_len)))
        step, each = self._pace.coefficients()
        seconds = step * found.steps + each * found.tokens
        return [round(float(value), 3) for value in seconds.tolist()]

    def _send(self, message: Any) -> None:
        self._out.send(self._encode(message), zmq.NOBLOCK)


_ANSWERS: dict[str, Callable[[EngineServer, Any], Any]] = {
    "hint": lambda server, asked: server.engine.hint(asked.hint),
    "prefix": lambda server, asked: server.engine.explain_prefix(asked.hint.tokens, salt=asked.hint.salt),
    "sessions": lambda server, asked: server.engine.sessions(asked.limit, asked.id),
    "session": lambda server, asked: server.engine.session(asked.id),
    "snapshot": lambda server, _: server.watcher.snapshot(),
    "check": lambda server, _: server.engine.check(),
    "index": lambda server, _: server.index(),
    "story": lambda server, asked: server.watcher.story(asked.id),
}
"""By `Ask.what`; an answer of _OF_ONE is None if there is no such session or request."""
_OF_ONE = ("session", "story")


def ready(engine: Engine, publisher: KvEventPublisher | None = None) -> Ready:
    """Return what the front has to know of an engine."""
    limits, manager, model = engine.scheduler.limits, engine.manager, engine.model
    longest = manager.longest if limits.max_model_len is None else min(manager.longest, limits.max_model_len)
    return Ready(
        block_size=manager.block_size,
        num_blocks=manager.num_blocks,
        host_blocks=manager.num_host_blocks,
        block_bytes=engine.pool.pages.page_bytes,
        cache_tokens=manager.longest,
        max_model_len=longest,
        max_sequences=limits.max_sequences,
        max_tokens_per_step=limits.max_tokens_per_step,
        vocabulary_size=model.vocabulary_size,
        policy=engine.scheduler.policy.name,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        prefix_caching=manager.prefix_caching,
        groups=[each.group for each in groups_of(manager)],
        rotary_limit=model.rotary_limit,
        kv_dtype=engine.pool.kv_dtype,
        kv_endpoint=None if publisher is None else publisher.endpoint,
        kv_replay_endpoint=None if publisher is None else publisher.replay_endpoint,
    )


def main() -> None:
    """Start as standard input says, and serve until it is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The front gets these, too, and ends this process when its requests have ended.
        signal.signal(number, signal.SIG_IGN)
    beginning = msgspec.json.decode(sys.stdin.buffer.readline(), type=Beginning)
    if beginning.says_json:
        divert(to_stderr)
    Thread(target=_end_with_the_front, daemon=True).start()
    context = zmq.Context()
    incoming, outgoing = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, endpoint in ((incoming, beginning.to_engine), (outgoing, beginning.from_engine)):
        socket.set_hwm(0)
        socket.connect(endpoint)
    try:
        for module in beginning.policies_of:
            import_module(module)
        engine = Engine(beginning.engine, clock=time.monotonic)
        publisher = configured_publisher(beginning.kv_events, engine.manager)
    except (PagedError, ImportError, OSError, MemoryError) as error:
        outgoing.send(msgspec.msgpack.encode(Failed(f"{error}" or type(error).__name__)))
        context.destroy(linger=5000)
        os._exit(2)
    outgoing.send(msgspec.msgpack.encode(ready(engine, publisher)))
    # What was loaded lives as long as the process: no collection need visit it.
    gc.collect()
    gc.freeze()
    EngineServer(engine, beginning.name, incoming, outgoing, publisher).serve()


def _end_with_the_front() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
