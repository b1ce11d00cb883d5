"""Content that is to stay: pinned, or evicted later than the rest, for good or until a logical time.

A pin is a reference to the block of each node of a prefix. A retention raises the level of a node and of all before it, so that a
child is never kept longer than its parent; what nobody retains is at level 0. Knows nodes, levels and a time that it is told.
Does not know requests, clocks, or whose content it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from block_manager.errors import InvalidConfig, UnknownContent, UnknownPin
from block_manager.free_list import Blocks
from block_manager.pool import Pool
from block_manager.prefix_index import PrefixIndex
from block_manager.runs import Run

HIGHEST_LEVEL = 3
Segment = tuple[Run, int, int]
Hold = Callable[[Blocks], None]


@dataclass(frozen=True, slots=True)
class Pin:
    """`num_tokens` of a prompt that stay where they are until `unpin`, or until the logical time that was named."""

    number: int
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """How a tier's blocks are held beyond the tables, and given back; both note it for the checker."""

    hold: Hold
    release: Hold


class Retentions:
    """Pins and levels of content, and when they end."""

    def __init__(
        self, index: PrefixIndex, block_size: int, pools: tuple[Pool, Pool], holders: tuple[Holder, Holder]
    ) -> None:
        """`pools` and `holders`: of the device, then of the host."""
        self._index = index
        index.closed = self.apply_to
        self._device, self._host = pools
        self._holders = holders
        self._block_size = block_size
        self._now = -np.inf
        self._next = 1
        self._pins: dict[int, tuple[Blocks, Blocks]] = {}
        # The last node of each retention that ends, by number; (when, number) in order, of pins, too.
        self._until: dict[int, tuple[Run, int]] = {}
        self._ends: list[tuple[float, int]] = []

    @property
    def num_pins(self) -> int:
        """Pins that hold."""
        return len(self._pins)

    def pin(self, segments: list[Segment], until: float | None) -> Pin:
        """Hold each node of a prefix where it resides: on the device, and where it does not, on the host."""
        number = self._numbered(until)
        on_device: list[int] = []
        on_host: list[int] = []
        for run, offset, count in segments:
            for at in range(offset, offset + count):
                block = self._index.device_block(run, at)
                (on_device if block >= 0 else on_host).append(block if block >= 0 else run.host_block(at))
        held = np.array(on_device, np.int64), np.array(on_host, np.int64)
        for holder, blocks in zip(self._holders, held, strict=True):
            holder.hold(blocks)
        self._pins[number] = held
        return Pin(number, (len(on_device) + len(on_host)) * self._block_size)

    def unpin(self, pin: Pin) -> None:
        """Raises UnknownPin for one that does not hold any more."""
        if not isinstance(pin, Pin) or pin.number not in self._pins:
            raise UnknownPin(pin)
        self._release(pin.number)

    def retain(self, segments: list[Segment], level: int, until: float | None) -> None:
        """The nodes of a prefix are kept at `level` at least, until the logical time `until` (None: as long as they live)."""
        number = self._numbered(until)
        run, offset, count = segments[-1]
        at = offset + count - 1
        for each, last in _upwards(run, at):
            if each.retained is None:
                each.retained = {}
            each.retained[number] = (last, level)
        if until is not None:
            self._until[number] = (run, at)
        self._apply(run, at)

    def expire(self, now: float) -> None:
        """What was to end by the logical time `now` has ended. A time before one that was told already changes nothing."""
        self._now = max(self._now, now)
        while self._ends and self._ends[0][0] <= self._now:
            _, number = heapq.heappop(self._ends)
            if number in self._pins:
                self._release(number)
            elif number in self._until:
                run, at = self._until.pop(number)
                for each, _ in _upwards(run, at):
                    if each.retained is not None:
                        each.retained.pop(number, None)
                self._apply(run, at)

    def clear(self) -> None:
        """All content is forgotten, and nothing is pinned."""
        self._until.clear()
        self._ends.clear()

    def _numbered(self, until: float | None) -> int:
        number = self._next
        if until is not None:
            if isinstance(until, bool) or not isinstance(until, (int, float)) or not self._now < until < np.inf:
                raise InvalidConfig(f"until has to be a logical time after {self._now}; got {until!r}.")
            heapq.heappush(self._ends, (until, number))
        self._next += 1
        return number

    def _release(self, number: int) -> None:
        for holder, blocks in zip(self._holders, self._pins.pop(number), strict=True):
            holder.release(blocks)

    def _apply(self, run: Run, at: int) -> None:
        """Levels of the nodes up to (`run`, `at`) are what their retentions say; the last node first."""
        for each, _ in _upwards(run, at):
            self.apply_to(each)

    def apply_to(self, run: Run) -> None:
        """Levels of a run's nodes are what its retentions say. Those of an open run wait until it is closed: its row holds them."""
        if run.row >= 0 or run.length == 0:
            return
        levels = levels_wanted(run)
        before = np.zeros(run.length, np.int8) if run.levels is None else run.levels[: run.length]
        changed = (levels != before).nonzero()[0]
        run.levels = levels if levels.any() else None
        assert run.blocks is not None, "a closed run keeps its blocks"
        on_device = changed[changed < run.num_device]
        if len(on_device):
            self._device.set_levels(run.blocks[0, on_device], levels[on_device])
        if run.num_host and run.host is not None:
            on_host = changed[run.host[changed] >= 0]
            if len(on_host):
                self._host.set_levels(run.host[on_host], levels[on_host])


def levels_wanted(run: Run) -> NDArray[np.int8]:
    """int8 [length]: what the retentions of a run say of its nodes."""
    levels = np.zeros(run.length, np.int8)
    for end, level in (run.retained or {}).values():
        np.maximum(levels[: end + 1], level, out=levels[: end + 1])
    return levels


def _upwards(run: Run | None, at: int) -> list[tuple[Run, int]]:
    """Each run on the way from a node to the root, with the last of its nodes on it."""
    found: list[tuple[Run, int]] = []
    while run is not None:
        found.append((run, at))
        at, run = run.at, run.parent
    return found


def level_checked(priority: object) -> int:
    """A priority as a level. Raises InvalidConfig."""
    if isinstance(priority, bool) or not isinstance(priority, (int, np.integer)) or not 1 <= priority <= HIGHEST_LEVEL:
        raise InvalidConfig(f"priority has to be from 1 to {HIGHEST_LEVEL}; got {priority!r}.")
    return int(priority)


def found_or_raise(segments: list[Segment], num_tokens: int) -> list[Segment]:
    """The segments, if there are any. Raises UnknownContent."""
    if not segments:
        raise UnknownContent(num_tokens)
    return segments
