"""One call at a time on a scheduler: a call that begins while another one runs is refused before anything changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from paged.errors import SchedulerInUse

Running = tuple[str, int]
"""Of the call that runs: its name and its thread."""

_NOW = "now"
_Method = TypeVar("_Method", bound=Callable[..., Any])


def alone(method: _Method) -> _Method:
    """Refuse the method with SchedulerInUse while another one of the same scheduler runs. Nothing waits."""
    name = method.__name__

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        running, mine = self._running, (name, threading.get_ident())
        try:
            # One operation, which no other thread and no interrupt can come into.
            other = running.setdefault(_NOW, mine)
            if other is not mine:
                raise _in_use(name, other)
            return method(self, *args, **kwargs)
        finally:
            if running.get(_NOW) is mine:
                del running[_NOW]

    return cast(_Method, call)


def _in_use(name: str, other: Running) -> SchedulerInUse:
    if other[1] == threading.get_ident():
        return SchedulerInUse(name, other[0])
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return SchedulerInUse(name, other[0], names.get(other[1], "one that has ended"))
