"""uvicorn's HTTP protocol with limits on the bytes and seconds of a request's head, and on open connections.

A client that sends its head slowly, or without an end, holds only a connection, and not for long.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from paged.serving.answers import encode
from paged.serving.errors import ApiError, unavailable, wrong

MAX_HEAD_BYTES = 64 * 1024
LINGER_S = 0.5
PROBES_S = (0.2, 0.4, 2.0)
"""Seconds from a client's end of file to the first probe, and between probes."""
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


class LimitedProtocol(HttpToolsProtocol):
    """One connection. `max_connections` and `header_timeout_s` are the server's settings; uvicorn gives the other arguments."""

    def __init__(self, *, max_connections: int, header_timeout_s: float, **options: Any) -> None:
        super().__init__(**options)
        self.max_connections, self.header_timeout_s = max_connections, header_timeout_s
        # Bytes of the head that is being read; -1: none is.
        self._head = 0
        self._timer: asyncio.TimerHandle | None = None
        self._prober: asyncio.TimerHandle | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a new connection."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self.refuse(
                unavailable(f"all {self.max_connections:,} connections are taken.", 1.0, "too_many_connections")
            )
            return
        self._timer = self.loop.call_later(self.header_timeout_s, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the client has gone."""
        self._stop_timer()
        if self._prober is not None:
            self._prober.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client."""
        if self._is_refused or self.transport.is_closing():
            return
        if self._head >= 0:
            self._head += len(data)
        super().data_received(data)
        if self._head > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.refuse(ApiError(431, f"the request's head is longer than {MAX_HEAD_BYTES:,} bytes."))

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Take the client's end of file. Return whether the connection stays open, until its last whole request is answered.

        A client may have closed its sending half alone, and still read. One that has gone looks the same, but answers a probe with a
        reset. Over TLS, and with HTTP/1.0, which has no probes, it counts as gone.
        """
        last = self.pipeline[0][0] if self.pipeline else self.cycle
        if self._is_refused or last is None or last.response_complete or last.more_body:
            return None
        if self.scheme == "https" or last.scope["http_version"] != "1.1":
            return None
        last.keep_alive = False
        self._prober = self.loop.call_later(PROBES_S[0], self._probe, PROBES_S[1:])
        return True

    def _probe(self, more_s: tuple[float, ...]) -> None:
        """Send an interim response, which clients of HTTP/1.1 skip, unless an answer has begun: its pieces are probes, too."""
        if self.transport.is_closing() or self.cycle.response_started:
            return
        self.transport.write(_PROBE)
        if more_s:
            self._prober = self.loop.call_later(more_s[0], self._probe, more_s[1:])

    def on_message_begin(self) -> None:
        """Begin to count a request's head."""
        super().on_message_begin()
        self._head = max(self._head, 0)
        if self._timer is None:
            self._timer = self.loop.call_later(self.header_timeout_s, self._too_slow)

    def on_headers_complete(self) -> None:
        """Note that the head has come."""
        self._head = -1
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self.refuse(wrong(msg))

    def refuse(self, error: ApiError) -> None:
        """Answer with this error, and close; only close while another answer is being written."""
        self._stop_timer()
        self._is_refused = True
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()
            return
        body = encode(error.body())
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **error.headers(),
        }
        lines = b"".join(f"{name}: {value}\r\n".encode() for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + body)
        if self._head <= MAX_HEAD_BYTES:
            self.transport.close()
            return
        # For a while drop what the client still sends: a connection closed now would be reset, and the answer lost.
        self.loop.call_later(LINGER_S, self.transport.close)

    def _too_slow(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            # The answer comes first; the connection closes behind it.
            self.cycle.keep_alive = False
        elif not self.transport.is_closing():
            self.refuse(ApiError(408, f"the request's head did not come within {self.header_timeout_s:g} s."))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
