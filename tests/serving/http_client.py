"""A small HTTP client for tests and benchmarks of the server: one request a connection, answers as they come, with the time of each piece.

It can read slowly, go away in the middle, and send what no library would.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Heard:
    """What a client saw of one request. Times are seconds after it began.

    status   of the answer; 0: the connection ended before one
    pieces   (time, the event as JSON) of a stream
    body     of an answer in one piece
    is_done  the stream ended with [DONE]
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[tuple[float, Any]] = field(default_factory=list)
    body: Any = None
    is_done: bool = False
    ended_s: float = 0.0

    @property
    def text(self) -> str:
        """All text of the first choice."""
        if self.body is not None:
            choice = self.body["choices"][0]
            return choice.get("text") if "text" in choice else choice["message"]["content"]
        found = []
        for _, piece in self.pieces:
            for choice in piece.get("choices", ()):
                if choice["index"] == 0:
                    found.append(choice["text"] if "text" in choice else choice["delta"].get("content", ""))
        return "".join(found)

    @property
    def error(self) -> dict[str, Any] | None:
        """The error that the client was told, in a body or in a stream."""
        if isinstance(self.body, dict) and "error" in self.body:
            return self.body["error"]
        return next((piece["error"] for _, piece in self.pieces if "error" in piece), None)

    @property
    def finish_reason(self) -> str | None:
        """Of the first choice."""
        if self.body is not None:
            return None if "error" in self.body else self.body["choices"][0]["finish_reason"]
        reasons = [
            choice["finish_reason"]
            for _, piece in self.pieces
            for choice in piece.get("choices", ())
            if choice["index"] == 0 and choice["finish_reason"] is not None
        ]
        return reasons[-1] if reasons else None

    @property
    def usage(self) -> dict[str, Any] | None:
        """What it took, where that was told."""
        if self.body is not None:
            return self.body.get("usage")
        return next((piece["usage"] for _, piece in reversed(self.pieces) if piece.get("usage")), None)

    @property
    def is_whole(self) -> bool:
        """Whether it was answered to its end."""
        if self.status != 200 or self.error is not None:
            return False
        return self.body is not None or self.is_done

    @property
    def times(self) -> list[float]:
        """When pieces with text came."""
        return [at for at, piece in self.pieces if piece.get("choices")]


async def ask(
    port: int,
    path: str,
    body: dict[str, Any] | bytes,
    *,
    headers: dict[str, str] | None = None,
    leave_after: int | None = None,
    leave_at_s: float | None = None,
    read_every_s: float = 0.0,
    keep_pieces: bool = True,
    timeout_s: float = 600.0,
    heard: Heard | None = None,
) -> Heard:
    """POST and read the answer. `leave_after` so many pieces, or `leave_at_s`, the connection is cut; `read_every_s` makes a slow reader.
    What has come so far stands in `heard`, where one is given."""
    heard, began = heard or Heard(), time.perf_counter()
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", f"content-length: {len(raw)}"]
    head += [f"{name}: {value}" for name, value in (headers or {}).items()]
    writer = None
    try:
        async with asyncio.timeout(timeout_s if leave_at_s is None else leave_at_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
            writer.write("\r\n".join([*head, "", ""]).encode() + raw)
            await _read(reader, heard, began, leave_after, read_every_s, keep_pieces)
    except TimeoutError:
        if leave_at_s is None:
            raise
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        heard.ended_s = time.perf_counter() - began
        if writer is not None and heard.is_whole:
            writer.close()
        elif writer is not None:
            writer.transport.abort()
    return heard


async def _read(
    reader: asyncio.StreamReader,
    heard: Heard,
    began: float,
    leave_after: int | None,
    read_every_s: float,
    keep_pieces: bool,
) -> None:
    line = await reader.readline()
    if not line:
        return
    heard.status = int(line.split()[1])
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        heard.headers[name.strip().lower()] = value.strip()
    if "content-length" in heard.headers:
        raw = await reader.readexactly(int(heard.headers["content-length"]))
        heard.body = json.loads(raw) if raw else None
        return
    rest = b""
    num = 0
    while True:
        size = int(await reader.readline() or b"0", 16)
        chunk = await reader.readexactly(size + 2)
        if not size:
            return
        now = time.perf_counter() - began
        rest += chunk[:-2]
        *events, rest = rest.split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                heard.is_done = True
            elif keep_pieces:
                heard.pieces.append((now, json.loads(event.removeprefix(b"data: "))))
            num += 1
            if leave_after is not None and num >= leave_after:
                return
        if read_every_s:
            await asyncio.sleep(read_every_s)


async def get(port: int, path: str, headers: dict[str, str] | None = None) -> Heard:
    """GET a path."""
    heard = Heard()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = [f"GET {path} HTTP/1.1", "host: localhost", "connection: close"]
    head += [f"{name}: {value}" for name, value in (headers or {}).items()]
    writer.write("\r\n".join([*head, "", ""]).encode())
    raw = await reader.read()
    writer.close()
    first, _, content = raw.partition(b"\r\n\r\n")
    heard.status = int(first.split()[1])
    for line in first.decode("latin-1").split("\r\n")[1:]:
        name, _, value = line.partition(":")
        heard.headers[name.strip().lower()] = value.strip()
    kind = heard.headers.get("content-type", "")
    heard.body = json.loads(content) if "json" in kind and content else content.decode()
    return heard
