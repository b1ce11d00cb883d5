"""Layers of several kinds: what each group of layers keeps of a sequence, counted in pages of one size.

    tokens      0        16       32       48       64
    full        | p3 p9  | p1 p7  | p4 p5  | p0 p2  |         2 pages a block
    window 32   |   -    |   -    | p6     | p12    |         1 page a block; what lies before the window went back
    state       | p8 p10 p11                                  3 pages in all, written in place

A block is named by the first of its pages. A state stands in column 0 of its table: a row draws it with its first block
and releases it with that.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paged.base.arguments import checked_integer
from paged.errors import InvalidConfig, UnsupportedByLayers

Counts = NDArray[np.int64]

# Restart points at even distances take at most this part of the full blocks between them, and a prompt has so many.
_PART, MOST_EVEN = 1 / 16, 6
# In tokens: each ends a chunk, and costs a short prompt a step.
LEAST_DISTANCE = 4096
# Without full attention block ids cost no page. A sequence may have so many: for each page of the pool, and at most.
_FREE_OF_COST_A_PAGE, _MOST_FREE_OF_COST = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same tokens of a sequence for the same time.

    kind    "full": all tokens; "window": the last `reach` tokens, with the newest; "chunk": those since the last
            multiple of `reach`; "state": one value of a fixed size, which each step overwrites
    reach   tokens of a window or chunk; 0 for other kinds
    pages   pages of one block; of a state, in all

    Raises InvalidConfig for another kind, for pages below 1, and for a reach that is below 1 or that the kind has not.
    """

    kind: Literal["full", "window", "chunk", "state"]
    reach: int = 0
    pages: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("full", "window", "chunk", "state"):
            raise InvalidConfig(f"a layer group is full, window, chunk or state; got kind {self.kind!r}.")
        is_bounded = self.kind in ("window", "chunk")
        checked_integer(f"reach of {self.kind} layers", self.reach, *((1, 2**31) if is_bounded else (0, 1)))
        checked_integer(f"pages of {self.kind} layers", self.pages, 1, 2**15)

    @property
    def name(self) -> str:
        """The group in words, such as "window layers of 1,024" or "state layers"."""
        return f"{self.kind} layers" + (f" of {self.reach:,}" if self.reach else "")

    def front(self, computed: Any) -> Any:
        """The first of so many computed tokens that the group has to keep, int or int64 [n]. A state keeps none."""
        if self.kind == "window":
            return np.maximum(computed - self.reach + 1, 0)
        return computed // self.reach * self.reach if self.reach else computed * (self.kind == "state")


