"""The content tree: its edges are runs, consecutive full blocks that one sequence computed.

A *node* is content: the tokens of a full block after those of its parent. A node is named (run, offset); a run hangs
off the node (parent, at), or off the root of a namespace. A row that is still computing may own one *open* run. Its
content is read from the row's tokens and table, so decoding adds nodes at no cost.

    root ── run 0: | n0 | n1 | n2 | n3 |
                          └── run 3: | n0 | n1 | ...      (parent run 0, at 1)

A *place* is where a node may reside: a tier of a group, by index in `PrefixIndex.pools` (full: 0, 1; first side: 2, 3).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .content_key import extend_chain, node_prefix

Blocks = NDArray[np.int64]
NO_BLOCKS: Blocks = np.empty(0, np.int64)

DEVICE, HOST = 0, 1
# Places of each group, the full one first.
NUM_PLACES = 2


# A run, and the offset of a node in it.
Node = tuple["Run", int]
# Consecutive nodes of a run: the run, the first offset, and the one after the last.
Span = tuple["Run", int, int]

# Consecutive nodes of a run in a group: the group, the first offset, and the one after the last.
Reach = tuple[int, int, int]

# A node without a block, as bytes of int64. To search bytes costs a fifth of a numpy reduction. No block id ends in
# such a byte: ids are little-endian and less than 2**31.
_BYTE = b"\xff"
_HOLE = _BYTE * 8
_Key = TypeVar("_Key")
_NONE: Any = MappingProxyType({})
_NO_DIGESTS: list[bytes] = []


class Run:
    """One edge of the content tree.

    id          counts up and is never reused: a stale key never matches
    key         the bytes under which the first node is found
    parent, at  the node before the first one; (None, -1) below a root
    row         the row that extends an open run; -1 once closed, when `length` and `tokens` are set
    born        the step in which it began
    length      number of nodes
    tokens      the nodes' token ids, int32 as bytes
    blocks      by place: int64 [n], each node's block up to the last one there; -1: none. An open run's
                device blocks are in its row's table. Arrays are replaced, never changed: a queue may have them
    retained    number of a retention → (what it covers of this run, its level)
    pending     of a closed run: batch → the first of its nodes that this batch computes; both rise
    children    offset → number of runs that hang off that node
    digests     chained SHA-256 of the first nodes, as far as computed
    open_level  the level of the sides' content while the run is open
    is_end      its one node is the end of a row within a block: see `RowEnds`
    evicted     by device place of a side: the nodes that the side has evicted from either tier, a bit each
    """

    # Every few blocks of content have a run, so it makes a mapping of its own when something goes into it.
    __slots__ = (
        "_levels", "at", "blocks", "born", "children", "digests", "evicted", "id", "is_end", "key", "length",
        "open_level", "parent", "pending", "retained", "row", "tokens",
    )  # fmt: skip

    def __init__(
        self, id: int, key: bytes, parent: Run | None, at: int, row: int, born: int, num_places: int = NUM_PLACES
    ) -> None:
        self.id, self.key, self.parent, self.at, self.row, self.born = id, key, parent, at, row, born
        self.blocks = [NO_BLOCKS] * num_places
        self.length, self.tokens, self.is_end, self.open_level = 0, b"", False, 0
        self.retained: dict[int, tuple[list[Reach], int]] = _NONE
        # How many retentions cover just this reach, at this level.
        self._levels: dict[tuple[Reach, int], int] = _NONE
        self.pending: dict[int, int] = _NONE
        self.children: dict[int, int] = _NONE
        self.evicted: dict[int, int] = _NONE
        self.digests = _NO_DIGESTS

    @property
    def confirmed_length(self) -> int:
        return min(self.length, *self.pending.values()) if self.pending else self.length

    @property
    def end(self) -> int:
        """Number of nodes up to the last one that resides anywhere or has a child."""
        end = max(self.children) + 1 if self.children else 0
        return max(end, *map(len, self.blocks))

    def num_there(self, place: int, first: int, stop: int) -> int:
        """Number of nodes from `first` on, before `stop`, that reside in a place without a gap."""
        blocks = self.blocks[place]
        hole = blocks.tobytes().find(_HOLE, 8 * first)
        return max(0, min(stop, len(blocks) if hole < 0 else hole // 8) - first)

    def is_any_there(self, place: int, first: int, stop: int) -> bool:
        return bool(self.blocks[place][first:stop].tobytes().strip(_BYTE))

    def block(self, place: int, at: int) -> int:
        """The block of node `at` in a place; -1: it has none. Not for the device blocks of an open run."""
        blocks = self.blocks[place]
        return blocks.item(at) if at < len(blocks) else -1

    def blocks_in(self, place: int, first: int, stop: int) -> Blocks:
        """The block of each of these nodes in a place, int64 [stop - first], -1 for none; a copy."""
        found, there = np.full(stop - first, -1, np.int64), self.blocks[place][first:stop]
        found[: len(there)] = there
        return found

    def put(self, place: int, first: int, blocks: Blocks) -> None:
        """Let nodes from `first` on reside in these blocks of a place. Copies the array."""
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
        """Note that a side, by its place on the device, has evicted these nodes from a tier. `HitEnd.why` reads it."""
        self.evicted = {**self.evicted, place: self.evicted.get(place, 0) | ((1 << stop - first) - 1) << first}

    def was_evicted(self, place: int, first: int, stop: int) -> bool:
        """Return whether a side has evicted one of these nodes, and has it on no tier now."""
        if place not in self.evicted:
            return False
        is_missing = np.maximum(self.blocks_in(place, first, stop), self.blocks_in(place + HOST, first, stop)) < 0
        missing = np.packbits(is_missing, bitorder="little").tobytes()
        return self.evicted[place] >> first & int.from_bytes(missing, "little") > 0

    def become_end(self, tokens: bytes) -> None:
        """Become the end of a row within a block, with these tokens of the block."""
        self.length, self.tokens, self.is_end = 1, tokens, True

    def close(self, tokens: bytes, blocks: Blocks) -> None:
        """Close the run. Its nodes, perhaps none, are on the device in these blocks."""
        self.row = -1
        self.length = len(blocks)
        self.tokens = tokens
        self.blocks[DEVICE] = blocks if len(blocks) else NO_BLOCKS

    def shorten(self, length: int, num_bytes: int) -> None:
        """Keep a closed run's first `length` nodes; the rest is nowhere. Cut `tokens` to `num_bytes` if under half."""
        self.length = length
        del self.digests[length:]
        if 2 * num_bytes < len(self.tokens):
            self.tokens = self.tokens[:num_bytes]
            self.blocks = [blocks[:length].copy() for blocks in self.blocks]

    def unlink(self, *, keep_content: bool) -> None:
        """Note that the run has left the tree. With `keep_content` its tokens and parent can still be read."""
        self.length = 0
        if not keep_content:
            self.tokens = b""
            self.parent = None

    def vanish(self) -> None:
        self.unlink(keep_content=False)
        self.blocks = [NO_BLOCKS] * len(self.blocks)
        self.retained = self._levels = self.children = _NONE

    def note_pending(self, batch: int, first: int) -> None:
        self.pending = self.pending or {}
        self.pending[batch] = first

    def extend_digests(self, before: bytes, data: bytes, block_bytes: int) -> None:
        """Append the digests of the next nodes, given the one before them and their tokens."""
        self.digests = self.digests or []
        extend_chain(self.digests, before, data, block_bytes)

    def add_child(self, at: int) -> None:
        self.children = self.children or {}
        self.children[at] = self.children.get(at, 0) + 1

    def remove_child(self, at: int) -> bool:
        """Remove a child of node `at`. Return whether it was the last one."""
        return _count_down(self.children, at)

    def retain(self, number: int, reaches: list[Reach], level: int) -> None:
        """Note a retention of these nodes. It replaces one of the same number."""
        self.end_retention(number)
        self.retained, self._levels = self.retained or {}, self._levels or {}
        self.retained[number] = reaches, level
        for reach in reaches:
            self._levels[reach, level] = self._levels.get((reach, level), 0) + 1

    def end_retention(self, number: int) -> bool:
        """Forget the retention of this number, if there is one. Return whether levels may have changed."""
        if number not in self.retained:
            return False
        reaches, level = self.retained.pop(number)
        return sum(_count_down(self._levels, (reach, level)) for reach in reaches) > 0

    def levels_of(self, group: int, offsets: Blocks) -> NDArray[np.int8]:
        """Each node's level in a group, int8 [n]: the highest of its retentions, and of a side's `open_level`."""
        levels = np.full(len(offsets), self.open_level if group and self.row >= 0 else 0, np.int8)
        # By distinct reach: sessions that begin alike retain the same nodes of their first run.
        for (of_group, first, stop), level in self._levels:
            if of_group == group:
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

    `open_level`: the level of the sides' content of its open run. When the row ends, a retention may take over.
    A path without `reads` takes no hits. One without `writes` stays closed and looks up no block: its guard is -1.
    """

    run: Run | None = None
    at = -1
    published = 0
    open: Run | None = None

    def __init__(self, root: bytes, *, reads: bool = True, writes: bool = True, open_level: int = 0) -> None:
        self.root, self.reads, self.writes, self.open_level = root, reads, writes, open_level
        self.guard = 0 if writes else -1

    @property
    def prefix(self) -> bytes:
        """While the path is closed: the start of the key of a run that hangs off its end."""
        return self.root if self.run is None else node_prefix(self.run.id, self.at)

    def closed(self, length_of: Callable[[Run], int]) -> Path:
        """A copy of the path. It is closed after the first `length_of(run)` nodes of the open run, if there is one."""
        path = Path(self.root, reads=self.reads, writes=self.writes, open_level=self.open_level)
        path.run, path.at, path.published = self.run, self.at, self.published
        if self.open is not None and (length := length_of(self.open)) > 0:
            path.step_on(self.open, length - 1, length)
        return path

    def step_on(self, run: Run, at: int, num_nodes: int = 1) -> None:
        """Extend the closed path by `num_nodes` nodes. The last of them is (`run`, `at`)."""
        self.run, self.at = run, at
        self.published += num_nodes

    def open_run(self, run: Run) -> None:
        self.open, self.guard, run.open_level = run, -1, self.open_level

    def guard_at(self, length: int) -> None:
        self.guard = length

    def close(self, length: int) -> None:
        """End the open run after its first `length` nodes. With 0 the path ends where it did before the run."""
        run, self.open, self.guard = self.open, None, 0
        if run is not None and length:
            self.step_on(run, length - 1, length)

    def fills_next(self, num_blocks: int) -> bool:
        """Whether the next block to look up is among the row's first `num_blocks`."""
        return self.guard >= 0 and num_blocks > self.published + self.guard

    def open_length(self, num_blocks: int) -> int:
        """Number of nodes of the open run among the row's first `num_blocks` blocks, all full."""
        length = num_blocks - self.published
        return length if self.guard < 0 else min(length, self.guard)

    def truncate(self, keep: int) -> None:
        """Cut the closed path to its first `keep` blocks."""
        if keep < self.published:
            spans = first_of(self.spans(0), keep)
            self.run, self.at = (spans[-1][0], spans[-1][2] - 1) if spans else (None, -1)
            self.published = keep

    def spans(self, first: int) -> list[Span]:
        """The nodes of blocks `first` to `published` - 1, in order."""
        return spans_to(self.run, self.at, self.published - first)


