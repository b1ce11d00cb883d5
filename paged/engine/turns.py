"""Whose turn it is on an engine: one call of one thread at a time.

Knows calls by name and the threads that make them. Does not know what a call does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread

from paged.errors import EngineInUse

_NOW = "now"


class _Call:
    """One call that runs now."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.thread = current_thread()


class Turns:
    """Refuses a call that begins while another one runs. Nothing ever waits."""

    def __init__(self) -> None:
        # At most one entry. `setdefault` is one operation, which no other thread and no interrupt can come into.
        self._running: dict[str, _Call] = {}

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """The call `name` runs inside. Raises EngineInUse while any call runs, this thread's own ones included."""
        call = _Call(name)
        try:
            running = self._running.setdefault(_NOW, call)
            if running is not call:
                raise _in_use(call, running)
            yield
        finally:
            if self._running.get(_NOW) is call:
                del self._running[_NOW]

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        """The call `name` runs inside, which may come from a callback. Raises EngineInUse while a call of another
        thread runs."""
        running = self._running.get(_NOW)
        if running is not None and running.thread is current_thread():
            yield
        else:
            with self.alone(name):
                yield


def _in_use(call: _Call, running: _Call) -> EngineInUse:
    return EngineInUse(call.name, running.name, None if running.thread is call.thread else running.thread.name)
