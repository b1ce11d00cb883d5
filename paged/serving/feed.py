"""A reader of a running server's snapshots: GET dashboard/feed, server-sent events, each a Snapshot as JSON."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec

from paged.errors import NoFeed
from paged.serving.sight import Snapshot

SILENCE_S = 10.0
"""A server that sends nothing for so long is taken for gone."""


def snapshots(url: str, key: str | None = None) -> Iterator[Snapshot]:
    """Yield the server's snapshots as they come, without an end. `url` is the server's, with what a proxy strips off the path.

    The first one raises NoFeed for an invalid address or key, if nothing answers, the server refuses the key or no engine runs; a later
    one when the server goes away.
    """
    if key is not None and not (key.isascii() and key.isprintable()):
        raise NoFeed(url, "no server has this key: a key is printable ASCII text.")
    connection, path = _connection(url)
    headers = {"Accept": "text/event-stream", **({} if key is None else {"Authorization": f"Bearer {key}"})}
    try:
        connection.request("GET", f"{path}/dashboard/feed", headers=headers)
        answer = connection.getresponse()
        _check(url, answer, key)
        data = b""
        while line := answer.readline():
            if line.startswith(b"data:"):
                data += line[5:]
            elif not line.strip() and data:
                yield msgspec.json.decode(data, type=Snapshot)
                data = b""
    except TimeoutError:
        raise NoFeed(url, f"nothing came for {SILENCE_S:.0f} seconds.") from None
    except msgspec.MsgspecError as error:
        raise NoFeed(url, f"the answer is no snapshot of a paged server ({error}); is it of another version?") from None
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        if isinstance(error, NoFeed):
            raise
        raise NoFeed(url, f"no server answers there ({error}); `paged serve` starts one.") from None
    finally:
        connection.close()
    raise NoFeed(url, "the server has ended.")


def _connection(url: str) -> tuple[http.client.HTTPConnection, str]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise NoFeed(url, f"that is no address ({error}).") from None
    if not url.isprintable() or " " in url:
        raise NoFeed(url, "that is no address: it has a space, or a character that cannot be printed.")
    if parts.scheme not in ("http", "https") or not host:
        raise NoFeed(url, "that is no address; one looks like http://127.0.0.1:8000.")
    make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return make(host, port, timeout=SILENCE_S), parts.path.rstrip("/").removesuffix("/dashboard")


def _check(url: str, answer: http.client.HTTPResponse, key: str | None) -> None:
    if answer.status in (401, 403):
        why = (
            "the server asks for its admin key; give it by --api-key."
            if key is None
            else "the server refuses this key."
        )
        raise NoFeed(url, why)
    kind = answer.headers.get_content_type()
    if answer.status == 503 and kind == "application/json":
        with suppress(msgspec.MsgspecError, KeyError, TypeError):
            raise NoFeed(url, str(msgspec.json.decode(answer.read())["error"]["message"]))
    if answer.status != 200 or kind != "text/event-stream":
        raise NoFeed(url, f"no paged server: /dashboard/feed answers with status {answer.status}, {kind}.")
