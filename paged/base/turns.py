"""One call at a time on an object: a call that begins while another runs is refused, and changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from typing import Any, TypeVar, cast

_NOW = "now"
_Method = TypeVar("_Method", bound=Callable[..., Any])


class Turns:
    """Whose turn it is. `in_use` makes a refused call's error from its name, the running call, and that one's thread
    (None: this one).

    running  the name and the thread of the running call: at most one entry, under _NOW. `setdefault` is atomic
    """

    def __init__(self, in_use: Callable[[str, str, str | None], Exception]) -> None:
        self._in_use = in_use
        self.running: dict[str, tuple[str, int]] = {}

    def refusal(self, name: str, other: tuple[str, int]) -> Exception:
        """Return the error of the call `name`, which cannot begin because of the other one."""
        if other[1] == get_ident():
            return self._in_use(name, other[0], None)
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return self._in_use(name, other[0], names.get(other[1], "one that has ended"))

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Run the block as the call `name`. Raises `in_use`'s error while any call runs, in this thread, too."""
        running, mine = self.running, (name, get_ident())
        try:
            other = running.setdefault(_NOW, mine)
            if other is not mine:
                raise self.refusal(name, other)
            yield
        finally:
            if running.get(_NOW) is mine:
                del running[_NOW]

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        """Run the block as the call `name`, alone, or from a callback of a call that runs in this thread."""
        running = self.running.get(_NOW)
        if running is not None and running[1] == get_ident():
            yield
        else:
            with self.alone(name):
                yield


def alone(method: _Method) -> _Method:
    """Let the method run alone by its object's `_turns`: `Turns.alone` written out, since each step makes two such calls."""
    name = method.__name__

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        running, mine = self._turns.running, (name, get_ident())
        try:
            other = running.setdefault(_NOW, mine)
            if other is not mine:
                raise self._turns.refusal(name, other)
            return method(self, *args, **kwargs)
        finally:
            if running.get(_NOW) is mine:
                del running[_NOW]

    return cast(_Method, run)
