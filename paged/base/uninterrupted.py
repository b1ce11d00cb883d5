"""Blocks of code that signals do not interrupt: Ctrl-C alone, many times a step, or all signals that end a process."""

from __future__ import annotations

import signal as signals

# `signal`'s own functions wrap these and look each handler up among enum members: 10 µs a call, 3 times a step.
from _signal import SIGINT, default_int_handler, getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident, main_thread
from typing import Any

ENDING = [getattr(signals, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signals, name)]
"""The signals that ask a process to end."""


class Uninterrupted:
    """Ctrl-C inside the block raises KeyboardInterrupt at the block's end.

    This holds in the main thread, the only one that Ctrl-C interrupts, and while Python's own handler is installed: a
    program with a handler of its own decides what an interrupt does. Blocks may be nested; the outermost one holds the
    interrupt back.
    """

    def __enter__(self) -> None:
        self._has_come = False
        self._holds = get_ident() == main_thread().ident and getsignal(SIGINT) is default_int_handler
        if self._holds:
            signal(SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self._holds:
            signal(SIGINT, default_int_handler)
            if self._has_come:
                raise KeyboardInterrupt

    def _note(self, *_: object) -> None:
        self._has_come = True


@contextmanager
def held_back() -> Iterator[None]:
    """Call handlers of the signals `ENDING` only at the block's end, for the first signal that came."""
    came: list[int] = []
    try:
        with handled_by(lambda number, _frame: came.append(number), in_place_of=callable):
            yield
    finally:
        for number in came[:1]:
            signals.raise_signal(number)


@contextmanager
def handled_by(handler: Any, *, in_place_of: Callable[[Any], bool]) -> Iterator[None]:
    """Within the block let `handler` replace the handlers of `ENDING` for which `in_place_of` is true.

    Python sets handlers in the main thread alone; in another thread the block changes none.
    """
    if get_ident() != main_thread().ident:
        yield
        return
    before = {number: found for number in ENDING if in_place_of(found := signals.getsignal(number))}
    try:
        for number in before:
            signals.signal(number, handler)
        yield
    finally:
        for number, found in before.items():
            signals.signal(number, found)
