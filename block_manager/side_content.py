"""Content of sides (windows, chunks and states): what is kept, and after which lengths a prompt can begin with it.

    full      | n0 | n1 | n2 | n3 | n4 |      the lookup finds all five nodes
    window    | -  | -  | n2 | n3 | -  |      reaches back from the end of n3
    state     | -  | -  | -  | ◆  | -  |      kept at the end of n3
    the hit ends where every group can stand: after n3

A node resides in each group separately, in that group's place. When a row ends, what it holds is kept. What it
passes before is kept if a prompt is likely to begin there: after its own prompt's last full block, at a junction,
at a length in `keep_at`, or at an even restart. The rest is kept only while pages are free, and is evicted first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.base.arguments import MOST_KEPT_AT
from paged.base.growing import rising_from

from .flights import Flight, StateRead
from .growth import Growth
from .layout import Side
from .prefix_index import Match, PrefixIndex
from .runs import DEVICE, NO_BLOCKS, NUM_PLACES, Blocks, Path, Reach, Run, Span, first_of, rest_of, spans_to, stretches
from .tables import Rows

# Indices in `tables.wanted`. Index 0 is the prompt's end, which is kept only while pages are free. Then come its last
# full block, the junction with other content, and the lengths in `keep_at`.
_LAST, _JUNCTION = 1, 2


class Part(NamedTuple):
    """What a row takes of one group: nodes, and the device block of each, int64 [n]; -1: only the host has it."""

    place: int
    spans: list[Span]
    blocks: Blocks


class Found(NamedTuple):
    """Result of a lookup.

    match       the nodes that the full group has
    stands      by table, bool [n]: can the side stand after each of the match's n confirmed blocks? First: can all?
    num_blocks  length of the hit, the first nodes of the match: every side can stand after them
    end         the end of a row behind the hit, from which a row can go on; None: there is none
    """

    match: Match
    stands: list[NDArray[np.bool_]]
    num_blocks: int
    end: Run | None

    @property
    def hit(self) -> Match:
        """The nodes of the hit."""
        return Match(first_of(self.match.spans, self.num_blocks))

    def cut(self, num_blocks: int, end: Run | None = None) -> Found:
        """The same lookup with the first `num_blocks` nodes as the hit, and this end behind them."""
        return self._replace(num_blocks=num_blocks, end=end)


class HitEnd(NamedTuple):
    """Where a lookup ended, in tokens.

    num_tokens  length of the hit, with the end of a row behind it
    confirmed   length of the full group's confirmed nodes; `found`: pending ones included
    sought      length of the longest possible hit: whole blocks, and one token left to compute
    alone       by side: length of the longest hit that this side allows, on the device and the host
    limit       index of the side that allows the shortest one
    why         "whole": all was found; "not cached": the full group has no more; "not loaded": the host has more. Of
                the side: "pending": its next block is being computed; "evicted": it had more; "not kept": it never had
    from_host   tokens that the hit gained by loads from the host
    """

    num_tokens: int
    confirmed: int
    found: int
    sought: int
    alone: tuple[int, ...]
    limit: int
    why: str
    from_host: int = 0

    @property
    def lost(self) -> int:
        """Confirmed tokens of the full group behind the hit."""
        return max(self.confirmed - self.num_tokens, 0)


def _last(stands: NDArray[np.bool_]) -> int:
    """The number of blocks up to the last after which the side can stand; 0 if there is none."""
    return len(stands) - int(stands[::-1].argmax()) if stands.any() else 0


class SideContent:
    def __init__(self, index: PrefixIndex, growth: Growth, row_ends: bool) -> None:
        self._index, self._tables, self._device = index, growth.tables, growth.device
        self._layout, self._size = growth.layout, growth.tables.block_size
        self._pages, self._num_tiers = self._layout.pages_of_place, 1 + index.retentions.host_gives_way
        self.ends = RowEnds(index, growth, row_ends)
        # By table: pages that its window or chunk has passed and released so far.
        self.passed = [0] * (1 + len(self._layout.sides))
        # By row: the sequence's uid, where its hit ended, whether that counts. By side: tokens lost by hits it ended.
        self._ends: dict[int, tuple[int, HitEnd, bool]] = {}
        self.lost = [0] * len(self._layout.sides)

    def begin(self, row: int, num_tokens: int, keep_at: Sequence[int]) -> None:
        """Note after how many blocks of a new row's prompt others may begin: its last full block that leaves a token to
        compute, the lengths in `keep_at` (rounded down), even restarts, and, while pages are free, its end if a block
        ends there."""
        if not self._layout.keeps:
            return
        last, is_even = (num_tokens - 1) // self._size, num_tokens % self._size == 0
        asked = dict.fromkeys(length // self._size for length in keep_at if self._size <= length <= num_tokens)
        even = self._layout.even_restarts(last)
        self._tables.want(row, [(last + 1) * is_even, last, 0, *list(asked)[:MOST_KEPT_AT], *even])

    def longest(self, match: Match, have: int = 0, tiers: int = 1) -> Found:
        """Find the longest hit: the part of `match` after which every side can stand with content on the first `tiers`
        tiers (1: the device). The match begins behind the row's first `have` blocks."""
        stands = self._stands(match, have, tiers)
        return Found(match, stands, _last(stands[0]), None)

    def standing(self, spans: list[Span], *, with_end: bool, tiers: int | None = None) -> Found:
        """`longest` of confirmed nodes, by default on all tiers; `with_end`: or the end of a row behind all of them."""
        tiers = tiers or self._num_tiers
        found = self.longest(Match(spans), tiers=tiers)
        return self.ends.behind(found, tiers) if with_end and spans else found

    def find(
        self, path: Path, tokens: NDArray[np.int32], match: Match, have: int = 0, *, may_copy: bool = True
    ) -> tuple[Found, Found]:
        """Return two hits, of the device, and of all tiers: the `longest` each, or an end of a row further on that `tokens`
        continue. `match` is what follows the closed `path` on the device. Unless a row `may_copy`, or if nodes are
        pending, nothing can be loaded, and both are the same."""
        here = self.longest(match, have)
        if not may_copy:
            return here, here
        here = self.ends.find(path, tokens, have, here, 1)
        if self._num_tiers == 1 or match.num_pending:
            return here, here
        match = self._index.match_tiers(path, tokens, (len(tokens) - 1) // self._size - have, match)
        return here, self.ends.find(path, tokens, have, self.longest(match, have, 2), 2)

    def cheapest(
        self, here: Found, both: Found, have: int, room: int, is_worth: Callable[[int, int, int], bool]
    ) -> tuple[Found, list[Part]]:
        """Choose between `here`, a hit on the device, and longer hits of `both` tiers that load at most `room` pages
        and are worth it (`BlockManager.load_where`). Return the hit, and its parts: none if it is `here`."""
        best, paid, parts = here, 0, list[Part]()
        for hit in self._longer(here, both):
            its_parts = self.parts_of(hit, have)
            pages = sum(int(np.count_nonzero(part.blocks < 0)) * self._pages[part.place] for part in its_parts)
            start, stop = (have * self._size + self.length_of(each) for each in (best, hit))
            if pages <= room and stop > start and is_worth(start, stop, pages - paid):
                best, paid, parts = hit, pages, its_parts
        return best, parts

    def _longer(self, here: Found, both: Found) -> list[Found]:
        """Hits of `both` behind `here`: of each stretch of blocks after which all sides can stand, the first and the
        last one. Each block in a stretch costs as much as the one before, and saves more. Then that with an end."""
        stands = both.stands[0].copy()
        stands[: here.num_blocks] = False
        nums = dict.fromkeys([num for first, stop in stretches(stands) for num in (first + 1, stop)])
        return [both.cut(num) for num in nums] + [both] * (both.end is not here.end)

    def length_of(self, found: Found) -> int:
        return found.num_blocks * self._size + (0 if found.end is None else len(found.end.tokens) // 4)

    def parts_of(self, found: Found, have: int) -> list[Part]:
        """What a row with `have` blocks takes of a hit: from each side what it reads there, then all of the full group."""
        spans, end = found.hit.spans, found.end
        parts = [Part(side.place, read, blocks) for side, read, blocks in self._read_by_sides(found, have)]
        parts.append(Part(DEVICE, spans, self._index.blocks_of(DEVICE, spans)))
        if end is not None:
            parts += [Part(place, [(end, 0, 1)], end.blocks_in(place, 0, 1)) for place in self._pages]
        return parts

    def _read_by_sides(self, found: Found, have: int = 0) -> Iterator[tuple[Side, list[Span], Blocks]]:
        """By side: the nodes of a hit from which a row with `have` blocks goes on, and their blocks."""
        spans = found.hit.spans
        for side in self._layout.sides:
            # The end of a row has a state of its own.
            if found.end is None or not side.is_state:
                read = rest_of(spans, side.reads_from(have + found.num_blocks) - have)
                yield side, read, self._residence(side, read)

    def reached(self, spans: list[Span], *, with_end: bool) -> dict[Run, list[Reach]]:
        """What a retention of confirmed nodes covers, by run, last run first: these nodes and all before them, and what
        the sides have at their last restart point, and at even ones. `with_end`: a row ended behind them; its end, and
        the restart point before it."""
        last, _, stop = spans[-1]
        way = reversed(spans_to(last, stop - 1))
        reaches: dict[Run, list[Reach]] = {run: [(0, first, end)] for run, first, end in way}
        if not self._layout.sides:
            return reaches
        furthest = self.standing(spans, with_end=with_end)
        stands, hits = furthest.stands[0], [furthest]
        if with_end:
            # The next prompt may leave out this row's answer, and then begins where the prompt ended.
            before = first_of(spans, furthest.match.num_blocks - (furthest.end is None))
            hits.append(self.standing(before, with_end=False))
        hits += [furthest.cut(num) for num in self._layout.even_restarts(len(stands)) if stands[num - 1]]
        for hit in hits:
            for side, nodes, _ in self._read_by_sides(hit):
                for run, first, stop in nodes:
                    reaches[run].append((side.table, first, stop))
        if furthest.end is None:
            return reaches
        return {furthest.end: [(place // NUM_PLACES, 0, 1) for place in self._pages], **reaches}

    def _stands(self, match: Match, have: int, tiers: int = 1) -> list[NDArray[np.bool_]]:
        """`Found.stands` of a match from column `have` on. The row holds what its windows reach back to before that."""
        most, found = match.num_confirmed, []
        ends = np.arange(have + 1, have + most + 1)
        for side in self._layout.sides:
            blocks = np.maximum.reduce([self._residence(side, match.spans, tier) for tier in range(tiers)])
            stands = blocks[:most] >= 0
            if not side.is_state:
                # Holes before each column. A window stands if none lies between its first column and its end.
                holes = np.concatenate([[0], np.cumsum(~stands)])
                stands = holes[1:] == holes[np.maximum(side.first_column(ends * self._size) - have, 0)]
            found.append(stands)
        return [np.logical_and.reduce(found), *found]

    def can_stand(self, run: Run, length: int) -> NDArray[np.bool_]:
        """Whether every side can stand after each of the run's first `length` nodes, all confirmed: bool [length]."""
        return self._stands(Match(spans_to(run, length - 1)), 0)[0][-length:]

    def hit_end(self, lookup: Found, sought: int, have: int = 0, from_host: int = 0) -> HitEnd:
        """Describe where a lookup of `sought` blocks ended. The row had the first `have` of them before."""
        match, stands, *_ = lookup
        size, most, found = self._size, have + len(stands[0]), (have + match.num_blocks) * self._size
        taken = have * size + self.length_of(lookup)
        alone = [have + _last(each) for each in stands[1:]]
        least, why = min(alone), "whole" if taken >= sought * size else "not cached"
        limit = alone.index(least)
        if taken < found:
            # What the side lacks to stand one block further on.
            side = self._layout.sides[limit]
            lacking = rest_of(first_of(match.spans, most - have), side.reads_from(least + 1) - have)
            is_evicted = any(run.was_evicted(side.place, begin, stop) for run, begin, stop in lacking)
            why = "pending" if least == most else "evicted" if is_evicted else "not kept"
            if (have + _last(stands[0])) * size > taken:
                why = "not loaded"
        allowed = tuple([max(size * blocks, taken) for blocks in alone])
        return HitEnd(taken, size * most, found, size * sought, allowed, limit, why, from_host)

    def note(self, row: int, found: Found, sought: int, have: int, *, count: bool, from_host: int = 0) -> None:
        """Note where the row's lookup of `sought` blocks ended, and its junction; it had `have` of them. `count`: add
        the full group's tokens behind the hit to `lost`. A second lookup replaces the first until the row computes."""
        if found.match.num_blocks:
            self._note_junction(row, have, found)
        elif found.end is None:
            return
        end = self.hit_end(found, sought, have, from_host)
        uid, before, was_counted = self._ends.get(row, (0, end, count))
        is_again = uid == self._tables.uid[row]
        if have * self._size > (before.num_tokens if is_again else 0):
            # It has computed blocks since its first lookup.
            return
        if is_again and (count := was_counted):
            self.lost[before.limit] -= before.lost
        if count:
            self.lost[end.limit] += end.lost
        self._ends[row] = self._tables.uid.item(row), end, count

    def _note_junction(self, row: int, have: int, lookup: Found) -> None:
        """Note the junction, where the row's prompt parts from content behind `have` blocks, as wanted if the hit ended
        before it and the content goes on. Note also in `tables.branches` whether content goes on behind the hit."""
        found, hit = lookup.match, lookup.hit
        run, _, stop = found.spans[-1]
        is_shortened = hit.num_blocks < found.num_blocks
        goes_on = run.row >= 0 or stop < run.end or self._index.num_behind(run, stop - 1) > 0
        if is_shortened and goes_on and lookup.end is None:
            self._tables.want(row, [have + found.num_blocks], _JUNCTION)
        if hit.spans:
            run, _, stop = hit.spans[-1]
            self._tables.branches[row] = self._index.num_behind(run, stop - 1) or (not is_shortened and goes_on)

    def end_of(self, row: int) -> HitEnd | None:
        """Where the row's hit ended; None if nothing was found."""
        uid, end, _ = self._ends.get(row, (0, None, False))
        return end if uid == self._tables.uid[row] else None

    def cached_pages(self, tier: int) -> list[int]:
        """Cached pages of a tier: of the full group, then of each side."""
        pool = self._index.pools[NUM_PLACES + tier]
        assert pool.place is not None, "windows and states have places of their own"
        counts = np.bincount(pool.place[pool.state < 0], minlength=len(self._index.pools)).tolist()
        of_sides = [counts[side.place + tier] * side.pages for side in self._layout.sides]
        return [pool.num_cached - sum(of_sides), *of_sides]

    def _residence(self, side: Side, spans: list[Span], tier: int = DEVICE) -> Blocks:
        """The block of each node in a side's place on a tier, int64 [n]; -1: it has none."""
        tables, found = self._tables, [NO_BLOCKS]
        for run, first, stop in spans:
            blocks = run.blocks_in(side.place + tier, first, stop)
            if run.row >= 0 and not side.is_state and tier == DEVICE:
                # The run's row is still computing: what its window holds can be shared.
                start = self._index.paths[run.row].published
                begin = max(start + first, tables.first.item(side.table, run.row))
                blocks[begin - start - first :] = tables.blocks[side.table, run.row, begin : start + stop]
            found.append(blocks)
        return np.concatenate(found)

    def renew(self, spans: list[Span]) -> None:
        """Let what sides keep at even restarts of these nodes, from the root on, be used now: it is evicted after them."""
        for blocks in self.even_blocks(spans):
            self._device.hold(blocks)
            self._device.release(blocks)

    def even_blocks(self, spans: list[Span], tier: int = DEVICE) -> list[Blocks]:
        """By side, its cached blocks on a tier at even restarts of these nodes, from the root on; the last node's first."""
        restarts, found = self._layout.even_restarts(Match(spans).num_blocks), list[Blocks]()
        for side in self._layout.sides if restarts else ():
            columns = np.unique(np.concatenate([np.arange(side.reads_from(num), num) for num in restarts]))
            blocks = self._residence(side, spans, tier)[columns[::-1]]
            blocks = blocks[blocks >= 0]
            found.append(blocks[self._index.pages(tier).state[blocks] < 0])
        return found

    def take(self, row: int, have: int, found: Found) -> None:
        """Let the row hold what every side has of a hit behind its `have` blocks; its tables have the columns."""
        tables, stop = self._tables, have + found.num_blocks
        if not have:
            self.renew(found.hit.spans)
        for side, _, blocks in self._read_by_sides(found, have):
            if side.is_state:
                passed, taken = slice(min(have, 1)), slice(1)
                tables.let_move(row, True)
            else:
                begin, first = side.reads_from(stop), tables.first.item(side.table, row)
                passed, taken = slice(first, min(begin, have)), slice(stop - len(blocks), stop)
                tables.set_first(side.table, row, max(begin, first))
            self._device.hold(blocks)
            if have:
                self._device.release(tables.blocks[side.table, row, passed])
            tables.put(side.table, row, taken, blocks)

    def next_end(self, row: int, start: int, end: int) -> int:
        """Where a share from token `start` on ends: the first length at which states are wanted, at most `end`."""
        wanted = self._tables.wanted[:, row] * self._size
        return int(min([end, *(length for length in wanted.tolist() if length > start)]))

    def end(self, row: int) -> list[Span]:
        """Keep what a row that ends has in its sides, and its end. Return its nodes, if they have even restarts."""
        self.keep_all(row)
        self.ends.keep(row)
        has_even = self._layout.even_restarts(self._tables.full_blocks(row))
        return self._index.paths[row].closed(self._index.confirmed_length).spans(0) if has_even else []

    def keep_all(self, row: int) -> None:
        """Keep what the row's sides hold of its confirmed nodes. The row ends, or goes to the host."""
        tables = self._tables
        if not self._index.paths[row].writes:
            return
        for side in self._layout.bounded:
            first = int(tables.first[side.table, row])
            self._keep(side, row, first, tables.blocks[side.table, row, first : tables.num_blocks[row]])
        computed = int(tables.num_computed[row])
        if computed and computed % self._size == 0 and computed == tables.num_launched[row] and tables.num_blocks[row]:
            for side in self._layout.states:
                self._keep(side, row, computed // self._size - 1, tables.blocks[side.table, row, :1])

    def give_back_fronts(self, rows: Rows) -> None:
        """Release what windows and chunks of these distinct rows passed, by computed tokens, later blocks first."""
        tables = self._tables
        for side in self._layout.bounded:
            begins = tables.first[side.table][rows]
            ends = np.minimum(side.first_column(tables.num_computed[rows]), tables.num_blocks[rows])
            # In most steps few rows pass a block. Only those go on.
            passing = (ends > begins).nonzero()[0]
            if not len(passing):
                continue
            which, begins, ends = rows[passing], begins[passing], ends[passing]
            counts = ends - begins
            tables.set_first(side.table, which, ends)
            self.count_passed(side, int(counts.sum()))
            if np.count_nonzero(is_wanted := begins < tables.keeps_to[side.table][which]):
                for i in is_wanted.nonzero()[0].tolist():
                    self._pass_by(side, which.item(i), begins.item(i), ends.item(i))
                begins, counts, which = begins[~is_wanted], counts[~is_wanted], which[~is_wanted]
            # Forks may pass a shared block in the same step: `repeats`.
            columns = which.repeat(counts), rising_from(begins, counts)
            self._device.release(tables.blocks[side.table][columns], repeats=True)

    def count_passed(self, side: Side, num_blocks: int) -> None:
        self.passed[side.table] += num_blocks * side.pages

    def _pass_by(self, side: Side, row: int, first: int, stop: int) -> None:
        """Release columns `first` to `stop` - 1, which a window passed. Keep wanted ones; others if pages are free."""
        tables, device, is_wanted = self._tables, self._device, np.zeros(stop - first, np.bool_)
        wanted = set(tables.wanted[_LAST:, row].tolist())
        for end in wanted:
            is_wanted[max(side.reads_from(end) - first, 0) : max(end - first, 0)] = True
        blocks = tables.blocks[side.table, row, first:stop].astype(np.int64)
        # Content from which other rows go on ages as usual. What only this conversation used goes first.
        is_next = ~is_wanted & ~(device.has_content(blocks) & tables.branches[row])
        cuts = (is_wanted[1:] != is_wanted[:-1]).nonzero()[0] + 1
        for begin, end in pairwise([0, *cuts.tolist(), stop - first]):
            its, goes_next = blocks[begin:end], is_next[begin:end]
            if (is_wanted[begin] or device.num_free > 0) and self._index.paths[row].writes:
                self._keep(side, row, first + begin, its)
            device.release(its[~goes_next])
            device.release(its[goes_next], is_next=True)
        last = max(wanted)
        if stop > side.reads_from(last) and last * self._size <= tables.num_computed[row]:
            # Keep the rest of the last wanted window now: one call costs as much as a call for one block.
            self._keep(side, row, stop, tables.blocks[side.table, row, stop : min(last, tables.num_blocks[row])])
            tables.has_kept(side.table, row)

    def _keep(self, side: Side, row: int, first: int, blocks: NDArray[Any]) -> None:
        """Let these blocks of the row, int32 or int64 [n], carry its confirmed nodes from column `first` on. A state's
        block carries the node at whose end the state stands."""
        path = self._index.paths[row].closed(self._index.confirmed_length)
        self.keep_nodes(side.place, first_of(path.spans(first), len(blocks)), blocks)

    def keep_nodes(self, place: int, spans: list[Span], blocks: NDArray[Any]) -> None:
        """Let used blocks of a place, int32 or int64 [n], carry these nodes, one each. Skip a block that is below 0 or
        carries a node already, and a node that resides in the place already."""
        for run, begin, end in spans:
            its, blocks = blocks[: end - begin].astype(np.int64), blocks[end - begin :]
            is_new = (run.blocks_in(place, begin, end) < 0) & (its >= 0) & ~self._device.has_content(its)
            for start, stop in stretches(is_new):
                self._index.reside(place, run, begin + start, its[start:stop])

    # -- states that are read from one block and written to another

    def move_states(self, rows: Rows, starts: NDArray[np.int64], flight: Flight) -> None:
        """Draw new blocks for the rows' states. The batch reads the old ones, after `starts` tokens, int64 [n]."""
        tables = self._tables
        old = [tables.blocks[side.table, rows, 0].tolist() for side in self._layout.states]
        for side in self._layout.states:
            tables.put(side.table, rows, 0, self._device.draw(len(rows), side.pages))
        tables.let_move(rows, False)
        for row, start, *blocks in zip(rows.tolist(), starts.tolist(), *old, strict=True):
            flight.reads.update({row: StateRead(tables.uid.item(row), start, tuple(blocks))})

    def keep_states(self, flight: Flight) -> None:
        """Keep states that this batch begins with at blocks' ends: wanted ones if pages are available, else if free."""
        rows, starts, _ = flight.columns()
        tables, size, device, pages = self._tables, self._size, self._device, self._layout.state_pages
        # Leave what the rows may draw in the next step.
        spared = pages + len(rows) * self._layout.block_pages
        at_ends = (starts % size == 0).nonzero()[0]
        rows, starts = rows[at_ends], starts[at_ends]
        may = (starts > 0) & (starts <= tables.wanted[:, rows].max(axis=0, initial=0) * size)
        for row, start in zip(rows[may].tolist(), starts[may].tolist(), strict=True):
            if row in flight.reads or not self._index.paths[row].writes:
                continue
            is_wanted = start // size in tables.wanted[_LAST:, row]
            if device.num_free >= pages or (is_wanted and device.num_available >= spared):
                self.move_states(np.array([row]), np.array([start]), flight)

    def settle(self, flight: Flight) -> None:
        """Release states, at least one, that an ended batch read and did not overwrite. Keep those at blocks' ends."""
        tables, rows = self._tables, np.array(list(flight.reads))
        uids, starts, blocks = (np.array(column) for column in zip(*flight.reads.values(), strict=True))
        is_live = tables.uid[rows] == uids
        is_wanted = is_live & (tables.wanted[_LAST:, rows] == starts // self._size).any(axis=0)
        may_keep = is_live & (starts % self._size == 0) & (tables.num_computed[rows] >= starts)
        for side, read in zip(self._layout.states, blocks.T, strict=True):
            is_new = ~self._device.has_content(read)
            for i in (is_new & may_keep).nonzero()[0].tolist():
                self._keep(side, rows.item(i), starts.item(i) // self._size - 1, read[i : i + 1])
            is_next = ~is_wanted & ~(is_live & tables.branches[rows] & ~is_new)
            self._device.release(read[~is_next], repeats=True)
            self._device.release(read[is_next], is_next=True, repeats=True)

    def take_back(self, flight: Flight, rows: Rows) -> Rows:
        """Give rows back the states that the batch read and did not overwrite. It did not run, or their drafts were
        wrong. Return the rows that now stand where the batch began; a row without such states is not among them."""
        tables = self._tables
        reads = {row: read for row in rows.tolist() if (read := flight.reads.pop(row, None)) is not None}
        if not reads:
            return rows[:0]
        rows = np.array(list(reads))
        uids, starts, blocks = (np.array(column) for column in zip(*reads.values(), strict=True))
        # A row that has ended, fallen back further or gone to the host has released what it held.
        stands = (tables.uid[rows] == uids) & (tables.num_launched[rows] > starts) & (tables.num_blocks[rows] > 0)
        rows = rows[stands]
        for side, read in zip(self._layout.states, blocks.T, strict=True):
            self._device.release(read[~stands], repeats=True)
            self._device.release(tables.blocks[side.table, rows, 0], repeats=True)
            tables.put(side.table, rows, 0, read[stands])
        tables.let_move(rows, True)
        return rows


class RowEnds:
    """Ends of rows within a block, for models with states: the next turn of a conversation computes no token twice.

        tokens   0        16       32    37           a row ends after 37 tokens
        full     | n0     | n1     : e  |             its partial block of each group, and its state,
        state                           ◆             are content: the end of node n1, for the tokens 32 to 36

    A node has one end at most, the newest. A row that begins there copies the partial blocks and reads the state.
    """

    def __init__(self, index: PrefixIndex, growth: Growth, row_ends: bool) -> None:
        self._index, self._growth, self._tables, self._device = index, growth, growth.tables, growth.device
        self._layout, self._size = growth.layout, growth.tables.block_size
        # Whether rows may begin at such ends.
        self.are_kept = row_ends and self._layout.keeps and bool(self._layout.states)

    def keep(self, row: int) -> None:
        """Keep the end of the row, which is about to end, if it stands within a block."""
        if not self.are_kept:
            return
        tables = self._tables
        computed = tables.num_computed.item(row)
        column, rest = divmod(computed, self._size)
        path = self._index.paths[row].closed(self._index.confirmed_length)
        stands = rest and computed == tables.num_launched.item(row) and path.published == column > 0
        if not (stands and path.writes and column < tables.num_blocks[row]):
            # Or the partial block is on the host.
            return
        pools, blocks = self._index.pools, {DEVICE: tables.blocks.item(0, row, column)}
        if pools[DEVICE].refs(blocks[DEVICE]) > 1 and not tables.shares_tail[row]:
            # Another row has computed all of the block, which this one held ahead: it will be a node of that row's run.
            return
        for side in self._layout.sides:
            blocks[side.place] = tables.blocks.item(side.table, row, 0 if side.is_state else column)
        if not any(pools[place].has_content(block) for place, block in blocks.items()):
            self._index.add_end(path, tables.tokens[row, column * self._size : computed].tobytes(), blocks)

    def find(self, path: Path, tokens: NDArray[np.int32], have: int, found: Found, tiers: int) -> Found:
        """`found` at column `have`, or a longer end of a row that `tokens` continue."""
        if not self._index.ends:
            return found
        layout, room = self._layout, self._growth.num_unpromised
        for num_blocks, end in self._below(path, found):
            start = (have + num_blocks) * self._size
            length = start + len(end.tokens) // 4
            is_continued = length < len(tokens) and tokens[start:length].tobytes() == end.tokens
            # Room for all that the row then holds, for copies of the partial blocks, and for other states.
            needed = layout.pages_for((num_blocks + 1) * self._size) + layout.block_pages + layout.state_pages
            if num_blocks < found.num_blocks or not is_continued or room < needed:
                continue
            if self._is_whole(end, found, num_blocks, tiers):
                return found.cut(num_blocks, end)
        return found

    def behind(self, found: Found, tiers: int) -> Found:
        """`found`, or the end of a row behind its whole match, if these tiers have that."""
        run, _, stop = found.match.spans[-1]
        end, num = self._index.end_of(run, stop - 1), found.match.num_blocks
        return found.cut(num, end) if end is not None and self._is_whole(end, found, num, tiers) else found

    def _is_whole(self, end: Run, found: Found, num_blocks: int, tiers: int) -> bool:
        """Return whether these tiers have all of an end behind `num_blocks` blocks, and windows can stand there."""
        is_there = all(any(end.block(at + tier, 0) >= 0 for tier in range(tiers)) for at in self._layout.pages_of_place)
        # With 0 blocks the row stands there already.
        windows = self._layout.bounded if num_blocks else ()
        return is_there and all(found.stands[side.table][num_blocks - 1] for side in windows)

    def _below(self, path: Path, found: Found) -> Iterator[tuple[int, Run]]:
        """Yield (nodes before it, end) of ends behind a match's confirmed nodes, longest first, then the path's."""
        stop = len(found.stands[0])
        for run, first, last in reversed(first_of(found.match.spans, stop)):
            for at in sorted(run.children, reverse=True):
                end = self._index.end_of(run, at) if first <= at < last else None
                if end is not None:
                    yield stop - last + at + 1, end
            stop -= last - first
        if (end := self._index.ends.get(path.prefix)) is not None:
            yield 0, end

    def take(self, row: int, have: int, end: Run) -> int:
        """Let the row, which had `have` blocks before the hit, go on from an end behind it. Returns the tokens won."""
        tables, growth = self._tables, self._growth
        column = tables.num_blocks.item(row)
        tables.ensure_columns(column + 1)
        for _, place, _ in self._layout.of_blocks:
            # Hold the source first: the next draw must not evict it.
            growth.copies.hold_source(place, end.block(place, 0))
        for side in self._layout.states:
            self._device.hold(end.blocks_in(side.place, 0, 1))
            if have:
                self._device.release(tables.blocks[side.table, row, :1])
            tables.put(side.table, row, 0, end.block(side.place, 0))
        for _, place, pages in self._layout.of_blocks:
            growth.copy_into(place, row, column, end.block(place, 0), pages)
        tables.let_move(row, True)
        won = len(end.tokens) // 4
        length = column * self._size + won
        tables.set_progress(row, length, length)
        return won
