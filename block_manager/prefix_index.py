"""The exact prefix cache: which content resides in which block, and which row may share it.

A lookup compares token ids, not hashes. Each row has a path through the content: open, guarded or closed (`Path`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np

from paged.base.arguments import Tokens

from .content_key import namespace_digest, node_prefix
from .flights import Flight, Flights
from .pool import Pool, Retentions
from .runs import DEVICE, HOST, NO_BLOCKS, NUM_PLACES, Blocks, Node, Path, Run, Span, num_nodes, spans_to, stretches
from .tables import Tables


class Match(NamedTuple):
    """A lookup's result: nodes. The last `num_pending` of them are pending, or stand on a pending one."""

    spans: list[Span]
    num_pending: int = 0

    @property
    def num_blocks(self) -> int:
        return num_nodes(self.spans)

    @property
    def num_confirmed(self) -> int:
        return num_nodes(self.spans) - self.num_pending


class PrefixIndex:
    def __init__(
        self, tables: Tables, flights: Flights, device: Pool, host: Pool, *sides: Pool, host_gives_way: bool
    ) -> None:
        """`sides`: two pools of each, device and host, the same for all sides. `host_gives_way`: see `Retentions`."""
        self._tables = tables
        self._flights = flights
        # By place.
        self.pools = (device, host, *sides)
        self.retentions = Retentions(self.pools, host_gives_way=host_gives_way)
        self._block_size = tables.block_size
        self.block_bytes = 4 * tables.block_size
        self.runs: dict[bytes, Run] = {}
        # Ends of rows within a block, by the key prefix of the node before them.
        self.ends: dict[bytes, Run] = {}
        self.paths: dict[int, Path] = {}
        # Closed runs with pending nodes, by the batch that computes these.
        self.pending: dict[int, list[Run]] = {}
        # How many rows `tables.looks_up` marks. At 0 a step does not read it.
        self.num_looking_up = 0
        self.batch = 1
        # Over all pages that were evicted from the device, the sum of steps since the run of their node began.
        self.lifetime_steps = 0
        self._run_ids = count()
        # The last `_most_gone` evictions, by the digest of the first node of each: place, number of nodes, step.
        self.gone: OrderedDict[bytes, tuple[int, int, int]] = OrderedDict()
        self._most_gone = 0
        # Runs whose nodes came to a place, left it or were confirmed, but not by growth; None until events are read.
        self.changed: set[Run] | None = None
        self._num_places, self.has_sides = len(self.pools), bool(sides)
        for place, pool in enumerate(self.pools[: 2 * NUM_PLACES]):
            pool.on_eviction(partial(self._evict, place), has_places=place >= NUM_PLACES)

    def listen(self) -> set[Run]:
        """Return the set `changed`, with all runs of today in it. The reader removes the runs that it has read."""
        self.changed = set(self.runs.values())
        return self.changed

    def remember_evicted(self, most: int) -> None:
        """Remember the last `most` evictions in `gone`, from now on."""
        self._most_gone = most

    def open_path(
        self, row: int, root: bytes, *, reads: bool = True, writes: bool = True, key: bytes = b"", level: int = 0
    ) -> Path:
        """Open a path for a row. With a `key`, that of its first block, begin a run: the row computes that block."""
        path = self.paths[row] = Path(root, reads=reads, writes=writes, open_level=level if self.has_sides else 0)
        if key:
            self.open_run(row, path, key)
        else:
            self._mark(row, path)
        return path

    def fork_path(self, row: int, child: int) -> None:
        """Open a path for the child, a fork, that ends where the row's does. It includes pending nodes."""
        path = self.paths[child] = self.paths[row].closed(self._pending_length)
        self._mark(child, path)

    def release_path(self, row: int) -> tuple[int, Blocks, int, Run | None]:
        """Drop the path of a row that ends; its open run stays as content. Returns (first, blocks, num, run). Columns
        before `first` carry nodes. `blocks`, int64 [n], are the row's blocks from there on: release the first `num` as
        nodes of `run`, which they do not carry yet; the rest carries no node."""
        path, tables, size = self.paths[row], self._tables, self._block_size
        run, start = path.open, path.published
        num = tables.num_computed.item(row) // size - start
        is_confirmed = 0 < num == tables.content_end(row) // size - start
        if run is not None and not (is_confirmed and path.guard < 0 and not run.retained and not run.open_level):
            self.close_run(row)
            run, start = None, path.published
        blocks = tables.blocks[0, row, start : tables.num_blocks.item(row)].astype(np.int64)
        if run is None:
            num = 0
            self.num_looking_up -= path.writes
        else:
            self._keep(run, row, start, blocks[:num])
        del self.paths[row]
        return start, blocks, num, run

    def _keep(self, run: Run, row: int, start: int, blocks: Blocks) -> None:
        """Close the run. Its nodes get the row's tokens from block `start` on, and these blocks, int64 [n]."""
        first, stop = start * self._block_size, (start + len(blocks)) * self._block_size
        run.close(self._tables.tokens[row, first:stop].tobytes(), blocks)
        if self.changed is not None:
            self.changed.add(run)

    def contents(self, tier: str) -> set[tuple[bytes, ...]]:
        """Every confirmed node in a tier, as the path to it: encoded namespace, then the token bytes of each block."""
        size, place = self.block_bytes, ("device", "host").index(tier)
        found: set[tuple[bytes, ...]] = set()
        for run in self.runs.values():
            length = max(self.confirmed_length(run), 0)
            if there := [at for at, block in enumerate(self.blocks_in(place, run, 0, length).tolist()) if block >= 0]:
                spans = spans_to(run, length - 1)
                data = b"".join(self.run_tokens(*span) for span in spans)
                path = (spans[0][0].key[:-size], *(data[start : start + size] for start in range(0, len(data), size)))
                found.update(path[: len(path) - length + at + 1] for at in there)
        return found

    def hashes(self, row: int) -> list[bytes]:
        """Chained SHA-256 of the row's confirmed nodes, first to last."""
        spans = self.paths[row].closed(self.confirmed_length).spans(0)
        return [digest for run, first, stop in spans for digest in self.digests(run, stop, first)]

    def match(self, path: Path, tokens: Tokens, limit: int, place: int = DEVICE, after: Sequence[Span] = ()) -> Match:
        """Find the longest content of these tokens, from the root on, behind the closed `path` and the nodes `after` it:
        at most `limit` blocks behind the path. Finds confirmed nodes that reside in the place; on the device also
        pending ones, which later batches may share. Changes nothing."""
        start = path.published * self._block_size
        data = tokens[start : start + limit * self._block_size].tobytes()
        run, at = path.run, path.at
        if after:
            run, _, stop = after[-1]
            at = stop - 1
        size, block, num_pending = self.block_bytes, num_nodes(after), 0
        spans: list[Span] = []
        while block < limit:
            if run is not None:
                first = at + 1
                if run.row < 0:
                    count = run.num_there(place, first, run.length if place == DEVICE else run.confirmed_length)
                else:
                    count = self._pending_length(run) - first if place == DEVICE else 0
                count = min(count, limit - block)
                same = self._common(run, first, data, block, count) if count > 0 else 0
                if same:
                    at += same
                    spans.append((run, first, at + 1))
                    # Behind a pending node all are.
                    confirmed = first if num_pending else self.confirmed_length(run)
                    if at >= confirmed:
                        num_pending += at + 1 - max(first, confirmed)
                    block += same
                    if block == limit:
                        break
                elif not first:
                    break
            prefix = path.root if run is None else node_prefix(run.id, at)
            child = self.runs.get(prefix + data[block * size : (block + 1) * size])
            if child is None:
                break
            run, at = child, -1
        return Match(spans, num_pending)

    def match_tiers(self, path: Path, tokens: Tokens, limit: int, match: Match) -> Match:
        """Add to a match what only the host has behind it, if no node of it is pending."""
        if match.num_pending:
            return match
        return Match(match.spans + self.match(path, tokens, limit, HOST, match.spans).spans)

    def blocks_of(self, place: int, spans: list[Span]) -> Blocks:
        """The block of each of these nodes in a place, int64 [n], -1: it has none; of the full group in open runs, too."""
        parts = [self.blocks_in(place, *span) for span in spans]
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else NO_BLOCKS

    def blocks_in(self, place: int, run: Run, first: int, stop: int) -> Blocks:
        """`blocks_of` of one span. Not to be written to."""
        if run.row >= 0 and place == DEVICE:
            start = self.paths[run.row].published
            return self._tables.blocks[0, run.row, start + first : start + stop].astype(np.int64)
        there = run.blocks[place][first:stop]
        return there if len(there) == stop - first else run.blocks_in(place, first, stop)

    def block(self, place: int, run: Run, at: int) -> int:
        """The block of a node in a place; -1: it has none."""
        return self.blocks_in(place, run, at, at + 1).item()

    def fills_next(self, row: int) -> bool:
        """Whether the row's launched tokens fill the block that it looks up next."""
        return self.paths[row].fills_next(self._tables.content_end(row) // self._block_size)

    def is_behind(self, row: int) -> bool:
        """Whether the row has confirmed blocks that are no nodes, because another batch had the same ones pending."""
        path = self.paths[row]
        return path.open is None and path.fills_next(self._tables.full_blocks(row))

    def begin_pending(self, row: int) -> None:
        """Make pending nodes of full blocks that a row computes, unless they are cached. It fills its next block."""
        path = self.paths[row]
        if path.open is not None:
            self._pass_guard(row, path)
            return
        for node in self.nodes_of_forks(row):
            path.step_on(*node)
        if self.fills_next(row):
            block = self._tables.block_bytes(row, path.published)
            if self._after(path, block, self._total_length) is None:
                self.open_run(row, path, path.prefix + block)

    def publish(self, row: int) -> list[tuple[int, int]]:
        """Make nodes of the row's confirmed full blocks; look up where necessary. Returns (column, other block) of each
        block that duplicates another one on the device: the caller replaces it in the tables that name it."""
        path, tables = self.paths[row], self._tables
        switches: list[tuple[int, int]] = []
        full = tables.full_blocks(row)
        if not path.fills_next(full):
            return switches
        if path.open is not None:
            if self._pass_guard(row, path):
                return switches
            self.close_run(row, path.guard)
        while path.published < full:
            column = path.published
            block = tables.block_bytes(row, column)
            found = self._after(path, block, self._pending_length)
            if found is None:
                self.open_run(row, path, path.prefix + block)
                break
            run, at = found
            if self.confirmed_length(run) <= at:
                # The node is pending in a later batch. It gives way to the confirmed block, unless a row or run stands
                # on it. Then this row looks again when its next block is full.
                if not self._give_way(run, at):
                    break
                continue
            block_id = self.block(DEVICE, run, at)
            if block_id < 0:
                self.reside(DEVICE, run, at, tables.blocks[0, row, column : column + 1].astype(np.int64))
            elif block_id != tables.blocks[0, row, column]:
                switches.append((column, block_id))
            path.step_on(run, at)
        return switches

    def nodes_of_forks(self, row: int) -> list[Node]:
        """Nodes behind the row's closed path that reside in its own blocks: a fork published them. Changes nothing."""
        path, tables, found = self.paths[row], self._tables, list[Node]()
        full = min(tables.full_blocks(row), tables.num_blocks.item(row))
        if path.open is not None or not path.fills_next(full):
            return found
        path = path.closed(self.confirmed_length)
        while path.published < full:
            node = self._after(path, tables.block_bytes(row, path.published), self.confirmed_length)
            if node is None or self.block(DEVICE, *node) != tables.blocks[0, row, path.published]:
                break
            found.append(node)
            path.step_on(*node)
        return found

    def _give_way(self, run: Run, at: int) -> bool:
        """Withdraw an open run's pending nodes from `at` on if no run or row stands on them. Return whether it did."""
        stands = (path.at for path in self.paths.values() if path.run is run)
        if run.row < 0 or any(offset >= at for offset in (*run.children, *stands)):
            return False
        # In all places: a row that shared them may have copied them to the host.
        self._give_up(run, at)
        if at:
            self._guard(run.row, at)
        else:
            self.close_run(run.row, 0)
        return True

    def fall_back(self, row: int) -> None:
        """Cut the row's path and open run at its launched tokens, which fell. No other row stands on what is lost."""
        path, full = self.paths[row], self._tables.content_end(row) // self._block_size
        if path.open is not None:
            length = max(full - path.published, 0)
            self._give_up(path.open, length)
            if not length:
                self.close_run(row, 0)
        if path.open is None:
            path.truncate(full)

    def confirm(self, batch: int) -> None:
        """Confirm the nodes of closed runs that the batch computed."""
        runs = self.pending.pop(batch, ())
        for run in runs:
            del run.pending[batch]
        if self.changed is not None:
            self.changed.update(runs)

    def withdraw(self, batch: int) -> None:
        """Withdraw the nodes of closed runs that the batch, which did not run, computes. No row stands on them."""
        # Children first: their ids are higher.
        runs = sorted(self.pending.pop(batch, ()), key=lambda run: -run.id)
        for run in runs:
            length = run.pending.pop(batch)
            if run.length:
                # A run without nodes was removed with the last of its children.
                self._give_up(run, length)
                self._trim(run)
        if self.changed is not None:
            self.changed.update(runs)

    def nodes_lost(self, flight: Flight) -> dict[Run, int]:
        """By run, the first node that the batch computes. If it does not run, no node from there on is content."""
        number = flight.number
        lost = {run: run.pending[number] for run in self.pending.get(number, ())}
        for row, start, _ in flight.shares():
            path = self.paths[row]
            if path.open is not None:
                lost[path.open] = max(start // self._block_size - path.published, 0)
        return lost

    def first_on(self, row: int, lost: dict[Run, int]) -> int:
        """The row's first column, before its open run, with a node that is lost: `lost[run]` or later; -1: none."""
        column = 0
        for run, first, stop in self.paths[row].spans(0):
            if run in lost and stop > lost[run]:
                return column + max(0, lost[run] - first)
            column += stop - first
        return -1

    def close_run(self, row: int, length: int | None = None) -> None:
        """Close the row's path and its open run, if it has one. The run keeps its first `length` nodes (None: all)."""
        path = self.paths[row]
        run, start = path.open, path.published
        if run is None:
            return
        length = max(self._pending_length(run) if length is None else length, 0)
        self._note_pending(run, row, start, length)
        blocks = self.blocks_in(DEVICE, run, 0, length)
        self._keep(run, row, start, blocks)
        self.pools[DEVICE].carry(blocks, run)
        if run.retained or run.open_level:
            self.retentions.apply_to(run)
        path.close(length)
        self._mark(row, path)
        # A run without nodes goes now, or with the last run that hangs off it: those are withdrawn next.
        if not length and not run.children:
            self._unlink(run)

    def _note_pending(self, run: Run, row: int, start: int, length: int) -> None:
        first = self._tables.num_computed.item(row) // self._block_size - start
        if first >= length:
            return
        for batch, share in self._flights.shares_of(row):
            stop = min(share.end // self._block_size - start, length)
            if stop > max(first, 0):
                run.note_pending(batch, max(first, 0))
                self.pending.setdefault(batch, []).append(run)
                first = stop

    def num_behind(self, run: Run, at: int) -> int:
        """How many runs hang off this node; ends of rows do not count."""
        return run.children.get(at, 0) - (self.end_of(run, at) is not None)

    def end_of(self, run: Run, at: int) -> Run | None:
        return self.ends.get(node_prefix(run.id, at))

    def add_end(self, path: Path, tokens: bytes, blocks: dict[int, int]) -> None:
        """Make used blocks, by place, the end of a row behind a closed path, with these tokens; an older end goes."""
        if (before := self.ends.get(path.prefix)) is not None:
            self._give_up(before, 0)
            self._unlink(before)
        end = Run(next(self._run_ids), path.prefix, path.run, path.at, -1, self.batch, self._num_places)
        end.become_end(tokens)
        self.ends[end.key] = end
        if path.run is not None:
            path.run.add_child(path.at)
        for place, block in blocks.items():
            self.reside(place, end, 0, np.array([block]))

    def reside(self, place: int, run: Run, first: int, blocks: Blocks) -> None:
        """Let the run's nodes from `first` on reside in these used blocks of a place, int64 [n]."""
        self.pools[place].carry(blocks, run, place)
        run.put(place, first, blocks)
        if run.retained or run.open_level or (self.retentions.host_gives_way and place % NUM_PLACES == HOST):
            offsets = np.arange(first, first + len(blocks))
            self.pools[place].set_levels(blocks, self.retentions.levels_of(place, run, offsets))
        self._set_host_levels(place, run)
        if self.changed is not None and not run.is_end:
            self.changed.add(run)

    def _set_host_levels(self, place: int, run: Run) -> None:
        """Set the run's levels on the host after `place` changed, if that is one on the device."""
        if self.retentions.host_gives_way and place % NUM_PLACES == DEVICE and len(run.blocks[place + HOST]):
            self.retentions.apply_to(run)

    def draw_for(self, place: int, run: Run, first: int, stop: int, pages: int = 1) -> Blocks:
        """Draw a block in a place for each of these nodes. Returns them, int64 [n], the last node's first."""
        blocks = self.pools[place].draw(stop - first, pages)
        self.reside(place, run, first, blocks[::-1])
        return blocks

    def clear(self) -> None:
        """Forget all content. No block of either tier is used, so no path has a node."""
        for pool in self.pools:
            pool.forget_all()
        for run in [*self.runs.values(), *self.ends.values()]:
            # A session may still refer to it.
            run.vanish()
        self.runs.clear()
        self.ends.clear()
        self.pending.clear()
        self.retentions.clear()
        self.gone.clear()

    def digests(self, run: Run, stop: int, start: int = 0) -> list[bytes]:
        """Chained SHA-256 of the run's nodes from `start` to `stop` - 1. Each is computed once while the run lives."""
        known = len(run.digests)
        if known < stop:
            before = self.digest_before(run, known) or namespace_digest(run.key[: -self.block_bytes])
            run.extend_digests(before, self.run_tokens(run, known, stop), self.block_bytes)
        return run.digests[start:stop]

    def digest_before(self, run: Run, at: int) -> bytes | None:
        """The digest of the node before node `at` of the run; None: `at` is the first node of a namespace."""
        if at:
            return self.digests(run, at, at - 1)[0]
        return None if run.parent is None else self.digests(run.parent, run.at + 1, run.at)[0]

    def confirmed_length(self, run: Run) -> int:
        if run.row < 0:
            return run.confirmed_length
        # Blocks behind a guarded end count only when this row's `publish` has looked them up.
        return self.paths[run.row].open_length(self._tables.num_computed.item(run.row) // self._block_size)

    def _pending_length(self, run: Run) -> int:
        """Nodes of the run, with pending ones."""
        if run.row < 0:
            return run.length
        return self.paths[run.row].open_length(self._tables.content_end(run.row) // self._block_size)

    def _total_length(self, run: Run) -> int:
        """Nodes of the run, with pending ones and those that will follow a guarded end."""
        if run.row < 0:
            return run.length
        return self._tables.content_end(run.row) // self._block_size - self.paths[run.row].published

    def _after(self, path: Path, block: bytes, length_of: Callable[[Run], int]) -> Node | None:
        """The node with this block's tokens behind a closed path: the next of the same run, or the first of another."""
        run, at = path.run, path.at + 1
        if run is not None and at < length_of(run) and self.run_tokens(run, at, at + 1) == block:
            return run, at
        child = self.runs.get(path.prefix + block)
        return None if child is None else (child, 0)

    def _pass_guard(self, row: int, path: Path) -> bool:
        """Lift the guard of the row's open run unless a run there begins with its next block. Return whether it did."""
        assert path.open is not None, "only an open run is guarded"
        block = self._tables.block_bytes(row, path.published + path.guard)
        if node_prefix(path.open.id, path.guard - 1) + block in self.runs:
            return False
        self._guard(row, -1)
        return True

    def _guard(self, row: int, length: int) -> None:
        """Guard the row's open run at `length` nodes; -1: lift the guard."""
        path = self.paths[row]
        path.guard_at(length)
        self._mark(row, path)

    def open_run(self, row: int, path: Path, key: bytes) -> None:
        """Open a run under `key` for a full block that is not cached and that the row computes. Its path is closed."""
        parent, at = path.run, path.at
        run = Run(next(self._run_ids), key, parent, at, row, self.batch, self._num_places)
        self.runs[key] = run
        self._tables.next_event[row] = (path.published + 1) * self._block_size
        path.open_run(run)
        self._mark(row, path)
        if parent is not None:
            parent.add_child(at)
            if parent.row >= 0 and at + 1 >= self._total_length(parent):
                self._guard(parent.row, at + 1)

    def _mark(self, row: int, path: Path) -> None:
        """Set `tables.looks_up` of the row, whose path changed its state."""
        if self._tables.looks_up.item(row) is not (looks_up := path.guard >= 0):
            self._tables.looks_up[row] = looks_up
            self.num_looking_up += 1 if looks_up else -1

    def _unlink(self, run: Run) -> None:
        """Remove a run that resides nowhere and has no child from the tree. Then trim its parent, too."""
        del (self.ends if run.is_end else self.runs)[run.key]
        parent, at = run.parent, run.at
        # Unread events need its tokens and the hashes of its parents.
        run.unlink(keep_content=self.changed is not None)
        if parent is None or not parent.remove_child(at):
            return
        if parent.row < 0:
            self._trim(parent)
        elif self.paths[parent.row].guard == at + 1:
            self._guard(parent.row, -1)

    def _trim(self, run: Run) -> None:
        """Drop the last nodes of a closed run: those that reside nowhere and have no child."""
        if not (length := run.end):
            self._unlink(run)
        elif length < run.length:
            # Unread events need the tokens.
            run.shorten(length, length * self.block_bytes if self.changed is None else len(run.tokens))

    def _give_up(self, run: Run, first: int, first_place: int = DEVICE, stop: int | None = None) -> None:
        """Withdraw the run's nodes from `first` on, before `stop`, in this and later places: their blocks lose them."""
        for place in range(first_place, len(self.pools)):
            blocks = run.blocks[place]
            if first < len(blocks):
                lost = blocks[first:stop]
                self.pools[place].forget_content(lost[lost >= 0])
                run.drop(place, first, len(blocks) if stop is None else stop)

    def _evict(self, place: int, taken: list[Blocks], blocks: Blocks) -> None:
        for its_place, parts, _ in self.by_place(place, taken, blocks):
            self.forget(its_place, self.nodes_in(its_place, parts))

    def by_place(self, place: int, taken: list[Blocks], blocks: Blocks) -> Iterator[tuple[int, list[Blocks], Blocks]]:
        """Split what a pool evicts by place. Yields (place, parts, their blocks); each part lies in one place. Sides
        come first, because their content goes with nodes of the full group. `place`: of a pool that has one alone."""
        pool = self.pools[place]
        if pool.place is None:
            yield place, taken, blocks
            return
        places = [pool.place.item(part.item(0)) for part in taken]
        for place in sorted(set(places), reverse=True):
            parts = [part for part, its_place in zip(taken, places, strict=True) if its_place == place]
            yield place, parts, np.concatenate(parts)

    def nodes_in(self, place: int, taken: list[Blocks]) -> list[Span]:
        """The nodes in blocks that a place evicts, as spans in order of eviction; a span's last node goes first."""
        found, runs = list[Span](), self.pools[place].run
        for blocks in taken:
            start = 0
            while start < len(blocks):
                last = blocks.item(start)
                run: Run = runs.item(last)
                there = run.blocks[place]
                stop = len(there)
                if there.item(-1) != last:
                    stop = int((there == last).argmax()) + 1
                first = max(0, stop - len(blocks) + start)
                # After a row ended, both are most often views of one array, and equal.
                if there.base is None or there.base is not blocks.base:
                    residing, mine = there[first:stop], blocks[start : start + stop - first][::-1]
                    # They are most often equal. Comparing bytes costs a fifth of a numpy reduction.
                    if residing.tobytes() != mine.tobytes():
                        first = stop - int((residing != mine)[::-1].argmax())
                found.append((run, first, stop))
                start += stop - first
        return found

    def loose_end(self, place: int, way: list[Node], most: int | None = None) -> list[Span]:
        """The loose end of a way in a place: its last cached nodes, `most` at most, off which no other run hangs.
        Returns the last span first. Skips runs of the way that have no node, or none yet."""
        pool, found, child = self.pools[place], list[Span](), None
        for run, at in way:
            if not run.length:
                continue
            own = -1 if child is None else child.at
            branching = [offset for offset in run.children if self.num_behind(run, offset) > (offset == own)]
            first = max(branching, default=-1) + 1
            there, child = run.blocks[place], run
            if len(there) > at + 1:
                break
            blocks = there[first:][::-1][:most]
            is_loose = (pool.state[blocks] < 0) & (blocks >= 0)
            num = len(blocks) if is_loose.all() else int(is_loose.argmin())
            if num:
                found.append((run, len(there) - num, len(there)))
            most = None if most is None else most - num
            if first or num < len(there):
                break
        return found

    def ends_of(self, run: Run, first: int = 0) -> list[Run]:
        """The ends of rows behind nodes of the run, from `first` on."""
        ends = [self.end_of(run, at) for at in run.children if at >= first] if self.ends else []
        return [end for end in ends if end is not None]

    def pages(self, place: int) -> Pool:
        """The pool of a tier's pages. `place`: of its full group, whose own pool may count positions alone."""
        return self.pools[place - NUM_PLACES]

    def cached_blocks(self, place: int, spans: list[Span]) -> list[Blocks]:
        """By group, the cached blocks with pages that a tier has of these nodes, in the order in which they go, int64
        [n]: sides, with ends of rows first, then the full group. `place`: of the full group on this tier."""
        pool, found = self.pages(place), list[Blocks]()
        both = [(end, 0, 1) for run, first, _ in spans for end in self.ends_of(run, first)] + spans
        for at in range(place, self._num_places, NUM_PLACES):
            if self.pools[at] is pool:
                parts = [run.blocks_in(at, first, stop)[::-1] for run, first, stop in both]
                blocks = np.concatenate([NO_BLOCKS, *parts])
                blocks = blocks[blocks >= 0]
                found.append(blocks[pool.state[blocks] < 0])
        return found[::-1]

    def node_of_each(self, place: int, blocks: Blocks) -> list[Node | None]:
        pool = self.pools[place]
        carries = pool.has_content(blocks).tolist()
        each = zip(blocks.tolist(), pool.run[blocks].tolist(), carries, strict=True)
        return [(run, int((run.blocks[place] == block).argmax())) if has else None for block, run, has in each]

    def forget(self, place: int, spans: list[Span]) -> None:
        """Remove these nodes from a place. `spans`: oldest first, so that children go before parents."""
        if self.has_sides:
            # Ends first, so that `_lose` does not withdraw them, too. Skip runs that went when the host made room.
            spans = [span for span in spans if span[0].length or span[0].row >= 0]
            spans.sort(key=lambda span: not span[0].is_end)
        if self.changed is not None:
            self.changed.update(run for run, _, _ in spans if not run.is_end)
        pool, are_sides = self.pools[place], place >= NUM_PLACES
        if self._most_gone and not are_sides:
            for run, first, stop in spans:
                if not run.is_end:
                    (digest,) = self.digests(run, first + 1, first)
                    self.gone[digest] = place, stop - first, self.batch
                    self.gone.move_to_end(digest)
            while len(self.gone) > self._most_gone:
                self.gone.popitem(last=False)
        for run, first, stop in spans:
            if pool is self.pages(DEVICE):
                self.lifetime_steps += pool.pages_in(run.blocks[place][first:stop]) * (self.batch - run.born)
            run.drop(place, first, stop)
            self._set_host_levels(place, run)
            if are_sides:
                run.note_evicted(place - place % NUM_PLACES, first, stop)
            elif self.has_sides:
                self._lose(run, first)
            if run.row < 0 and run.length:
                # A run of which only ends of rows were left was removed with the last of them.
                self._trim(run)

    def _lose(self, run: Run, first: int) -> None:
        """Withdraw what no prompt can begin with now: the sides' content of nodes from `first` on that the full group
        has on no tier, and ends of rows behind nodes that are on no tier, or left the device before the end."""
        is_there = np.maximum(*(run.blocks_in(place, first, run.length) for place in (DEVICE, HOST))) >= 0
        for begin, stop in stretches(~is_there):
            self._give_up(run, first + begin, NUM_PLACES, first + stop)
        for at in list(run.children) if self.ends and run.row < 0 else ():
            end = self.end_of(run, at)
            if end is not None and run.block(DEVICE, at) < 0 and (run.block(HOST, at) < 0 or end.block(DEVICE, 0) >= 0):
                self._give_up(end, 0)
                self._unlink(end)

    def run_tokens(self, run: Run, first: int, stop: int) -> bytes:
        size = self.block_bytes
        if run.row < 0:
            return run.tokens[first * size : stop * size]
        column, size = self.paths[run.row].published, self._block_size
        return self._tables.tokens[run.row, (column + first) * size : (column + stop) * size].tobytes()

    def _common(self, run: Run, offset: int, data: bytes, block: int, count: int) -> int:
        """How many nodes, of the `count` from `offset` on, match `data` from block `block` on before one differs."""
        size = self.block_bytes
        mine = self.run_tokens(run, offset, offset + count)
        if data.startswith(mine, block * size):
            return count
        theirs = data[block * size : (block + count) * size]
        differs = np.frombuffer(mine, np.int32) != np.frombuffer(theirs, np.int32)
        return int(differs.argmax()) // self._block_size
