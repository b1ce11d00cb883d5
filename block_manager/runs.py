"""Content as a tree of runs: consecutive full blocks that one sequence computed are one edge of it.

A *node* is content: a full block's tokens after its parent's. Nodes of a run are (run, offset 0, 1, ...); a run hangs off the
node (parent, at), or off the root of a namespace. A row that is still computing may own one *open* run, whose content is the
row's own tokens and table and whose length is read off the row, so that decoding publishes blocks at no cost.

    root ── run 0: | n0 | n1 | n2 | n3 |
                          └── run 3: | n0 | n1 | ...      (parent run 0, at 1)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Consecutive nodes of a run: the first one, and how many.
Segment = tuple["Run", int, int]


class Run:
    """One edge of the content tree.

    id          counts up, never reused: a stale key can never match
    key         the bytes under which the first node is found
    parent, at  the node before the first one: (None, -1) below a namespace's root
    row         the row that still extends it (open), -1 once closed; what follows is set when it closes
    born        the step in which it began
    length      nodes
    num_device  nodes that reside on the device: always the first ones, because who uses a child uses its parent
    tokens      the nodes' token ids, int32 as bytes
    blocks      int64 [groups, length], the device blocks of the first num_device nodes
    host        int64 [n], the host blocks of the first nodes, of all in a closed run, -1 where one has none; None: none has
    num_host    nodes that reside on the host
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
        "host",
        "id",
        "key",
        "length",
        "num_device",
        "num_host",
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
        self.num_device = 0
        self.tokens = b""
        self.blocks: NDArray[np.int64] | None = None
        self.host: NDArray[np.int64] | None = None
        self.num_host = 0
        self.retained: dict[int, tuple[int, int]] | None = None
        self.pending: list[tuple[int, int]] = []
        self.children: dict[int, int] | None = None
        self.digests: list[bytes] | None = None

    @property
    def confirmed_length(self) -> int:
        """Nodes of a closed run that are computed and confirmed."""
        return min(self.length, self.pending[0][1]) if self.pending else self.length

    def first_of(self, batch: int) -> int:
        """The first node that this batch computes; `length` if it computes none."""
        return min([first for number, first in self.pending if number == batch], default=self.length)

    def forget_batch(self, batch: int) -> None:
        """None of its nodes waits for this batch any more."""
        self.pending = [entry for entry in self.pending if entry[0] != batch]

    def host_block(self, at: int) -> int:
        """The host block of node `at`, -1 where it has none."""
        return -1 if self.host is None or at >= len(self.host) else self.host.item(at)

    def levels_of(self, places: NDArray[np.int64]) -> NDArray[np.int8]:
        """int8 [n], how long each of these nodes is to be kept: the highest level of the retentions that reach it, else 0."""
        levels = np.zeros(len(places), np.int8)
        for last, level in (self.retained or {}).values():
            np.maximum(levels, level, out=levels, where=places <= last)
        return levels

    def host_places(self, length: int) -> NDArray[np.int64]:
        """`host` with entries for at least so many nodes: an open run, whose nodes others may swap out, still grows."""
        have = self.host
        if have is None or len(have) < length:
            self.host = np.empty(length, np.int64)
            self.host.fill(-1)
            if have is not None:
                self.host[: len(have)] = have
            return self.host
        return have


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

    def segments(self, first: int) -> list[Segment]:
        """The nodes of blocks `first` to `published` as (run, offset, count), in order; the path has no open run."""
        found: list[Segment] = []
        run: Run | None = self.run
        at, stop = self.at, self.published
        while run is not None and stop > first:
            count = min(at + 1, stop - first)
            found.append((run, at + 1 - count, count))
            stop -= at + 1
            at, run = run.at, run.parent
        found.reverse()
        return found


def first_of(segments: list[Segment], num_nodes: int) -> list[Segment]:
    """The first so many nodes of segments, all of them if there are fewer."""
    found: list[Segment] = []
    for run, offset, count in segments:
        if num_nodes > 0:
            found.append((run, offset, min(count, num_nodes)))
        num_nodes -= count
    return found
