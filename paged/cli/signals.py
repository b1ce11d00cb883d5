"""The end of a command by a signal: within a second, with the results so far, and with status 128 plus the signal's number.

Before a command runs the process ends at once. After that a signal raises a KeyboardInterrupt: bars and live views
restore the terminal, half-written files are removed, and the command prints its results. If that takes too long (a
library swallows the interrupt, a matrix product takes a second), a thread ends the process. A command that lets others
end first, such as a server, is `unhurried`.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any, NoReturn

from paged.base.uninterrupted import ENDING, handled_by

GRACE_S = 0.6
"""Most time between a signal and the end of the process."""
_TIDYING_S = 0.1


class Ended(KeyboardInterrupt):
    """Raised by a signal other than Ctrl-C."""


_latest = signal.SIGINT


def end_at_once() -> None:
    """End the process at once on a signal, from now on. Signals that it ignores already (nohup, a shell's `&`) stay ignored."""
    _on_signals(dict.fromkeys(ENDING, _end))


def interrupt() -> None:
    """Interrupt what runs on a signal, from now on. It has GRACE_S to end, or until a second signal."""
    came, comes = os.pipe()
    os.set_blocking(comes, False)
    # The system writes a signal's number there at once, whatever the main thread does.
    signal.set_wakeup_fd(comes, warn_on_full_buffer=False)
    Thread(target=_end_late, args=(came,), daemon=True).start()
    sys.unraisablehook = _other_than_interrupts
    # Ctrl-C keeps Python's own handler, which uninterrupted blocks hold back.
    _on_signals({number: signal.default_int_handler if number == signal.SIGINT else _raise for number in ENDING})


@contextmanager
def at_once() -> Iterator[None]:
    """Let a signal end the process at once within the block: for loading libraries, during which Python's handlers may wait for seconds.
    The block must have no results to keep, and show the cursor."""
    with handled_by(signal.SIG_DFL, in_place_of=_is_heard):
        yield


@contextmanager
def unhurried() -> Iterator[None]:
    """Let a signal's handler take as long as it takes within the block: for a command that lets others end first."""
    descriptor = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)


def leave(status: int) -> NoReturn:
    """End the process with this status at once: a library's exit handlers may take a second."""
    for number in ENDING:
        # The status has been decided.
        signal.signal(number, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


def status() -> int:
    """Return the exit status after a KeyboardInterrupt: 128 plus the signal's number."""
    return 128 + _latest


def is_interrupt(problem: BaseException | None) -> bool:
    """Whether an exception is a KeyboardInterrupt, or was raised while one was handled."""
    while problem is not None and not isinstance(problem, KeyboardInterrupt):
        problem = problem.__cause__ or problem.__context__
    return problem is not None


def _on_signals(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        if _is_heard(signal.getsignal(number)):
            signal.signal(number, handler)


def _is_heard(handler: Any) -> bool:
    return handler is not signal.SIG_IGN


def _end(number: int, _frame: object) -> None:
    os._exit(128 + number)


def _raise(number: int, _frame: object) -> None:
    global _latest
    _latest = signal.Signals(number)
    raise Ended


def _end_late(came: int) -> None:
    number = _next(came)
    Thread(target=lambda: _end_here(_next(came)), daemon=True).start()
    time.sleep(GRACE_S)
    _end_here(number)


def _end_here(number: int) -> NoReturn:
    """Show the cursor, remove the semaphores of a pool of processes, and end the process. Wait for a blocked terminal at most _TIDYING_S."""
    threads = [Thread(target=each, daemon=True) for each in (_show_cursor, _remove_semaphores)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + _TIDYING_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    os._exit(128 + number)


def _remove_semaphores() -> None:
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        # As multiprocessing itself at the end of a process, but without waiting.
        with suppress(Exception):
            util._run_finalizers(0)  # type: ignore[attr-defined]


def _show_cursor() -> None:
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.isatty(descriptor):
                os.write(descriptor, b"\x1b[?25h")


def _next(came: int) -> int:
    """Return the next signal that ends a process. Others, such as of a resized terminal, write a byte there, too."""
    while (number := os.read(came, 1)[0]) not in ENDING:
        pass
    return number


def _other_than_interrupts(unraisable: Any) -> None:
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
