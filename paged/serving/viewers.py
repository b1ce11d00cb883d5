"""The dashboard's snapshots, taken once for all viewers, and only while there is one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.responses import Response, StreamingResponse

from paged.errors import EngineAway
from paged.serving.engine_client import EngineClient
from paged.serving.errors import unavailable

EVERY_S = 0.5
MOST_VIEWERS = 64


class Viewers:
    """Snapshots of the engine, twice a second, for each viewer."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._viewers: set[asyncio.Queue[bytes | None]] = set()
        self._taker: asyncio.Task[None] | None = None

    def feed(self) -> Response:
        """Return the response that sends snapshots until the client goes. Raises ApiError for one viewer too many."""
        if len(self._viewers) >= MOST_VIEWERS:
            raise unavailable(f"{MOST_VIEWERS} dashboards are open; no more are fed.", 10.0, "too_many_dashboards")
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._events(), headers=headers, media_type="text/event-stream")

    def close(self) -> None:
        """End the feeds of all viewers."""
        if self._taker is not None:
            self._taker.cancel()
            self._taker = None
        for viewer in self._viewers:
            _put(viewer, None)

    async def _events(self) -> AsyncIterator[bytes]:
        """Yield events until the engine has gone for good or `close`; a slow viewer gets the latest."""
        viewer: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        self._viewers.add(viewer)
        if self._taker is None:
            self._taker = asyncio.get_running_loop().create_task(self._take())
        try:
            while (event := await viewer.get()) is not None:
                yield event
        finally:
            self._viewers.discard(viewer)

    async def _take(self) -> None:
        while self._viewers:
            try:
                snapshot = await self._engine.ask("snapshot")
            except EngineAway as error:
                if error.back_in_s is None:
                    break
                snapshot = None
            for viewer in self._viewers:
                # A comment shows that the server lives.
                _put(viewer, b": no engine\n\n" if snapshot is None else b"data: " + snapshot + b"\n\n")
            await asyncio.sleep(EVERY_S)
        self._taker = None
        for viewer in self._viewers:
            _put(viewer, None)


def _put(viewer: asyncio.Queue[bytes | None], event: bytes | None) -> None:
    if viewer.full():
        viewer.get_nowait()
    viewer.put_nowait(event)
