"""The exact prefix cache: which content resides in which block, and which row may share it.

Lookup compares token ids: a hit is equality.

A row's path is one of three: *open* (it extends a run of its own; each full block is a node by itself, at no cost), *guarded*
(open, but another run hangs off the end, so the next full block is looked up) or *closed* (after a hit, fork, switch or
truncation: the next full block is looked up, then shared or begun as a new run).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .content_key import extend_chain, namespace_digest, node_prefix
from .flights import Flight, Flights
from .free_list import Blocks, Stretch, Taken
from .host_residence import HostResidence
from .pool import Pool
from .runs import Path, Run, Segment
from .tables import Rows, Tables

if TYPE_CHECKING:
    from .events import EventLog

_NO_ROWS: Rows = np.empty(0, np.int64)


class Match(NamedTuple):
    """What a lookup found: segments (run, offset, count), blocks in all, and the first block that is only pending (-1: none)."""

    segments: list[Segment]
    num_blocks: int
    first_pending: int


def _prefix_after(root: bytes, run: Run | None, at: int) -> bytes:
    """What the key of a run that hangs off the node (`run`, `at`) begins with, or without one off the root."""
    return root if run is None else node_prefix(run.id, at)


def _num_on_host(run: Run, first: int) -> int:
    """Confirmed nodes of the run, from `first` on, that are on the host without a gap; of an open run none counts."""
    if run.host is None:
        return 0
    is_there = run.host[first : run.confirmed_length] >= 0
    return len(is_there) if is_there.all() else int(is_there.argmin())


class PrefixIndex:
    """Finds, publishes, withdraws and forgets content."""

    def __init__(self, tables: Tables, flights: Flights, device: Pool, host: Pool) -> None:
        self._tables = tables
        self._flights = flights
        self._device = device
        self._block_size = tables.block_size
        self.block_bytes = 4 * tables.block_size
        self.runs: dict[bytes, Run] = {}
        self.paths: dict[int, Path] = {}
        # Closed runs with pending nodes, by the batch that computes them.
        self.pending: dict[int, list[Run]] = {}
        # Whether the row's next full block is a node by itself: the one thing that a step asks of every row.
        self.is_lazy = np.zeros(tables.num_rows, np.bool_)
        # Paths that are not: while there are none, a step need not even ask.
        self.num_attentive = 0
        self.batch = 1
        # Of the nodes that left the device, the steps since their run began, in all.
        self.lifetime_steps = 0
        self._next_run = 0
        # Told which nodes come to a tier and leave it, once events are read; nodes of an open run are not told as they are computed.
        self.log: EventLog | None = None
        self.host = HostResidence(host, self._trim)
        # Called with nodes of closed runs that are about to leave the device, the last one of each first, and with their blocks.
        self.leave: Callable[[list[Stretch], Blocks], None] | None = None
        # Called with a run that was retained while it was open, and is closed now.
        self.closed: Callable[[Run], None] | None = None
        device.forget = self._forget_device
        tables.before_growth.append(self._ensure_rows)

    def open_path(self, row: int, root: bytes, *, reads: bool = True, writes: bool = True) -> Path:
        """A path at the root for a row that was just opened."""
        path = self.paths[row] = Path(root, reads=reads, writes=writes)
        # Who does not write never has a block to look up.
        self.is_lazy[row] = not writes
        self.num_attentive += writes
        return path

    def fork_path(self, row: int, child: int) -> None:
        """The child stands where the row does, on pending nodes too."""
        parent, full = self.paths[row], self._tables.content_end(row) // self._block_size
        path = self.open_path(child, parent.root, reads=parent.reads, writes=parent.writes)
        path.run, path.at, path.published = parent.run, parent.at, parent.published
        if parent.open is None:
            return
        # A guarded end is no node yet: the row's path says where the tree ends.
        count = min(self._pending_length(parent.open), full - parent.published)
        if count > 0:
            path.run, path.at, path.published = parent.open, count - 1, parent.published + count

    def _ensure_rows(self, num_rows: int) -> None:
        """Make room for `num_rows` rows; there may be more already, where the tables then found no memory for themselves."""
        if num_rows > len(self.is_lazy):
            self.is_lazy = np.concatenate([self.is_lazy, np.zeros(num_rows - len(self.is_lazy), np.bool_)])

    def release_path(self, row: int) -> tuple[int, int]:
        """Forget the path of a row that ends; its open run stays as content. Returns (first, stop): the row's blocks before
        `first` are nodes, from `stop` on they are not, and those in between have been given back already."""
        path, tables = self.paths[row], self._tables
        run, start = path.open, path.published
        if run is not None and path.guard < 0 and not run.retained:
            stop = tables.num_computed.item(row) // self._block_size
            if stop > start and tables.content_end(row) // self._block_size == stop:
                blocks = tables.blocks[:, row, start:stop].astype(np.int64)
                if self._device.release_run(blocks[0], run):
                    self._keep(run, row, start, blocks)
                    self.is_lazy[row] = False
                    del self.paths[row]
                    return start, stop
        self.close_run(row)
        self.num_attentive -= path.writes
        del self.paths[row]
        return path.published, path.published

    def _keep(self, run: Run, row: int, start: int, blocks: NDArray[np.int64]) -> None:
        """The run keeps its tokens, the row's from block `start` on, and these blocks, [groups, n], by itself from now on."""
        length = blocks.shape[1]
        first, stop = start * self._block_size, (start + length) * self._block_size
        run.tokens = self._tables.tokens[row, first:stop].tobytes()
        run.blocks = blocks
        run.length = run.num_device = length
        run.row = -1
        if self.log is not None:
            self.log.closed(run, row, length)
        if run.num_host:
            run.host_places(length)

    def last_node(self, row: int) -> tuple[Run, int] | None:
        """The row's last confirmed node as (run, offset); None if it has none."""
        path = self.paths[row]
        if path.open is not None and (length := self.confirmed_length(path.open)) > 0:
            return path.open, length - 1
        run, at = path.run, path.at
        while run is not None and (length := self.confirmed_length(run)) <= at:
            # Above a pending node all may be pending, up to where a confirmed one stands.
            run, at = (run, length - 1) if length else (run.parent, run.at)
        return None if run is None else (run, at)

    def contents(self, tier: str) -> set[tuple[bytes, ...]]:
        """Every confirmed node in a tier, "device" or "host", as its path: encoded namespace, then the token bytes of each block."""
        size = self.block_bytes
        paths: dict[tuple[int, int], tuple[bytes, ...]] = {}
        found: set[tuple[bytes, ...]] = set()
        for run in sorted(self.runs.values(), key=lambda run: run.id):
            prefix = (run.key[:-size],) if run.parent is None else paths.get((run.parent.id, run.at))
            length = self.confirmed_length(run)
            data = self.run_tokens(run, 0, length)
            for at in range(length):
                assert prefix is not None, "a parent has a lower id than its child"
                prefix = (*prefix, data[at * size : (at + 1) * size])
                paths[run.id, at] = prefix
                if (self.device_block(run, at) if tier == "device" else run.host_block(at)) >= 0:
                    found.add(prefix)
        return found

    def hashes(self, row: int) -> list[bytes]:
        """Chained SHA-256 of the row's confirmed nodes, first to last."""
        path = self.paths[row]
        segments = path.segments(0)
        if path.open is not None and (length := self.confirmed_length(path.open)):
            segments.append((path.open, 0, length))
        found: list[bytes] = []
        for run, offset, count in segments:
            found.extend(self.digests(run, offset + count, offset))
        return found

    def num_published(self, row: int) -> int:
        """Blocks of the row that are nodes, pending ones too."""
        path = self.paths[row]
        return path.published if path.open is None else path.published + self._pending_length(path.open)

    def match(self, path: Path | None, root: bytes, data: bytes, limit: int) -> Match:
        """The longest run of blocks, at most `limit`, that continues `path` (None: from the root) with the tokens in `data`.

        Finds what resides on the device, confirmed or pending: what a batch that is out computes is there for all later ones. Changes
        nothing.
        """
        run, at, first = (None, -1, 0) if path is None else (path.run, path.at, path.published)
        segments = self._walk(root, run, at, data, 0, limit, self._num_on_device)
        num_blocks, first_pending = 0, -1
        for run, offset, count in segments:
            if first_pending < 0 and offset + count > (confirmed := self.confirmed_length(run)):
                first_pending = first + num_blocks + max(0, confirmed - offset)
            num_blocks += count
        return Match(segments, num_blocks, first_pending)

    def match_on_host(self, path: Path | None, root: bytes, data: bytes, limit: int, match: Match) -> list[Segment]:
        """What continues a match, of which nothing is pending, and has a host block only: segments (run, offset, count)."""
        run, at = (None, -1) if path is None else (path.run, path.at)
        if match.segments:
            run, offset, count = match.segments[-1]
            at = offset + count - 1
        return self._walk(root, run, at, data, match.num_blocks, limit, _num_on_host)

    def _walk(
        self,
        root: bytes,
        run: Run | None,
        at: int,
        data: bytes,
        block: int,
        limit: int,
        num_usable: Callable[[Run, int], int],
    ) -> list[Segment]:
        """Segments (run, offset, count) of the nodes that come after (`run`, `at`) with the tokens of `data` from `block` to `limit` - 1.

        `num_usable` says how many nodes of a run, from one of them on, may be among them.
        """
        size = self.block_bytes
        segments: list[Segment] = []
        while block < limit:
            if run is not None:
                count = min(num_usable(run, at + 1), limit - block)
                same = self._common(run, at + 1, data, block, count) if count > 0 else 0
                if same:
                    segments.append((run, at + 1, same))
                    block += same
                    at += same
                    if block == limit:
                        break
            child = self.runs.get(_prefix_after(root, run, at) + data[block * size : (block + 1) * size])
            if child is None or num_usable(child, 0) <= 0:
                break
            run, at = child, -1
        return segments

    def _num_on_device(self, run: Run, first: int) -> int:
        """Nodes of the run, from `first` on, that a lookup may use."""
        return (run.num_device if run.row < 0 else self._pending_length(run)) - first

    def has_first(self, root: bytes, block: bytes) -> bool:
        """Whether some run begins at this root with this block."""
        return root + block in self.runs

    def blocks_of(self, match: Match) -> Blocks:
        """The device blocks of a match in order, int64 [num_blocks]."""
        parts = [self._segment_blocks(run, offset, count) for run, offset, count in match.segments]
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.int64)

    def step_on(self, row: int, last: Segment, num_blocks: int) -> None:
        """The row's path, which is closed, goes on by `num_blocks` nodes, the last of which are (run, offset, count)."""
        path = self.paths[row]
        run, offset, count = last
        path.run, path.at = run, offset + count - 1
        path.published += num_blocks

    def fills_next(self, row: int, end: int) -> bool:
        """Whether a row that is not lazy, put in flight up to `end` tokens that it knows, fills the block that has to be looked up next."""
        path = self.paths[row]
        return end // self._block_size > path.published + (0 if path.open is None else path.guard)

    def is_behind(self, row: int) -> bool:
        """Whether the row has confirmed blocks that could not become nodes when they were computed: another batch had the same pending."""
        path = self.paths[row]
        return path.open is None and path.writes and path.published < self._tables.full_blocks(row)

    def attentive(self, rows: Rows) -> Rows:
        """The places in `rows` of those that are not lazy, int64 [k]. Empty where `num_attentive` is 0."""
        is_lazy = self.is_lazy[rows]
        return _NO_ROWS if is_lazy.all() else (~is_lazy).nonzero()[0]

    def begin_pending(self, row: int, end: int) -> None:
        """A row that is not lazy was put in flight up to `end` tokens and fills its next block: the full blocks that it computes
        become pending nodes, if they are not cached: a run of their own, or what follows in its open one."""
        path = self.paths[row]
        assert self.fills_next(row, end), "there is a block to look up"
        if path.open is not None:
            if self._child_at_guard(row, path) is None:
                self._drop_guard(row, path)
            return
        for run, at in self.nodes_of_forks(row):
            path.run, path.at, path.published = run, at, path.published + 1
        block = self._tables.block_bytes(row, path.published)
        node = path.root, path.run, path.at
        if self.fills_next(row, end) and self._after(*node, block, self._total_length) is None:
            self.open_run(row, path, _prefix_after(*node) + block)

    def publish(self, row: int) -> list[tuple[int, Run, int]]:
        """Make nodes of the row's confirmed full blocks, one by one where they have to be looked up.

        Returns the blocks whose content already resides elsewhere on the device, as (column, run, offset): the caller switches
        the tables that name the duplicate.
        """
        path = self.paths[row]
        switches: list[tuple[int, Run, int]] = []
        if not path.writes:
            return switches
        full = self._tables.full_blocks(row)
        if path.open is not None:
            if path.guard < 0 or full <= path.published + path.guard:
                return switches
            if self._child_at_guard(row, path) is None:
                self._drop_guard(row, path)
                return switches
            self.close_run(row, path.guard)
        while path.published < full:
            column = path.published
            block = self._tables.block_bytes(row, column)
            found = self._after(path.root, path.run, path.at, block, self._pending_length)
            if found is None:
                self.open_run(row, path, _prefix_after(path.root, path.run, path.at) + block)
                break
            run, at = found
            if self.confirmed_length(run) <= at:
                # Pending in a later batch. What is confirmed goes first, unless a row or a run stands on the pending one already:
                # then this row looks again when its next block is full.
                if not self._give_way(run, at):
                    break
                continue
            if run.row < 0 and at >= run.num_device:
                self.reside(run, at, self._tables.blocks[0, row, column : column + 1].astype(np.int64))
            elif self._segment_blocks(run, at, 1)[0] != self._tables.blocks[0, row, column]:
                switches.append((column, run, at))
            path.run, path.at, path.published = run, at, column + 1
        return switches

    def nodes_of_forks(self, row: int) -> list[tuple[Run, int]]:
        """What follows the row's path, if that is closed, and lies in its own blocks: they became nodes through a fork of it. Changes
        nothing; the row finds them when it looks again."""
        path, tables = self.paths[row], self._tables
        found: list[tuple[Run, int]] = []
        if path.open is not None or not path.writes:
            return found
        run, at = path.run, path.at
        for column in range(path.published, min(tables.full_blocks(row), int(tables.num_blocks[row]))):
            child = self._after(path.root, run, at, tables.block_bytes(row, column), self.confirmed_length)
            if child is None or self.device_block(*child) != tables.blocks[0, row, column]:
                break
            found.append(child)
            run, at = child
        return found

    def _give_way(self, run: Run, at: int) -> bool:
        """Withdraw the pending nodes of an open run, the first of them at `at`, if no other run and no row stands on them; whether
        that was so. Its row looks them up when it has computed them."""
        if run.row < 0 or any(offset >= at for offset in run.children or ()):
            return False
        if any(path.run is run and path.at >= at for path in self.paths.values()):
            return False
        # A row that shared them and went to the host may have left copies there.
        self.host.give_up(run, at)
        if at == 0:
            self._abandon_run(run.row, run)
        else:
            self.paths[run.row].guard = at
            self._set_lazy(run.row, False)
        return True

    def fall_back(self, row: int) -> None:
        """The row is launched to fewer tokens than before: its path ends there, and its open run shrinks, or goes if nothing is left.

        No other row stands on what is lost.
        """
        path = self.paths[row]
        run, full = path.open, self._tables.content_end(row) // self._block_size
        if run is not None:
            length = full - path.published
            self.host.give_up(run, max(length, 0))
            if length <= 0:
                self._abandon_run(row, run)
        if path.open is None:
            path.truncate(full)

    def _abandon_run(self, row: int, run: Run) -> None:
        """The row's open run has no node any more, and no confirmed one hangs off it."""
        path = self.paths[row]
        path.open, path.guard = None, -1
        self._set_lazy(row, False)
        run.row = -1
        if self.log is not None:
            self.log.closed(run, row, 0)
        # Runs that hang off it are withdrawn in a moment, and it goes with the last of them.
        if not run.children:
            self._unlink(run)

    def confirm(self, batch: int) -> None:
        """The batch ran: what it computed of closed runs is confirmed."""
        for run in self.pending.pop(batch, ()):
            run.forget_batch(batch)
        if self.log is not None:
            self.log.confirm()

    def withdraw(self, batch: int) -> None:
        """The batch did not run: what it was to compute of closed runs is no content. No row stands on it."""
        # A child's id is higher than its parent's.
        for run in sorted(self.pending.pop(batch, ()), key=lambda run: -run.id):
            length = run.first_of(batch)
            run.forget_batch(batch)
            if not run.length:
                # It went with the last of its children.
                continue
            if length < run.length:
                assert run.blocks is not None, "a closed run keeps its blocks"
                self._device.forget_content(run.blocks[0, length : run.num_device])
                self.host.give_up(run, length)
                run.num_device = min(run.num_device, length)
                self._shorten(run, length)
            self._trim(run)
        if self.log is not None:
            self.log.confirm()

    def nodes_lost(self, flight: Flight) -> dict[Run, int]:
        """Of each run, the first node that the batch computes: none of them is content if it does not run."""
        lost: dict[Run, int] = {}
        for run in self.pending.get(flight.number, ()):
            lost[run] = run.first_of(flight.number)
        for row, start, _ in flight.shares():
            path = self.paths[row]
            if path.open is not None:
                lost[path.open] = max(start // self._block_size - path.published, 0)
        return lost

    def first_on(self, row: int, lost: dict[Run, int]) -> int:
        """The row's first block whose node is among these or behind one of them on its run, before its own open run; -1: none."""
        column = 0
        for run, offset, count in self.paths[row].segments(0):
            if run in lost and offset + count > lost[run]:
                return column + max(0, lost[run] - offset)
            column += count
        return -1

    def close_run(self, row: int, length: int | None = None) -> None:
        """The row extends its run no more: the run keeps its tokens and blocks by itself, and the path becomes closed."""
        path = self.paths[row]
        run = path.open
        if run is None:
            return
        length = self._pending_length(run) if length is None else length
        if length <= 0:
            self._abandon_run(row, run)
            return
        start = path.published
        self._note_pending(run, row, start, length)
        blocks = self._tables.blocks[:, row, start : start + length].astype(np.int64)
        self._keep(run, row, start, blocks)
        self._device.carry(blocks[0], run)
        if run.retained and self.closed is not None:
            self.closed(run)
        if path.guard < 0:
            self.is_lazy[row] = False
            self.num_attentive += 1
        path.open, path.guard = None, -1
        path.run, path.at, path.published = run, length - 1, start + length

    def _note_pending(self, run: Run, row: int, start: int, length: int) -> None:
        """Which batches compute the nodes of the row's run, which begins at its block `start`, that are not confirmed."""
        first = self._tables.num_computed.item(row) // self._block_size - start
        if first >= length:
            return
        for batch, share in self._flights.shares_of(row):
            stop = min(share.end // self._block_size - start, length)
            if stop > max(first, 0):
                run.pending.append((batch, max(first, 0)))
                self.pending.setdefault(batch, []).append(run)
                first = stop

    def reside(self, run: Run, at: int, blocks: Blocks) -> None:
        """Nodes of a closed run from `at` on, the first one that is not on the device, reside in these used blocks, int64 [n], from now
        on."""
        assert run.blocks is not None and run.num_device == at, "residence on the device is a prefix of a run"
        run.num_device = stop = at + len(blocks)
        run.blocks[0, at:stop] = blocks
        self._device.carry(blocks, run)
        if run.retained:
            self._device.set_levels(blocks, run.levels_of(np.arange(at, stop)))
        if self.log is not None:
            self.log.came([(run, at, stop)], "device")

    def device_block(self, run: Run, at: int) -> int:
        """The device block of a node, -1 where it has none."""
        if run.row < 0 and at >= run.num_device:
            return -1
        return int(self._segment_blocks(run, at, 1)[0])

    def clear(self) -> None:
        """Forget all content; the caller has seen that no block is used."""
        self._device.forget_all()
        self.host.clear()
        self.runs.clear()
        self.pending.clear()
        for path in self.paths.values():
            path.run, path.at, path.published = None, -1, 0

    def digests(self, run: Run, stop: int, start: int = 0) -> list[bytes]:
        """Chained SHA-256 of the nodes of a run from `start` to `stop` - 1, each computed once while the run lives."""
        if run.digests is None:
            run.digests = []
        known = len(run.digests)
        if known < stop:
            digest = run.digests[-1] if known else self._digest_before(run)
            extend_chain(run.digests, digest, self.run_tokens(run, known, stop), self.block_bytes)
        return run.digests[start:stop]

    def _digest_before(self, run: Run) -> bytes:
        if run.parent is None:
            return namespace_digest(run.key[: -self.block_bytes])
        return self.digests(run.parent, run.at + 1, run.at)[0]

    def confirmed_length(self, run: Run) -> int:
        """Nodes of the run that are computed and confirmed."""
        if run.row < 0:
            return run.confirmed_length
        path = self.paths[run.row]
        length = self._tables.num_computed.item(run.row) // self._block_size - path.published
        # What comes after a guarded end has to be looked up before it counts, by `publish` of this very row.
        return length if path.guard < 0 else min(length, path.guard)

    def _total_length(self, run: Run) -> int:
        if run.row < 0:
            return run.length
        return self._tables.content_end(run.row) // self._block_size - self.paths[run.row].published

    def _pending_length(self, run: Run) -> int:
        """Nodes of the run, with those that any batch is computing."""
        total = self._total_length(run)
        if run.row < 0 or self.paths[run.row].guard < 0:
            return total
        return min(total, self.paths[run.row].guard)

    def _after(
        self, root: bytes, run: Run | None, at: int, block: bytes, length_of: Callable[[Run], int]
    ) -> tuple[Run, int] | None:
        """The node after (`run`, `at`), or the first one, with these tokens: inside the same run, or the first of a run that hangs there."""
        if run is not None and at + 1 < length_of(run) and self.run_tokens(run, at + 1, at + 2) == block:
            return run, at + 1
        child = self.runs.get(_prefix_after(root, run, at) + block)
        return None if child is None else (child, 0)

    def _child_at_guard(self, row: int, path: Path) -> Run | None:
        """The run that hangs off the end of the row's guarded one and begins with the row's next block."""
        assert path.open is not None, "only an open run is guarded"
        block = self._tables.block_bytes(row, path.published + path.guard)
        return self.runs.get(node_prefix(path.open.id, path.guard - 1) + block)

    def _drop_guard(self, row: int, path: Path) -> None:
        """What the row computes next is not cached: its open run goes on past the runs that hang off its end."""
        path.guard = -1
        self._set_lazy(row, True)

    def open_run(self, row: int, path: Path, key: bytes) -> None:
        """The row, whose path is closed, computes a full block that is not cached, found under `key` from now on."""
        parent, at = path.run, path.at
        run = Run(self._next_run, key, parent, at, row, self.batch)
        self._next_run += 1
        self.runs[key] = run
        if self.log is not None:
            self.log.opened(run, path.published)
        path.open, path.guard = run, -1
        self._set_lazy(row, True)
        if parent is None:
            return
        if parent.children is None:
            parent.children = {}
        parent.children[at] = parent.children.get(at, 0) + 1
        if parent.row >= 0 and at + 1 >= self._total_length(parent):
            self.paths[parent.row].guard = at + 1
            self._set_lazy(parent.row, False)

    def _set_lazy(self, row: int, is_lazy: bool) -> None:
        # As bool: numpy takes a microsecond to compare one of its own.
        if bool(self.is_lazy[row]) is not is_lazy:
            self.is_lazy[row] = is_lazy
            self.num_attentive += -1 if is_lazy else 1

    def _unlink(self, run: Run) -> None:
        """Take a run without residence and children out of the tree, and what is left without either above it."""
        del self.runs[run.key]
        # An evicted block names its last run until it carries another: that must not keep the content alive.
        run.blocks = None
        parent, at = run.parent, run.at
        # Events that were not read yet name its tokens, and hashes begin with its parents.
        if self.log is None:
            run.tokens = b""
            run.parent = None
        if parent is None or parent.children is None:
            return
        parent.children[at] -= 1
        if parent.children[at] == 0:
            del parent.children[at]
            if not parent.children:
                parent.children = None
            if parent.row < 0:
                self._trim(parent)
            elif self.paths[parent.row].guard == at + 1:
                self._drop_guard(parent.row, self.paths[parent.row])

    def _trim(self, run: Run) -> None:
        """Drop the last nodes of a closed run that reside nowhere and have no child."""
        length = run.num_device
        if not (length or run.num_host or run.children):
            run.length = 0
            self._unlink(run)
            return
        if length == run.length:
            return
        if run.num_host and run.host is not None:
            if run.host.item(run.length - 1) >= 0:
                return
            length = max(length, run.length - int((run.host[run.length - 1 :: -1] >= 0).argmax()))
        if run.children:
            length = max(length, max(run.children) + 1)
        if length < run.length:
            self._shorten(run, length)

    def _shorten(self, run: Run, length: int) -> None:
        """The closed run has only its first `length` nodes; the others reside nowhere and have no child."""
        run.length = length
        if run.digests is not None:
            del run.digests[length:]
        if 2 * length * self.block_bytes < len(run.tokens) and self.log is None:
            assert run.blocks is not None
            run.tokens = run.tokens[: length * self.block_bytes]
            run.blocks = run.blocks[:, :length].copy()
            if run.host is not None:
                run.host = run.host[:length].copy() if run.num_host else None

    def _forget_device(self, blocks: Blocks, taken: list[Taken]) -> None:
        """These blocks, evicted oldest first and so children before parents, hold their nodes no more."""
        leaving: list[Stretch] = []
        stops: dict[Run, int] = {}
        for part, nodes, _ in taken:
            leaving += self._nodes_in(part, stops) if nodes is None else nodes
        if self.leave is not None:
            self.leave(leaving, blocks)
        if self.log is not None:
            self.log.left(leaving, "device")
            self._device.run[blocks] = None
        for run, first, stop in leaving:
            # Not before: while one leaves, what becomes of the host may be the end of another.
            self.lifetime_steps += (stop - first) * (self.batch - run.born)
            run.num_device = first
            self._trim(run)

    def _nodes_in(self, blocks: Blocks, stops: dict[Run, int]) -> list[Stretch]:
        """The nodes in these blocks, which are evicted in this order; `stops`: by run, the first of those that leave before them."""
        found: list[Stretch] = []
        for run, same in groupby(self._device.run[blocks].tolist()):
            stop = stops.get(run, run.num_device)
            stops[run] = first = stop - len(list(same))
            found.append((run, first, stop))
        return found

    def _segment_blocks(self, run: Run, offset: int, count: int) -> Blocks:
        if run.row < 0:
            assert run.blocks is not None
            return run.blocks[0, offset : offset + count]
        start = self.paths[run.row].published + offset
        return self._tables.blocks[0, run.row, start : start + count].astype(np.int64)

    def run_tokens(self, run: Run, first: int, stop: int) -> bytes:
        """The token ids of a run's nodes from `first` to `stop` - 1, as bytes."""
        size = self.block_bytes
        if run.row < 0:
            return run.tokens[first * size : stop * size]
        column, size = self.paths[run.row].published, self._block_size
        return self._tables.tokens[run.row, (column + first) * size : (column + stop) * size].tobytes()

    def _common(self, run: Run, offset: int, data: bytes, block: int, count: int) -> int:
        """How many of `count` nodes from `offset` on have the tokens of `data` from `block` on."""
        size = self.block_bytes
        mine = self.run_tokens(run, offset, offset + count)
        if data.startswith(mine, block * size):
            return count
        theirs = data[block * size : (block + count) * size]
        if count == 1 or mine[:size] != theirs[:size]:
            return 0
        differs = np.frombuffer(mine, np.int32) != np.frombuffer(theirs, np.int32)
        return int(differs.argmax()) // self._block_size
