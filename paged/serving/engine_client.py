"""The front's side of the engine: sends requests, and gives each call its outputs.

    starting ─> ready ─> restarting ─> ready          dead: it died too often, or could not begin

An engine that dies is replaced. The requests that it had begun end with EngineDied, since their state is lost;
the others go to the next engine, once.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from paged import POLICIES
from paged.engine.results import Completion, EngineOutput
from paged.errors import EngineAway, EngineDied, PagedError, RefusedByEngine
from paged.scheduler import Hint
from paged.serving.kv_hints import KvOutcome
from paged.serving.metrics import Metrics
from paged.serving.settings import Settings
from paged.serving.wire import (
    Abort,
    Add,
    Answered,
    Ask,
    Beginning,
    Figures,
    FromEngine,
    Hinted,
    Ready,
    Refused,
    Stepped,
)

MOST_TRIES = 2
"""Engines that a request is sent to."""


def policies_of() -> list[str]:
    """Return the modules whose import registered policies with their own strategies."""
    found = {getattr(policy.strategies, "__module__", None) for policy in POLICIES.values()}
    return sorted(module for module in found if module not in (None, "__main__"))


@dataclass(slots=True)
class Inbox:
    """The outputs of one call's prompts, until its one task takes them. The answers' lengths bound its size."""

    begun: float | None = None
    num_open: int = 0
    completions: dict[int, Completion] = field(default_factory=dict)
    # Of the actions that came with the call, which arrive before its last output; None: it had none, or has no outcomes yet.
    hint_outcomes: list[KvOutcome] | None = None
    on_begun: Callable[[int], None] | None = None
    _outputs: list[tuple[int, EngineOutput]] = field(default_factory=list)
    _error: PagedError | None = None
    _waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[tuple[int, EngineOutput]]:
        """Wait for outputs, and return those since the last call, each with its prompt's index; none once all prompts have ended.
        Raises the error that the call failed with."""
        while not self._outputs and self.num_open and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._outputs:
            taken, self._outputs = self._outputs, []
            return taken
        if self._error is not None:
            raise self._error
        return []

    def begin(self, place: int, now: float) -> None:
        """Note that the prompt at this index was admitted."""
        if self.begun is None:
            self.begun = now
        if self.on_begun is not None:
            self.on_begun(place)

    def push(self, place: int, output: EngineOutput) -> None:
        """Add an output."""
        self._outputs.append((place, output))
        if output.finished:
            self.num_open -= 1
        self._wake()

    def complete(self, place: int, completion: Completion) -> None:
        """Add all of a prompt's answers."""
        self.completions[place] = completion
        self.num_open -= 1
        self._wake()

    def fail(self, error: PagedError) -> None:
        """End the call with an error. `take` still returns the outputs before it first."""
        if self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True)
class _Held:
    """A request that the engine has, or will get: its call, and the number of engines that it was sent to."""

    add: Add
    inbox: Inbox
    place: int
    has_begun: bool = False
    num_tries: int = 0
    # By sequence, when the engine sent the latest tokens.
    latest: dict[int, float] = field(default_factory=dict)


