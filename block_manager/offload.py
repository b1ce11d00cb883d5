"""Content that leaves the device goes to the host, and comes back on a hit.

    evicted node ── not on the host yet ──> device → host        hit on it ── worth it ──> host → device

Copies are planned here and taken with `take_moves`, all that were planned since the last time at once. Host blocks that they read or
write are held until then, so that no block is written twice, or read and written, by copies that run together. Knows runs, both
pools and the copies that nobody has taken yet. Does not know tables, nor what a copy costs: `is_worth_loading` is told.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from block_manager.free_list import Blocks
from block_manager.host_residence import HostResidence
from block_manager.moves import NO_MOVES, NO_PAIRS, Moves, Pairs
from block_manager.pool import Pool
from block_manager.runs import Run

Segment = tuple[Run, int, int]


def _always(start: int, stop: int) -> bool:
    return stop > start


class Offload:
    """Plans the copies of content between the tiers. `offloaded_blocks` and `loaded_blocks` count them."""

    def __init__(self, device: Pool, host: Pool, residence: HostResidence) -> None:
        self._device = device
        self._host = host
        self._residence = residence
        # Whether KV of positions start to stop - 1 of a sequence is cheaper to load than to compute.
        self.is_worth_loading: Callable[[int, int], bool] = _always
        # Closed while copies of an earlier batch are still to run: theirs come first.
        self.is_open = True
        self.offloaded_blocks = self.loaded_blocks = 0
        self._out: list[tuple[Blocks, Blocks]] = []
        self._in: list[tuple[Blocks, Blocks]] = []
        self._busy: list[Blocks] = []

    def leave(self, run: Run, first: int) -> None:
        """The nodes of a closed run from `first` on are about to leave the device, last one first: those that the host has not yet
        are copied there, as far as it has blocks for them, and the others count as used just now."""
        stop = run.num_device
        assert run.blocks is not None, "a closed run keeps its blocks"
        sources = run.blocks[0, first:stop]
        if self._in:
            self._forget_loads(sources)
        if not self.is_open:
            return
        there = np.empty(0, np.int64) if run.num_host == 0 or run.host is None else run.host[first:stop]
        num_there = int(np.count_nonzero(there >= 0))
        if num_there == 0:
            self._copy_out(run, np.arange(first, stop), sources)
        elif num_there == stop - first:
            self._host.hold(there)
            self._busy.append(there[::-1].copy())
        else:
            # Room for one may be made by forgetting another one of them, so one by one.
            for at in range(stop - 1, first - 1, -1):
                assert run.host is not None
                block = run.host[at : at + 1].copy()
                if block[0] >= 0:
                    self._host.hold(block)
                    self._busy.append(block)
                else:
                    self._copy_out(run, np.array([at]), run.blocks[0, at : at + 1])

    def hold_sources(self, segments: list[Segment]) -> Blocks:
        """The host blocks of these nodes in order, int64 [n], which have one holder more until the moves are taken: copies read them."""
        parts = [run.host[offset : offset + count] for run, offset, count in segments if run.host is not None]
        blocks = np.concatenate(parts)
        self._host.hold(blocks)
        self.keep_until_taken(blocks)
        return blocks

    def keep_until_taken(self, blocks: Blocks) -> None:
        """Whoever held these host blocks, in order, holds them until the moves are taken: copies read them."""
        self._busy.append(blocks[::-1])

    def load(self, sources: Blocks, blocks: Blocks) -> None:
        """Host blocks that are held are copied to device blocks, both int64 [n]."""
        self._in.append((sources, blocks))
        self.loaded_blocks += len(blocks)

    def held(self) -> Blocks:
        """Host blocks that copies which nobody has taken yet hold, one entry a reference, int64 [n]; for the checker."""
        return np.concatenate([np.empty(0, np.int64), *self._busy])

    def take_moves(self) -> Moves:
        """All copies that were planned since the last call; they run together, and before anything that is planned later."""
        if not self._busy:
            return NO_MOVES
        moves = Moves(_pairs(self._out), _pairs(self._in))
        busy, self._busy, self._out, self._in = self._busy, [], [], []
        for blocks in busy:
            self._host.release(blocks)
        return moves

    def _copy_out(self, run: Run, offsets: NDArray[np.int64], sources: Blocks) -> None:
        room = min(len(offsets), self._host.num_available)
        if not room:
            return
        # They leave last one first, so the last ones find room.
        offsets, sources = offsets[len(offsets) - room :], sources[len(sources) - room :]
        blocks = self._host.draw(room)
        self._residence.put(run, offsets, blocks)
        self._out.append((sources.copy(), blocks))
        self._busy.append(blocks[::-1].copy())
        self.offloaded_blocks += room

    def _forget_loads(self, blocks: Blocks) -> None:
        """What was to be copied into these blocks need not be: they are given to somebody else before it ran."""
        kept = []
        for sources, targets in self._in:
            stays = ~np.isin(targets, blocks)
            self.loaded_blocks -= len(targets) - int(np.count_nonzero(stays))
            kept.append((sources[stays], targets[stays]))
        self._in = kept


def _pairs(parts: list[tuple[Blocks, Blocks]]) -> Pairs:
    if not parts:
        return NO_PAIRS
    count = sum(len(sources) for sources, _ in parts)
    pairs, stop = np.empty((count, 2), np.int32), 0
    for sources, targets in parts:
        start, stop = stop, stop + len(sources)
        pairs[start:stop, 0], pairs[start:stop, 1] = sources, targets
    return pairs
