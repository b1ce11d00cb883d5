"""The exact prefix cache: which content resides in which block, and which row may share it.

A lookup compares token ids. A row's path is *open* (it extends its own run; each full block is a node at no cost),
*guarded* (open, but another run hangs off the end, so the next full block is looked up) or *closed* (after a hit, fork,
switch or truncation: the next full block is looked up, then shared or begun as a new run).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from .content_key import extend_chain, namespace_digest, node_prefix
from .flights import Flight, Flights
from .pool import NO_BLOCKS, Pool, Taken
from .retention import Retentions
from .runs import DEVICE, Blocks, Node, Path, Run, Span
from .tables import Rows, Tables

_NO_ROWS: Rows = np.empty(0, np.int64)


class Listener(Protocol):
    """Gets the nodes that come to a place and leave it: see `EventLog`."""

    def opened(self, run: Run, first: int) -> None: ...
    def closed(self, run: Run, row: int, length: int) -> None: ...
    def came(self, nodes: list[Span], place: int) -> None: ...
    def left(self, nodes: list[Span], place: int) -> None: ...
    def confirm(self) -> None: ...


class Match(NamedTuple):
    """What a lookup found: nodes, their number, and the first block that is only pending (-1: none)."""

    spans: list[Span]
    num_blocks: int
    first_pending: int


_NOTHING = Match([], 0, -1)


def _prefix_after(root: bytes, run: Run | None, at: int) -> bytes:
    """The start of the key of a run that hangs off node (`run`, `at`), or off the root."""
    return root if run is None else node_prefix(run.id, at)


class PrefixIndex:
    def __init__(self, tables: Tables, flights: Flights, device: Pool, host: Pool) -> None:
        self._tables = tables
        self._flights = flights
        self.pools = (device, host)
        self.retentions = Retentions(self.pools)
        self._block_size = tables.block_size
        self.block_bytes = 4 * tables.block_size
        self.runs: dict[bytes, Run] = {}
        self.paths: dict[int, Path] = {}
        # Closed runs with pending nodes, by the batch that computes them.
        self.pending: dict[int, list[Run]] = {}
        # Whether the row's next full block needs no lookup: all that a step reads of every row.
        self.is_lazy = np.zeros(tables.num_rows, np.bool_)
        # Paths that are not lazy: without any, a step reads nothing.
        self.num_attentive = 0
        self.batch = 1
        # Steps since their run began, summed over the nodes that left the device.
        self.lifetime_steps = 0
        self._next_run = 0
        # Set once events are read; it finds the growth of open runs itself.
        self.log: Listener | None = None
        for place, pool in enumerate(self.pools):
            pool.on_eviction(partial(self._evict, place))
        tables.before_growth.append(self._ensure_rows)

    def open_path(self, row: int, root: bytes, *, reads: bool = True, writes: bool = True) -> Path:
        path = self.paths[row] = Path(root, reads=reads, writes=writes)
        # A row that does not write looks no block up.
        self.is_lazy[row] = not writes
        self.num_attentive += writes
        return path

    def fork_path(self, row: int, child: int) -> None:
        """Open a path for the child where the row's ends, pending nodes included."""
        parent, full = self.paths[row], self._tables.content_end(row) // self._block_size
        path = self.open_path(child, parent.root, reads=parent.reads, writes=parent.writes)
        path.run, path.at, path.published = parent.run, parent.at, parent.published
        if parent.open is None:
            return
        # A guarded end is no node yet.
        count = min(self._pending_length(parent.open), full - parent.published)
        if count > 0:
            path.run, path.at, path.published = parent.open, count - 1, parent.published + count

    def _ensure_rows(self, num_rows: int) -> None:
        """Make room for `num_rows` rows; there may be more already, if the tables failed to grow."""
        if num_rows > len(self.is_lazy):
            self.is_lazy = np.concatenate([self.is_lazy, np.zeros(num_rows - len(self.is_lazy), np.bool_)])

    def release_path(self, row: int) -> tuple[int, Blocks, Run | None]:
        """Drop the path of a row that ends; its open run stays as content. Returns (first, blocks, run): the row's
        blocks before column `first` carry nodes, `blocks` from there on are to be released as nodes of `run`, which
        they do not carry yet, and the rest carries none."""
        path, tables = self.paths[row], self._tables
        run, start = path.open, path.published
        if run is not None and path.guard < 0 and not run.retained:
            stop = tables.num_computed.item(row) // self._block_size
            if stop > start and tables.content_end(row) // self._block_size == stop:
                blocks = tables.blocks[0, row, start:stop].astype(np.int64)
                self._keep(run, row, start, blocks)
                self.is_lazy[row] = False
                del self.paths[row]
                return start, blocks, run
        self.close_run(row)
        self.num_attentive -= path.writes
        del self.paths[row]
        return path.published, NO_BLOCKS, None

    def _keep(self, run: Run, row: int, start: int, blocks: Blocks) -> None:
        """Close the run with the row's tokens from block `start` on and these blocks, int64 [n]."""
        first, stop = start * self._block_size, (start + len(blocks)) * self._block_size
        run.close(self._tables.tokens[row, first:stop].tobytes(), blocks)
        if self.log is not None:
            self.log.closed(run, row, len(blocks))

    def last_node(self, row: int) -> Node | None:
        """The row's last confirmed node; None if it has none."""
        path = self.paths[row]
        if path.open is not None and (length := self.confirmed_length(path.open)) > 0:
            return path.open, length - 1
        run, at = path.run, path.at
        while run is not None and (length := self.confirmed_length(run)) <= at:
            # The nodes before a pending one may be pending, too.
            run, at = (run, length - 1) if length else (run.parent, run.at)
        return None if run is None else (run, at)

    def contents(self, tier: str) -> set[tuple[bytes, ...]]:
        """Every confirmed node in a tier as its path: encoded namespace, then the token bytes of each block."""
        size, place = self.block_bytes, [pool.tier for pool in self.pools].index(tier)
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
                if self.block(place, run, at) >= 0:
                    found.add(prefix)
        return found

    def hashes(self, row: int) -> list[bytes]:
        """Chained SHA-256 of the row's confirmed nodes, first to last."""
        path = self.paths[row]
        spans = path.spans(0)
        if path.open is not None and (length := self.confirmed_length(path.open)):
            spans.append((path.open, 0, length))
        found: list[bytes] = []
        for run, first, stop in spans:
            found.extend(self.digests(run, stop, first))
        return found

    def num_published(self, row: int) -> int:
        """Blocks of the row that are nodes, pending ones too."""
        path = self.paths[row]
        return path.published if path.open is None else path.published + self._pending_length(path.open)

    def match(
        self, path: Path | None, root: bytes, data: bytes, limit: int, place: int = DEVICE, after: Match = _NOTHING
    ) -> Match:
        """The longest run of blocks that continues `path` (None: from the root), and a match `after` it: at most
        `limit` blocks of both. `data` are the tokens from the first block after the path on. Finds confirmed nodes that
        reside in the place; on the device pending ones, too, which later batches may share. Changes nothing."""
        run, at, column = (None, -1, 0) if path is None else (path.run, path.at, path.published)
        if after.spans:
            run, _, stop = after.spans[-1]
            at = stop - 1
        size, block, first_pending = self.block_bytes, after.num_blocks, -1
        spans: list[Span] = []
        while block < limit:
            if run is not None:
                first = at + 1
                count = min(self._num_usable(place, run, first), limit - block)
                same = self._common(run, first, data, block, count) if count > 0 else 0
                if same:
                    at += same
                    spans.append((run, first, at + 1))
                    if first_pending < 0 and at >= (confirmed := self.confirmed_length(run)):
                        first_pending = column + block + max(0, confirmed - first)
                    block += same
                    if block == limit:
                        break
                elif not first:
                    break
            child = self.runs.get(_prefix_after(root, run, at) + data[block * size : (block + 1) * size])
            if child is None:
                break
            run, at = child, -1
        return Match(spans, block - after.num_blocks, first_pending)

    def _num_usable(self, place: int, run: Run, first: int) -> int:
        """Nodes of the run from `first` on that reside in a place without a gap, and that a lookup may use."""
        if run.row >= 0:
            return self._pending_length(run) - first if place == DEVICE else 0
        return run.num_there(place, first, run.length if place == DEVICE else run.confirmed_length)

    def has_first(self, root: bytes, block: bytes) -> bool:
        return root + block in self.runs

    def blocks_of(self, place: int, spans: list[Span]) -> Blocks:
        parts = [self._span_blocks(place, *span) for span in spans]
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.int64)

    def step_on(self, row: int, last: Span, num_blocks: int) -> None:
        """Extend the row's closed path by `num_blocks` nodes that end with `last`."""
        path = self.paths[row]
        path.run, path.at = last[0], last[2] - 1
        path.published += num_blocks

    def fills_next(self, row: int, end: int) -> bool:
        """Whether a row that is not lazy fills the block that it looks up next with its first `end` tokens."""
        path = self.paths[row]
        return end // self._block_size > path.published + (0 if path.open is None else path.guard)

    def is_behind(self, row: int) -> bool:
        """Whether the row has confirmed blocks that are no nodes: another batch had the same ones pending."""
        path = self.paths[row]
        return path.open is None and path.writes and path.published < self._tables.full_blocks(row)

    def attentive(self, rows: Rows) -> Rows:
        """The places in `rows` of those that are not lazy, int64 [k]. Empty if `num_attentive` is 0."""
        is_lazy = self.is_lazy[rows]
        return _NO_ROWS if is_lazy.all() else (~is_lazy).nonzero()[0]

    def begin_pending(self, row: int, end: int) -> None:
        """Make pending nodes of the full, uncached blocks that a row computes up to `end`; it fills its next block."""
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
        """Make nodes of the row's confirmed full blocks, with lookups where necessary. Returns duplicates of other
        device blocks, as (column, run, offset): the caller switches the tables that name them."""
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
                # Pending in a later batch: the confirmed block goes first, unless a row or run stands on the pending
                # one. Then this row looks again when its next block is full.
                if not self._give_way(run, at):
                    break
                continue
            block_id = self.block(DEVICE, run, at)
            if block_id < 0:
                self.reside(DEVICE, run, at, self._tables.blocks[0, row, column : column + 1].astype(np.int64))
            elif block_id != self._tables.blocks[0, row, column]:
                switches.append((column, run, at))
            path.run, path.at, path.published = run, at, column + 1
        return switches

    def nodes_of_forks(self, row: int) -> list[Node]:
        """Nodes after the row's closed path in its own blocks, which a fork of it published. Changes nothing."""
        path, tables = self.paths[row], self._tables
        found: list[Node] = []
        if path.open is not None or not path.writes:
            return found
        run, at = path.run, path.at
        for column in range(path.published, min(tables.full_blocks(row), int(tables.num_blocks[row]))):
            child = self._after(path.root, run, at, tables.block_bytes(row, column), self.confirmed_length)
            if child is None or self.block(DEVICE, *child) != tables.blocks[0, row, column]:
                break
            found.append(child)
            run, at = child
        return found

    def _give_way(self, run: Run, at: int) -> bool:
        """Withdraw an open run's pending nodes from `at` on, if no run or row stands on them. Return whether it did."""
        if run.row < 0 or any(offset >= at for offset in run.children or ()):
            return False
        if any(path.run is run and path.at >= at for path in self.paths.values()):
            return False
        # A row that shared them and went to the host may have left copies there.
        self._give_up(run, at)
        if at == 0:
            self._abandon_run(run.row, run)
        else:
            self.paths[run.row].guard = at
            self._set_lazy(run.row, False)
        return True

    def fall_back(self, row: int) -> None:
        """Cut the row's path and open run to its launched tokens, which fell. No other row stands on what is lost."""
        path = self.paths[row]
        run, full = path.open, self._tables.content_end(row) // self._block_size
        if run is not None:
            length = full - path.published
            self._give_up(run, max(length, 0))
            if length <= 0:
                self._abandon_run(row, run)
        if path.open is None:
            path.truncate(full)

    def _abandon_run(self, row: int, run: Run) -> None:
        """Drop the row's open run, which has no node any more and no confirmed child."""
        path = self.paths[row]
        path.open, path.guard = None, -1
        self._set_lazy(row, False)
        run.row = -1
        if self.log is not None:
            self.log.closed(run, row, 0)
        # If runs hang off it, they are withdrawn next, and it goes with the last of them.
        if not run.children:
            self._unlink(run)

    def confirm(self, batch: int) -> None:
        """Confirm the nodes of closed runs that the batch computed."""
        for run in self.pending.pop(batch, ()):
            run.forget_batch(batch)
        if self.log is not None:
            self.log.confirm()

    def withdraw(self, batch: int) -> None:
        """Withdraw nodes of closed runs that the batch, which did not run, was to compute. No row stands on them."""
        # A child's id is higher than its parent's.
        for run in sorted(self.pending.pop(batch, ()), key=lambda run: -run.id):
            length = run.first_of(batch)
            run.forget_batch(batch)
            if not run.length:
                # It went with the last of its children.
                continue
            if length < run.length:
                self._give_up(run, length)
                self._shorten(run, length)
            self._trim(run)
        if self.log is not None:
            self.log.confirm()

    def nodes_lost(self, flight: Flight) -> dict[Run, int]:
        """The first node of each run that the batch computes: if it does not run, no node from there on is content."""
        lost: dict[Run, int] = {}
        for run in self.pending.get(flight.number, ()):
            lost[run] = run.first_of(flight.number)
        for row, start, _ in flight.shares():
            path = self.paths[row]
            if path.open is not None:
                lost[path.open] = max(start // self._block_size - path.published, 0)
        return lost

    def first_on(self, row: int, lost: dict[Run, int]) -> int:
        """The row's first block, before its open run, whose node is in `lost` or behind one on its run; -1: none."""
        column = 0
        for run, first, stop in self.paths[row].spans(0):
            if run in lost and stop > lost[run]:
                return column + max(0, lost[run] - first)
            column += stop - first
        return -1

    def close_run(self, row: int, length: int | None = None) -> None:
        """Close the row's path and its open run, if any, which keeps its first `length` blocks (None: all)."""
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
        blocks = self._tables.blocks[0, row, start : start + length].astype(np.int64)
        self._keep(run, row, start, blocks)
        self.pools[DEVICE].carry(blocks, run)
        if run.retained:
            self.retentions.apply_to(run)
        if path.guard < 0:
            self.is_lazy[row] = False
            self.num_attentive += 1
        path.open, path.guard = None, -1
        path.run, path.at, path.published = run, length - 1, start + length

    def _note_pending(self, run: Run, row: int, start: int, length: int) -> None:
        first = self._tables.num_computed.item(row) // self._block_size - start
        if first >= length:
            return
        for batch, share in self._flights.shares_of(row):
            stop = min(share.end // self._block_size - start, length)
            if stop > max(first, 0):
                run.pending.append((batch, max(first, 0)))
                self.pending.setdefault(batch, []).append(run)
                first = stop

    def reside(self, place: int, run: Run, first: int, blocks: Blocks) -> None:
        """Place nodes of a closed run, from `first` on, in these used blocks of a place, int64 [n]."""
        self.pools[place].carry(blocks, run)
        self._put(place, run, first, blocks)
        if self.log is not None:
            self.log.came([(run, first, first + len(blocks))], place)

    def draw_for(self, place: int, spans: list[Span], count: int) -> Blocks:
        """Draw a block in a place for each of these `count` nodes, int64 [count]: span by span, last node first."""
        blocks, end = self.pools[place].draw(count, for_nodes=True), 0
        for run, first, stop in spans:
            start, end = end, end + stop - first
            mine = blocks[start:end][::-1]
            self.pools[place].run[mine] = run
            self._put(place, run, first, mine)
        if self.log is not None:
            self.log.came(spans, place)
        return blocks

    def _put(self, place: int, run: Run, first: int, blocks: Blocks) -> None:
        run.put(place, first, blocks)
        if run.retained:
            self.pools[place].set_levels(blocks, run.levels_of(np.arange(first, first + len(blocks))))

    def block(self, place: int, run: Run, at: int) -> int:
        """The block of a node in a place, -1 where it has none."""
        if run.row >= 0 and place == DEVICE:
            return self._tables.blocks.item(0, run.row, self.paths[run.row].published + at)
        return run.block(place, at)

    def clear(self) -> None:
        for pool in self.pools:
            pool.forget_all()
        self.runs.clear()
        self.pending.clear()
        for path in self.paths.values():
            path.run, path.at, path.published = None, -1, 0

    def digests(self, run: Run, stop: int, start: int = 0) -> list[bytes]:
        """Chained SHA-256 of the run's nodes from `start` to `stop` - 1, each computed once while the run lives."""
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
        if run.row < 0:
            return run.confirmed_length
        path = self.paths[run.row]
        length = self._tables.num_computed.item(run.row) // self._block_size - path.published
        # What follows a guarded end counts only after `publish` of this row has looked it up.
        return length if path.guard < 0 else min(length, path.guard)

    def _total_length(self, run: Run) -> int:
        if run.row < 0:
            return run.length
        return self._tables.content_end(run.row) // self._block_size - self.paths[run.row].published

    def _pending_length(self, run: Run) -> int:
        """Nodes of the run, pending ones included."""
        total = self._total_length(run)
        if run.row < 0 or self.paths[run.row].guard < 0:
            return total
        return min(total, self.paths[run.row].guard)

    def _after(
        self, root: bytes, run: Run | None, at: int, block: bytes, length_of: Callable[[Run], int]
    ) -> Node | None:
        """The node with these tokens after (`run`, `at`) or the root: in the same run, or the first of another."""
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
        """Extend the row's open run past the runs that hang off its end: the next block is not cached."""
        path.guard = -1
        self._set_lazy(row, True)

    def open_run(self, row: int, path: Path, key: bytes) -> None:
        """Open a run under `key` for a full block, not cached, that the row computes; the row's path is closed."""
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
        # As bool: to compare one of numpy's takes a microsecond.
        if bool(self.is_lazy[row]) is not is_lazy:
            self.is_lazy[row] = is_lazy
            self.num_attentive += -1 if is_lazy else 1

    def _unlink(self, run: Run) -> None:
        """Remove a run without residence and children from the tree, and what above it then has neither."""
        del self.runs[run.key]
        parent, at = run.parent, run.at
        # Unread events need its tokens and its parents' hashes.
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
        length = run.end
        if not length:
            run.length = 0
            self._unlink(run)
        elif length < run.length:
            self._shorten(run, length)

    def _shorten(self, run: Run, length: int) -> None:
        # Unread events need its tokens.
        run.shorten(length, length * self.block_bytes if self.log is None else len(run.tokens))

    def _give_up(self, run: Run, length: int) -> None:
        """Withdraw the run's nodes from `length` on: their blocks carry nothing."""
        for place, blocks in enumerate(run.blocks):
            if blocks is not None and run.is_any_there(place, length, len(blocks)):
                lost = blocks[length:]
                self.pools[place].forget_content(lost[lost >= 0])
                run.drop(place, length, len(blocks))

    def _evict(self, place: int, taken: list[Taken], blocks: Blocks) -> None:
        self.forget(place, self.nodes_in(place, taken), blocks)

    def nodes_in(self, place: int, taken: list[Taken]) -> list[Span]:
        """The nodes in blocks that a place evicts, in order, as spans whose last node comes first."""
        found: list[Span] = []
        for blocks, nodes, _ in taken:
            if nodes is not None:
                found.append(nodes)
            else:
                found += self._found_in(place, blocks)
        return found

    def _found_in(self, place: int, blocks: Blocks) -> list[Span]:
        runs, found, start = self.pools[place].run, list[Span](), 0
        while start < len(blocks):
            run: Run = runs.item(blocks.item(start))
            there = run.blocks[place]
            assert there is not None, "the run of a block has nodes there"
            stop = len(there)
            if there.item(-1) != blocks.item(start):
                stop = int((there == blocks[start]).argmax()) + 1
            first = max(0, stop - len(blocks) + start)
            nodes, mine = there[first:stop], blocks[start : start + stop - first][::-1]
            # Bytes: most often they are equal, and comparing them costs a fifth of a numpy reduction.
            if nodes.tobytes() != mine.tobytes():
                first = stop - int((nodes != mine)[::-1].argmax())
            found.append((run, first, stop))
            start += stop - first
        return found

    def node_of_each(self, place: int, blocks: Blocks) -> list[Node | None]:
        pool, found = self.pools[place], list[Node | None]()
        offsets: dict[Run, dict[int, int]] = {}
        runs, has_content = pool.run[blocks].tolist(), pool.has_content(blocks).tolist()
        for block, run, has_node in zip(blocks.tolist(), runs, has_content, strict=True):
            if has_node and run not in offsets:
                offsets[run] = {there: at for at, there in enumerate(run.blocks[place].tolist())}
            found.append((run, offsets[run][block]) if has_node else None)
        return found

    def forget(self, place: int, spans: list[Span], blocks: Blocks) -> None:
        """Remove these nodes from these blocks of a place. Oldest first: children are evicted before parents."""
        if self.log is not None:
            self.log.left(spans, place)
            self.pools[place].run[blocks] = None
        for run, first, stop in spans:
            if place == DEVICE:
                self.lifetime_steps += (stop - first) * (self.batch - run.born)
            run.drop(place, first, stop)
            if run.row < 0:
                self._trim(run)

    def _span_blocks(self, place: int, run: Run, first: int, stop: int) -> Blocks:
        if run.row < 0 or place != DEVICE:
            there = run.blocks[place]
            assert there is not None, "the nodes reside there"
            return there[first:stop]
        start = self.paths[run.row].published
        return self._tables.blocks[0, run.row, start + first : start + stop].astype(np.int64)

    def run_tokens(self, run: Run, first: int, stop: int) -> bytes:
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
