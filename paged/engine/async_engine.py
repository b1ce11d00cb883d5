"""An engine for asyncio: many tasks send requests, and one thread runs the steps.

    async for output in engine.generate(prompt, params):     one task a request; leaving the loop aborts the request
        ...

All calls of the engine run in one thread of its own, one after the other. So the event loop never waits for a step, and
the engine never has two calls at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from paged.base.words import shown
from paged.engine.config import EngineConfig
from paged.engine.door import checked_time
from paged.engine.engine import Engine
from paged.engine.results import EngineOutput
from paged.errors import DeadlineExceeded, DuplicateRequest, EngineClosed, InvalidRequest
from paged.model.loading import LoadedModel
from paged.sampling.params import SamplingParams
from paged.sampling.search_params import SearchParams
from paged.scheduler import Hint, HintOutcome, PrefixExplanation, SessionView

T = TypeVar("T")


class AsyncEngine:
    """An Engine for many tasks of one event loop. Takes the arguments of Engine; is an async context manager.

    async with AsyncEngine() as engine:
        async for output in engine.generate("The with statement"):
            print(output.text, end="")
    """

    def __init__(self, model: EngineConfig | LoadedModel | str | Path | None = None, **options: Any) -> None:
        self.engine = Engine(model, **options)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paged")
        self._queues: dict[str, asyncio.Queue[EngineOutput | BaseException]] = {}
        self._has_work = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None
        self._num_added = 0
        self._is_closed = False

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | SearchParams | None = None,
        *,
        request_id: str | None = None,
        deadline_s: float | None = None,
        **wishes: Any,
    ) -> AsyncIterator[EngineOutput]:
        """Yield a request's outputs as they come, up to the one that is `finished`; `wishes` as of Engine.add_request.

        A task that leaves the loop, or is cancelled, aborts its request. An error in a request's own processors ends
        that request alone, with "error". Raises as Engine.add_request; DeadlineExceeded after `deadline_s` seconds;
        EngineClosed; and the error of a step, in every task that waits.
        """
        self._must_be_open()
        loop = asyncio.get_running_loop()
        ends = None if deadline_s is None else loop.time() + checked_time("deadline_s", deadline_s)
        while request_id is None:
            free, self._num_added = f"async-{self._num_added}", self._num_added + 1
            request_id = None if free in self._queues else free
        if not isinstance(request_id, str):
            raise InvalidRequest(f"id has to be a non-empty string; got {shown(request_id)}.")
        if request_id in self._queues:
            raise DuplicateRequest(request_id)
        queue: asyncio.Queue[EngineOutput | BaseException] = asyncio.Queue()
        self._queues[request_id] = queue
        is_over = False
        try:
            await self._call(lambda: self.engine.add_request(prompt, params, id=request_id, **wishes))
            self._go_on()
            while not is_over:
                try:
                    async with asyncio.timeout_at(ends):
                        found = await queue.get()
                except TimeoutError:
                    raise DeadlineExceeded(f'request "{request_id}" did not end within {deadline_s} s.') from None
                if isinstance(found, BaseException):
                    is_over = True
                    raise found
                is_over = found.finished
                yield found
        finally:
            del self._queues[request_id]
            if not is_over and not self._is_closed:
                # However the task ended, the engine may not keep its request.
                await asyncio.shield(self._call(lambda: self.engine.forget([request_id])))

    async def abort(self, request_id: str) -> None:
        """End a request; its task gets the last output. Raises InvalidRequest if no task waits for it."""
        queue = self._queues.get(request_id)
        if queue is None:
            raise InvalidRequest(f'no task waits for a request "{request_id}".')
        output = await self._call(lambda: self.engine.abort(request_id))
        if output is not None:
            queue.put_nowait(output)

    async def hint(self, hint: Hint) -> HintOutcome:
        """As Engine.hint; runs the steps that the hint needs. Raises EngineClosed, too."""
        outcome, goes_on = await self._call(lambda: (self.engine.hint(hint), self.engine.has_unfinished))
        if goes_on:
            self._go_on()
        return outcome

    async def explain_prefix(self, prompt: str | Sequence[int], *, salt: str | None = None) -> PrefixExplanation:
        """As Engine.explain_prefix. Raises EngineClosed, too."""
        return await self._call(lambda: self.engine.explain_prefix(prompt, salt=salt))

    async def session(self, session_id: str) -> SessionView:
        """As Engine.session. Raises EngineClosed, too."""
        return await self._call(lambda: self.engine.session(session_id))

    async def sessions(self, limit: int, prefix: str = "") -> list[SessionView]:
        """As Engine.sessions. Raises EngineClosed, too."""
        return await self._call(lambda: self.engine.sessions(limit, prefix))

    async def close(self) -> None:
        """Abort every request, and end the thread. Tasks that wait get EngineClosed."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._driver is not None:
            self._driver.cancel()
        for queue in self._queues.values():
            queue.put_nowait(EngineClosed("the engine was closed."))
        ids = list(self._queues)
        try:
            await asyncio.shield(asyncio.wrap_future(self._thread.submit(self.engine.forget, ids)))
        finally:
            await asyncio.shield(asyncio.wrap_future(self._thread.submit(self.engine.close)))
            self._thread.shutdown(wait=False)

    def _must_be_open(self) -> None:
        if self._is_closed:
            raise EngineClosed("the engine was closed; make a new one.")

    async def _call(self, what: Callable[[], T]) -> T:
        """Run a function in the engine's thread."""
        self._must_be_open()
        return await asyncio.wrap_future(self._thread.submit(what))

    def _go_on(self) -> None:
        self._has_work.set()
        if self._driver is None:
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        """Run steps while there is work."""
        while True:
            await self._has_work.wait()
            try:
                outputs, goes_on = await self._call(lambda: (self.engine.step(), self.engine.has_unfinished))
            except Exception as error:
                await self._fail(error)
                continue
            if not goes_on:
                self._has_work.clear()
            for output in outputs:
                queue = self._queues.get(output.id)
                if queue is not None:
                    queue.put_nowait(output)

    async def _fail(self, error: Exception) -> None:
        """End all requests after a step has raised; their tasks get the error."""
        self._has_work.clear()
        waiting = dict(self._queues)
        # After an error within the scheduler's books this may fail, too.
        with suppress(Exception):
            await self._call(lambda: self.engine.forget(list(waiting)))
        for queue in waiting.values():
            queue.put_nowait(error)
