"""Sharing by content, with a prefix cache: hits, rows that share pending blocks, and duplicates that are released.

batch 7        leader | b1 | b2 | b3 pending |   batch 7 is confirmed: b3 is a node, and both rows keep it
batch 7 or 8   sharer | b1 | b2 | b3 | b9 |      batch 7 is cancelled: the sharer's table ends before b3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.errors import UnknownContent

from .content_key import extend_chain, namespace_digest
from .events import EventLog
from .flights import Flight, Flights
from .growth import Growth
from .layout import Counts
from .pool import Retained
from .prefix_index import Match, PrefixIndex
from .runs import DEVICE, HOST, NO_BLOCKS, Blocks, Node, Path, Span, first_of, num_nodes, rest_of, upwards
from .side_content import Found, HitEnd, Part, SideContent
from .tables import Rows
from .tiers import Offload, Tiers
from .views import WINDOW


class Hit(NamedTuple):
    """The cached prefix of a prompt: `num_tokens` in device `blocks`, int64 [n], then `host_tokens` of the host."""

    num_tokens: int
    blocks: Blocks
    host_tokens: int = 0


class Sharer(NamedTuple):
    """A row that shares blocks which this batch or earlier ones were computing for another row when it took them. When
    the batch has run, so have all that they depend on."""

    batch: int
    row: int
    uid: int
    is_counted: bool


class Sharing:
    """Hits, publication, duplicates. Counts lookups as `MemoryStats`; `recent`: (tokens, found) of the last ones."""

    def __init__(self, flights: Flights, index: PrefixIndex, growth: Growth, tiers: Tiers, sides: SideContent) -> None:
        self._tables, self._flights, self._index, self._growth = growth.tables, flights, index, growth
        self._tiers, self._offload, self._sides = tiers, tiers.offload, sides
        self._device = index.pools[DEVICE]
        self._sharers: list[Sharer] = []
        self.queries = self.query_tokens = self.hit_tokens = self.pending_hit_tokens = self.host_hit_tokens = 0
        self.recent: deque[tuple[int, int]] = deque(maxlen=WINDOW)

    def count_lookup(self, num_tokens: int, found: int) -> None:
        self.queries += 1
        self.query_tokens += num_tokens
        self.recent.append((num_tokens, found))

    def extend_hit(self, row: int, *, count: bool = True, room: int | None = None) -> int:
        """Look up content behind the row's blocks, and share or load it. Returns the tokens won: 0 for a row in flight,
        or one with blocks beyond its nodes, which it computed itself. Loads what only the host has where that is worth
        it (`load_where`), into at most `room` pages (None: all that can be drawn)."""
        if (limit := self._begin_lookup(row)) <= 0:
            return 0
        if self._offload is not None:
            # Before the lookup, so that this draw evicts nothing that is found.
            self._growth.draw_promised()
        match, loaded = self._index.match(self._index.paths[row], self._tables.tokens[row], limit), 0
        if self._growth.layout.sides:
            won, loaded = self._take_standing(row, match, limit, room, count=count)
        else:
            won = self._take(row, match, count=count) if match.spans else 0
            if self._offload is not None and self._growth.copies.may_copy_content and not match.num_pending:
                loaded = self._load(row, self._offload, limit - match.num_blocks, room)
                won += loaded
        if count:
            self.hit_tokens += won
            self.host_hit_tokens += loaded
        return won

    def _begin_lookup(self, row: int) -> int:
        """Publish what the row has computed. Return how many blocks behind that may be found: 0 or less if none can."""
        index, tables, path = self._index, self._tables, self._index.paths[row]
        if tables.num_launched[row] != tables.num_computed[row]:
            return 0
        if index.is_behind(row):
            # Another batch had the same blocks pending. It may have ended.
            self.publish(row)
        if path.open is not None or tables.num_blocks[row] != path.published or not path.reads:
            return 0
        if path.run is None and path.root + tables.block_bytes(row, 0) not in index.runs:
            # The first block of most new prompts is not cached.
            return 0
        return (int(tables.num_tokens[row]) - 1) // tables.block_size - path.published

    def _take_standing(self, row: int, match: Match, limit: int, room: int | None, *, count: bool) -> tuple[int, int]:
        """Choose the part of the match, or a longer one with loads, that all groups have, load it, and let the row
        share it. Returns the tokens won, and how many of them were loaded."""
        tables, sides, path = self._tables, self._sides, self._index.paths[row]
        have, known = path.published, tables.tokens[row, : tables.num_tokens[row]]
        here, both = sides.find(path, known, match, have, may_copy=self._growth.copies.may_copy_content)
        found, brought, won = here, [], 0
        if both is not here and self._offload is not None:
            room = self._growth.num_unpromised if room is None else room
            cheapest, parts = sides.cheapest(here, both, have, room, self._offload.is_worth_loading)
            if brought := self._offload.bring(parts):
                found = cheapest
        loaded = sides.length_of(found) - sides.length_of(here)
        sides.note(row, both.cut(found.num_blocks, found.end), have + limit, have, count=count, from_host=loaded)
        if found.num_blocks:
            won = self._take(row, found.hit, count=count, found=found)
        if found.end is not None:
            won += sides.ends.take(row, have, found.end)
        for place, blocks in brought:
            self._index.pools[place].release(blocks)
        return won, loaded

    def _take(self, row: int, match: Match, *, count: bool, found: Found | None = None) -> int:
        """Let the row share what was found on the device; where there are sides, `found`. Returns the tokens won."""
        index, tables, size = self._index, self._tables, self._tables.block_size
        if match.num_pending:
            # A pending block may be promised and not drawn yet. The caller made sure that this draw evicts nothing.
            self._growth.draw_promised()
        have, blocks = index.paths[row].published, index.blocks_of(DEVICE, match.spans)
        tables.ensure_columns(have + len(blocks))
        self._device.hold(blocks)
        if found is not None:
            self._sides.take(row, have, found)
        won = self._go_on(row, blocks, match.spans[-1])
        if match.num_pending:
            self._sharers.append(Sharer(index.batch, row, tables.uid.item(row), count))
            if count:
                self.pending_hit_tokens += match.num_pending * size
        return won

    def take_ahead(self, rows: Rows, starts: Counts, ends: Counts) -> None:
        """Let rows hold what the full group has of tokens `starts[i]` to `ends[i]` - 1, instead of promised blocks. A
        side ended their hit before these tokens: they compute them again, and do not write them (`written_from`)."""
        index, tables, size = self._index, self._tables, self._tables.block_size
        stops = np.minimum(-(-ends // size), (tables.num_tokens[rows] - 1) // size)
        for i in (tables.looks_up[rows] & (starts // size < stops)).nonzero()[0].tolist():
            row, stop = rows.item(i), stops.item(i)
            path, have = index.paths[row], tables.num_blocks.item(row)
            if path.open is not None or not path.reads:
                continue
            first = path.published
            match = index.match(path, tables.tokens[row], stop - first)
            blocks = index.blocks_of(DEVICE, match.spans)[: match.num_confirmed]
            held = tables.blocks[0, row, first:have]
            # Behind its nodes the row may hold blocks of its own, which it has to write.
            is_own = (blocks[: len(held)] != held[: len(blocks)]).any()
            if is_own or first + len(blocks) <= starts[i] // size:
                continue
            if len(blocks) > len(held):
                self._growth.hold_promised(row, have, blocks[len(held) :])
            self._flights.composed.written_from.update({row: min((first + len(blocks)) * size, ends.item(i))})

    def _go_on(self, row: int, blocks: Blocks, last: Span) -> int:
        """Append `blocks`, with last nodes `last`, to the row's table and path. Returns their tokens."""
        (run, _, stop), path, size = last, self._index.paths[row], self._tables.block_size
        self._growth.write(row, path.published, blocks)
        path.step_on(run, stop - 1, len(blocks))
        self._tables.set_progress(row, path.published * size, path.published * size)
        return len(blocks) * size

    def _load(self, row: int, offload: Offload, limit: int, room: int | None) -> int:
        """Load what only the host has of the row's next `limit` blocks: draw blocks, plan copies. Returns tokens."""
        path, size, pages = self._index.paths[row], self._tables.block_size, self._growth.layout.full_pages
        match = self._index.match(path, self._tables.tokens[row], limit, HOST)
        room = self._device.num_available if room is None else min(room, self._device.num_available)
        num_blocks, start = min(match.num_blocks, room // pages), path.published * size
        if num_blocks <= 0 or not offload.is_worth_loading(start, start + num_blocks * size, num_blocks * pages):
            return 0
        spans = first_of(match.spans, num_blocks)
        return self._go_on(row, offload.load(spans), spans[-1])

    def publish(self, row: int) -> None:
        """Make nodes of the row's confirmed full blocks; release duplicates of nodes on the device."""
        # A swapped row has no device block that could carry a node.
        for column, block in () if self._tables.is_swapped[row] else self._index.publish(row):
            self._switch(row, column, block)

    def _switch(self, row: int, column: int, block: int) -> None:
        """Replace the row's block at `column`, a duplicate of `block`, in every table that names it."""
        tables = self._tables
        duplicate, live = tables.blocks.item(0, row, column), tables.live_rows
        # A shared block is at the same column in every table.
        names_it = (tables.blocks[0, live, column] == duplicate) & (tables.num_blocks[live] > column)
        new, old = np.array([block]), np.array([duplicate])
        for other in live[names_it].tolist():
            self._device.hold(new)
            self._growth.write(other, column, new)
            self._device.release(old)

    def cut_sharers(self, flight: Flight) -> dict[int, int]:
        """Truncate sharers at their first node that the cancelled batch computes. Returns hit tokens lost, by row."""
        index, size, lost_hits = self._index, self._tables.block_size, dict[int, int]()
        lost_nodes = index.nodes_lost(flight)
        starts = {share.row: share.start for share in flight.shares()}
        for _, row, uid, is_counted in sorted(self._sharers, key=lambda sharer: sharer.batch):
            column = index.first_on(row, lost_nodes) if self._tables.uid[row] == uid else -1
            # Nodes that the row itself computes fall back with its share.
            if column >= 0 and (row not in starts or column < starts[row] // size):
                lost = (index.paths[row].published - column) * size if is_counted else 0
                self.hit_tokens -= lost
                self.pending_hit_tokens -= lost
                lost_hits[row] = lost_hits.get(row, 0) + lost
                self.truncate(row, column)
        return lost_hits

    def share_fork(self, row: int, child: int) -> None:
        """Note the child, a fork of the row, as a sharer in each batch in which the row is one."""
        uid = self._tables.uid.item(child)
        self._sharers += [Sharer(batch, child, uid, False) for batch in self._batches_of(row)]

    def forget_sharers(self, batch: int) -> None:
        """Forget the sharers of a batch that ran, and of earlier numbers: those were never put out."""
        self._sharers = [sharer for sharer in self._sharers if sharer.batch > batch]

    def hand_down(self, batch: int) -> None:
        """Give the sharers of the latest batch, which is cancelled, to the batch before it."""
        theirs = [sharer for sharer in self._sharers if sharer.batch == batch]
        self._sharers = [sharer for sharer in self._sharers if sharer.batch != batch]
        if theirs and (outstanding := self._flights.outstanding):
            self._sharers += [sharer._replace(batch=outstanding[-1].number) for sharer in theirs]

    def truncate(self, row: int, keep: int) -> None:
        """Release the row's blocks from column `keep` on, on both tiers. Its watermarks fall with its table."""
        tables = self._tables
        if keep == tables.num_blocks[row] and not tables.is_swapped[row]:
            return
        self._index.close_run(row)
        self._index.paths[row].truncate(keep)
        if tables.is_swapped[row]:
            self._tiers.trim(row, keep)
        self._flights.clip(row, keep * tables.block_size)
        tables.fall_back(row, keep * tables.block_size)
        self._growth.give_back(row, keep)
        tables.reserved[row] = min(int(tables.reserved[row]), keep)

    def is_unconfirmed(self, row: int) -> bool:
        """Whether the row shares a block that some batch is still computing."""
        return bool(self._batches_of(row))

    def _batches_of(self, row: int) -> set[int]:
        """Return the batches in which the row is a sharer."""
        its = row, self._tables.uid.item(row)
        return {sharer.batch for sharer in self._sharers if (sharer.row, sharer.uid) == its}


class Content:
    """Unchecked lookups, retentions and events of content on both tiers. Takes token arrays and encoded namespaces."""

    def __init__(self, index: PrefixIndex, growth: Growth, offload: Offload | None, sides: SideContent) -> None:
        self._index, self._growth, self._offload, self._sides = index, growth, offload, sides
        self._tables, self.retentions = growth.tables, index.retentions
        self.ways = Ways(index, growth, offload, sides)
        # None until events are read.
        self._events: EventLog | None = None

    def _match(self, tokens: NDArray[np.int32], root: bytes) -> Match:
        """The longest prefix of these tokens that the full group has; one token is left out at least."""
        if not self.has_first(tokens, root):
            # The usual miss, found without copying the tokens.
            return Match([])
        return self._index.match(Path(root), tokens, (len(tokens) - 1) // self._tables.block_size)

    def _hit(self, tokens: NDArray[np.int32], root: bytes) -> Match:
        """The part of `_match` after which every group can stand."""
        match = self._match(tokens, root)
        return self._sides.longest(match).hit if self._growth.layout.sides else match

    def hit_end(self, tokens: NDArray[np.int32], root: bytes) -> HitEnd:
        """Where a lookup of these tokens would end now, in a model with sides."""
        sides, sought = self._sides, (len(tokens) - 1) // self._tables.block_size
        here, both = sides.find(Path(root), tokens, self._match(tokens, root))
        found = here
        if self._offload is not None:
            found, _ = sides.cheapest(here, both, 0, self._growth.num_unpromised, self._offload.is_worth_loading)
        from_host = sides.length_of(found) - sides.length_of(here)
        return sides.hit_end(both.cut(found.num_blocks, found.end), sought, from_host=from_host)

    def lookup(self, tokens: NDArray[np.int32], root: bytes) -> Hit:
        """The cached prefix of a prompt, at most len(tokens) - 1 tokens. Changes and counts nothing."""
        index, size, end, on_host = self._index, self._tables.block_size, None, 0
        match = self._match(tokens, root)
        if self._growth.layout.sides:
            here, there = self._sides.find(Path(root), tokens, match)
            on_host = self._sides.length_of(there) - self._sides.length_of(here)
            match, end = here.hit, here.end
        elif self._offload is not None:
            both = index.match_tiers(Path(root), tokens, (len(tokens) - 1) // size, match)
            on_host = (both.num_blocks - match.num_blocks) * size
        blocks = index.blocks_of(DEVICE, match.spans)
        if end is not None:
            return Hit(match.num_blocks * size + len(end.tokens) // 4, np.append(blocks, end.block(DEVICE, 0)), on_host)
        return Hit(match.num_blocks * size, blocks.copy(), on_host)

    def first_key(self, tokens: NDArray[np.int32], root: bytes) -> bytes:
        """The key under which the first block of these tokens is cached."""
        return root + tokens[: self._tables.block_size].tobytes()

    def has_first(self, tokens: NDArray[np.int32], root: bytes) -> bool:
        """Whether the first block of these tokens may be cached. If not, none of them is."""
        return self.first_key(tokens, root) in self._index.runs

    def held_prefix(self, tokens: NDArray[np.int32], root: bytes, *, confirmed: bool = False) -> int:
        """Pages of the cached prefix that rows hold already: sharing them takes no available page. `confirmed`: without
        those that a batch is still computing. Changes nothing."""
        match = self._hit(tokens, root)
        if not match.spans:
            # A fast path: every step asks this about the first waiting request.
            return 0
        blocks = self._index.blocks_of(DEVICE, match.spans)
        if confirmed:
            blocks = blocks[: match.num_confirmed]
        return int(np.count_nonzero(self._index.pools[DEVICE].state[blocks] > 0)) * self._growth.layout.full_pages

    def may_be_found(self, tokens: NDArray[np.int32], root: bytes) -> bool:
        """Whether the cached prefix may grow soon: it ends where an open run does, whose row may compute more of it."""
        spans = self._hit(tokens, root).spans
        if not spans:
            return self.has_first(tokens, root)
        run, _, stop = spans[-1]
        return run.row >= 0 and stop >= self._index.confirmed_length(run)

    def retain(self, tokens: NDArray[np.int32], root: bytes, level: int, until: float | None) -> int:
        """`BlockManager.retain`. Raises UnknownContent, or InvalidConfig for `until`."""
        if not (spans := self.ways.confirmed(tokens, root)):
            raise UnknownContent(len(tokens))
        self.retentions.retain(self._sides.reached(spans, with_end=False), level, until)
        return num_nodes(spans) * self._tables.block_size

    def why_missing(self, tokens: NDArray[np.int32], root: bytes) -> tuple[int, int, tuple[int, int, int] | None, bool]:
        """Blocks of these tokens' cached prefix on the device, and on the host; the eviction that took the next block
        (place, blocks, step; None: not remembered); and whether another namespace has the first block."""
        here, there = self.ways.split(self.ways.confirmed(tokens, root))
        num, size, first = num_nodes(here) + num_nodes(there), self._index.block_bytes, self.first_key(tokens, b"")
        gone, elsewhere, digests = None, False, list[bytes]()
        if (num + 1) * size <= 4 * len(tokens):
            extend_chain(digests, namespace_digest(root), tokens[: (num + 1) * size // 4].tobytes(), size)
            gone = self._index.gone.get(digests[-1])
            roots = [key for key, run in self._index.runs.items() if run.parent is None] if not num else []
            elsewhere = any(key.endswith(first) and key != root + first for key in roots)
        return num_nodes(here), num_nodes(there), gone, elsewhere

    def reset(self) -> bool:
        """Forget all content. Return False and change nothing while any block of either tier is used or pinned."""
        if any(pool.num_used for pool in self._index.pools):
            return False
        self._index.clear()
        if self._events is not None:
            self._events.clear()
        return True

    def event_log(self) -> EventLog:
        """The log of events. The first call begins it."""
        if self._events is None:
            self._events = EventLog(self._index, self._growth, self._sides)
        return self._events


class Ways:
    """What sessions and hints do with cached content. They name it by its *way*: the last node of each run, the last run
    first. Nodes of a way may be gone."""

    def __init__(self, index: PrefixIndex, growth: Growth, offload: Offload | None, sides: SideContent) -> None:
        self._index, self._offload, self._sides = index, offload, sides
        self._layout, self.retentions = growth.layout, index.retentions

    def confirmed(self, tokens: NDArray[np.int32], root: bytes) -> list[Span]:
        """The confirmed nodes of a prefix, all of these tokens at most: those on the device, then those on the host."""
        path, limit = Path(root), len(tokens) // self._layout.block_size
        match = self._index.match_tiers(path, tokens, limit, self._index.match(path, tokens, limit))
        return first_of(match.spans, match.num_confirmed)

    def way_of(self, row: int) -> list[Node]:
        """The way of a row: its last confirmed node, and the last node of each run before that."""
        length_of = self._index.confirmed_length
        path = self._index.paths[row].closed(length_of)
        # Nodes before a pending one may be pending, too.
        way = [(run, min(at + 1, length_of(run)) - 1) for run, at in upwards(path.run, path.at)]
        return [node for node in way if node[1] >= 0]

    def way_to(self, spans: list[Span]) -> list[Node]:
        """The way to the last of these nodes: that node, and the last node of each run before it."""
        return [] if not spans else list(upwards(spans[-1][0], spans[-1][2] - 1))

    def spans_of(self, way: list[Node]) -> list[Span]:
        """The cached nodes of a way, first to last, without a gap: those on the device, then those on the host."""
        found = list[Span]()
        for run, at in reversed(way):
            stop = min(at + 1, self._index.confirmed_length(run))
            # The device has no node behind one that it lacks.
            length = stop if run.row >= 0 else run.num_there(DEVICE, 0, stop)
            length += run.num_there(HOST, length, stop)
            if length:
                found.append((run, 0, length))
            if length <= at:
                break
        return found

    def split(self, spans: list[Span]) -> tuple[list[Span], list[Span]]:
        """Split confirmed nodes: those that the device has, and those after them."""
        num = int(np.count_nonzero(self._index.blocks_of(DEVICE, spans) >= 0))
        return first_of(spans, num), rest_of(spans, num)

    def device_blocks(self, way: list[Node]) -> Blocks:
        """The device blocks of a way, without a gap, first to last, int64 [n]."""
        return self._index.blocks_of(DEVICE, self.split(self.spans_of(way))[0])

    def is_any_there(self, place: int, way: list[Node]) -> bool:
        return any(run.is_any_there(place, 0, at + 1) for run, at in way)

    def retain_way(self, way: list[Node], level: int, until: float | None, *, was_left: bool) -> Retained | None:
        """`retain` the cached part of a way. Returns None, and does nothing, if nothing is cached or `until` has
        passed. `was_left`: a row ended behind the way."""
        if (until is not None and until <= self.retentions.now) or not (spans := self.spans_of(way)):
            return None
        reached = self._sides.reached(spans, with_end=was_left and _is_whole(way, spans))
        return self.retentions.retain(reached, level, until)

    def within(self, way: list[Node], room: int, *, was_left: bool) -> tuple[int, list[Part]]:
        """How many blocks of a way a row can begin with: those on the device, and those that loads bring into `room`
        pages (-1: none). And the parts that it takes. `was_left`: a row ended behind the way; its end is taken, too."""
        spans, sides = self.spans_of(way), self._sides
        here, there = self.split(spans)
        if not self._layout.sides:
            spans = here + first_of(there, max(room, 0) // self._layout.full_pages)
            return num_nodes(spans), [Part(DEVICE, spans, self._index.blocks_of(DEVICE, spans))]
        with_end = was_left and _is_whole(way, spans)
        found = sides.standing(here, with_end=with_end and not there, tiers=1)
        both = sides.standing(spans, with_end=with_end)
        found, parts = sides.cheapest(found, both, 0, room, lambda *_: True)
        return found.num_blocks, parts or sides.parts_of(found, 0)

    def lacks(self, parts: list[Part]) -> bool:
        """Whether only the host has some of the blocks of these parts."""
        return any((part.blocks < 0).any() for part in parts)

    def pages_of(self, parts: list[Part]) -> int:
        """Pages of the device blocks of these parts."""
        pages = self._layout.pages_of_place
        return sum(int(np.count_nonzero(blocks >= 0)) * pages[place] for place, _, blocks in parts)

    def pin(self, parts: list[Part]) -> list[tuple[int, Blocks]]:
        """Hold the device blocks of these parts until `unpin`. Returns (place, blocks) of each; blocks int64 [n]."""
        for place, spans, blocks in parts:
            if place != DEVICE:
                # What the window of a running row holds becomes content only when it is passed: make it content now.
                self._sides.keep_nodes(place, spans, blocks)
        held = [(place, blocks[blocks >= 0]) for place, _, blocks in parts]
        for place, blocks in held:
            self._index.pools[place].keep(blocks)
        return held

    def pages_held_alone(self, held: list[tuple[int, Blocks]]) -> int:
        """Device pages that nothing but these pins holds."""
        pages, num = self._layout.pages_of_place, 0
        for place in {place for place, _ in held}:
            named, times = np.unique(
                np.concatenate([blocks for other, blocks in held if other == place]), return_counts=True
            )
            num += int(np.count_nonzero(self._index.pools[place].refs(named) == times)) * pages[place]
        return num

    def unpin(self, held: list[tuple[int, Blocks]]) -> None:
        for place, blocks in _as_they_go(held):
            self._index.pools[place].let_go(blocks.copy())

    def fetch(self, parts: list[Part]) -> None:
        """Load what only the host has of these parts to the device. All are cached there then, as just used."""
        assert self._offload is not None, "content is on the host alone only where it is offloaded"
        for place, blocks in _as_they_go(self._offload.bring(parts)):
            self._index.pools[place].release(blocks)

    def demote(self, way: list[Node], most: int | None = None) -> tuple[Blocks, int]:
        """Let the loose end of a way, its last `most` blocks at most, be evicted next, even if it is retained. Returns
        its device blocks, and how many blocks it has on both tiers together."""
        index, total, gone = self._index, 0, NO_BLOCKS
        for place in (DEVICE, HOST):
            spans = index.loose_end(place, way, most)
            if place == HOST:
                # What stays on the device stays retained, for others behind it: on the host the end stops before that.
                there = index.blocks_of(DEVICE, spans[::-1])[::-1]
                stays = (there >= 0) & ~np.isin(there, gone)
                spans = index.loose_end(place, way, int(stays.argmax())) if stays.any() else spans
            for run, first, _ in spans:
                for lost, start in [(end, 0) for end in index.ends_of(run, first)] + [(run, first)]:
                    self.retentions.cut(lost, start)
            self.put_first(place, index.cached_blocks(place, spans))
            total += num_nodes(spans)
            gone = gone if place else index.blocks_of(DEVICE, spans)
        return gone, total

    def on_raised(self, choose: Callable[[int, int, int], None]) -> None:
        """Call `choose` with a place, a level and a number of pages before so many of that raised level are evicted."""
        for place in (DEVICE, HOST):
            self._index.pages(place).on_raised(partial(choose, place))

    def loose_end(self, place: int, way: list[Node], level: int) -> list[Blocks]:
        """The blocks of a loose end, and of what is evicted with it, that are at this raised level, not at a lower."""
        levels, spans = self._index.pages(place).level, self._index.loose_end(place, way)
        of_level = [blocks[levels[blocks] == level] for blocks in self._index.cached_blocks(place, spans)]
        if self._layout.even_restarts(sum(at + 1 for _, at in way)):
            # Those of even restarts last: a prompt of which a part is left begins there.
            last = np.concatenate([NO_BLOCKS, *self._sides.even_blocks(self.spans_of(way), place)])
            of_level = [part[np.isin(part, last) == is_last] for is_last in (False, True) for part in of_level]
        return [blocks for blocks in of_level if len(blocks)]

    def put_first(self, place: int, ends: list[Blocks]) -> tuple[Blocks, Blocks]:
        """Let these blocks of loose ends, in a tier's pool of pages, be evicted next of their levels, first ones first.
        Returns the blocks and their marks, for `num_first`."""
        pool = self._index.pages(place)
        for blocks in reversed(ends):
            pool.put_first(blocks)
        blocks = np.concatenate([NO_BLOCKS, *ends])
        return blocks, pool.state[blocks]

    def num_first(self, place: int, blocks: Blocks, marks: Blocks) -> int:
        """How many of these blocks are still where `put_first` put them."""
        return int(np.count_nonzero(self._index.pages(place).state[blocks] == marks))


def _is_whole(way: list[Node], spans: list[Span]) -> bool:
    """Whether all of a way is cached. An end of a row behind only a part of it may be another row's."""
    return num_nodes(spans) == sum(at + 1 for _, at in way)


def _as_they_go(held: list[tuple[int, Blocks]]) -> list[tuple[int, Blocks]]:
    """Order places and blocks of a prompt for release: later parts go first, to be evicted first, and those of windows
    and states before those of the full group."""
    last_first = held[::-1]
    return sorted(last_first, key=lambda item: item[0] == DEVICE)
