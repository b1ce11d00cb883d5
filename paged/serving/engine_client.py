"""The front's side of the engine: sends requests, and gives each call its outputs.

    starting ─> ready ─> restarting ─> ready          dead: it died too often, or could not begin

An engine that dies is replaced. Requests that it had begun end with EngineDied, for their state is lost;
the others go to the next engine, once.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from paged import POLICIES
from paged.engine.results import Completion, EngineOutput
from paged.errors import EngineAway, EngineDied, PagedError, RefusedByEngine
from paged.serving.settings import Settings
from paged.serving.wire import Abort, Add, Ask, Beginning, Figures, FromEngine, Ready, Refused, Stepped, Told

MOST_TRIES = 2
"""Engines that a request is given to."""


def policies_of() -> list[str]:
    """The modules whose import registered policies with strategies of their own."""
    found = {getattr(policy.strategies, "__module__", None) for policy in POLICIES.values()}
    return sorted(module for module in found if module not in (None, "__main__"))


class Inbox:
    """The outputs of one call's prompts. One task takes from it; the rest is kept, and is bounded by the answers' length."""

    __slots__ = ("_error", "_news", "_waiter", "begun", "completions", "num_open", "on_begun")

    def __init__(self) -> None:
        self.begun: float | None = None
        self.num_open = 0
        self.completions: dict[int, Completion] = {}
        self.on_begun: Callable[[int], None] | None = None
        self._news: list[tuple[int, EngineOutput]] = []
        self._error: PagedError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[tuple[int, EngineOutput]]:
        """Return the outputs since the last time, each with the place of its prompt: at least one, or none once all have ended. Raises what
        the call failed with."""
        while not self._news and self.num_open and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._news:
            taken, self._news = self._news, []
            return taken
        if self._error is not None:
            raise self._error
        return []

    def begin(self, place: int, now: float) -> None:
        """Note that the prompt at this place was admitted."""
        if self.begun is None:
            self.begun = now
        if self.on_begun is not None:
            self.on_begun(place)

    def push(self, place: int, output: EngineOutput) -> None:
        """Add an output."""
        self._news.append((place, output))
        if output.finished:
            self.num_open -= 1
        self._wake()

    def complete(self, place: int, completion: Completion) -> None:
        """Note that all of a prompt's answers have come."""
        self.completions[place] = completion
        self.num_open -= 1
        self._wake()

    def fail(self, error: PagedError) -> None:
        """End the call with an error; outputs that have come are kept."""
        if self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Held:
    """A request that the engine has, or will get: its call, and the number of engines that it was given to."""

    __slots__ = ("add", "has_begun", "inbox", "latest", "num_tries", "place")

    def __init__(self, add: Add, inbox: Inbox, place: int) -> None:
        self.add = add
        self.inbox = inbox
        self.place = place
        self.has_begun = False
        self.num_tries = 0
        # By sequence, when the engine sent its latest tokens.
        self.latest: dict[int, float] = {}


