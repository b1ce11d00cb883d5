"""Content as a tree of runs: consecutive full blocks that one sequence computed are one edge of it.

A *node* is content: a full block's tokens after its parent's. Nodes of a run are (run, offset 0, 1, ...); a run hangs off the
node (parent, at), or off the root of a namespace. A row that is still computing may own one *open* run, whose content is the
row's own tokens and table and whose length is read off the row, so that decoding publishes blocks at no cost.

    root ── run 0: | n0 | n1 | n2 | n3 |
                          └── run 3: | n0 | n1 | ...      (parent run 0, at 1)

A *place* is where a node may reside: the index of a pool in `PrefixIndex.pools`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.int64]

DEVICE, HOST = 0, 1
NUM_PLACES = 2

# A run, and an offset in it.
Node = tuple["Run", int]
# Consecutive nodes of a run: the first one, and the one after the last.
Span = tuple["Run", int, int]

# A node without a block, as bytes of int64. Searching bytes costs a fifth of a numpy reduction. No block id ends in such a byte: the
# bytes of an id are little-endian, and ids are less than 2**31.
_BYTE = b"\xff"
_HOLE = _BYTE * 8


class Run:
    """One edge of the content tree.

    id          counts up, never reused: a stale key can never match
    key         the bytes under which the first node is found
    parent, at  the node before the first one: (None, -1) below a namespace's root
    row         the row that still extends it (open), -1 once closed; `length` and `tokens` are set when it closes
    born        the step in which it began
    length      nodes
    tokens      the nodes' token ids, int32 as bytes
    blocks      by place: int64 [n], the block of each node up to the last one that resides there, -1 for one that does not; None:
                none does. The device blocks of an open run are its row's. An array is replaced and never changed: the free list
                may have it
    retained    number of a retention → (its last node on this run, its level); None: there is none
    pending     of a closed run whose last nodes are not confirmed: (batch, first node that this batch computes), rising
    children    offset → number of runs that hang off that node
    digests     chained SHA-256 of the first nodes, as far as it was asked for
    """

    __slots__ = (
        "at",
        "blocks",
        "born",
        "children",
        "digests",
        "id",
        "key",
        "length",
        "parent",
        "pending",
        "retained",
        "row",
        "tokens",
    )

    def __init__(self, run_id: int, key: bytes, parent: Run | None, at: int, row: int, born: int) -> None:
        self.id = run_id
        self.key = key
        self.parent = parent
        self.at = at
        self.row = row
        self.born = born
        self.length = 0
        self.tokens = b""
        self.blocks: list[Blocks | None] = [None] * NUM_PLACES
        self.retained: dict[int, tuple[int, int]] | None = None
        self.pending: list[tuple[int, int]] = []
        self.children: dict[int, int] | None = None
        self.digests: list[bytes] | None = None

    @property
    def confirmed_length(self) -> int:
        """Nodes of a closed run that are computed and confirmed."""
        return min(self.length, self.pending[0][1]) if self.pending else self.length

    def end_in(self, place: int) -> int:
        """Nodes up to the last one that resides in a place."""
        blocks = self.blocks[place]
        return 0 if blocks is None else len(blocks)

    @property
    def end(self) -> int:
        """Nodes up to the last one that resides anywhere, or has a child."""
        end = max(self.children) + 1 if self.children else 0
        for blocks in self.blocks:
            if blocks is not None and len(blocks) > end:
                end = len(blocks)
        return end

    def num_there(self, place: int, first: int, stop: int) -> int:
        """Nodes from `first` on, and before `stop`, that reside in a place without a gap."""
        blocks = self.blocks[place]
        if blocks is None:
            return 0
        hole = blocks.tobytes().find(_HOLE, 8 * first)
        return max(0, min(stop, len(blocks) if hole < 0 else hole // 8) - first)

    def is_any_there(self, place: int, first: int, stop: int) -> bool:
        """Whether any of these nodes resides in a place."""
        blocks = self.blocks[place]
        return blocks is not None and bool(blocks[first:stop].tobytes().strip(_BYTE))

    def block(self, place: int, at: int) -> int:
        """The block of node `at` in a place, -1 where it has none; of an open run, not on the device."""
        blocks = self.blocks[place]
        return -1 if blocks is None or at >= len(blocks) else blocks.item(at)

    def put(self, place: int, first: int, blocks: Blocks) -> None:
        """Nodes from `first` on reside in these blocks of a place, which are copied."""
        have, stop = self.blocks[place], first + len(blocks)
        length = 0 if have is None else len(have)
        if not first and stop >= length:
            self.blocks[place] = blocks.copy()
            return
        there = np.empty(max(length, stop), np.int64)
        there.fill(-1)
        if have is not None:
            there[:length] = have
        there[first:stop] = blocks
        self.blocks[place] = there

    def drop(self, place: int, first: int, stop: int) -> None:
        """These nodes do not reside in a place any more."""
        have = self.blocks[place]
        if have is None or (not first and stop >= len(have)):
            self.blocks[place] = None
            return
        if stop < len(have):
            have = have.copy()
            have[first:stop] = -1
        else:
            have = have[:first]
            if have.item(-1) < 0:
                have = have[: len(have.tobytes().rstrip(_BYTE)) // 8]
        self.blocks[place] = have if len(have) else None

    def close(self, tokens: bytes, blocks: Blocks) -> None:
        """The run has these nodes, on the device, and its row does not extend it any more."""
        self.row = -1
        self.length = len(blocks)
        self.tokens = tokens
        self.blocks[DEVICE] = blocks

    def shorten(self, length: int, num_bytes: int) -> None:
        """The closed run has only its first `length` nodes; the others reside nowhere. Of its tokens the first `num_bytes` are kept, if
        these are less than half."""
        self.length = length
        if self.digests is not None:
            del self.digests[length:]
        if 2 * num_bytes < len(self.tokens):
            self.tokens = self.tokens[:num_bytes]
            self.blocks = [None if blocks is None else blocks[:length].copy() for blocks in self.blocks]

    def first_of(self, batch: int) -> int:
        """The first node that this batch computes; `length` if it computes none."""
        return min([first for number, first in self.pending if number == batch], default=self.length)

    def forget_batch(self, batch: int) -> None:
        """None of its nodes waits for this batch any more."""
        self.pending = [entry for entry in self.pending if entry[0] != batch]

    def retain(self, number: int, last: int, level: int) -> None:
        """A retention of this number keeps its nodes up to `last`."""
        if self.retained is None:
            self.retained = {}
        self.retained[number] = last, level

    def levels_of(self, offsets: Blocks) -> NDArray[np.int8]:
        """int8 [n], how long each of these nodes is to be kept: the highest level of the retentions that reach it, else 0."""
        levels = np.zeros(len(offsets), np.int8)
        for last, level in (self.retained or {}).values():
            np.maximum(levels, level, out=levels, where=offsets <= last)
        return levels


class Path:
    """Where a row stands in the tree: its first `published` blocks are nodes, the last of them (`run`, `at`).

    With an `open` run, which begins at block `published`, every full block after that is a node, too.
    `guard` is the open run's length at which another run hangs off its end (-1: none does): the block after it has to be
    looked up before it may count as a node. A path that does not read takes nothing that others have, and one that does not write
    ends where what it took ends: what its row computes becomes no node.
    """

    __slots__ = ("at", "guard", "open", "published", "reads", "root", "run", "writes")

    def __init__(self, root: bytes, *, reads: bool = True, writes: bool = True) -> None:
        self.root = root
        self.reads = reads
        self.writes = writes
        self.run: Run | None = None
        self.at = -1
        self.published = 0
        self.open: Run | None = None
        self.guard = -1

    def truncate(self, keep: int) -> None:
        """Only the first `keep` blocks stay; the path has no open run."""
        drop = self.published - keep
        if drop <= 0:
            return
        run: Run | None = self.run
        at = self.at
        while run is not None and drop > at:
            drop -= at + 1
            at, run = run.at, run.parent
        self.run, self.at, self.published = run, at - drop, keep

    def spans(self, first: int) -> list[Span]:
        """The nodes of blocks `first` to `published`, in order; the path has no open run."""
        found: list[Span] = []
        stop = self.published
        for run, at in upwards(self.run, self.at):
            if stop <= first:
                break
            found.append((run, max(0, at + 1 - stop + first), at + 1))
            stop -= at + 1
        found.reverse()
        return found


def upwards(run: Run | None, at: int) -> Iterator[tuple[Run, int]]:
    """Each run on the way from a node to the root, with the last of its nodes on it."""
    while run is not None:
        yield run, at
        at, run = run.at, run.parent


def first_of(spans: list[Span], num_nodes: int) -> list[Span]:
    """The first so many nodes of spans, all of them if there are fewer."""
    found: list[Span] = []
    for run, first, stop in spans:
        if num_nodes > 0:
            found.append((run, first, min(stop, first + num_nodes)))
        num_nodes -= stop - first
    return found


def last_of(spans: list[Span], num_nodes: int) -> list[Span]:
    """As `first_of`, of spans of which the last node comes first."""
    found: list[Span] = []
    for run, first, stop in spans:
        if num_nodes > 0:
            found.append((run, max(first, stop - num_nodes), stop))
        num_nodes -= stop - first
    return found


def num_nodes(spans: list[Span]) -> int:
    """How many nodes there are in spans."""
    return sum(stop - first for _, first, stop in spans)
