"""A line of JSON for each request that ended, written by a thread of its own.

    write ──> at most 8,192 lines, 16 MiB ──> thread ──> the stream's file descriptor

A full disk, a closed pipe or a reader that sleeps costs lines, which are counted, and never holds a request up: `write` neither waits nor
fails. Knows records and lines; docs/metrics.md explains them. Does not know HTTP.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from threading import Condition, Thread
from typing import Protocol

import msgspec

from paged.serving.durations import durations
from paged.serving.records import RequestRecord

MOST_LINES = 8192
MOST_BYTES = 16 * 2**20
"""That wait to be written; lines beyond are lost."""

_NOT_YET_OR_NO_MORE = {"engine_starting", "shutdown"}
"""Codes of a request that came before the engine had begun, or after the server was told to end: neither is the server's failure."""


class HasFileno(Protocol):
    """A file, a pipe, a terminal."""

    def fileno(self) -> int:
        """Its descriptor."""


class Line(msgspec.Struct, frozen=True):
    """What is said of a request, in this order. Seconds are from its coming on; null: it did not get there."""

    time: str
    level: str
    id: str
    endpoint: str
    tenant: str | None
    status: int
    finish_reason: str
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    recomputed_tokens: int
    preemptions: int
    longest_pause_s: float
    waited_s: float | None
    ttft_s: float | None
    e2e_s: float | None
    n: int
    max_tokens: int
    streams: bool
    prompt: str | msgspec.UnsetType | None = msgspec.UNSET
    answer: str | msgspec.UnsetType | None = msgspec.UNSET


class LinesLost(msgspec.Struct, frozen=True):
    """What is said once the log can be written again."""

    time: str
    level: str
    message: str
    lost: int


class RequestLog:
    """The log of a server, on a stream with a file descriptor, which is written to directly: what the stream itself has buffered is not
    flushed. `clock` gives the time of day, in seconds since 1970."""

    def __init__(
        self, stream: HasFileno, *, with_prompts: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        # Kept, so that the descriptor is not closed, and another file's.
        self._stream = stream
        self._file = stream.fileno()
        self._with_prompts = with_prompts
        self._clock = clock
        self._encode = msgspec.json.Encoder().encode
        self._changed = Condition()
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_closed = False
        self._lost = 0
        # The rest of a line that could not be written stands in the file without an end.
        self._is_torn = False
        self._thread = Thread(target=self._run, name="paged-log", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Lines that were not written, since the log began."""
        return self._lost

    def write(self, record: RequestRecord) -> None:
        """A request has ended."""
        line = self._encoded(self._line(record))
        with self._changed:
            if self._is_closed or len(self._lines) >= MOST_LINES or self._num_bytes + len(line) > MOST_BYTES:
                self._lost += 1
                return
            self._lines.append(line)
            self._num_bytes += len(line)
            self._changed.notify()

    def close(self, timeout_s: float = 1.0) -> None:
        """Write what waits, for as long as that; what is left then is lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        with self._changed:
            self._lost += len(self._lines)
            self._lines.clear()

    def _run(self) -> None:
        told = 0
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
                if lost == told or self._lines:
                    continue
            # All has been written that waited: it works again.
            said = LinesLost(self._now(), "warning", f"{lost - told} lines of this log were lost.", lost - told)
            if self._put(self._encoded(said)):
                told = lost

    def _put(self, line: bytes) -> bool:
        """Write a line, and wait as long as that takes; whether it could be written."""
        if self._is_torn:
            line = b"\n" + line
        rest = memoryview(line)
        try:
            while rest:
                try:
                    rest = rest[os.write(self._file, rest) :]
                except BlockingIOError:
                    # The pipe is full, and somebody who shares it does not want to wait.
                    room = select.poll()
                    room.register(self._file, select.POLLOUT)
                    room.poll()
        except OSError:
            self._is_torn = self._is_torn or len(rest) < len(line)
            return False
        self._is_torn = False
        return True

    def _encoded(self, line: Line | LinesLost) -> bytes:
        try:
            return self._encode(line) + b"\n"
        except UnicodeEncodeError:
            # Half a surrogate pair, which JSON can carry into a prompt, and UTF-8 cannot carry out.
            fields = msgspec.structs.asdict(line)
            for name, value in fields.items():
                if isinstance(value, str):
                    fields[name] = value.encode("utf-8", "replace").decode()
            return self._encode(type(line)(**fields)) + b"\n"

    def _now(self) -> str:
        now = datetime.fromtimestamp(self._clock(), UTC)
        return now.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"

    def _line(self, record: RequestRecord) -> Line:
        took = durations(record)
        return Line(
            time=self._now(),
            level=_level_of(record),
            id=record.id,
            endpoint=record.endpoint,
            tenant=record.tenant,
            status=record.status,
            finish_reason=record.finish_reason,
            error=record.error,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            output_tokens=record.output_tokens,
            recomputed_tokens=record.recomputed_tokens,
            preemptions=record.preemptions,
            longest_pause_s=round(max(0.0, record.longest_pause_s), 6),
            waited_s=_rounded(took.waited),
            ttft_s=_rounded(took.ttft),
            e2e_s=_rounded(took.e2e),
            n=record.n,
            max_tokens=record.max_tokens,
            streams=record.streams,
            prompt=record.prompt if self._with_prompts else msgspec.UNSET,
            answer=record.answer if self._with_prompts else msgspec.UNSET,
        )


def _level_of(record: RequestRecord) -> str:
    if record.status >= 500 and (record.submitted is not None or record.error not in _NOT_YET_OR_NO_MORE):
        return "error"
    return "warning" if record.status >= 400 else "info"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