def upwards(run: Run | None, at: int) -> Iterator[tuple[Run, int]]:
    """Yield each run from a node up to the root, with its last node on this way."""
    while run is not None:
        yield run, at
        at, run = run.at, run.parent


def spans_to(run: Run | None, at: int, num_nodes: int = sys.maxsize) -> list[Span]:
    """The last `num_nodes` nodes from the root to a node, in order; by default all."""
    found: list[Span] = []
    for each, last in upwards(run, at):
        if num_nodes <= 0:
            break
        found.append((each, max(0, last + 1 - num_nodes), last + 1))
        num_nodes -= last + 1
    return found[::-1]


def first_of(spans: list[Span], num_nodes: int) -> list[Span]:
    """The first `num_nodes` nodes of spans; all if there are fewer."""
    found: list[Span] = []
    for run, first, stop in spans:
        if num_nodes > 0:
            found.append((run, first, min(stop, first + num_nodes)))
        num_nodes -= stop - first
    return found


def rest_of(spans: list[Span], num_nodes: int) -> list[Span]:
    """The nodes of spans behind the first `num_nodes`."""
    found: list[Span] = []
    for run, first, stop in spans:
        if num_nodes < stop - first:
            found.append((run, first + max(num_nodes, 0), stop))
        num_nodes -= stop - first
    return found


def stretches(are_there: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The stretches of True: (first, one after the last) of each."""
    padded = np.concatenate([[False], are_there, [False]])
    edges = (padded[1:] != padded[:-1]).nonzero()[0].tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def spans_where(spans: list[Span], are_there: NDArray[np.bool_]) -> list[Span]:
    """The nodes of spans for which `are_there` is True; bool [number of nodes]."""
    found, start = list[Span](), 0
    for run, first, stop in spans:
        is_there, start = are_there[start : start + stop - first], start + stop - first
        found += [(run, first + begin, first + end) for begin, end in stretches(is_there)]
    return found


def _count_down(counts: dict[_Key, int], key: _Key) -> bool:
    """Lower a count by 1, and remove it at 0. Return whether it was removed."""
    counts[key] -= 1
    return not counts[key] and not counts.pop(key)


def num_nodes(spans: Sequence[Span]) -> int:
    return sum(stop - first for _, first, stop in spans)