class Side:
    """A group beside the full one. `table`: the index of its table. `place`: where its content is on the device; the
    place after it is on the host. `most`: the most blocks that a row holds, one of them still in flight."""

    def __init__(self, group: LayerGroup, table: int, block_size: int, *, keeps: bool) -> None:
        self.group, self.name, self.table = group, group.name, table
        self.kind, self.reach, self.pages = group.kind, group.reach, group.pages
        # Each group has two places.
        self.place = 2 * table
        self.is_state = group.kind == "state"
        self._size, self._keeps = block_size, keeps
        span = group.reach - 1 if group.kind == "window" else group.reach
        # Whole blocks that a window reaches back over from the end of a block.
        self._behind = -(-span // block_size)
        self.most = 1 if self.is_state else self._behind + 2

    def first_column(self, computed: Any) -> Any:
        """The first column that a row with so many computed tokens still reads, int or int64 [n]. Where content is
        kept, the row also reads from the end of its last full block: it can begin again there."""
        if self._keeps and self.kind == "window":
            return np.maximum(computed // self._size - self._behind, 0)
        if self._keeps:
            computed = computed // self._size * self._size
        return self.group.front(computed) // self._size

    def reads_from(self, num_blocks: int) -> int:
        """Return the first column that a row reads which begins after so many blocks; a state stands with the last one."""
        return num_blocks - 1 if self.is_state else int(self.first_column(num_blocks * self._size))


class Layout:
    """The groups of a model, and counts of pages. `sides`: all groups but the full one. `keeps`: their content is kept.

    block_pages   pages that a row draws with one more block, in all groups that have blocks
    full_pages    the full group's part of these; 0 without a full group
    pages_of_place  by place on the device (`PrefixIndex.pools`): pages of a block
    state_pages   pages that a row draws with its first block, besides
    spare_pages   pages that a row may need for a moment beyond what it holds: for other states, where content is kept
    """

    def __init__(self, groups: Sequence[LayerGroup], block_size: int, *, keeps: bool = False) -> None:
        full = [group for group in groups if group.kind == "full"]
        kinds = [(group.kind, group.reach) for group in groups if group.kind != "state"]
        if not groups or len(set(kinds)) < len(kinds):
            raise InvalidConfig(f"groups have to be one or more, each kind and reach once; got {list(groups)}.")
        self.groups = tuple(groups)
        self.block_size, self.keeps = block_size, keeps
        self.full_pages = full[0].pages if full else 0
        others = [group for group in groups if group.kind != "full"]
        self.sides = tuple(Side(group, table, block_size, keeps=keeps) for table, group in enumerate(others, 1))
        # By group: the index of its table.
        numbers = count(1)
        self.table_of = tuple(0 if group.kind == "full" else next(numbers) for group in groups)
        self.bounded = tuple(side for side in self.sides if not side.is_state)
        self.states = tuple(side for side in self.sides if side.is_state)
        # (table, place, pages of a block) of each group that has blocks.
        self.of_blocks = ((0, 0, self.full_pages), *((side.table, side.place, side.pages) for side in self.bounded))
        self.pages_of_place = {0: self.full_pages} | {side.place: side.pages for side in self.sides}
        self.block_pages = self.full_pages + sum(side.pages for side in self.bounded)
        self.state_pages = sum(side.pages for side in self.states)
        self.spare_pages = self.state_pages if keeps else 0
        self.most_pages = max(group.pages for group in groups)
        self.is_plain = not self.sides and self.full_pages == 1
        restart_pages = self.state_pages + sum((side.most - 2) * side.pages for side in self.bounded)
        # In blocks; 0: there are none. Windows alone gain little by them, and lose what they take.
        distance = math.ceil(restart_pages / max(self.full_pages, 1) / _PART)
        self._distance = max(distance, -(-LEAST_DISTANCE // block_size)) if full and self.states else 0

    def refuse(self, what: str) -> None:
        """Raise UnsupportedByLayers, which names `what`, unless all layers are full and a block takes one page."""
        if not self.is_plain:
            kinds = " and ".join(sorted({side.kind for side in self.sides}))
            alone = f"full layers of {self.full_pages} pages a block"
            raise UnsupportedByLayers(what, f"{kinds} layers" if kinds else alone)

    def even_restarts(self, num_blocks: int) -> list[int]:
        """Return after which of so many blocks sides are kept though no prompt is known to begin there: when the tail of a
        prompt is evicted, the rest is found up to the last of them. Long prompts have every second, fourth, ... one."""
        if not 0 < self._distance <= num_blocks:
            return []
        distance = self._distance << (num_blocks // self._distance // (MOST_EVEN + 1)).bit_length()
        return list(range(distance, num_blocks + 1, distance))

    def num_main_blocks(self, num_pages: int) -> int:
        """Number of block ids of the full group."""
        return num_pages if self.full_pages else min(num_pages * _FREE_OF_COST_A_PAGE, _MOST_FREE_OF_COST)

    def pages_for(self, num_tokens: int) -> int:
        """Pages of a sequence of so many tokens while its next block is in flight."""
        blocks = -(-num_tokens // self.block_size)
        if self.is_plain:
            return blocks
        return blocks * self.full_pages + sum([min(blocks, side.most) * side.pages for side in self.sides])

    def tokens_in(self, num_pages: int) -> int:
        """Tokens of the longest sequence that fits into so many pages."""
        if self.is_plain:
            return num_pages * self.block_size
        # Pages rise with the number of blocks.
        numbers = range(1, self.num_main_blocks(num_pages) + 1)
        room = num_pages - self.spare_pages
        return bisect_right(numbers, room, key=lambda n: self.pages_for(n * self.block_size)) * self.block_size

    def side_slots(self, num_tokens: Counts) -> Counts:
        """What the sides of sequences of so many tokens hold, in slots of the full group, int64 [n]."""
        blocks = -(-num_tokens // self.block_size)
        pages = sum([np.minimum(blocks, side.most) * side.pages for side in self.sides], np.zeros_like(num_tokens))
        return pages * self.block_size // max(self.full_pages, 1)


PLAIN = (LayerGroup("full"),)
"""One group of layers that keep all tokens; a block takes one page."""
