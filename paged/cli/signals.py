"""The end of a command by a signal: within a second, with the results that it had finished, and status 128 plus the signal.

Before a command runs there is nothing to keep, and the process ends at once. Then the signal is a KeyboardInterrupt,
wherever Python is: bars and live views restore the terminal, half-written files are removed, and a command prints
its results. A thread waits beside it, for code that does not listen (a library that swallows the interrupt, a product that
takes a second), and ends the process. A command that lets others end first, as a server does, asks for it to be
`unhurried`.
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
"""Between a signal and the end of the process, whatever it does."""
_TIDYING_S = 0.1


class Ended(KeyboardInterrupt):
    """Raised by a signal other than Ctrl-C."""


_latest = signal.SIGINT


def end_at_once() -> None:
    """From now on a signal ends the process where it is. Signals that this process ignores already (nohup, a shell's `&`) stay ignored."""
    _on_signals(dict.fromkeys(ENDING, _end))


def interrupt() -> None:
    """From now on a signal interrupts what runs; it has GRACE_S to come to an end, or until a second one comes."""
    came, comes = os.pipe()
    os.set_blocking(comes, False)
    # The system writes its number there at once, whatever the main thread is doing.
    signal.set_wakeup_fd(comes, warn_on_full_buffer=False)
    Thread(target=_end_late, args=(came,), daemon=True).start()
    sys.unraisablehook = _other_than_interrupts
    # Ctrl-C keeps Python's own handler: what belongs together holds that one back.
    _on_signals({number: signal.default_int_handler if number == signal.SIGINT else _raise for number in ENDING})


@contextmanager
def at_once() -> Iterator[None]:
    """Within the block a signal ends the process where it is, in the middle of an instruction: while libraries load, which may keep Python
    and its handlers waiting for seconds. Nothing is to be kept there, and the cursor has to be shown."""
    with handled_by(signal.SIG_DFL, in_place_of=_is_heard):
        yield


@contextmanager
def unhurried() -> Iterator[None]:
    """Within the block a signal does what its handler does, however long that takes: for a command that lets others end first."""
    descriptor = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)


def leave(status: int) -> NoReturn:
    """End the process with this status, at once: the command has ended, and libraries may take a second to say goodbye."""
    for number in ENDING:
        # The status has been decided.
        signal.signal(number, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


def status() -> int:
    """The exit status after a KeyboardInterrupt: of the signal that it was."""
    return 128 + _latest


def is_interrupt(problem: BaseException | None) -> bool:
    """Whether this exception is a KeyboardInterrupt, or was raised while one passed."""
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
    """End the process, whose live view may not have put the terminal right, and whose pool of processes may have names of semaphores with the system.
    A terminal that takes nothing is not waited for."""
    threads = [Thread(target=each, daemon=True) for each in (_show_cursor, _take_names_away)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + _TIDYING_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    os._exit(128 + number)


def _take_names_away() -> None:
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        # What multiprocessing itself does at the end of a process, but for waiting.
        with suppress(Exception):
            util._run_finalizers(0)  # type: ignore[attr-defined]


def _show_cursor() -> None:
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.isatty(descriptor):
                os.write(descriptor, b"\x1b[?25h")


def _next(came: int) -> int:
    """The next signal that ends a process; others, of a resized terminal for one, have a byte there, too."""
    while (number := os.read(came, 1)[0]) not in ENDING:
        pass
    return number


def _other_than_interrupts(unraisable: Any) -> None:
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
