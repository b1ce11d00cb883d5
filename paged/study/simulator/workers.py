"""Processes for simulations, which end with what they were made for.

Each is a fresh interpreter: what the program has imported, and threads that it runs, are none of their business.
Ctrl-C is the program's alone, though a terminal sends it to them, too. However the program ends, by a signal that no
handler sees as well, they end with it.
"""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from threading import Thread
from typing import Any

from paged.base.uninterrupted import held_back


class _Worker(SpawnProcess):
    def start(self) -> None:
        if not hasattr(signal, "pthread_sigmask"):
            super().start()
            return
        with held_back():
            # A new program keeps what is blocked, so Ctrl-C is not its own from its first instruction on.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                super().start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)


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


class _Pool(ProcessPoolExecutor):
    def submit(self, *args: Any, **options: Any) -> Future[Any]:  # type: ignore[override]
        """As of the pool. It starts workers and, once, its own thread: one that has been made and not started could not be waited for."""
        with held_back():
            return super().submit(*args, **options)


@contextmanager
def processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """So many processes, until the block's end: nobody waits for what they still compute."""
    workers = _Workers()
    theirs, ours = workers.Pipe(duplex=False)
    pool: _Pool | None = None
    has_ended = False

    def end() -> None:
        nonlocal has_ended
        # A thread whose join is interrupted counts as ended (CPython 3.11), and what it still holds would be nobody's.
        with held_back():
            workers.kill()
            if pool is not None:
                _end_of_results(pool)
                pool.shutdown(cancel_futures=True)
            ours.close()
            theirs.close()
            has_ended = True

    try:
        try:
            # Whole or not at all: what a pool that was half made holds would be nobody's, too.
            with held_back():
                pool = _Pool(jobs, mp_context=workers, initializer=_end_with, initargs=(theirs,))
            yield pool
        finally:
            end()
    finally:
        # A signal may have come when the end had begun, and before signals were held back.
        if not has_ended:
            end()


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
