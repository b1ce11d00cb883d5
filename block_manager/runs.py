"""The content tree: its edges are runs, consecutive full blocks that one sequence computed.

A *node* is content: a full block's tokens after its parent's. Nodes of a run are (run, offset 0, 1, ...); a run hangs
off node (parent, at), or off the root of a namespace. A row that is still computing may own one *open* run: its content
is the row's tokens and table, its length is read off the row, so decoding publishes blocks at no cost.

    root ── run 0: | n0 | n1 | n2 | n3 |
                          └── run 3: | n0 | n1 | ...      (parent run 0, at 1)

A *place* is where a node may reside, a tier of a group: the index of a pool in `PrefixIndex.pools`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .content_key import node_prefix

Blocks = NDArray[np.int64]
NO_BLOCKS: Blocks = np.empty(0, np.int64)

DEVICE, HOST = 0, 1
# Of each group: the full one, then the sides.
NUM_PLACES = 2


# A run, and an offset in it.
Node = tuple["Run", int]
# Consecutive nodes of a run: the first, and the one after the last.
Span = tuple["Run", int, int]

# Of a group: the first of consecutive nodes of a run, and the one after the last.
Reach = tuple[int, int, int]

# A node without a block, as bytes of int64: searching bytes costs a fifth of a numpy reduction. No block id ends in
# such a byte: ids are little-endian and less than 2**31.
_BYTE = b"\xff"
_HOLE = _BYTE * 8
_Key = TypeVar("_Key")


class Run:
    """One edge of the content tree.

    id          counts up, never reused: a stale key never matches
    key         the bytes under which the first node is found
    parent, at  the node before the first one; (None, -1) below a root
    row         the row that extends it (open); -1 once closed, when `length` and `tokens` are set
    born        the step in which it began
    length      nodes
    tokens      the nodes' token ids, int32 as bytes
    blocks      by place: int64 [n], each node's block up to the last one there, -1 for a node not there. An open run
                has its row's on the device. Arrays are replaced, never changed: a queue may have them
    retained    number of a retention → (what it is of on this run, its level)
    pending     of a closed run with unconfirmed nodes: batch → the first node that it computes, both rising
    children    offset → number of runs that hang off that node
    digests     chained SHA-256 of the first nodes, as far as computed
    open_level  of what sides have of it while it is open
    is_end      its one node is where a row ended within a block: see `RowEnds`
    evicted     by place of a side, the nodes that it has evicted, a bit each
    """

    # Of the class until a run has its own: one is made for each request.
    length, tokens, is_end, open_level = 0, b"", False, 0
    evicted: Mapping[int, int] = MappingProxyType({})

    def __init__(
        self, id: int, key: bytes, parent: Run | None, at: int, row: int, born: int, num_places: int = NUM_PLACES
    ) -> None:
        self.id, self.key, self.parent, self.at, self.row, self.born = id, key, parent, at, row, born
        self.blocks = [NO_BLOCKS] * num_places
        self.retained: dict[int, tuple[list[Reach], int]] = {}
        # How many retentions are of just these nodes, at this level.
        self._levels: dict[tuple[Reach, int], int] = {}
        self.pending: dict[int, int] = {}
        self.children: dict[int, int] = {}
        self.digests: list[bytes] = []

    @property
    def confirmed_length(self) -> int:
        return min(self.length, *self.pending.values()) if self.pending else self.length

    @property
    def end(self) -> int:
        """Nodes up to the last one that resides anywhere or has a child."""
        end = max(self.children) + 1 if self.children else 0
        return max(end, *map(len, self.blocks))

    def num_there(self, place: int, first: int, stop: int) -> int:
        """Nodes from `first` on, before `stop`, that reside in a place without a gap."""
        blocks = self.blocks[place]
        hole = blocks.tobytes().find(_HOLE, 8 * first)
        return max(0, min(stop, len(blocks) if hole < 0 else hole // 8) - first)

    def is_any_there(self, place: int, first: int, stop: int) -> bool:
        return bool(self.blocks[place][first:stop].tobytes().strip(_BYTE))

    def block(self, place: int, at: int) -> int:
        """The block of node `at` in a place, -1 where it has none; of an open run, not on the device."""
        blocks = self.blocks[place]
        return blocks.item(at) if at < len(blocks) else -1

    def blocks_in(self, place: int, first: int, stop: int) -> Blocks:
        """The block of each of these nodes in a place, int64 [stop - first]; -1 where it has none. A copy."""
        found, there = np.full(stop - first, -1, np.int64), self.blocks[place][first:stop]
        found[: len(there)] = there
        return found

    def put(self, place: int, first: int, blocks: Blocks) -> None:
        """Let nodes from `first` on reside in these blocks of a place, which are copied."""
        stop = first + len(blocks)
        there = self.blocks_in(place, 0, max(stop, len(self.blocks[place])))
        there[first:stop] = blocks
        self.blocks[place] = there

    def drop(self, place: int, first: int, stop: int) -> None:
        """End the residence of these nodes in a place."""
        have = self.blocks[place]
        if stop < len(have):
            have = have.copy()
            have[first:stop] = -1
        else:
            have = have[:first]
            if len(have) and have.item(-1) < 0:
                have = have[: len(have.tobytes().rstrip(_BYTE)) // 8]
        self.blocks[place] = have if len(have) else NO_BLOCKS

    def note_evicted(self, place: int, first: int, stop: int) -> None:
        """Note that a side has evicted these nodes from its place on the device, or the host's after it, for who asks why a hit ended."""
        self.evicted = {**self.evicted, place: self.evicted.get(place, 0) | ((1 << stop - first) - 1) << first}

    def was_evicted(self, place: int, first: int, stop: int) -> bool:
        """Return whether a side has evicted one of these nodes, which it has on neither tier."""
        if place not in self.evicted:
            return False
        is_missing = np.maximum(self.blocks_in(place, first, stop), self.blocks_in(place + HOST, first, stop)) < 0
        missing = np.packbits(is_missing, bitorder="little").tobytes()
        return self.evicted[place] >> first & int.from_bytes(missing, "little") > 0

    def become_end(self, tokens: bytes) -> None:
        """Be where a row ended within a block, after these tokens of it."""
        self.length, self.tokens, self.is_end = 1, tokens, True

    def close(self, tokens: bytes, blocks: Blocks) -> None:
        """Close the run with these nodes, perhaps none, on the device."""
        self.row = -1
        self.length = len(blocks)
        self.tokens = tokens
        self.blocks[DEVICE] = blocks if len(blocks) else NO_BLOCKS

    def shorten(self, length: int, num_bytes: int) -> None:
        """Keep a closed run's first `length` nodes; the rest is nowhere. Cut tokens to `num_bytes` if under half."""
        self.length = length
        del self.digests[length:]
        if 2 * num_bytes < len(self.tokens):
            self.tokens = self.tokens[:num_bytes]
            self.blocks = [blocks[:length].copy() for blocks in self.blocks]

    def unlink(self, *, keep_content: bool) -> None:
        """Note that the run has left the tree. With `keep_content` tokens and parent stay: they can still be read."""
        self.length = 0
        if not keep_content:
            self.tokens = b""
            self.parent = None

    def vanish(self) -> None:
        self.unlink(keep_content=False)
        self.blocks = [NO_BLOCKS] * len(self.blocks)
        self.retained.clear()
        self._levels.clear()
        self.children.clear()

    def add_child(self, at: int) -> None:
        self.children[at] = self.children.get(at, 0) + 1

    def remove_child(self, at: int) -> bool:
        """Return whether it was the last one of node `at`."""
        return _count_down(self.children, at)

    def retain(self, number: int, reaches: list[Reach], level: int) -> None:
        """Note a retention of this number, of these nodes."""
        self.end_retention(number)
        self.retained[number] = reaches, level
        for reach in reaches:
            self._levels[reach, level] = self._levels.get((reach, level), 0) + 1

    def end_retention(self, number: int) -> bool:
        """Forget the retention of this number, if there is one. Return whether levels may have changed."""
        reaches, level = self.retained.pop(number, ([], 0))
        return sum(_count_down(self._levels, (reach, level)) for reach in reaches) > 0

    def levels_of(self, group: int, offsets: Blocks) -> NDArray[np.int8]:
        """int8 [n]: each node's level in a group, the highest of the retentions that reach it, else 0."""
        levels = np.full(len(offsets), self.open_level if group and self.row >= 0 else 0, np.int8)
        # Of many sessions that begin alike, most retain the same of the first run.
        for (its, first, stop), level in self._levels:
            if its == group:
                np.maximum(levels, level, out=levels, where=(offsets >= first) & (offsets < stop))
        return levels