class EngineClient:
    """The engine of a server. Belongs to one event loop.

    on_ready, on_stepped, on_death, on_gap, on_said
                called with Ready, with each Stepped, when an engine died, with the seconds between two steps' tokens of an answer, and with
                each line that it says on standard error (None: that is the server's own)
    """

    def __init__(self, settings: Settings, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._name = name
        self._clock = clock
        self._context = zmq.asyncio.Context()
        self._folder = Path(tempfile.mkdtemp(prefix="paged-"))
        self._life = 0
        self._process: asyncio.subprocess.Process | None = None
        self._out: zmq.asyncio.Socket | None = None
        self._held: dict[str, _Held] = {}
        self._questions: dict[int, asyncio.Future[bytes | None]] = {}
        self._num_asked = 0
        self._deaths: deque[float] = deque()
        self._keeper: asyncio.Task[None] | None = None
        self._has_begun = asyncio.Event()
        self._began_at = 0.0
        self._takes_s = 20.0
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self.state = "starting"
        self.why = ""
        self.ready: Ready | None = None
        self.figures: Figures | None = None
        # Requests that have begun since.
        self.num_begun = 0
        self.num_restarts = 0
        self.on_ready: Callable[[Ready], None] | None = None
        self.on_stepped: Callable[[Stepped], None] | None = None
        self.on_death: Callable[[], None] | None = None
        self.on_gap: Callable[[float], None] | None = None
        self.on_said: Callable[[bytes], None] | None = None

    def start(self) -> None:
        """Start an engine, and a new one when it dies."""
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def wait_until_ready(self) -> Ready:
        """Once the engine takes requests. Raises EngineAway where it cannot begin."""
        await self._has_begun.wait()
        if self.ready is None:
            raise EngineAway(self.why, None)
        return self.ready

    @property
    def process_id(self) -> int | None:
        """Of the engine that runs."""
        return None if self._process is None else self._process.pid

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""
        return sum(not held.has_begun for held in self._held.values())

    @property
    def num_alive(self) -> int:
        """Requests that have not ended."""
        return len(self._held)

    def is_alive(self, request_id: str) -> bool:
        """Whether a request of this id has not ended."""
        return request_id in self._held

    @property
    def back_in_s(self) -> float | None:
        """Seconds until the engine takes requests, if it starts as fast as the last time; None: it never will."""
        if self.state == "ready":
            return 0.0
        if self.state in ("dead", "closed"):
            return None
        return max(1.0, self._began_at + self._takes_s - self._clock())

    def must_take(self) -> None:
        """Raise EngineAway if no requests are taken."""
        if self.state == "starting":
            raise EngineAway("the engine is starting.", self.back_in_s, "engine_starting")
        if self.state != "ready":
            raise EngineAway(self.why or f"the engine is {self.state}.", self.back_in_s)

    def submit(self, adds: list[Add], inbox: Inbox) -> None:
        """Give the engine a call's requests. Raises EngineAway."""
        self.must_take()
        for place, add in enumerate(adds):
            held = self._held[add.id] = _Held(add, inbox, place)
            inbox.num_open += 1
            self._give(held)

    def abort(self, ids: list[str]) -> None:
        """Abort requests that have no reader any more."""
        alive = [request_id for request_id in ids if self._held.pop(request_id, None) is not None]
        if alive and self.state == "ready":
            self._send(Abort(alive))

    async def ask(self, what: str, request_id: str = "") -> bytes | None:
        """The engine's answer to a question, JSON; None: it knows no such request. Raises EngineAway."""
        self.must_take()
        self._num_asked += 1
        number = self._num_asked
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        self._send(Ask(number, what, request_id))
        try:
            return await answer
        finally:
            self._questions.pop(number, None)

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
            if failure is not None and self.num_restarts == 0 and self.ready is None:
                # It could not even begin: the next one could not either.
                self._die(failure)
                return
            self.figures = None
            logging.error(
                "the engine process died (status %s).", None if self._process is None else self._process.returncode
            )
            if self.on_death is not None:
                self.on_death()
            self._deaths.append(now)
            while self._deaths and self._deaths[0] < now - self._settings.restart_window_s:
                self._deaths.popleft()
            if len(self._deaths) > self._settings.max_restarts:
                self._die(
                    f"the engine died {len(self._deaths)} times within {self._settings.restart_window_s:g} s, and is not begun again."
                )
                return
            self.num_restarts += 1
            self._pass_on()

    def _die(self, why: str) -> None:
        self.state, self.why, self.ready = "dead", why, None
        self._fail_all(EngineDied(why, None))
        self._has_begun.set()

    async def _live(self) -> str | None:
        """Run one engine from its beginning to its end. Return why it could not begin, if it could not."""
        self._life += 1
        self._began_at = self._clock()
        to_engine, from_engine = (f"ipc://{self._folder}/{name}{self._life}" for name in ("to", "from"))
        out, incoming = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket, endpoint in ((out, to_engine), (incoming, from_engine)):
            socket.set_hwm(0)
            socket.bind(endpoint)
        weights = {tenant.name: tenant.weight for tenant in self._settings.tenants}
        engine = self._settings.engine.but(tenant_weights=weights) if weights else self._settings.engine
        says_json = self.on_said is not None
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
        assert process.stdin is not None, "it was asked for"
        process.stdin.write(msgspec.json.encode(beginning) + b"\n")
        self._out = out
        reader = asyncio.get_running_loop().create_task(self._read(incoming))
        listener = asyncio.get_running_loop().create_task(self._listen(process.stderr))
        try:
            status = await process.wait()
            # What it sent before it died has come already, or will at once.
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
        """Read and sort the engine's messages, until one says that it cannot begin."""
        while True:
            message = self._decode(await incoming.recv())
            if isinstance(message, Stepped):
                self._stepped(message)
            elif isinstance(message, Refused):
                held = self._held.pop(message.id, None)
                if held is not None:
                    held.inbox.fail(RefusedByEngine(message.error, message.kind))
            elif isinstance(message, Told):
                answer = self._questions.get(message.number)
                if answer is not None and not answer.done():
                    answer.set_result(message.answer)
            elif isinstance(message, Ready):
                self._begun_with(message)
            else:
                return message.error

    async def _listen(self, said: asyncio.StreamReader | None) -> None:
        """Pass on the lines of the engine's standard error."""
        rest = b""
        while said is not None and self.on_said is not None and (data := await said.read(2**16)):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self.on_said(line)
        if self.on_said is not None and rest:
            self.on_said(rest)

    def _begun_with(self, ready: Ready) -> None:
        self._takes_s = max(1.0, self._clock() - self._began_at)
        self.ready, self.state = ready, "ready"
        if self.on_ready is not None:
            self.on_ready(ready)
        self._has_begun.set()
        for held in list(self._held.values()):
            self._give(held)

    def _stepped(self, step: Stepped) -> None:
        held_ones, on_gap = self._held, self.on_gap
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
                    if before is not None and on_gap is not None:
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
        if self.on_stepped is not None:
            self.on_stepped(step)

    def _pass_on(self) -> None:
        """Fail the requests that a dead engine had begun; the rest waits for the next one."""
        error = EngineDied("the engine died while it had this request; it was not finished.", self.back_in_s)
        for request_id, held in list(self._held.items()):
            if held.has_begun or held.num_tries >= MOST_TRIES:
                del self._held[request_id]
                held.inbox.fail(error)

    def _fail_all(self, error: PagedError) -> None:
        held_ones, self._held = self._held, {}
        for held in held_ones.values():
            held.inbox.fail(error)

    def _give(self, held: _Held) -> None:
        held.num_tries += 1
        self._send(held.add)

    def _send(self, message: Any) -> None:
        assert self._out is not None, "there is an engine"
        # Without a limit on what is on its way this neither waits nor fails. The future is done at once.
        self._out.send(self._encode(message), zmq.NOBLOCK)
