"""The ingress, which takes calls, checks them, and sends each to a replica.

If a replica dies, the requests that its engine had not begun go to another replica, once. The others end with an error, in their
stream if that has begun.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
from pydantic import ValidationError
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException

from paged.integrations.ray import asked
from paged.integrations.ray.asked import Asked, Prompt
from paged.integrations.ray.routing import longest_noted, note
from paged.model.checkpoint import is_shipped, named_or_shipped
from paged.model.tokenizer import load_tokenizer
from paged.serving.answering import error_response, until_gone
from paged.serving.answers import DONE, event
from paged.serving.app import guarded
from paged.serving.asking import Asking
from paged.serving.bodies import ChatRequest, CompletionRequest
from paged.serving.engine_client import MOST_TRIES
from paged.serving.errors import SERVER, ApiError, unavailable
from paged.serving.front import INLINE_CHARS, LAST_S, Call, salt_of, while_any
from paged.serving.settings import Settings
from paged.serving.wire import Ready

PATIENCE_S = 30.0
"""For a replica to take a call: longer than Ray needs to notice a dead replica, shorter than clients wait."""
AGAIN_S = 5.0
"""The Retry-After of a call that no replica took."""
_OF_ONE = ("/metrics", "/dashboard", "/requests/", "/debug/", "/load", "/sessions", "/v1/kv_hints", "/explain")
"""Paths that show a single engine, which replicas refuse."""


class _NotTaken(Exception):
    """No replica took a call in time."""


def asking_of(settings: Settings) -> Asking:
    """Return the tokenizer of bodies. Raises BrokenCheckpoint."""
    folder = Path(named_or_shipped(settings.engine.model.model))
    return Asking(settings, load_tokenizer(folder), is_shipped(folder))


class Ingress:
    """An ASGI application in front of replicas. `replicas` is Ray's handle of them; `is_behind_ray`: Ray's proxy sets request ids."""

    # Each replica writes its own log, in Ray's folder of logs.
    log = None

    def __init__(
        self,
        settings: Settings,
        asking: Asking,
        replicas: Any,
        *,
        is_behind_ray: bool = False,
        clock: Callable[[], float] = time.monotonic,
        new_id: Callable[[], str] = lambda: uuid4().hex,
    ) -> None:
        self.settings = settings
        self._asking = asking
        self._replicas = replicas
        self._answer = replicas.options(method_name="answer", stream=True)
        self._is_behind_ray = is_behind_ray
        self._clock = clock
        self._app = guarded(self._forward, settings, clock, new_id)
        self._num_open = 0
        self._has_to_end = asyncio.Event()
        self._is_draining = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a call, or the events of the server's life."""
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
        else:
            scope.setdefault("state", {})
            await self._app(scope, receive, _without_id(send) if self._is_behind_ray else send)

    async def wait_until_ready(self) -> Ready:
        """Wait for a replica. Return what its engine has."""
        return msgspec.json.decode(await self._replicas.options(method_name="ready").remote(), type=Ready)

    async def drain(self, timeout_s: float) -> None:
        """Take no more calls, and let open calls end within so many seconds."""
        self._is_draining = True
        await while_any(lambda: self._num_open, self._clock, timeout_s)
        self._has_to_end.set()
        await while_any(lambda: self._num_open, self._clock, LAST_S)

    async def _forward(self, scope: Any, receive: Any, send: Any) -> None:
        """Send a call to a replica, and its answer to the client."""
        answer = _Answer(send)
        tasks: list[asyncio.Task[Any]] = []
        self._num_open += 1
        try:
            sent = await self._asked(scope)
            work = asyncio.create_task(self._answered(sent, answer))
            tasks = [work, asyncio.create_task(until_gone(receive)), asyncio.create_task(self._has_to_end.wait())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif self._has_to_end.is_set():
                work.cancel()
                await asyncio.wait([work])
                raise unavailable("the server ends, and this request was not finished in time.", None, "shutdown")
        except ApiError as error:
            await answer.fail(error)
        finally:
            self._num_open -= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _asked(self, scope: Any) -> Asked:
        """Return a call for a replica. Raises ApiError."""
        call: Call = scope["state"]["call"]
        if self._is_draining:
            raise unavailable("the server ends, and takes no more requests.", 1.0, "shutdown")
        if call.path == "/" or call.path.startswith(_OF_ONE):
            raise ApiError(501, f"{call.path} shows one engine, and there are several replicas here.", code="replicas")
        prompt = None
        if call.path in ("/v1/completions", "/v1/chat/completions"):
            is_long = len(call.body) > INLINE_CHARS
            prompt = await asyncio.to_thread(self._prompt_of, call) if is_long else self._prompt_of(call)
        return Asked(call, scope["method"], scope["query_string"], list(scope["headers"]), 0.0, prompt)

    def _prompt_of(self, call: Call) -> Prompt | None:
        """Return the first prompt of a body; None if it has none, which a replica will report."""
        try:
            if call.path == "/v1/completions":
                body = CompletionRequest.model_validate_json(call.body)
                tokens, salt = self._asking.prompts(body, longest_noted())[0], body.cache_salt
            else:
                chat = ChatRequest.model_validate_json(call.body)
                tools = chat.tools if chat.tool_choice != "none" else None
                tokens = self._asking.chat(chat.messages, tools, chat.chat_template_kwargs, longest_noted())
                salt = chat.cache_salt
            salt = salt_of(call.tenant, salt)
            return Prompt(np.asarray(tokens, np.int32), None if salt is None else (salt, None, None))
        except (ApiError, ValidationError, OverflowError):
            return None

    async def _answered(self, sent: Asked, answer: _Answer) -> None:
        """Answer a call by a replica, or by another one if the first died before it began. Raises ApiError if no replica took it."""
        for num_left in reversed(range(MOST_TRIES)):
            try:
                async with aclosing(self._messages(sent)) as news:
                    async for messages in news:
                        for message in messages:
                            await answer.take(message)
                # No effect if the answer has ended.
                await answer.fail(ApiError(500, "the replica ended this request without its answer.", kind=SERVER))
                return
            except _NotTaken:
                raise unavailable("no replica takes requests at the moment.", AGAIN_S, "no_replica") from None
            except RayActorError:
                if answer.has_begun or not num_left:
                    what = "had begun with this request" if answer.has_begun else "had this request, as had one before"
                    await answer.fail(unavailable(f"the replica that {what} died.", None, "engine_died"))
                    return
            except (RayError, RayServeException) as error:
                failure = ApiError(500, f"Ray could not run this request: {type(error).__name__}.", kind=SERVER)
                await answer.fail(failure)
                return

    async def _messages(self, sent: Asked) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Yield a replica's messages. Raises _NotTaken, RayError and RayServeException."""
        response = self._answer.remote(replace(sent, waited=self._clock() - sent.call.arrived))
        news, is_over = aiter(response), False
        try:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    first: list[dict[str, Any]] = await anext(news, [])
            except TimeoutError:
                raise _NotTaken from None
            yield first
            async for messages in news:
                yield messages
            is_over = True
        finally:
            if not is_over:
                response.cancel()


class _Answer:
    """The answer that a client was sent so far."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self._replica = ""
        self._is_stream = False
        self._has_ended = False
        # The status line was sent; the engine has begun.
        self.has_started = self.has_begun = False

    async def take(self, message: dict[str, Any]) -> None:
        """Take a message of a replica."""
        match message["type"]:
            case asked.TAKEN:
                self._replica = message["replica"]
                note(self._replica, message["report"])
            case asked.ENDED:
                note(self._replica, message["report"])
            case asked.BEGUN:
                self.has_begun = True
            case "http.response.start":
                self.has_started = self.has_begun = True
                self._is_stream = (b"content-type", b"text/event-stream") in message["headers"]
                await self._send(
                    {**message, "headers": [*message["headers"], (b"x-paged-replica", self._replica.encode())]}
                )
            case _:
                self._has_ended = not message.get("more_body", False)
                await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """End the answer with an error. An answer that is not a stream and of which a part was sent just stops, which a client notices."""
        if self._has_ended:
            return
        if self.has_started:
            if self._is_stream:
                last = event(error.body()) + DONE
                await self._send({"type": "http.response.body", "body": last, "more_body": False})
            return
        await error_response(error)({"type": "http"}, self._send, self._send)


def _without_id(send: Any) -> Any:
    """Send answers without the request's id, which Ray's proxy sets."""

    async def send_less(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [each for each in message["headers"] if each[0] != b"x-request-id"]}
        await send(message)

    return send_less
