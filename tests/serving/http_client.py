"""A small HTTP client for tests and benchmarks of the server: one request a connection, answers as they come, with the time of each piece.

It can read slowly, go away in the middle, and send what no library would.
"""

import asyncio
import http.client
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

# A busy machine is slow: this only ends a wait for what never comes.
LIMIT_S = 600.0
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
USUAL = {"prompt": "The with statement", "max_tokens": 8, "temperature": 0}
LONG = USUAL | {"max_tokens": 900, "ignore_eos": True, "stream": True}
DRAWN = LONG | {"max_tokens": 1000, "n": 8, "temperature": 1.0}


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
    def parts(self) -> list[Any]:
        return [self.body] if isinstance(self.body, dict) else [piece for _, piece in self.pieces]

    @property
    def choices(self) -> list[Any]:
        """The first choice, as far as each part has it."""
        return [each for part in self.parts for each in part.get("choices", ()) if each["index"] == 0]

    @property
    def text(self) -> str:
        """All text of the first choice."""
        kinds = (each.get("message") or each.get("delta") or {"content": each.get("text")} for each in self.choices)
        return "".join(kind.get("content") or "" for kind in kinds)

    @property
    def error(self) -> Any:
        """The error that the client was told, in a body or in a stream."""
        return next((part["error"] for part in self.parts if "error" in part), None)

    @property
    def finish_reason(self) -> str | None:
        return next((each["finish_reason"] for each in reversed(self.choices) if each["finish_reason"]), None)

    @property
    def usage(self) -> Any:
        return next((part["usage"] for part in reversed(self.parts) if part.get("usage")), None)

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and self.error is None and (self.body is not None or self.is_done)

    @property
    def times(self) -> list[float]:
        """When pieces with text came."""
        return [at for at, piece in self.pieces if piece.get("choices")]


def key(name: str | None) -> dict[str, str]:
    return {} if name is None else {"authorization": f"Bearer {name}"}


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
    heard: Heard | None = None,
) -> Heard:
    """POST and read the answer. `leave_after` so many pieces, or `leave_at_s`, the connection is cut; `read_every_s` makes a slow reader.
    What has come so far stands in `heard`, where one is given."""
    heard, began = heard or Heard(), time.perf_counter()
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"content-type": "application/json", "content-length": len(raw)} | (headers or {})
    writer = None
    try:
        async with asyncio.timeout(LIMIT_S if leave_at_s is None else leave_at_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
            fields = "".join(f"{name}: {value}\r\n" for name, value in {"host": "localhost", **given}.items())
            writer.write(f"POST {path} HTTP/1.1\r\n{fields}\r\n".encode() + raw)
            first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].decode("latin-1").split("\r\n")
            heard.status = int(first.split()[1])
            parts = (line.partition(":") for line in lines)
            heard.headers |= {name.strip().lower(): value.strip() for name, _, value in parts}
            if "content-length" in heard.headers:
                raw = await reader.readexactly(int(heard.headers["content-length"]))
                heard.body = json.loads(raw) if raw else None
                return heard
            num = 0
            async for event in _events(reader, read_every_s):
                num += 1
                if event == b"data: [DONE]":
                    heard.is_done = True
                elif keep_pieces:
                    heard.pieces.append((time.perf_counter() - began, json.loads(event.removeprefix(b"data: "))))
                if num == leave_after:
                    break
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


async def _events(reader: asyncio.StreamReader, read_every_s: float) -> AsyncIterator[bytes]:
    rest = b""
    while size := int(await reader.readline() or b"0", 16):
        *events, rest = (rest + (await reader.readexactly(size + 2))[:-2]).split(b"\n\n")
        for event in events:
            yield event
        if read_every_s:
            await asyncio.sleep(read_every_s)
    await reader.readexactly(2)


def asked(server: Any, body: dict[str, Any] | bytes = USUAL, path: str = TEXT, **how: Any) -> Heard:
    """POST to a server, outside an event loop."""
    return asyncio.run(ask(server.port, path, body, **how))


def got(server: Any, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> Heard:
    """GET, or another method without a body, outside an event loop."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S)) as connection:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        content = answer.read()
        heard = Heard(answer.status, {name.lower(): value for name, value in answer.getheaders()})
    is_json = "json" in heard.headers.get("content-type", "") and content
    heard.body = json.loads(content) if is_json else content.decode()
    return heard


def num_open(server: Any) -> int:
    """Requests that a server has taken and not answered yet."""
    return got(server, "/load").body["server_load"]


def figure(page: str, name: str, **labels: str) -> float:
    """The sum of a metric's series that have these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    series = re.findall(rf"^{name}{{(.*)}} (\S+)$", page, re.MULTILINE)
    return sum(float(value) for given, value in series if all(each in given for each in wanted))


@contextmanager
def streaming(
    port: int, body: dict[str, Any] = DRAWN, headers: dict[str, str] | None = None
) -> Iterator[tuple[http.client.HTTPResponse, Any]]:
    """The answer to a long request, to read by hand, and its first event, which has come."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)) as connection:
        connection.request("POST", TEXT, json.dumps(body), {"content-type": "application/json", **(headers or {})})
        with connection.getresponse() as answer:
            assert answer.status == 200
            yield answer, json.loads(answer.readline().removeprefix(b"data: "))
