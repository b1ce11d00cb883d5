"""A server from its settings: sockets, signals, and its end.

SIGTERM ─> no new requests, running ones go on ─> all have ended, or shutdown_timeout_s is over ─> the end
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn

from paged.errors import EngineAway, InvalidConfig, ServerFailed
from paged.model.checkpoint import check_folder, named_or_shipped
from paged.serving.app import build_app
from paged.serving.front import Front
from paged.serving.http_protocol import LimitedProtocol
from paged.serving.request_log import RequestLog, divert, to_stderr
from paged.serving.settings import Settings
from paged.serving.wire import Ready

_BACKLOG = 4096
# Beside connections: the engine's pipes, files, our own sockets.
_OTHER_FILES = 256


class Hosted(Protocol):
    """The part of a server behind its application: a front, or a router to others."""

    @property
    def log(self) -> RequestLog | None:
        """The log for the server's own lines."""

    async def wait_until_ready(self) -> Ready:
        """Wait until it takes requests. Raises EngineAway if it never will."""

    async def drain(self, timeout_s: float) -> None:
        """Take no more calls, and wait up to `timeout_s` for the open ones to end."""


def _own(settings: Settings) -> tuple[Hosted, Any]:
    front = Front(settings)
    return front, build_app(front)


class _Draining(uvicorn.Server):
    """uvicorn's server, but that it lets requests end first. A second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, hosted: Hosted, timeout_s: float) -> None:
        super().__init__(config)
        self._hosted = hosted
        self._timeout_s = timeout_s
        self._ending: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # The signal that ends it.
        self.signal: int | None = None

    async def startup(self, sockets: Any = None) -> None:
        """Listen."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the end after a signal: running requests end first."""
        self.signal = sig
        if self._loop is None or self._ending is not None:
            self.should_exit = self.force_exit = True
            # Each request that is cut off would log a traceback.
            logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
            return
        self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._ending = self._ending or asyncio.get_running_loop().create_task(self._drained())

    async def _drained(self) -> None:
        await self._hosted.drain(self._timeout_s)
        self.should_exit = True


def serve(
    settings: Settings,
    on_ready: Callable[[Ready, int], None] | None = None,
    make: Callable[[Settings], tuple[Hosted, Any]] = _own,
) -> bool:
    """Serve until a signal comes. Return whether running requests could end: False after a second signal.

    on_ready  called with the engine's `Ready` and the port, once requests are taken
    make      makes the hosted part and its ASGI application, once the port is bound

    Raises InvalidConfig, ServerFailed (the port is taken, the engine cannot begin), CheckpointNotFound and BrokenCheckpoint before it
    serves; KeyboardInterrupt after it has ended, if the signal was Ctrl-C.
    """
    if settings.log == "json":
        divert(to_stderr)
    # Before the tokenizer's library is loaded, which takes seconds.
    context = None if settings.tls_certificate is None else _tls(settings)
    check_folder(Path(named_or_shipped(settings.engine.model.model)))
    listening = _bound(settings.host, settings.port)
    _raise_file_limit(settings.max_connections + _OTHER_FILES)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    hosted, app = make(settings)
    if hosted.log is not None:
        divert(hosted.log.say)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=partial(  # type: ignore[arg-type]
            LimitedProtocol, max_connections=settings.max_connections, header_timeout_s=settings.header_timeout_s
        ),
        ws="none",
        loop="uvloop" if sys.platform != "win32" else "asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=settings.keep_alive_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=2,
        ssl_context_factory=None if context is None else lambda *_: context,
    )
    server = _Draining(config, hosted, settings.shutdown_timeout_s)
    failure: list[str] = []

    async def watch() -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            ready = await hosted.wait_until_ready()
        except EngineAway as error:
            failure.append(str(error))
            server.should_exit = True
            return
        # What was loaded lives as long as the process: a collection that visited it would delay streams by 15 ms.
        gc.collect()
        gc.freeze()
        if on_ready is not None:
            on_ready(ready, listening.getsockname()[1])

    async def run() -> None:
        watcher = asyncio.get_running_loop().create_task(watch())
        try:
            await server.serve(sockets=[listening])
        finally:
            watcher.cancel()

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(run())
    if failure:
        raise ServerFailed(failure[0])
    if server.signal == signal.SIGINT:
        raise KeyboardInterrupt
    return not server.force_exit


def _tls(settings: Settings) -> ssl.SSLContext:
    """Read the certificate, its key, and the CA of clients. Raises InvalidConfig with the file's name, which the library leaves out."""
    certificate, key, clients = settings.tls_certificate, settings.tls_key, settings.tls_client_ca
    for path in (certificate, key, clients):
        try:
            if path is not None:
                with open(path, "rb"):
                    pass
        except OSError as error:
            raise InvalidConfig(f"{path}: {error.strerror}.") from None
    assert certificate is not None, "TLS has a certificate"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{certificate} and {key} are no certificate and its key: {error}") from None
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(clients)
        except (OSError, ValueError) as error:
            raise InvalidConfig(f"{clients} has no certificate that signs for clients: {error}") from None
    return context


def _bound(host: str, port: int) -> socket.socket:
    """Bind a socket to this address. Raises ServerFailed."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except (OSError, UnicodeError) as error:
        # A label of more than 63 characters is a UnicodeError.
        number, why = (
            (error.errno, error.strerror) if isinstance(error, OSError) else (None, "this is no name of a host")
        )
        advice = (
            "port; 0 is any free one"
            if number in (errno.EADDRINUSE, errno.EACCES)
            else "--host; 127.0.0.1 is this machine alone, 0.0.0.0 all of its addresses"
        )
        raise ServerFailed(f"cannot listen on {host}:{port}: {why}. Name another {advice}.") from None
    return found


def _raise_file_limit(wanted: int) -> None:
    """Raise this process's limit of open files, as far as the system allows: a connection is an open file."""
    try:
        import resource
    except ImportError:  # Windows has no such limit.
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
