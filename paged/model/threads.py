"""How many threads a forward pass gets: as many as there are cores that no other process uses, asked again while it runs.

    2 cores, all idle              2 threads
    2 cores, one of them busy      1 thread: a second one would wait for a core in every product, and the first one for it

torch's threads wait by spinning, so that one which has no core holds up all others for as long as the system takes to
give it one: with two threads beside one busy core a model is slower than with one, several times.
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

# So old may a reading be, in seconds; and so long has a window to be: the counters are in hundredths of a second.
_STALE = 0.5
# A core that others use to this share is not free.
_SHARE = 0.4
_COUNTERS = Path("/proc/stat")
_GROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")


class Reading(NamedTuple):
    """Seconds: what the clock says, what all processes have used of the cores that this one may use, and what this one has."""

    now: float
    used_by_all: float
    used_by_us: float


def read_usage() -> Reading | None:
    """None where the system does not say."""
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
    """Cores that this process may use, by its affinity and its group's limit."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
    try:
        quota, period = _GROUP_LIMIT.read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        # There is none, or it says "max".
        return cores


class FreeCores:
    """Cores that no other process uses, from one reading to the next."""

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
        """At least 1, and all where it is not known."""
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
    """torch on so many threads, for the whole process, as long as any caller is inside; then on as many as before the first came in. The fewest that
    a caller wants count, and none gets more than there were."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside: list[int] = []
        self._before = 1

    @contextmanager
    def at_most(self, count: int) -> Iterator[None]:
        """A caller is inside who wants so many at most."""
        # What counts cores does without it.
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
"""Of this process."""


@cache
def free_cores() -> FreeCores:
    """Of this process, read at the first use."""
    return FreeCores()
