"""The dashboard's pictures, taken once for all viewers, and only while there is one."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response

from paged.errors import EngineAway
from paged.serving.answering import until_gone
from paged.serving.engine_client import EngineClient
from paged.serving.errors import unavailable

EVERY_S = 0.5
MOST_LOOKING = 64


class Sight:
    """Pictures of the engine, twice a second."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._lookers: set[asyncio.Queue[bytes | None]] = set()
        self._taker: asyncio.Task[None] | None = None

    def feed(self) -> Response:
        """The pictures as server-sent events, until the client goes. Raises ApiError where too many look already."""
        if len(self._lookers) >= MOST_LOOKING:
            raise unavailable(f"{MOST_LOOKING} dashboards are open; no more are fed.", 10.0, "too_many_dashboards")
        return _Feed(self)

    def close(self) -> None:
        """End the pictures of all viewers."""
        if self._taker is not None:
            self._taker.cancel()
            self._taker = None
        for looker in self._lookers:
            _hand(looker, None)

    def join(self) -> asyncio.Queue[bytes | None]:
        """Return a queue of pictures from now on, None at the end; a slow viewer gets the latest."""
        looker: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        self._lookers.add(looker)
        if self._taker is None:
            self._taker = asyncio.get_running_loop().create_task(self._take())
        return looker

    def leave(self, looker: asyncio.Queue[bytes | None]) -> None:
        """Remove a viewer."""
        self._lookers.discard(looker)

    async def _take(self) -> None:
        while self._lookers:
            try:
                picture = await self._engine.ask("snapshot")
            except EngineAway as error:
                if error.back_in_s is None:
                    break
                picture = None
            for looker in self._lookers:
                # A comment, which says that the server lives.
                _hand(looker, b": no engine\n\n" if picture is None else b"data: " + picture + b"\n\n")
            await asyncio.sleep(EVERY_S)
        self._taker = None
        for looker in self._lookers:
            _hand(looker, None)


def _hand(looker: asyncio.Queue[bytes | None], picture: bytes | None) -> None:
    if looker.full():
        looker.get_nowait()
    looker.put_nowait(picture)


class _Feed(Response):
    """The response to one viewer."""

    def __init__(self, sight: Sight) -> None:
        self._sight = sight
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Feed."""
        looker = self._sight.join()
        listener = asyncio.get_running_loop().create_task(_until_gone(receive, looker))
        try:
            headers = [
                (b"content-type", b"text/event-stream"),
                (b"cache-control", b"no-store"),
                (b"x-accel-buffering", b"no"),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while (picture := await looker.get()) is not None:
                await send({"type": "http.response.body", "body": picture, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            listener.cancel()
            self._sight.leave(looker)


async def _until_gone(receive: Any, looker: asyncio.Queue[bytes | None]) -> None:
    await until_gone(receive)
    _hand(looker, None)
