"""Content that leaves the device goes to the host, and comes back on a hit.

    evicted node ── not on the host yet ──> device → host        hit on it ── worth it ──> host → device

Copies are planned here and taken with `take_moves`, all that were planned since the last time at once. Host blocks that they read or
write are held until then, so that no block is written twice, or read and written, by copies that run together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .free_list import Taken
from .moves import NO_MOVES, NO_PAIRS, Moves, Pairs
from .prefix_index import PrefixIndex
from .runs import DEVICE, HOST, Blocks, Run, Span, last_of

# A part of what goes to the host together may be all that is evicted there at a time: it is cut off a list no longer than this.
_SPANS = 64


def _always(start: int, stop: int) -> bool:
    return stop > start


class Offload:
    """Plans the copies of content between the tiers. `offloaded_blocks` and `loaded_blocks` count them."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        device, self._host = index.pools
        device.forget = self._evict
        # Whether KV of positions start to stop - 1 of a sequence is cheaper to load than to compute.
        self.is_worth_loading: Callable[[int, int], bool] = _always
        # Closed while copies of an earlier batch are, or might have to be, still to run: theirs come first.
        self.is_open = True
        self.offloaded_blocks = self.loaded_blocks = 0
        self._out: list[Pairs] = []
        self._in: list[tuple[Blocks, Blocks]] = []
        # Host blocks in the order in which they are released.
        self._busy: list[Blocks] = []

    def _evict(self, taken: list[Taken], sources: Blocks) -> None:
        """The nodes in these device blocks, of closed runs, leave them: those that the host has not yet are copied there, as far as it has
        blocks for them, and the others count as used just now."""
        leaving = self._index.nodes_in(DEVICE, taken)
        if self._in:
            self._forget_loads(sources)
        if self.is_open:
            self._keep_on_host(leaving, sources)
        self._index.forget(DEVICE, leaving, sources)

    def _keep_on_host(self, leaving: list[Span], sources: Blocks) -> None:
        new: list[Span] = []
        start = stop = 0
        for run, first, last in leaving:
            if is_there := run.is_any_there(HOST, first, last):
                # What goes before it may take host blocks of its nodes.
                self._copy_out(new, sources[start:stop])
                new, start = [], stop
            stop += last - first
            if is_there:
                self._hold_or_copy(run, first, last, sources[start:stop])
                start = stop
                continue
            new.append((run, first, last))
            if len(new) == _SPANS:
                self._copy_out(new, sources[start:stop])
                new, start = [], stop
        self._copy_out(new, sources[start:stop])

    def _hold_or_copy(self, run: Run, first: int, stop: int, sources: Blocks) -> None:
        """These nodes, of which the host had some, are held there or copied to it."""
        if run.num_there(HOST, first, stop) == stop - first:
            self._hold(self._index.blocks_of(HOST, [(run, first, stop)])[::-1])
            return
        # Room for one may be made by forgetting another one of them, so one by one.
        for at in range(stop - 1, first - 1, -1):
            block = run.block(HOST, at)
            if block >= 0:
                self._hold(np.array([block]))
            else:
                self._copy_out([(run, at, at + 1)], sources[stop - 1 - at : stop - at])

    def _hold(self, blocks: Blocks) -> None:
        self._host.hold(blocks)
        self._busy.append(blocks)

    def hold_sources(self, spans: list[Span]) -> Blocks:
        """The host blocks of these nodes in order, int64 [n], which have one holder more until the moves are taken: copies read them."""
        blocks = self._index.blocks_of(HOST, spans)
        self._hold(blocks[::-1])
        return blocks

    def keep_until_taken(self, blocks: Blocks) -> None:
        """These host blocks, in order, stay held until the moves are taken: copies read them."""
        self._busy.append(blocks[::-1])

    def load(self, sources: Blocks, blocks: Blocks) -> None:
        """Host blocks that are held are copied to device blocks, both int64 [n]."""
        self._in.append((sources, blocks))
        self.loaded_blocks += len(blocks)

    def held(self) -> Blocks:
        """Host blocks that copies which were not taken yet hold, one entry a reference, int64 [n]; for the checker."""
        return np.concatenate([np.empty(0, np.int64), *self._busy])

    def take_moves(self) -> Moves:
        """All copies that were planned since the last call; they run together, and before anything that is planned later."""
        if not self._busy:
            return NO_MOVES
        out = self._out
        moves = Moves(NO_PAIRS if not out else out[0] if len(out) == 1 else np.concatenate(out), _pairs(self._in))
        busy, self._busy, self._out, self._in = self._busy, [], [], []
        for blocks in busy:
            self._host.release(blocks)
        return moves

    def _copy_out(self, spans: list[Span], sources: Blocks) -> None:
        """Nodes that the host has not go there from these device blocks, as far as there is room."""
        room = min(len(sources), self._host.num_available)
        if not room:
            return
        if room < len(sources):
            spans, sources = last_of(spans, room), sources[:room]
        blocks = self._index.draw_for(HOST, spans, room)
        self._out.append(_pairs([(sources, blocks)]))
        self._busy.append(blocks)
        self.offloaded_blocks += room

    def _forget_loads(self, blocks: Blocks) -> None:
        """What was to be copied into these blocks need not be: they are given to another row before it ran."""
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