class Path:
    """Where a row stands in the tree: its first `published` blocks are nodes, the last of them (`run`, `at`).

    A path is in one of three states. Block `published + guard` is the next one that is looked up.

              open_run            guard_at(n)
    closed  ────────────>  open  <───────────>  guarded        close(n): back to closed, on node n - 1 of the open run
    guard 0                 -1     guard_at(-1)  n > 0

    closed    after a hit, fork, switch or truncation: the next full block is looked up, then shared or begun as a run
    open      the row extends its own run, `open`, from block `published` on: each full block is a node at no cost
    guarded   open, but another run hangs off node `guard` - 1 of `open`: the block after it is looked up first

    `open_level`: of what windows and states keep of its open run, before the row ends and its retention begins.
    A path without `reads` takes no hits. One without `writes` is closed for good, and looks no block up: guard -1.
    """

    run: Run | None = None
    at = -1
    published = 0
    open: Run | None = None

    def __init__(self, root: bytes, *, reads: bool = True, writes: bool = True, open_level: int = 0) -> None:
        self.root, self.reads, self.writes, self.open_level, self.guard = (
            root,
            reads,
            writes,
            open_level,
            0 if writes else -1,
        )

    @property
    def prefix(self) -> bytes:
        """The start of the key of a run that hangs off the path's end, while it is closed."""
        return self.root if self.run is None else node_prefix(self.run.id, self.at)

    def closed(self, length_of: Callable[[Run], int]) -> Path:
        """A copy that is closed after the first `length_of(run)` nodes of the open run, if there is one."""
        path = Path(self.root, reads=self.reads, writes=self.writes, open_level=self.open_level)
        path.run, path.at, path.published = self.run, self.at, self.published
        if self.open is not None and (length := length_of(self.open)) > 0:
            path.step_on(self.open, length - 1, length)
        return path

    def step_on(self, run: Run, at: int, num_nodes: int = 1) -> None:
        """Extend the closed path by `num_nodes` nodes, the last of them (`run`, `at`)."""
        self.run, self.at = run, at
        self.published += num_nodes

    def open_run(self, run: Run) -> None:
        self.open, self.guard, run.open_level = run, -1, self.open_level

    def guard_at(self, length: int) -> None:
        self.guard = length

    def close(self, length: int) -> None:
        """End the open run after its first `length` nodes; without any the path ends where it did before the run."""
        run, self.open, self.guard = self.open, None, 0
        if run is not None and length:
            self.step_on(run, length - 1, length)

    def fills_next(self, num_blocks: int) -> bool:
        """Whether the block that is looked up next is among the row's first `num_blocks`."""
        return self.guard >= 0 and num_blocks > self.published + self.guard

    def open_length(self, num_blocks: int) -> int:
        """Nodes of the open run among the row's first `num_blocks` blocks, all of them full."""
        length = num_blocks - self.published
        return length if self.guard < 0 else min(length, self.guard)

    def truncate(self, keep: int) -> None:
        """Keep the first `keep` blocks of the closed path."""
        if keep < self.published:
            spans = first_of(self.spans(0), keep)
            self.run, self.at = (spans[-1][0], spans[-1][2] - 1) if spans else (None, -1)
            self.published = keep

    def spans(self, first: int) -> list[Span]:
        """The nodes of blocks `first` to `published` - 1, in order."""
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


def stretches(are_there: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The stretches that are there without a gap: the first of each, and the one after its last."""
    padded = np.concatenate([[False], are_there, [False]])
    edges = (padded[1:] != padded[:-1]).nonzero()[0].tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def spans_where(spans: list[Span], are_there: NDArray[np.bool_]) -> list[Span]:
    """Those of the nodes of spans that are there, one of `are_there` each."""
    found, start = list[Span](), 0
    for run, first, stop in spans:
        its, start = are_there[start : start + stop - first], start + stop - first
        found += [(run, first + begin, first + end) for begin, end in stretches(its)]
    return found


def _count_down(counts: dict[_Key, int], key: _Key) -> bool:
    """Count one less of `key`. Return whether none is left."""
    counts[key] -= 1
    return not counts[key] and not counts.pop(key)


def num_nodes(spans: list[Span]) -> int:
    return sum(stop - first for _, first, stop in spans)
