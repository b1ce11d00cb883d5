"""Content that leaves the device goes to the host, and comes back on a hit.

    evicted node ── not on the host yet ──> device → host        hit on it ── worth it ──> host → device

Copies are planned here and taken with `take_moves`, all that were planned since the last time at once. Host blocks that they read or
write are held until then, so that no block is written twice, or read and written, by copies that run together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .free_list import Blocks, Stretch
from .host_residence import HostResidence
from .moves import NO_MOVES, NO_PAIRS, Moves, Pairs
from .pool import Pool
from .runs import Run, Segment

# A part of what goes to the host together may be all that is evicted there at a time: it is cut off a list no longer than this.
_STRETCHES = 64
# What the places of nodes look like that have no host block: comparing bytes costs a fifth of a numpy reduction.
_PATTERN = 1024
_NOWHERE = np.full(_PATTERN, -1, np.int64).tobytes()


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
        # Closed while copies of an earlier batch are, or might have to be, still to run: theirs come first.
        self.is_open = True
        self.offloaded_blocks = self.loaded_blocks = 0
        self._out: list[Pairs] = []
        self._in: list[tuple[Blocks, Blocks]] = []
        # Host blocks in the order in which they are released, and the nodes in them where they were whole stretches of runs.
        self._busy: list[tuple[Blocks, list[Stretch] | None]] = []

    def leave(self, leaving: list[Stretch], sources: Blocks) -> None:
        """Nodes of closed runs are about to leave these device blocks, stretch by stretch and the last node of each first: those that
        the host has not yet are copied there, as far as it has blocks for them, and the others count as used just now."""
        if self._in:
            self._forget_loads(sources)
        if not self.is_open:
            return
        new: list[Stretch] = []
        start = stop = 0
        for run, first, last in leaving:
            if run.num_host and run.host is not None and _is_any_there(run.host[first:last]):
                # What goes before it may take host blocks of its nodes.
                self._copy_out(new, sources[start:stop])
                start, stop = stop, stop + last - first
                self._leave_again(run, first, last, sources[start:stop])
                new, start = [], stop
            else:
                new.append((run, first, last))
                stop += last - first
                if len(new) == _STRETCHES:
                    self._copy_out(new, sources[start:stop])
                    new, start = [], stop
        self._copy_out(new, sources[start:stop])

    def _leave_again(self, run: Run, first: int, stop: int, sources: Blocks) -> None:
        """`leave` of nodes of which the host had some."""
        there = np.empty(0, np.int64) if run.host is None else run.host[first:stop][::-1].copy()
        if len(there) and there.min() >= 0:
            self._host.hold(there)
            self._busy.append((there, [(run, first, stop)]))
            return
        # Room for one may be made by forgetting another one of them, so one by one.
        for at in range(stop - 1, first - 1, -1):
            block = run.host_block(at)
            if block >= 0:
                held = np.array([block])
                self._host.hold(held)
                self._busy.append((held, [(run, at, at + 1)]))
            else:
                self._copy_out([(run, at, at + 1)], sources[stop - 1 - at : stop - at])

    def hold_sources(self, segments: list[Segment]) -> Blocks:
        """The host blocks of these nodes in order, int64 [n], which have one holder more until the moves are taken: copies read them."""
        parts = [run.host[offset : offset + count] for run, offset, count in segments if run.host is not None]
        blocks = np.concatenate(parts)
        self._host.hold(blocks)
        self.keep_until_taken(blocks)
        return blocks

    def keep_until_taken(self, blocks: Blocks) -> None:
        """These host blocks, in order, stay held until the moves are taken: copies read them."""
        self._busy.append((blocks[::-1], None))

    def load(self, sources: Blocks, blocks: Blocks) -> None:
        """Host blocks that are held are copied to device blocks, both int64 [n]."""
        # Copied for the reason why `_copy_out` makes pairs at once.
        self._in.append((sources, blocks.copy()))
        self.loaded_blocks += len(blocks)

    def held(self) -> Blocks:
        """Host blocks that copies which were not taken yet hold, one entry a reference, int64 [n]; for the checker."""
        return np.concatenate([np.empty(0, np.int64), *(blocks for blocks, _ in self._busy)])

    def take_moves(self) -> Moves:
        """All copies that were planned since the last call; they run together, and before anything that is planned later."""
        if not self._busy:
            return NO_MOVES
        out = self._out
        moves = Moves(NO_PAIRS if not out else out[0] if len(out) == 1 else np.concatenate(out), _pairs(self._in))
        busy, self._busy, self._out, self._in = self._busy, [], [], []
        for blocks, stretches in busy:
            if stretches is None:
                self._host.release(blocks)
            else:
                self._host.release_nodes(blocks, stretches)
        return moves

    def _copy_out(self, stretches: list[Stretch], sources: Blocks) -> None:
        """Nodes that the host has not go there from these device blocks, as far as there is room."""
        room = min(len(sources), self._host.num_available)
        if not room:
            return
        if room < len(sources):
            stretches, sources = _first_of(stretches, room), sources[:room]
        blocks = self._residence.draw_for(stretches, room)
        # As they are now: what is evicted may come in the run's own array, which changes when the run comes back.
        self._out.append(_pairs([(sources, blocks)]))
        self._busy.append((blocks, stretches))
        self.offloaded_blocks += room

    def _forget_loads(self, blocks: Blocks) -> None:
        """What was to be copied into these blocks need not be: they are given to another row before it ran."""
        kept = []
        for sources, targets in self._in:
            stays = ~np.isin(targets, blocks)
            self.loaded_blocks -= len(targets) - int(np.count_nonzero(stays))
            kept.append((sources[stays], targets[stays]))
        self._in = kept


def _is_any_there(places: Blocks) -> bool:
    if len(places) > _PATTERN:
        return bool((places >= 0).any())
    looks = places.tobytes()
    return looks != _NOWHERE[: len(looks)]


def _first_of(stretches: list[Stretch], room: int) -> list[Stretch]:
    """So many nodes of these, those that leave first: of each stretch the last ones."""
    found: list[Stretch] = []
    for run, first, stop in stretches:
        if room > 0:
            found.append((run, max(first, stop - room), stop))
        room -= stop - first
    return found


def _pairs(parts: list[tuple[Blocks, Blocks]]) -> Pairs:
    if not parts:
        return NO_PAIRS
    count = sum(len(sources) for sources, _ in parts)
    pairs, stop = np.empty((count, 2), np.int32), 0
    for sources, targets in parts:
        start, stop = stop, stop + len(sources)
        pairs[start:stop, 0], pairs[start:stop, 1] = sources, targets
    return pairs
