"""A log with a line of JSON for each request that ended, and for other messages. A thread writes it.

    write ──> at most 8,192 lines, 16 MiB ──> thread ──> the stream's file descriptor

`write` neither waits nor fails: with a full disk, a closed pipe or a slow reader lines are lost, and counted.
`divert` makes lines of libraries' log records, warnings and tracebacks.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any

import msgspec

from paged.serving.records import RequestRecord, durations

if TYPE_CHECKING:
    from _typeshed import HasFileno

MOST_LINES = 8192
MOST_BYTES = 16 * 2**20
"""Limits on the lines that wait to be written; further ones are lost."""

_BEGINNING = b'{"time":"'
_FIELDS = (
    *("id", "endpoint", "tenant", "status", "finish_reason", "error", "prompt_tokens", "cached_tokens"),
    *("output_tokens", "recomputed_tokens", "preemptions", "longest_pause_s", "waited_s", "ttft_s", "e2e_s"),
    *("n", "max_tokens", "streams"),
)
"""Fields of a request's line, in order. Seconds count from its arrival; null: it did not get there."""
_NO_FAILURES = {"engine_starting", "shutdown"}
"""Error codes of requests before the engine has begun, or after the signal to end: the server has not failed."""


class RequestLog:
    """The log of a server. Writes to the stream's file descriptor, and does not flush the stream's own buffer. `clock`: Unix time."""

    def __init__(
        self, stream: HasFileno, *, with_prompts: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        # A stream that is collected closes its descriptor, which another file may then get.
        self._stream = stream
        self._file = stream.fileno()
        self._with_prompts = with_prompts
        self._clock = clock
        self._changed = Condition()
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_closed = False
        self._lost = 0
        # The last line in the file has no end, since the rest of it could not be written.
        self._is_torn = False
        self._thread = Thread(target=self._run, name="paged-log", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Lines that were not written since the log began."""
        return self._lost

    def write(self, record: RequestRecord) -> None:
        """Write the line of a request that has ended."""
        self._enqueue(_line(self._clock(), _level_of(record), **self._fields(record)))

    def say(self, level: str, message: str) -> None:
        """Write a message about no request."""
        self._enqueue(_line(self._clock(), level, message=message))

    def pass_on(self, line: bytes) -> None:
        """Pass on a line of the engine process's standard error: one of ours, or a library's text."""
        if line.startswith(_BEGINNING):
            self._enqueue(line + b"\n")
        elif line.strip():
            self.say("warning", line.decode("utf-8", "replace"))

    def _enqueue(self, line: bytes) -> None:
        with self._changed:
            if self._is_closed or len(self._lines) >= MOST_LINES or self._num_bytes + len(line) > MOST_BYTES:
                self._lost += 1
                return
            self._lines.append(line)
            self._num_bytes += len(line)
            self._changed.notify()

    def close(self, timeout_s: float = 1.0) -> None:
        """Write the waiting lines for at most `timeout_s`; the others are lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        with self._changed:
            self._lost += len(self._lines)
            self._lines.clear()

    def _run(self) -> None:
        reported = 0
        while True:
            with self._changed:
                while not (self._lines or self._is_closed):
                    self._changed.wait()
                if not self._lines:
                    return
                line = self._lines.popleft()
                self._num_bytes -= len(line)
            has_written = self._put(line)
            with self._changed:
                if not has_written:
                    self._lost += 1
                    continue
                lost = self._lost
                if lost == reported or self._lines:
                    continue
            # No line waits: writing works again.
            num = lost - reported
            if self._put(_line(self._clock(), "warning", message=f"{num} lines of this log were lost.", lost=num)):
                reported = lost

    def _put(self, line: bytes) -> bool:
        """Write a line, however long that takes. Return whether it could be written."""
        if self._is_torn:
            line = b"\n" + line
        rest = memoryview(line)
        try:
            while rest:
                try:
                    rest = rest[os.write(self._file, rest) :]
                except BlockingIOError:
                    # The pipe is full, and another process has made it non-blocking.
                    room = select.poll()
                    room.register(self._file, select.POLLOUT)
                    room.poll()
        except OSError:
            self._is_torn = self._is_torn or len(rest) < len(line)
            return False
        self._is_torn = False
        return True

    def _fields(self, record: RequestRecord) -> dict[str, Any]:
        took = durations(record)
        seconds = {f"{name}_s": took[name] for name in ("waited", "ttft", "e2e")}
        seconds["longest_pause_s"] = max(0.0, record.longest_pause_s)
        rounded = {name: None if value is None else round(value, 6) for name, value in seconds.items()}
        fields = {name: rounded[name] if name in rounded else getattr(record, name) for name in _FIELDS}
        return fields | ({"prompt": record.prompt, "answer": record.answer} if self._with_prompts else {})


def to_stderr(level: str, message: str) -> None:
    """Write a line to standard error at once. Does nothing if that fails."""
    with suppress(OSError):
        os.write(2, _line(time.time(), level, message=message))


def divert(say: Callable[[str, str], None]) -> None:
    """Pass this process's log records, warnings and uncaught exceptions to `say` from now on, as a level and a message with the traceback."""
    logging.basicConfig(handlers=[_Handler(say)], level=logging.WARNING, force=True)
    logging.captureWarnings(True)

    def uncaught(kind: type[BaseException], error: BaseException | None, trace: Any) -> None:
        logging.critical("uncaught %s", kind.__name__, exc_info=(kind, error or kind(), trace))

    sys.excepthook = uncaught
    threading.excepthook = lambda its: uncaught(its.exc_type, its.exc_value, its.exc_traceback)


class _Handler(logging.Handler):
    def __init__(self, say: Callable[[str, str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.levelname.lower(), self.format(record))


def _line(now: float, level: str, **fields: Any) -> bytes:
    """Return a line of the log; `now` is Unix time."""
    moment = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
    said = {"time": moment, "level": level, **fields}
    try:
        return msgspec.json.encode(said) + b"\n"
    except UnicodeEncodeError:
        # Half a surrogate pair: JSON can escape it, and UTF-8 has none.
        texts = {
            name: value.encode("utf-8", "replace").decode() for name, value in said.items() if isinstance(value, str)
        }
        return msgspec.json.encode(said | texts) + b"\n"


def _level_of(record: RequestRecord) -> str:
    if record.status >= 500 and (record.submitted is not None or record.error not in _NO_FAILURES):
        return "error"
    return "warning" if record.status >= 400 else "info"