class EngineClient:
    """The engine of a server, whose steps `metrics` count. Belongs to one event loop.

    on_said  called with each line of the engine's standard error; None: the engine writes to the server's
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        clock: Callable[[], float],
        metrics: Metrics,
        on_said: Callable[[bytes], None] | None = None,
    ) -> None:
        self._settings = settings
        self._name = name
        self._clock = clock
        self._metrics = metrics
        self._on_said = on_said
        self._context = zmq.asyncio.Context()
        self._folder = Path(tempfile.mkdtemp(prefix="paged-"))
        self._life = 0
        self._process: asyncio.subprocess.Process | None = None
        self._out: zmq.asyncio.Socket | None = None
        self._held: dict[str, _Held] = {}
        self._questions: dict[int, asyncio.Future[Answered | None]] = {}
        self._num_asked = 0
        self._deaths: deque[float] = deque()
        self._keeper: asyncio.Task[None] | None = None
        self._has_begun = asyncio.Event()
        self._began_at = 0.0
        self._takes_s = 20.0
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        # Whether no more requests are taken, since the server is to end.
        self.is_draining = False
        self.state = "starting"
        self.why = ""
        self.ready: Ready | None = None
        self.figures: Figures | None = None
        # Requests that have begun since `figures`.
        self.num_begun = 0

    def start(self) -> None:
        """Start an engine, and another one whenever it dies."""
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def wait_until_ready(self) -> Ready:
        """Wait until the engine takes requests. Raises EngineAway if it cannot begin."""
        await self._has_begun.wait()
        if self.ready is None:
            raise EngineAway(self.why, None)
        return self.ready

    @property
    def num_alive(self) -> int:
        """Requests that have not ended."""
        return len(self._held)

    def is_alive(self, request_id: str) -> bool:
        """Whether a request of this id has not ended."""
        return request_id in self._held

    def tenant_of(self, request_id: str) -> str | None:
        """Return the tenant of a request that has not ended; None: it has none, or there is no such request."""
        held = self._held.get(request_id)
        return None if held is None else held.add.tenant

    @property
    def back_in_s(self) -> float | None:
        """Seconds until the engine takes requests, if it starts as fast as the last one did; None: it never will."""
        if self.state == "ready":
            return 0.0
        if self.state in ("dead", "closed"):
            return None
        return max(1.0, self._began_at + self._takes_s - self._clock())

    def must_take(self) -> Ready:
        """Return what the engine has. Raises EngineAway if it takes no requests now."""
        if self.is_draining:
            raise EngineAway("the server ends, and takes no more requests.", 1.0, "shutdown")
        if self.state == "starting":
            raise EngineAway("the engine is starting.", self.back_in_s, "engine_starting")
        if self.state != "ready":
            raise EngineAway(self.why or f"the engine is {self.state}.", self.back_in_s)
        assert self.ready is not None, "an engine that takes requests is ready"
        return self.ready

    def submit(self, adds: list[Add], inbox: Inbox) -> None:
        """Send a call's requests to the engine. Raises EngineAway."""
        self.must_take()
        for place, add in enumerate(adds):
            held = self._held[add.id] = _Held(add, inbox, place)
            inbox.num_open += 1
            self._send_request(held)

    def abort(self, ids: list[str]) -> None:
        """Abort requests that have no reader any more."""
        alive = [request_id for request_id in ids if self._held.pop(request_id, None) is not None]
        if alive and self.state == "ready":
            self._send(Abort(alive))

    async def ask(self, what: str, name: str = "", hint: Hint | None = None, limit: int = 0) -> bytes | None:
        """Return the engine's answer to an `Ask`, as JSON; None for an unknown request or session. Raises EngineAway, and RefusedByEngine
        for an error of the engine's."""
        self.must_take()
        self._num_asked += 1
        number = self._num_asked
        waiter = self._questions[number] = asyncio.get_running_loop().create_future()
        self._send(Ask(number, what, name, hint, limit))
        try:
            answered = await waiter
        finally:
            self._questions.pop(number, None)
        if answered is None:
            raise EngineAway("the engine died before it answered.", self.back_in_s)
        if answered.kind:
            raise RefusedByEngine(answered.error, answered.kind)
        return answered.answer

    async def close(self) -> None:
        """End the engine and all its requests."""
        self.state, self.why = "closed", "the server ends."
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self._fail_all(EngineDied(self.why, None))
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _keep(self) -> None:
        """Run one engine after the other, until they die too often."""
        while True:
            failure = await self._live()
            now = self._clock()
            if self.ready is None:
                # No engine has begun: the next one could not either.
                self._die(failure)
                return
            self.figures = None
            logging.error(
                "the engine process died (status %s).", None if self._process is None else self._process.returncode
            )
            self._metrics.restarted()
            self._deaths.append(now)
            while self._deaths and self._deaths[0] < now - self._settings.restart_window_s:
                self._deaths.popleft()
            if len(self._deaths) > self._settings.max_restarts:
                self._die(
                    f"the engine died {len(self._deaths)} times within {self._settings.restart_window_s:g} s, and is not begun again."
                )
                return
            self._fail_begun()

    def _die(self, why: str) -> None:
        self.state, self.why, self.ready = "dead", why, None
        self._fail_all(EngineDied(why, None))
        self._has_begun.set()

    async def _live(self) -> str:
        """Run one engine from its start to its end. Return why it could not begin; of one that did begin it means nothing."""
        self._life += 1
        self._began_at = self._clock()
        to_engine, from_engine = (f"ipc://{self._folder}/{name}{self._life}" for name in ("to", "from"))
        out, incoming = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket, endpoint in ((out, to_engine), (incoming, from_engine)):
            socket.set_hwm(0)
            socket.bind(endpoint)
        weights = {tenant.name: tenant.weight for tenant in self._settings.tenants}
        engine = self._settings.engine.but(tenant_weights=weights) if weights else self._settings.engine
        says_json = self._on_said is not None
        beginning = Beginning(
            engine, self._name, to_engine, from_engine, self._settings.kv_events, says_json, policies_of()
        )
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "paged.serving.engine_process",
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE if says_json else None,
            start_new_session=True,
        )
        assert process.stdin is not None, "it is a pipe"
        process.stdin.write(msgspec.json.encode(beginning) + b"\n")
        self._out = out
        reader = asyncio.get_running_loop().create_task(self._read(incoming))
        listener = asyncio.get_running_loop().create_task(self._listen(process.stderr))
        try:
            status = await process.wait()
            # What the engine sent before it died has come already, or comes at once.
            await asyncio.wait([reader, listener], timeout=0.2)
        finally:
            if process.returncode is None:
                process.kill()
            reader.cancel()
            listener.cancel()
            found = (await asyncio.gather(reader, listener, return_exceptions=True))[0]
            self._out = None
            out.close(linger=0)
            incoming.close(linger=0)
            self.state = "restarting" if self.state == "ready" else self.state
            # The next one begins now.
            self._began_at = self._clock()
            for answer in self._questions.values():
                if not answer.done():
                    answer.set_result(None)
        return found if isinstance(found, str) else f"the engine ended with status {status} while it began."

    async def _read(self, incoming: zmq.asyncio.Socket) -> str:
        """Dispatch the engine's messages until one says that it cannot begin; return why."""
        while True:
            message = self._decode(await incoming.recv())
            if isinstance(message, Stepped):
                self._stepped(message)
            elif isinstance(message, Refused):
                held = self._held.pop(message.id, None)
                if held is not None:
                    held.inbox.fail(RefusedByEngine(message.error, message.kind))
            elif isinstance(message, Answered):
                answer = self._questions.get(message.number)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            elif isinstance(message, Hinted):
                held = self._held.get(message.id)
                if held is not None:
                    held.inbox.hint_outcomes = message.outcomes
            elif isinstance(message, Ready):
                self._begun_with(message)
            else:
                return message.error

    async def _listen(self, said: asyncio.StreamReader | None) -> None:
        """Pass on the lines of the engine's standard error."""
        rest = b""
        while said is not None and self._on_said is not None and (data := await said.read(2**16)):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._on_said(line)
        if self._on_said is not None and rest:
            self._on_said(rest)

    def _begun_with(self, ready: Ready) -> None:
        self._takes_s = max(1.0, self._clock() - self._began_at)
        self.ready, self.state = ready, "ready"
        self._metrics.ready(ready)
        self._has_begun.set()
        for held in list(self._held.values()):
            self._send_request(held)

    def _stepped(self, step: Stepped) -> None:
        held_ones, on_gap = self._held, self._metrics.token_gap
        for request_id in step.begun:
            held = held_ones.get(request_id)
            if held is not None:
                held.has_begun = True
                held.inbox.begin(held.place, step.sent - step.seconds)
        for output in step.outputs:
            held = held_ones.get(output.id)
            if held is not None:
                if output.finished:
                    del held_ones[output.id]
                if output.token_ids:
                    before = held.latest.get(output.sequence)
                    if before is not None:
                        on_gap(step.sent - before)
                    held.latest[output.sequence] = step.sent
                held.inbox.push(held.place, output)
        for completion in step.completions:
            held = held_ones.pop(completion.id, None)
            if held is not None:
                held.inbox.complete(held.place, completion)
        if step.figures is not None:
            self.figures, self.num_begun = step.figures, 0
        else:
            self.num_begun += len(step.begun)
        self._metrics.stepped(step)

    def _fail_begun(self) -> None:
        """Fail the requests that a dead engine had begun, or that have had all of their tries; the others wait for the next engine."""
        error = EngineDied("the engine died while it had this request; it was not finished.", self.back_in_s)
        for request_id, held in list(self._held.items()):
            if held.has_begun or held.num_tries >= MOST_TRIES:
                del self._held[request_id]
                held.inbox.fail(error)

    def _fail_all(self, error: PagedError) -> None:
        held_ones, self._held = self._held, {}
        for held in held_ones.values():
            held.inbox.fail(error)

    def _send_request(self, held: _Held) -> None:
        held.num_tries += 1
        self._send(held.add)

    def _send(self, message: Any) -> None:
        assert self._out is not None, "there is an engine"
        # Without a high-water mark this neither waits nor fails, and the future is done at once.
        self._out.send(self._encode(message), zmq.NOBLOCK)
