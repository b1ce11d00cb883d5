"""The number of threads of a forward pass: as many as there are cores that no other process uses, counted every half second.

    2 cores, both idle             2 threads
    2 cores, one of them busy      1 thread: in every product a second one would wait for a core, and the first one for it

torch's threads wait by spinning, so a thread without a core holds up all others until the system gives it one. On two cores of which one is busy,
a model is several times slower with two threads than with one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import NamedTuple

# Seconds between two readings at least: the counters are in hundredths of a second.
_STALE = 0.5
# A core is free if others use less than this share of it.
_SHARE = 0.4
_COUNTERS = Path("/proc/stat")
_GROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")


class Reading(NamedTuple):
    """Seconds on the clock; seconds that all processes have used of the cores of this one; and seconds that this one has used."""

    now: float
    used_by_all: float
    used_by_us: float


def read_usage() -> Reading | None:
    """Read how much the cores were used; None if the system does not say."""
    try:
        lines = _COUNTERS.read_text(encoding="ascii").splitlines()
        ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        per_second = os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return None
    used = 0
    for name, *ticks in map(str.split, lines):
        if name in ours:
            # user, nice, system, idle, iowait, irq, softirq, steal
            used += sum(int(tick) for place, tick in enumerate(ticks[:8]) if place not in (3, 4))
    return Reading(time.monotonic(), used / per_second, time.process_time())


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and its control group's limit; at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
    try:
        quota, period = _GROUP_LIMIT.read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        # There is no limit, or it is "max".
        return cores


class FreeCores:
    """Counts the cores that no other process uses, between one reading and the next."""

    def __init__(
        self,
        read: Callable[[], Reading | None] = read_usage,
        cores: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._clock = read, clock
        self._cores = usable_cores() if cores is None else cores
        self._before = read()
        self._free = self._cores

    def count(self) -> int:
        """Return the number of free cores: at least 1; all if the use is not known."""
        before = self._before
        if before is None or self._clock() - before.now < _STALE:
            return self._free
        reading = self._read()
        if reading is not None:
            others = (reading.used_by_all - before.used_by_all) - (reading.used_by_us - before.used_by_us)
            free = self._cores - others / (reading.now - before.now)
            self._free = min(self._cores, max(1, int(free + _SHARE)))
            self._before = reading
        return self._free


class Threads:
    """Limits of torch's threads, for the whole process. While callers are inside `at_most`, the lowest limit holds, and never more threads than before
    the first one; when the last one leaves, the number is as before."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside: list[int] = []
        self._before = 1

    @contextmanager
    def at_most(self, count: int) -> Iterator[None]:
        """Limit torch to `count` threads inside."""
        # Here, since counting cores does not need torch.
        import torch

        with self._lock:
            if not self._inside:
                self._before = torch.get_num_threads()
            self._inside.append(count)
            torch.set_num_threads(min(self._before, *self._inside))
        try:
            yield
        finally:
            with self._lock:
                self._inside.remove(count)
                torch.set_num_threads(min([self._before, *self._inside]))


THREADS = Threads()
"""The limits of this process."""


@cache
def free_cores() -> FreeCores:
    """Return the counter of this process, whose first reading is at the first use."""
    return FreeCores()
