"""Processes for simulations, which end with what they were made for.

Each is a fresh interpreter: what the program has imported, and threads that it runs, are none of their business. Ctrl-C is the program's
alone, though a terminal sends it to them, too. However the program ends, by a signal that no handler sees as well, they end with it.
Knows processes. Does not know what they compute.
"""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from threading import Thread, current_thread, main_thread
from traceback import clear_frames
from typing import Any


class _Worker(SpawnProcess):
    def start(self) -> None:
        if not hasattr(signal, "pthread_sigmask"):
            super().start()
            return
        with _held_back():
            # A new program keeps what is blocked, so Ctrl-C is not its own from its first instruction on.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                super().start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _held_back() -> Iterator[None]:
    """A signal that Python handles comes at the block's end: a worker that is half started would say that it misses the other half."""
    if current_thread() is not main_thread():
        # Python handles signals in the main thread alone.
        yield
        return
    came: list[int] = []
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    handlers = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    for number in handlers:
        signal.signal(number, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)


class _Workers(SpawnContext):
    """Makes workers and knows them: the pool does not say whom it has started."""

    def __init__(self) -> None:
        self.made: list[_Worker] = []

    def Process(self, *args: Any, **options: Any) -> _Worker:  # type: ignore[override]  # noqa: N802  # as multiprocessing calls it
        worker = _Worker(*args, **options)
        self.made.append(worker)
        return worker

    def kill(self) -> None:
        for worker in self.made:
            # One that was never started, or has been closed, has nothing to end.
            with suppress(ValueError, AttributeError):
                worker.kill()


@contextmanager
def processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """So many processes. What is raised in the block kills them: nobody waits for what they still compute."""
    workers = _Workers()
    theirs, ours = workers.Pipe(duplex=False)
    pool = ProcessPoolExecutor(jobs, mp_context=workers, initializer=_end_with, initargs=(theirs,))
    try:
        yield pool
        pool.shutdown(cancel_futures=True)
    except BaseException as problem:
        # Also where the interrupt came while they were sent home: what was on its way then still holds the pool's semaphores.
        workers.kill()
        _end_of_results(pool)
        pool.shutdown(cancel_futures=True)
        clear_frames(problem.__traceback__)
        raise
    finally:
        ours.close()
        theirs.close()


def _end_of_results(pool: ProcessPoolExecutor) -> None:
    """Let the pool see that no more results come: one who was killed in the middle of a result leaves it waiting for the rest, as the pool itself
    holds the pipe's other end open (seen with CPython 3.11)."""
    writer = getattr(getattr(pool, "_result_queue", None), "_writer", None)
    if writer is not None:
        writer.close()


def _end_with(theirs: Connection) -> None:
    """In a worker: to end at once when the other end is closed, which the system does for a program that is gone."""

    def wait() -> None:
        with suppress(EOFError, OSError):
            theirs.recv_bytes()
        os._exit(1)

    Thread(target=wait, daemon=True).start()
