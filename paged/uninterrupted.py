"""Ctrl-C that waits until what belongs together has been done.

Knows SIGINT and Python's own handler of it. Does not know what is done.
"""

from __future__ import annotations

# What `signal` wraps: its own functions look every handler up among enum members, 10 µs a call, three times a step.
from _signal import SIGINT, default_int_handler, getsignal, signal  # type: ignore[import-not-found]
from threading import get_ident, main_thread


class Uninterrupted:
    """Ctrl-C inside the block raises KeyboardInterrupt at the block's end.

    Only in the main thread, the only one that Ctrl-C interrupts, and only while Python's own handler is installed: a
    program that has a handler of its own decides what an interrupt does. Blocks may be nested; the outermost one holds
    the interrupt back.
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
