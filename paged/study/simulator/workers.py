"""Processes for simulations, which end with the block that made them.

Each is a fresh interpreter, without the program's imports and threads. Ctrl-C interrupts the program alone, though a
terminal sends it to the processes, too. However the program ends, even by SIGKILL, they end with it.
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
            # A new program keeps blocked signals, so Ctrl-C does not reach it from its first instruction on.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                super().start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Workers(SpawnContext):
    """Makes workers and keeps them: the pool does not name those that it has started."""

    def __init__(self) -> None:
        self.made: list[_Worker] = []

    def Process(self, *args: Any, **options: Any) -> _Worker:  # type: ignore[override]  # noqa: N802  # as multiprocessing calls it
        worker = _Worker(*args, **options)
        self.made.append(worker)
        return worker

    def kill(self) -> None:
        for worker in self.made:
            # A worker that was never started, or has been closed, has no process.
            with suppress(ValueError, AttributeError):
                worker.kill()


class _Pool(ProcessPoolExecutor):
    def submit(self, *args: Any, **options: Any) -> Future[Any]:  # type: ignore[override]
        """As in the base class. It starts workers and, once, a thread; a signal in between would leave a thread that cannot be joined."""
        with held_back():
            return super().submit(*args, **options)


@contextmanager
def processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Make so many processes, which are killed at the end of the block."""
    workers = _Workers()
    theirs, ours = workers.Pipe(duplex=False)
    pool: _Pool | None = None
    has_ended = False

    def end() -> None:
        nonlocal has_ended
        # A thread whose join is interrupted counts as ended (CPython 3.11), and would leak what it still holds.
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
            # A pool that is half made would leak what it holds.
            with held_back():
                pool = _Pool(jobs, mp_context=workers, initializer=_end_with, initargs=(theirs,))
            yield pool
        finally:
            end()
    finally:
        # A signal may come after the end has begun, and before signals are held back.
        if not has_ended:
            end()


def _end_of_results(pool: ProcessPoolExecutor) -> None:
    """Close the pool's end of the pipe of results. Else a worker that was killed in the middle of a result leaves the pool waiting for the rest (seen
    with CPython 3.11)."""
    writer = getattr(getattr(pool, "_result_queue", None), "_writer", None)
    if writer is not None:
        writer.close()


def _end_with(theirs: Connection) -> None:
    """In a worker: exit when the pipe's other end is closed, as the system does for a program that has ended."""

    def wait() -> None:
        with suppress(EOFError, OSError):
            theirs.recv_bytes()
        os._exit(1)

    Thread(target=wait, daemon=True).start()
