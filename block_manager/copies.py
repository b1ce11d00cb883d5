"""Copies that run before the next batch: what is planned, and what is held until they are taken."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .moves import NO_MOVES, NO_PAIRS, Moves, Pairs, pairs_of
from .pool import Pool
from .runs import DEVICE, HOST, NUM_PLACES, Blocks


class Copies:
    """Copies that the composed batch makes before its forward pass, between the tiers and within the device. Those that
    are planned between two `take` run together. Until then blocks that they read or write, and that no row holds, are
    held: no page is written twice, or both read and written.

    held              (place, blocks) of each reference; on the host last nodes first
    may_copy_content  whether this batch may copy content. It may not if copies of an earlier batch come first
    """

    def __init__(self, pools: Sequence[Pool]) -> None:
        """`pools`: by place."""
        self._pools = pools
        self.held: list[tuple[int, Blocks]] = []
        self.may_copy_content = True
        self._out: list[Pairs] = []
        self._in: list[Pairs] = []
        # Within the device: (row, source page, target page). A row gets a copy of a block that it must not write.
        self._within: list[tuple[int, int, int]] = []

    def allow_content(self, may_copy: bool) -> None:
        self.may_copy_content = may_copy

    def hold(self, place: int, blocks: Blocks) -> None:
        self._pools[place].hold(blocks)
        self.held.append((place, blocks))

    def hold_source(self, place: int, block: int) -> None:
        """Hold a device block, once."""
        if not any(at == place and block in blocks for at, blocks in self.held):
            self.hold(place, np.array([block]))

    def take_over(self, place: int, blocks: Blocks) -> None:
        """Take over a row's references to these blocks."""
        self.held.append((place, blocks))

    def plan_out(self, place: int, sources: Blocks, targets: Blocks, pages: int) -> None:
        """Plan copies of blocks of so many pages from a place on the device to the host."""
        self._out.append(self.pairs((place, sources), (place + HOST, targets), pages))

    def plan_in(self, place: int, sources: Blocks, targets: Blocks, pages: int) -> None:
        """Plan copies from the host to a place on the device."""
        self._in.append(self.pairs((place + HOST, sources), (place, targets), pages))

    def plan_within(self, row: int, place: int, block: int, copy: int, pages: int) -> None:
        """Plan the copy of a device block into another one, which the row has now."""
        pairs = self.pairs((place, np.array([block])), (place, np.array([copy])), pages)
        self._within += [(row, source, target) for source, target in pairs.tolist()]

    def pairs(self, source: tuple[int, Blocks], target: tuple[int, Blocks], pages: int) -> Pairs:
        """The pages of the blocks of two places, one block after the other: (source, target) of each."""
        return np.stack([self._pools[at].pages_of(blocks, pages).ravel() for at, blocks in (source, target)], axis=1)

    def forget_loads(self, blocks: Blocks) -> int:
        """Drop planned loads into these blocks: another row gets them before the copies run. Return how many pages."""
        if not self._in:
            return 0
        pages = self._pools[DEVICE - NUM_PLACES].all_pages_of(blocks)
        before, self._in = self._in, [pairs[~np.isin(pairs[:, 1], pages)] for pairs in self._in]
        return sum(map(len, before)) - sum(map(len, self._in))

    def drop(self, row: int) -> None:
        """Drop the copies for a row that gives its blocks back."""
        self._within = [planned for planned in self._within if planned[0] != row]

    def read_at_sources(self, row: int, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """`pairs`, where a source that waits for a copy for the row is replaced by the page which that copy reads."""
        sources = {target: source for copying, source, target in self._within if copying == row}
        return [(sources.get(source, source), target) for source, target in pairs]

    def take_within(self) -> Pairs:
        """Return the copies within the device. What they read stays held."""
        planned, self._within = self._within, []
        return pairs_of([(source, target) for _, source, target in planned])

    def take(self) -> Moves:
        """Return all copies, and release what is held for them: they run before any that is planned later."""
        if not self.held and not self._within:
            # Without copies make no array: `swap_in` has changed the tables, and must not run out of memory here.
            return NO_MOVES
        planned = self._out, self._in, [self.take_within()]
        moves = Moves(*(np.concatenate(pairs) if pairs else NO_PAIRS for pairs in planned))
        held, self.held, self._out, self._in = self.held, [], [], []
        for place, blocks in sorted(held, key=lambda item: item[0] * (item[0] % NUM_PLACES == DEVICE)):
            self._pools[place].release(blocks)
        return moves
