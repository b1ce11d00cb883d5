"""What is retained in layers of several kinds, from outside: the level that each cached page must have.

A retention is of a *way*, whole blocks that a row left or that a prompt has, until a time. It raises these blocks in
the full group. Of windows, chunks and states it raises what a prompt reads that begins behind the way, at the last
place where all groups can stand. Of a row's way that is where the row ended, perhaps within a block, and the place
before it, where its prompt may have ended. Even restarts are raised, too. What a live row keeps of windows, chunks and
states has the level that its retention will have. All else is at level 0.

The rig's shadow says what lies on a page. What exactly was retained cannot always be seen from outside. So each
retention has what it raises surely, and what it may raise: of that, either level is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paged.testing import batch_oracles
from paged.testing.content import POISON
from paged.testing.flight import Flight, Key, Path
from paged.testing.life_oracles import ALIVE
from paged.testing.naive_layers import even_restarts, front

if TYPE_CHECKING:
    from paged.testing.scheduler_rig import SchedulerRig

END = -1
Item = tuple[int, int]
"""What a block holds: its group, END for all where a row ended within a block; its last slot's content."""


@dataclass
class Way:
    """What a row left, or a prompt has: the content of its slots; its blocks, of which at least and at most so many are
    cached; whether it is a row's."""

    path: list[int]
    blocks: list[Path]
    least: int
    most: int
    was_left: bool = True


@dataclass(eq=False)
class Kept:
    """A retention. `surely`: what it raises; `maybe`: that, and what it may raise."""

    way: Way
    level: int
    until: float
    surely: set[Item]
    maybe: set[Item]


@dataclass
class Turns:
    """A session: the level and time of its retentions, what its last turn left, and what retains that."""

    priority: int = 1
    lasts: float | None = None
    way: Way | None = None
    kept: list[Kept] = field(default_factory=list)


