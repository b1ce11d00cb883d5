"""The content tree: its edges are runs, consecutive full blocks that one sequence computed.

A *node* is content: a full block's tokens after its parent's. Nodes of a run are (run, offset 0, 1, ...); a run hangs
off node (parent, at), or off the root of a namespace. A row that is still computing may own one *open* run: its content
is the row's tokens and table, its length is read off the row, so decoding publishes blocks at no cost.

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
# Consecutive nodes of a run: the first, and the one after the last.
Span = tuple["Run", int, int]

# A node without a block, as bytes of int64: searching bytes costs a fifth of a numpy reduction. No block id ends in
# such a byte: ids are little-endian and less than 2**31.
_BYTE = b"\xff"
_HOLE = _BYTE * 8


class Run:
    """One edge of the content tree.

    id          counts up, never reused: a stale key never matches
    key         the bytes under which the first node is found
    parent, at  the node before the first one; (None, -1) below a root
    row         the row that extends it (open); -1 once closed, when `length` and `tokens` are set
    born        the step in which it began
    length      nodes
    tokens      the nodes' token ids, int32 as bytes
    blocks      by place: int64 [n], each node's block up to the last one there, -1 for a node not there; None: none is.
                An open run has its row's on the device. Arrays are replaced, never changed: the free list may have them
    retained    number of a retention → (its last node on this run, its level); None: there is none
    pending     of a closed run with unconfirmed nodes: (batch, first node that it computes), rising
    children    offset → number of runs that hang off that node
    digests     chained SHA-256 of the first nodes, as far as computed
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
        return min(self.length, self.pending[0][1]) if self.pending else self.length

    def end_in(self, place: int) -> int:
        blocks = self.blocks[place]
        return 0 if blocks is None else len(blocks)

    @property
    def end(self) -> int:
        """Nodes up to the last one that resides anywhere or has a child."""
        end = max(self.children) + 1 if self.children else 0
        for blocks in self.blocks:
            if blocks is not None and len(blocks) > end:
                end = len(blocks)
        return end

    def num_there(self, place: int, first: int, stop: int) -> int:
        """Nodes from `first` on, before `stop`, that reside in a place without a gap."""
        blocks = self.blocks[place]
        if blocks is None:
            return 0
        hole = blocks.tobytes().find(_HOLE, 8 * first)
        return max(0, min(stop, len(blocks) if hole < 0 else hole // 8) - first)

    def is_any_there(self, place: int, first: int, stop: int) -> bool:
        blocks = self.blocks[place]
        return blocks is not None and bool(blocks[first:stop].tobytes().strip(_BYTE))

    def block(self, place: int, at: int) -> int:
        """The block of node `at` in a place, -1 where it has none; of an open run, not on the device."""
        blocks = self.blocks[place]
        return -1 if blocks is None or at >= len(blocks) else blocks.item(at)

    def put(self, place: int, first: int, blocks: Blocks) -> None:
        """Let nodes from `first` on reside in these blocks of a place, which are copied."""
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
        """End the residence of these nodes in a place."""
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
        """Close the run with these nodes, on the device."""
        self.row = -1
        self.length = len(blocks)
        self.tokens = tokens
        self.blocks[DEVICE] = blocks

    def shorten(self, length: int, num_bytes: int) -> None:
        """Keep a closed run's first `length` nodes; the rest is nowhere. Cut tokens to `num_bytes` if that is under
        half."""
        self.length = length
        if self.digests is not None:
            del self.digests[length:]
        if 2 * num_bytes < len(self.tokens):
            self.tokens = self.tokens[:num_bytes]
            self.blocks = [None if blocks is None else blocks[:length].copy() for blocks in self.blocks]

    def first_of(self, batch: int) -> int:
        """The first node that this batch computes; `length` if there is none."""
        return min([first for number, first in self.pending if number == batch], default=self.length)

    def forget_batch(self, batch: int) -> None:
        self.pending = [entry for entry in self.pending if entry[0] != batch]

    def retain(self, number: int, last: int, level: int) -> None:
        if self.retained is None:
            self.retained = {}
        self.retained[number] = last, level

    def levels_of(self, offsets: Blocks) -> NDArray[np.int8]:
        """int8 [n]: each node's level, the highest of the retentions that reach it, else 0."""
        levels = np.zeros(len(offsets), np.int8)
        for last, level in (self.retained or {}).values():
            np.maximum(levels, level, out=levels, where=offsets <= last)
        return levels


class Path:
    """Where a row stands in the tree: its first `published` blocks are nodes, the last of them (`run`, `at`). With an
    `open` run, which begins at block `published`, every full block after that is a node, too. `guard` is the open run's
    length at which another run hangs off its end (-1: none): the next block is looked up before it counts as a node. A
    path without `reads` takes no hits; one without `writes` ends where its hits end."""

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
        """Keep the first `keep` blocks; the path has no open run."""
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
    """Each run from a node up to the root, with the last of its nodes on this way."""
    while run is not None:
        yield run, at
        at, run = run.at, run.parent


def first_of(spans: list[Span], num_nodes: int) -> list[Span]:
    """The first `num_nodes` nodes of spans, or all if there are fewer."""
    found: list[Span] = []
    for run, first, stop in spans:
        if num_nodes > 0:
            found.append((run, first, min(stop, first + num_nodes)))
        num_nodes -= stop - first
    return found


def last_of(spans: list[Span], num_nodes: int) -> list[Span]:
    """`first_of` for spans whose last node comes first."""
    found: list[Span] = []
    for run, first, stop in spans:
        if num_nodes > 0:
            found.append((run, max(first, stop - num_nodes), stop))
        num_nodes -= stop - first
    return found


def num_nodes(spans: list[Span]) -> int:
    return sum(stop - first for _, first, stop in spans)