class NaiveRetentions:
    """The rules of retentions, for a rig whose layers are of several kinds."""

    def __init__(self, rig: SchedulerRig) -> None:
        self._rig, self._groups, self._size = rig, rig.world.groups, rig.world.block_size
        kinds = [group.kind for group in self._groups]
        # Without full layers the manager does not show its content; which content a tenant's quota evicts is not
        # foreseen here.
        self.is_known = "full" in kinds and rig.world.prefix_caching and rig.world.max_cached_per_tenant is None
        self._full, self._has_ends = kinds.index("full") if self.is_known else END, "state" in kinds
        self._tiers = ("device", "host")[: 1 + rig.world.keeps_content_on_host]
        self._kept: list[Kept] = []
        self._turns: dict[str, Turns] = {}
        self._of_prompts: dict[object, list[Kept]] = {}
        self._deferred: dict[str, dict[str, Any]] = {}
        # The path to each content; the requests that have it, "" for a row that has ended; and contents at which a row
        # ended within a block.
        self._path_to: dict[int, list[int]] = {}
        self._owners: dict[int, set[str]] = {}
        self._ended: set[int] = set()
        # The nodes and the computed tokens of each live sequence with a row; and the latter where a batch has just
        # ended.
        self._rows: dict[Key, tuple[int, int]] = {}
        self._stood: dict[Key, int] = {}
        # The level at which each request was admitted; and requests that did not simply run on since.
        self._wishes: dict[str, int] = {}
        self.disturbed: set[str] = set()
        self._now = 0.0
        # States and levels of pages before a batch was scheduled.
        self._before: tuple[Any, Any] = (None, None)

    # -- what the rig says

    def added(self, id: str) -> None:
        """Note a request that was accepted."""
        self._wishes.pop(id, None)
        self.disturbed.discard(id)

    def begin(self) -> None:
        """Note pages and levels before a batch is scheduled."""
        if self.is_known:
            self._before = self._rig.manager.device.states, self._rig.manager.device.levels

    def scheduled(self, batch: Any, flight: Flight) -> list[str]:
        """Note a batch that was scheduled. Return what is wrong with what it evicted."""
        if not self.is_known:
            return []
        rig, num_kept, num_rows = self._rig, len(self._kept), len(self._rows)
        self._expire()
        preempted = {id for id, _ in batch.preempted}
        for key in [key for key in self._rows if key[0] in preempted]:
            self._note_end(key, self._rows.pop(key)[1])
        for its in [rig.books[id].request for id in batch.admitted]:
            session = 0 if its.session_id is None else self._turns.setdefault(its.session_id, Turns()).priority
            self._wishes[its.id] = max(session, 0 if its.retention is None else int(its.retention.priority))
        if len(self._kept) < num_kept or len(self._with_rows().keys() & self._rows) < num_rows:
            # Levels fell before anything was evicted, or the end of one row took the place of another's.
            return []
        (states, levels), now, written = self._before, rig.manager.device.states, sorted(self._written(flight))
        stays, gone = (states == 1) & (now == 1), (states == 1) & (now == 0)
        stays[written], gone[written] = False, states[written] == 1
        # What is copied for a row is held until it has pages.
        stays[batch.moves.device_to_device[:, 0]] = False
        if not (stays.any() and gone.any()):
            return []
        rig.events["evicted beside what is raised"] += bool(levels[stays].any())
        first, next_one = levels[gone].max(), levels[stays].min()
        return [f"18: a page of level {first} was evicted before one of level {next_one}"] if first > next_one else []

    def updated(self, flight: Flight) -> None:
        """Note a batch that was ended."""
        self._now = self._rig.now
        starts = (flight.batch.seq_lens - flight.batch.num_tokens).tolist()
        # A row whose states have seen wrong drafts goes back to before them.
        self._stood = {
            key: starts[place] if self._has_ends and flight.is_wrong(place) else flight.end(place)
            for place, key in enumerate(flight.keys)
            if flight.stands(place)
        }

    def hinted(self, hint: Any, outcome: Any, num_here: int) -> None:
        """Note a hint's outcome; `num_here` blocks of what it names were on the device before."""
        if not self.is_known:
            return
        self._expire()
        if hint.request is not None and outcome.status == "deferred":
            self._deferred.setdefault(hint.request, {})[hint.action] = hint
        if hint.request is not None or outcome.status == "missing":
            return
        turns, num = Turns(), outcome.num_tokens // self._size
        if hint.session is not None:
            turns = self._turns.setdefault(hint.session, turns)
        else:
            turns.kept = self._of_prompts.setdefault((repr(self._rig.hints.namespace(hint)), *hint.tokens), [])
            turns.way = self._way(
                self._rig.hints.namespace(hint), list(map(int, hint.tokens)), num, num, was_left=False
            )
        if hint.action == "retain":
            turns.priority, turns.lasts = hint.priority, hint.lasts
            if turns.way is not None and outcome.status != "deferred":
                was_left = turns.way.was_left and num == turns.way.most
                cut = replace(turns.way, least=num, most=num, was_left=was_left)
                self._keep(cut, hint.priority, hint.lasts, turns.kept)
        elif hint.action in ("demote", "end"):
            if hint.session is not None:
                self._drop(turns.kept)
            if hint.action == "end" and outcome.status == "accepted":
                del self._turns[hint.session]
            if turns.way is not None and num:
                self._demote(turns.way, num_here - num)

    def look(self, *, is_part: bool) -> list[str]:
        """Note which rows have ended, and return what is wrong with the levels of cached pages."""
        rig = self._rig
        if not self.is_known:
            return []
        for book in rig.books.values():
            for sequence in book.sequences:
                self._own(self._path(book.namespace, sequence.tokens), book.id)
        self._bury()
        manager, with_rows = rig.manager, self._with_rows()
        rows = {
            key: (len(manager.block_hashes(row)), int(manager.rows.num_computed[row])) for key, row in with_rows.items()
        }
        self.disturbed |= {id for id in self._wishes if rig.statuses.get(id) != "running"}
        # In the order in which a batch ends them.
        self._end_rows(
            [key for key in dict.fromkeys([*self._stood, *self._rows]) if key in self._rows and key not in rows]
        )
        self._rows, self._stood = rows, {}
        return [] if is_part else self._wrong_levels()

    def _with_rows(self) -> dict[Key, int]:
        rig = self._rig
        alive = [id for id in rig.live if rig.scheduler.status(id) in ALIVE]
        live = [(id, n) for id in alive for n, each in enumerate(rig.books[id].sequences) if each.reason is None]
        return {key: row for key in live if (row := rig.scheduler.row_of(*key)) >= 0}

    def _own(self, path: list[int], id: str) -> None:
        for content in path:
            self._owners.setdefault(content, set()).add(id)

    def _path(self, namespace: object, tokens: list[int]) -> list[int]:
        path = self._rig.shadow.contents.path(namespace, tokens).tolist()
        if path and path[-1] not in self._path_to:
            self._path_to |= {content: path[:number] for number, content in enumerate(path, 1)}
        return path

    def _way(self, namespace: object, tokens: list[int], least: int, most: int, *, was_left: bool = True) -> Way:
        blocks = batch_oracles.paths(self._rig, namespace, tokens, most)
        return Way(self._path(namespace, tokens), blocks, least, most, was_left)

    # -- what is retained

    def _expire(self) -> None:
        self._now = self._rig.now
        self._kept = [kept for kept in self._kept if self._now < kept.until]

    def _drop(self, gone: list[Kept]) -> None:
        self._kept = [kept for kept in self._kept if kept not in gone]
        gone.clear()

    def _node(self, content: int) -> list[int]:
        """The path to the last whole block on the way to a content."""
        path = self._path_to[content]
        return path[: len(path) // self._size * self._size]

    def _bury(self) -> None:
        """End retention of nodes that are nowhere, with nothing behind: later content of the same tokens is new."""
        there = self._rig.contents() | self._rig.contents("host") if self._kept else set()
        there = {path[:stop] for path in there for stop in range(2, len(path) + 1)}
        for kept in self._kept:
            alive = self._size * next((n for n, path in enumerate(kept.way.blocks) if path not in there), math.inf)
            kept.maybe -= {item for item in kept.maybe if len(self._node(item[1])) > alive}
            kept.surely &= kept.maybe

    def _note_end(self, key: Key, num_computed: int) -> None:
        """Note where a row ended: the end of another row behind the same node may be gone."""
        path = self._path(*self._rig.known(*key))[:num_computed]
        self._own(path, "")
        if self._has_ends and len(path) % self._size:
            self._ended.add(path[-1])
            for kept in self._kept:
                same = {item for item in kept.surely if self._node(item[1]) == self._node(path[-1])}
                kept.surely -= {item for item in same if item[0] == END}

    def _end_rows(self, keys: list[Key]) -> None:
        """Begin the retentions of rows that have ended together."""
        rig = self._rig
        for key in [key for key in keys if key[0] in rig.books]:
            (id, number), (num_nodes, computed), is_alone = key, self._rows[key], len(keys) == 1
            book, (namespace, tokens) = rig.books[id], rig.known(*key)
            tokens = tokens[: self._stood.get(key, computed)]
            self._note_end(key, len(tokens))
            if book.sequences[number].reason is None or book.is_aborted or book.was_cut_short:
                continue
            its, writes = book.request, book.request.writes_cache
            # It may have shared what another one computed, or share that now.
            is_sure = writes and not rig.flights and num_nodes == computed // self._size
            most = len(tokens) // self._size if writes else num_nodes
            way = self._way(namespace, tokens, most if is_sure else num_nodes, most)
            if its.retention is not None:
                self._keep(way, int(its.retention.priority), its.retention.lasts, [], is_alone=is_alone)
            if book.is_live or key != [other for other in keys if other[0] == id][-1]:
                continue
            if len(book.sequences) > 1:
                # It is not known which sequence ended last.
                way = replace(way, least=0)
            if its.session_id is not None:
                turns = self._turns.setdefault(its.session_id, Turns())
                turns.way = way
                self._keep(way, turns.priority, turns.lasts, turns.kept, is_alone=is_alone)
            for hint in self._deferred.pop(id, {}).values():
                if hint.action == "retain":
                    self._keep(way, hint.priority, hint.lasts, [], is_alone=is_alone)
                elif hint.action == "demote":
                    self._demote(way, None)

    def _keep(self, way: Way, level: int, lasts: float | None, before: list[Kept], *, is_alone: bool = True) -> None:
        """Begin a retention in the place of those `before`. `is_alone`: no other row ended at the same time."""
        self._drop(before)
        path, size, is_still = way.path, self._size, not self._rig.carries_moves
        surely, maybe = ({(self._full, path[n * size - 1]) for n in range(1, num + 1)} for num in (way.least, way.most))
        seen, certain = self._seen()
        ends = {(END, content) for content in self._ended if self._node(content) == path[: way.most * size]}
        is_sure = is_alone and is_still and way.least == way.most
        # Behind all of it; and behind a block less where a row left it, whose prompt may have ended there.
        for fewer in range(1 + way.was_left):
            most = max(
                (n for n in range(way.most - fewer + 1) if not is_still or self._read(path, n) <= seen), default=0
            )
            least = max((n for n in range(way.least - fewer + 1) if self._read(path, n) <= certain), default=0)
            for number in range(least if is_alone else 0, most + 1):
                maybe |= self._read(path, number)
            if is_sure and least == most and not (fewer and ends):
                surely |= self._read(path, most)
        for number in even_restarts(self._groups, way.most, size):
            read = self._read(path, number)
            maybe |= read if read <= seen or not is_still else set()
            surely |= read if is_sure and read <= certain else set()
        if way.was_left and ends:
            ends |= self._read(path, way.most, states=False)
            maybe |= ends
            if is_sure and len([number for number, _ in ends if number == END]) == 1 and ends <= certain:
                surely |= ends
        if maybe:
            until = math.inf if lasts is None else self._now + lasts
            before.append(Kept(way, level, until, surely, maybe | surely))
            self._kept += before
            self._rig.events["retained"] += 1

    def _demote(self, way: Way, first: int | None) -> None:
        """Let nothing retain a way's blocks from the `first` on (None: not known), nor what is behind them."""
        is_sure = first is not None and len(self._tiers) == 1
        stem = way.path[: (first + 1 if first is not None and is_sure else 1) * self._size]
        for kept in self._kept:
            cut = {item for item in kept.maybe if self._path_to[item[1]][: len(stem)] == stem}
            kept.surely -= cut
            kept.maybe -= cut if is_sure else set()

    def _read(self, path: list[int], num_blocks: int, *, states: bool = True) -> set[Item]:
        """What a prompt that begins behind so many blocks reads of windows, chunks and states."""
        stop, found = num_blocks * self._size, set[Item]()
        for number, group in enumerate(self._groups if num_blocks else ()):
            first = stop if group.kind in ("full", "state") else front(group, stop)
            ends = range(first // self._size * self._size + self._size, stop + 1, self._size)
            found |= {(number, path[end - 1]) for end in ([stop] if group.kind == "state" and states else ends)}
        return found

    # -- what lies on the pages

    def _written(self, flight: Flight) -> set[int]:
        """The pages that a batch writes, or copies to."""
        copied = flight.batch.moves.host_to_device[:, 1].tolist() + flight.batch.moves.device_to_device[:, 1].tolist()
        return {page for page, _ in self._rig.shadow.written(flight.batch, flight.views)} | set(copied)

    def _pages(self, tier: str) -> Iterator[tuple[int, int, list[Item], bool]]:
        """Each page that is not free, its group, what its block may hold, and whether it is cached and stays so."""
        rig, is_host = self._rig, tier == "host"
        late = [flight for flight in rig.flights if not flight.has_run]
        each = [set(f.batch.moves.device_to_host[:, 1].tolist()) if is_host else self._written(f) for f in late]
        to_come = set[int]().union(*each)
        pages = rig.shadow.host if is_host else rig.shadow.pages
        for page, state in enumerate(getattr(rig.manager, tier).states.tolist()):
            slots = [rig.shadow.what(slot) for slot in pages[page].tolist()]
            if state and slots[0][0] != POISON:
                part = slots[0][1]
                held = [content if where == part else POISON for content, where in slots]
                is_cached = state == 1 and page not in to_come and not rig.carries_moves
                yield page, part[0], list(self._items(part[0], held)), is_cached

    def _items(self, number: int, held: list[int]) -> Iterator[Item]:
        """What a group's block may hold, by its slots: behind the end of a row within it there may be more."""
        size = self._size
        if self._groups[number].kind == "state":
            if path := self._path_to.get(held[-1]):
                yield END if len(path) % size else number, held[-1]
            return
        for filled in range(size, 0, -1):
            path = self._path_to.get(held[filled - 1], [])
            is_here = path and len(path) % size == filled % size and path[-filled:] == held[:filled]
            if is_here and (filled == size or path[-1] in self._ended):
                yield number if filled == size else END, path[-1]

    def _seen(self) -> tuple[set[Item], set[Item]]:
        """What may lie on the tiers' pages, and what surely does: a row's end only if all groups have it."""
        seen, groups = set[Item](), dict[Item, set[int]]()
        for group, items, is_cached in [its[1:] for tier in self._tiers for its in self._pages(tier)]:
            seen |= set(items)
            for item in items if is_cached and len(items) == 1 else ():
                groups.setdefault(item, set()).add(group)
        return seen, {item for item, its in groups.items() if item[0] != END or len(its) == len(self._groups)}

    def _wrong_levels(self) -> list[str]:
        """Cached pages at another level than they must have."""
        rig, found = self._rig, list[str]()
        lives = [id for id, _ in self._rows if self._wishes.get(id, 0) and rig.books[id].request.writes_cache]
        here, certain = set[tuple[int, Item]](), set[tuple[int, Item]]()
        is_late = rig.carries_moves or any(not flight.has_run for flight in rig.flights)
        for tier in self._tiers:
            levels = getattr(rig.manager, tier).levels
            for page, group, items, is_cached in self._pages(tier):
                allowed = [self._levels(item, lives) for item in items]
                if tier == "host":
                    # What the device has, too, or will have, goes first.
                    both = [(group, item) for item in items]
                    allowed = [
                        {0} if it in certain else its | {0} if it in here or is_late else its
                        for it, its in zip(both, allowed, strict=True)
                    ]
                else:
                    here |= {(group, item) for item in items}
                    certain |= {(group, item) for item in items if is_cached and len(items) == 1}
                wanted = set().union(*allowed)
                rig.events["raised page seen"] += is_cached and bool(wanted) and 0 not in wanted
                if is_cached and wanted and levels[page] not in wanted:
                    what = " or ".join([rig.shadow.contents.describe(content) for _, content in items])
                    found.append(
                        f"18: {tier} page {page} of group {group} ({what}) is at level {levels[page]}, not {sorted(wanted)}"
                    )
        return found

    def _levels(self, item: Item, lives: list[str]) -> set[int]:
        """The levels that a block may have: the highest that surely raises it, and those above that may."""
        surely = max([kept.level for kept in self._kept if item in kept.surely], default=0)
        maybe = {kept.level for kept in self._kept if item in kept.maybe}
        for id in lives if item[0] not in (END, self._full) else ():
            if id in (owners := self._owners[item[1]]):
                maybe.add(self._wishes[id])
                book = self._rig.books[id]
                if owners == {id} and id not in self.disturbed and not book.was_steered and len(book.sequences) == 1:
                    surely = max(surely, self._wishes[id])
        return {surely} | {level for level in maybe if level > surely}
