"""Content of windows, chunks and states: which of it is kept, and at which lengths a prompt can begin with it.

    full      | n0 | n1 | n2 | n3 | n4 |      found: all five nodes
    window    | -  | -  | n2 | n3 | -  |      reaches back from the ends of n3
    state     | -  | -  | -  | ◆  | -  |      kept at the end of n3
    a hit ends where every group can stand: after n3

A node resides in each group by itself, in the place of that group. What a row holds when it ends is kept; what it passes
is kept if a prompt is likely to begin there (the last full block of its own prompt, where others part from it, and where
the caller says), and as long as pages are free, to be evicted first.
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
from .prefix_index import NOTHING, Match, PrefixIndex
from .runs import (
    DEVICE,
    HOST,
    NUM_PLACES,
    Blocks,
    Path,
    Reach,
    Run,
    Span,
    first_of,
    num_nodes,
    spans_where,
    stretches,
    upwards,
)
from .tables import Rows

# In `tables.wanted`: after the prompt's end, which is wanted while pages are free, come its last full block, the end of
# what it was found to share, and the lengths that were asked for.
_LAST, _JUNCTION = 1, 2
# Nodes of a place on the device, and the block of each there, int64 [n]: -1 for none, -2 where none is needed.
Part = tuple[int, list[Span], Blocks]


class Found(NamedTuple):
    """What a lookup found.

    match   what the full group has
    stands  by side, bool [n]: whether it can stand after each confirmed block of the match
    hit     the part of the match after which every side can stand
    end     the end of a row that goes on from there; None: none
    """

    match: Match
    stands: list[NDArray[np.bool_]]
    hit: Match
    end: Run | None


class HitEnd(NamedTuple):
    """Where a lookup ended, in tokens.

    num_tokens  where every group can stand: the hit, which the end of a row may have made longer
    confirmed   that the full group had; `found`: with those that batches were still computing
    sought      the most that there can be: a token is left to compute, and blocks are whole
    alone       the most that each side allows by itself, on the device and the host
    limit       the side that allows least
    why         "whole": all was found; "not cached": no group had more; of the side: "pending", what comes next was still
                being computed; "evicted", it had more; "not kept", it never had; or "not loaded": there is more on the host
    from_host   tokens of it for which something came from the host
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
        """Tokens behind it that the full group had."""
        return max(self.confirmed - self.num_tokens, 0)


def _last(stands: NDArray[np.bool_]) -> int:
    """The number of blocks after which it is last true, 0: after none."""
    return len(stands) - int(stands[::-1].argmax()) if stands.any() else 0


def _cut(found: Found, num: int) -> Found:
    """What was found, but its hit is the first `num` blocks of the match."""
    hit = Match(first_of(found.match.spans, num), num, -1) if num else NOTHING
    return found._replace(hit=hit, end=None)


class SideContent:
    def __init__(self, index: PrefixIndex, growth: Growth, row_ends: bool) -> None:
        self._index, self._tables, self._device = index, growth.tables, growth.device
        self._layout, self._size = growth.layout, growth.tables.block_size
        self._pages = self._layout.pages_of_place
        self.ends = RowEnds(index, growth, row_ends)
        # Pages that windows and chunks gave back in front so far, by table.
        self.passed = [0] * (1 + len(self._layout.sides))
        # By row: its uid, where its hit ended, and whether that is counted. By side: tokens that such ends lost.
        self._ends: dict[int, tuple[int, HitEnd, bool]] = {}
        self.lost = [0] * len(self._layout.sides)

    def begin(self, row: int, num_tokens: int, keep_at: Sequence[int]) -> None:
        """Note at which lengths the prompt of a new row is wanted: at its last full block, one token being left to
        compute, and at blocks' ends up to those of `keep_at`; at its own end, if that is a block's, while pages are free."""
        if not self._layout.keeps:
            return
        last, is_even = (num_tokens - 1) // self._size, num_tokens % self._size == 0
        asked = dict.fromkeys(length // self._size for length in keep_at if self._size <= length <= num_tokens)
        self._tables.want(row, [(last + 1) * is_even, last, 0, *list(asked)[:MOST_KEPT_AT]])

    def longest(self, match: Match, have: int = 0, tiers: int = 1) -> Found:
        """The part of a match behind the first `have` blocks, which a row has, after which every side can stand with what the
        first `tiers` have, 1: the device."""
        stands = self._stands(match, have, tiers)
        return _cut(Found(match, stands, NOTHING, None), _last(np.logical_and.reduce(stands)))

    def standing(self, spans: list[Span], tiers: int, *, with_end: bool) -> Found:
        """`longest` of confirmed nodes, or, `with_end`, the end of a row behind all of them."""
        found = self.longest(Match(spans, num_nodes(spans), -1), tiers=tiers)
        return self.ends.behind(found, tiers) if with_end and spans else found

    def find(
        self, path: Path, tokens: NDArray[np.int32], match: Match, have: int = 0, row: int = -1, tiers: int = 1
    ) -> Found:
        """`longest` behind a closed path, for these tokens, or further on where a row ended. Of two `tiers`: with what the host
        has beside and behind a match on the device, unless a part of that is pending."""
        if tiers > 1 and (tiers := 1 + (match.first_pending < 0)) > 1:
            stop = (len(tokens) - 1) // self._size
            data = tokens[have * self._size : stop * self._size].tobytes()
            rest = self._index.match(path, data, stop - have, HOST, match)
            match = Match(match.spans + rest.spans, match.num_blocks + rest.num_blocks, -1)
        found = self.longest(match, have, tiers)
        return self.ends.find(path, tokens, have, found, tiers, is_new=row < 0)

    def cheapest(
        self, found: Found, both: Found, have: int, room: int, is_worth: Callable[[int, int, int], bool]
    ) -> tuple[Found, list[Part]]:
        """Of what was `found` on the device and the lengths at which all can stand with what `both` tiers have, the one for which
        least is copied and computed (`load_where`), of at most `room` pages; and what it takes, nothing if that is on the device."""
        stands, best, paid, parts = np.logical_and.reduce(both.stands), found, 0, list[Part]()
        stands[: found.hit.num_blocks] = False
        # Between the ends of a stretch each block costs as much, and saves more than the one before.
        nums = dict.fromkeys([num for first, stop in stretches(stands) for num in (first + 1, stop)])
        for offer in [*(_cut(both, num) for num in nums), *[both] * (both.end is not found.end)]:
            taken = self.taken_by(offer, have, found.match.num_blocks)
            pages = sum(int(np.count_nonzero(blocks == -1)) * self._pages[place] for place, _, blocks in taken)
            start, stop = (have * self._size + self.length_of(each) for each in (best, offer))
            if pages <= room and stop > start and is_worth(start, stop, pages - paid):
                best, paid, parts = offer, pages, taken
        return best, parts

    def length_of(self, found: Found) -> int:
        return found.hit.num_blocks * self._size + (0 if found.end is None else len(found.end.tokens) // 4)

    def taken_by(self, found: Found, have: int, num_here: int) -> list[Part]:
        """What a row with `have` blocks takes of what was found, the sides first. The device has `num_here` of the full group."""
        num, spans, end, parts = found.hit.num_blocks, found.hit.spans, found.end, list[Part]()
        for side in self._layout.sides:
            blocks = self._residence(side, spans)
            blocks[: num - 1 if side.is_state else max(0, side.first_column((have + num) * self._size) - have)] = -2
            parts += [(side.place, spans, blocks)] * (end is None or not side.is_state)
        full = np.full(num, -1)
        full[:num_here] = self._index.blocks_of(DEVICE, first_of(spans, num_here))
        parts.append((DEVICE, spans, full))
        return parts if end is None else parts + [(at, [(end, 0, 1)], end.blocks_in(at, 0, 1)) for at in self._pages]

    def reached(self, spans: list[Span], tiers: int, *, with_end: bool) -> dict[Run, list[Reach]]:
        """What a retention of confirmed nodes is of, by run, last one first: with them, what the sides have on these tiers where a row
        behind them, or behind as many of them as it can, begins; and `with_end` where one ended."""
        # Not by spans: of one run the device may have the first nodes, and the host the rest.
        reaches: dict[Run, list[Reach]] = {run: [(0, 0, at + 1)] for run, at in upwards(spans[-1][0], spans[-1][2] - 1)}
        if not self._layout.sides:
            return reaches
        # The next prompt may not repeat an answer: where its own prompt ended is kept beside the row's end.
        found = [self.standing(spans, tiers, with_end=is_end) for is_end in (False, True)[: 1 + with_end]]
        for place, its, blocks in [part for each in found for part in self.taken_by(each, 0, 0)]:
            for run, first, stop in spans_where(its, blocks > -2):
                # Of the full group all is.
                if place != DEVICE or run.is_end:
                    reaches.setdefault(run, []).append((place // NUM_PLACES, first, stop))
        # The end of a row, if there is one, was added last.
        return dict(sorted(reaches.items(), key=lambda its: -its[0].id))

    def _stands(self, match: Match, have: int, tiers: int = 1) -> list[NDArray[np.bool_]]:
        """`Found.stands` of a match that begins at column `have`; a row that stands there holds what windows reach back to."""
        most = match.num_blocks if match.first_pending < 0 else min(match.num_blocks, match.first_pending - have)
        ends, found = np.arange(have + 1, have + most + 1), list[NDArray[np.bool_]]()
        for side in self._layout.sides:
            blocks = np.maximum.reduce([self._residence(side, match.spans, tier) for tier in range(tiers)])
            is_there = blocks[: max(most, 0)] >= 0
            found.append(is_there)
            if side.is_state:
                continue
            begins = side.first_column(ends * self._size)
            # Holes before each column; none may lie between where a window begins and its end.
            holes = np.concatenate([[0], np.cumsum(~is_there)])
            found[-1] = holes[1:] == holes[np.maximum(begins - have, 0)]
        return found

    def can_stand(self, run: Run, length: int) -> NDArray[np.bool_]:
        """Whether every side can stand after each of the run's first `length` nodes, bool [length], which are confirmed."""
        spans = [(each, 0, at + 1) for each, at in upwards(run, length - 1)][::-1]
        stands: NDArray[np.bool_] = np.logical_and.reduce(self._stands(Match(spans, num_nodes(spans), -1), 0))
        return stands[-length:]

    def hit_end(self, lookup: Found, sought: int, have: int = 0, from_host: int = 0) -> HitEnd:
        """Where a lookup of `sought` blocks ended, the first `have` of which were there already."""
        match, stands, *_ = lookup
        size, most, found = self._size, have + len(stands[0]), (have + match.num_blocks) * self._size
        taken = have * size + self.length_of(lookup)
        alone = [have + _last(each) for each in stands]
        limit, why = alone.index(min(alone)), "whole" if taken >= sought * size else "not cached"
        side, least = self._layout.sides[limit], min(alone)
        if taken < found:
            # What would have to be there to stand one block further.
            first = least if side.is_state else int(side.first_column((least + 1) * size))
            is_evicted = self._was_evicted(side, first_of(match.spans, most - have), first - have)
            why = "pending" if least == most else "evicted" if is_evicted else "not kept"
            if (have + _last(np.logical_and.reduce(stands))) * size > taken:
                why = "not loaded"
        allowed = tuple([max(size * blocks, taken) for blocks in alone])
        return HitEnd(taken, size * most, found, size * sought, allowed, limit, why, from_host)

    def _was_evicted(self, side: Side, spans: list[Span], first: int) -> bool:
        """Whether the side has evicted one of the nodes from the place `first` of the spans on, which is not there."""
        for run, begin, stop in spans:
            if run.was_evicted(side.place, min(begin + max(first, 0), stop), stop):
                return True
            first -= stop - begin
        return False

    def note(self, row: int, found: Found, sought: int, have: int, *, count: bool, from_host: int = 0) -> None:
        """Note where the row's lookup, of `sought` blocks of which it had `have`, ended, and where its prompt is wanted.
        `count`: what the full group had behind it is lost."""
        if found.match.num_blocks:
            self._note_junction(row, have, found)
        elif found.end is None:
            return
        end = self.hit_end(found, sought, have, from_host)
        uid, before, was_counted = self._ends.get(row, (0, end, count))
        is_again = uid == self._tables.uid[row]
        if have * self._size > (before.num_tokens if is_again else 0):
            # It has begun to compute.
            return
        if is_again and (count := was_counted):
            self.lost[before.limit] -= before.lost
        if count:
            self.lost[end.limit] += end.lost
        self._ends[row] = self._tables.uid.item(row), end, count

    def _note_junction(self, row: int, have: int, lookup: Found) -> None:
        """Note where the row's prompt parts from what the full group has behind `have` blocks, if that goes on and no
        group stood there: it is wanted. And whether what it is given is where others go on, too."""
        found, hit = lookup.match, lookup.hit
        run, _, stop = found.spans[-1]
        is_shortened = hit.num_blocks < found.num_blocks
        goes_on = run.row >= 0 or stop < run.end or self._index.branches(run, stop - 1)
        if is_shortened and goes_on and lookup.end is None:
            self._tables.want(row, [have + found.num_blocks], _JUNCTION)
        if hit.spans:
            run, _, stop = hit.spans[-1]
            self._tables.branches[row] = self._index.branches(run, stop - 1) or (not is_shortened and goes_on)

    def end_of(self, row: int) -> HitEnd | None:
        """Where the row's hit ended; None: nothing was found."""
        uid, end, _ = self._ends.get(row, (0, None, False))
        return end if uid == self._tables.uid[row] else None

    def cached_pages(self, tier: int) -> list[int]:
        """Pages of a tier with content that none holds, of the full group and each side."""
        pool = self._index.pools[NUM_PLACES + tier]
        assert pool.place is not None, "windows and states have places of their own"
        counts = np.bincount(pool.place[pool.state < 0], minlength=len(self._index.pools)).tolist()
        its = [counts[side.place + tier] * side.pages for side in self._layout.sides]
        return [pool.num_cached - sum(its), *its]

    def _residence(self, side: Side, spans: list[Span], tier: int = DEVICE) -> Blocks:
        """The block of each node of the spans in a side's place of a tier, int64 [n]; -1: none."""
        found = np.empty(num_nodes(spans), np.int64)
        at = 0
        for run, first, stop in spans:
            part = found[at : at + stop - first]
            part[:] = run.blocks_in(side.place + tier, first, stop)
            if run.row >= 0 and not side.is_state and tier == DEVICE:
                # A row that goes on shares what its window still holds.
                start, held = self._index.paths[run.row].published, int(self._tables.first[side.table, run.row])
                begin = max(start + first, held)
                part[max(0, begin - start - first) :] = self._tables.blocks[side.table, run.row, begin : start + stop]
            at += stop - first
        return found

    def take(self, row: int, have: int, match: Match, *, with_states: bool) -> None:
        """Give the row, which has `have` blocks, what every side holds of a hit; its table has the columns."""
        tables, stop = self._tables, have + match.num_blocks
        for side in self._layout.sides:
            blocks = self._residence(side, match.spans)
            if side.is_state and not with_states:
                continue
            if side.is_state:
                self._device.hold(blocks[-1:])
                if have:
                    self._device.release(tables.blocks[side.table, row, :1])
                tables.put(side.table, row, 0, blocks[-1])
                tables.let_move(row, True)
                continue
            begin, first = int(side.first_column(stop * self._size)), int(tables.first[side.table, row])
            blocks = blocks[max(begin - have, 0) :]
            self._device.hold(blocks)
            if first < min(begin, have):
                self._device.release(tables.blocks[side.table, row, first : min(begin, have)])
            tables.put(side.table, row, slice(stop - len(blocks), stop), blocks)
            tables.set_first(side.table, row, max(begin, first))

    def _wanted(self, row: int) -> set[int]:
        """Numbers of blocks after which the row's prompt is wanted, whether pages are free or not."""
        return set(self._tables.wanted[_LAST:, row].tolist()) - {0}

    def next_end(self, row: int, start: int, end: int) -> int:
        """Where a share from token `start` on ends, at most at `end`: at the first length at which its states are wanted."""
        wanted = self._tables.wanted[:, row] * self._size
        return int(min([length for length in wanted.tolist() if start < length < end], default=end))

    def keep_all(self, row: int) -> None:
        """Keep what the sides of a row that ends hold of confirmed nodes."""
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
        """Release what lies before the windows and chunks of these distinct rows, by computed tokens, later blocks first."""
        tables = self._tables
        for side in self._layout.bounded:
            begins = tables.first[side.table][rows]
            ends = np.minimum(side.first_column(tables.num_computed[rows]), tables.num_blocks[rows])
            # Few rows pass a block in a step: the rest of this is for them.
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
            # Forks pass a block that they share in one step.
            columns = which.repeat(counts), rising_from(begins, counts)
            self._device.release(tables.blocks[side.table][columns], repeats=True)

    def count_passed(self, side: Side, num_blocks: int) -> None:
        self.passed[side.table] += num_blocks * side.pages

    def _pass_by(self, side: Side, row: int, first: int, stop: int) -> None:
        """Release columns `first` to `stop` - 1, which a window passed; keep what is wanted, or while pages last."""
        tables, columns, wanted = self._tables, np.arange(first, stop), self._wanted(row)
        last = max(wanted, default=0)
        is_wanted = np.zeros(len(columns), np.bool_)
        for end in wanted:
            is_wanted |= (columns >= side.first_column(end * self._size)) & (columns < end)
        blocks = tables.blocks[side.table, row, first:stop].astype(np.int64)
        was_content = self._device.has_content(blocks)
        bounds = [0, *((is_wanted[1:] != is_wanted[:-1]).nonzero()[0] + 1).tolist(), len(columns)]
        for begin, end in pairwise(bounds):
            kept = is_wanted[begin] or self._device.num_free > 0
            if kept and self._index.paths[row].writes:
                self._keep(side, row, first + begin, blocks[begin:end])
            if is_wanted[begin]:
                self._device.release(blocks[begin:end])
                continue
            # What others go on from ages as all does; what a conversation has left behind is of no more use.
            stays = was_content[begin:end] & tables.branches[row]
            self._device.release(blocks[begin:end][stays])
            self._device.release(blocks[begin:end][~stays], is_next=True)
        if stop > side.first_column(last * self._size) and last * self._size <= tables.num_computed[row]:
            # All of the last wanted window at once: block by block it costs as much each time.
            self._keep(side, row, stop, tables.blocks[side.table, row, stop : min(last, tables.num_blocks[row])])
            tables.has_kept(side.table, row)

    def _keep(self, side: Side, row: int, first: int, blocks: NDArray[Any]) -> None:
        """Let these blocks of the row, int32 or int64 [n], carry its confirmed nodes from column `first` on. Of a state:
        the node at whose end it stands."""
        path = self._index.paths[row].closed(self._index.confirmed_length)
        self.keep_nodes(side.place, first_of(path.spans(first), len(blocks)), blocks)

    def keep_nodes(self, place: int, spans: list[Span], blocks: NDArray[Any]) -> None:
        """Let used blocks of a place, int32 or int64 [n], carry these nodes, as far as they carry none (below 0: there is no
        block), and the nodes reside nowhere in the place."""
        for run, begin, end in spans:
            its, blocks = blocks[: end - begin].astype(np.int64), blocks[end - begin :]
            is_new = (run.blocks_in(place, begin, end) < 0) & (its >= 0) & ~self._device.has_content(its)
            for start, stop in stretches(is_new):
                self._index.reside(place, run, begin + start, its[start:stop])

    # -- states that are read from one block and written to another

    def move_states(self, rows: Rows, starts: NDArray[np.int64], flight: Flight) -> None:
        """Draw other blocks for the states of these rows after `starts` tokens, int64 [n], which the batch must not overwrite."""
        tables = self._tables
        old = [tables.blocks[side.table, rows, 0].tolist() for side in self._layout.states]
        for side in self._layout.states:
            tables.put(side.table, rows, 0, self._device.draw(len(rows), side.pages))
        tables.let_move(rows, False)
        for row, start, *blocks in zip(rows.tolist(), starts.tolist(), *old, strict=True):
            flight.reads.update({row: StateRead(tables.uid.item(row), start, tuple(blocks))})

    def keep_states(self, flight: Flight) -> None:
        """Let rows whose state is wanted write another one if pages are available; at other chunks' ends, if free."""
        rows, starts, _ = flight.columns()
        tables, size, device, pages = self._tables, self._size, self._device, self._layout.state_pages
        # What the rows may draw in the next step is not taken.
        spared = pages + len(rows) * self._layout.block_pages
        at_ends = (starts % size == 0).nonzero()[0]
        rows, starts = rows[at_ends], starts[at_ends]
        may = (starts > 0) & (starts <= tables.wanted[:, rows].max(axis=0, initial=0) * size)
        for row, start in zip(rows[may].tolist(), starts[may].tolist(), strict=True):
            if row in flight.reads or not self._index.paths[row].writes:
                continue
            is_wanted = start // size in self._wanted(row)
            if device.num_free >= pages or (is_wanted and device.num_available >= spared):
                self.move_states(np.array([row]), np.array([start]), flight)

    def settle(self, flight: Flight) -> None:
        """Let go of the states that a batch that ran read and did not overwrite, of which there is one at least: they are kept, or free."""
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
        """Give rows the states that the batch was to read and not to overwrite, if there are any: it did not run, or their drafts
        were wrong. Returns the rows that stand where they stood before it."""
        tables = self._tables
        reads = {row: read for row in rows.tolist() if (read := flight.reads.pop(row, None)) is not None}
        if not reads:
            return rows[:0]
        rows = np.array(list(reads))
        uids, starts, blocks = (np.array(column) for column in zip(*reads.values(), strict=True))
        # It may have ended, stand further in front, or be on the host: then what it held is given back already.
        stands = (tables.uid[rows] == uids) & (tables.num_launched[rows] > starts) & (tables.num_blocks[rows] > 0)
        rows = rows[stands]
        for side, read in zip(self._layout.states, blocks.T, strict=True):
            self._device.release(read[~stands], repeats=True)
            self._device.release(tables.blocks[side.table, rows, 0], repeats=True)
            tables.put(side.table, rows, 0, read[stands])
        tables.let_move(rows, True)
        return rows


class RowEnds:
    """Ends of rows within a block, where models keep states: the next turn of a conversation computes nothing twice.

        tokens   0        16       32    37           a row ends after 37 tokens
        full     | n0     | n1     : e  |             its partial block of each group, and its state,
        state                           ◆             are content: the end of node n1, for the tokens 32 to 36

    A node has one end, and a newer one replaces it. A row that begins there copies the partial blocks and reads the state.
    """

    def __init__(self, index: PrefixIndex, growth: Growth, row_ends: bool) -> None:
        self._index, self._growth, self._tables, self._device = index, growth, growth.tables, growth.device
        self._layout, self._size = growth.layout, growth.tables.block_size
        # Whether rows begin there.
        self.are_kept = row_ends and self._layout.keeps and bool(self._layout.states)

    def keep(self, row: int) -> None:
        """Keep where the row, which is about to end, stands within a block."""
        if not self.are_kept:
            return
        tables = self._tables
        computed = tables.num_computed.item(row)
        column, rest = divmod(computed, self._size)
        path = self._index.paths[row].closed(self._index.confirmed_length)
        stands = rest and computed == tables.num_launched.item(row) and path.published == column > 0
        # Not on the host.
        stands = stands and column < tables.num_blocks[row]
        if not stands or not path.writes:
            return
        blocks = {DEVICE: tables.blocks.item(0, row, column)}
        for side in self._layout.sides:
            blocks[side.place] = tables.blocks.item(side.table, row, 0 if side.is_state else column)
        pools = self._index.pools
        if not any(pools[place].has_content(block) for place, block in blocks.items()):
            self._index.add_end(path, tables.tokens[row, column * self._size : computed].tobytes(), blocks)

    def find(
        self, path: Path, tokens: NDArray[np.int32], have: int, found: Found, tiers: int, *, is_new: bool
    ) -> Found:
        """What was `found` at column `have`, or the tokens' longest end on these tiers if further on. `is_new`: no row takes it."""
        if not self._index.ends or not (is_new or self._growth.may_copy):
            return found
        match, stands, hit, _ = found
        layout, room = self._layout, self._growth.num_unpromised
        for num_blocks, end in self._below(path, match, len(stands[0])):
            start = (have + num_blocks) * self._size
            length = start + len(end.tokens) // 4
            is_theirs = length < len(tokens) and tokens[start:length].tobytes() == end.tokens
            # Room to copy the partial blocks and to write another state, when all that a row takes before is held.
            needed = layout.pages_for((num_blocks + 1) * self._size) + layout.block_pages + layout.state_pages
            if num_blocks < hit.num_blocks or not is_theirs or room < needed:
                continue
            if self._is_whole(end, stands, num_blocks, tiers):
                return _cut(found, num_blocks)._replace(end=end)
        return found

    def behind(self, found: Found, tiers: int) -> Found:
        """What was `found`, or the end of a row behind all of its match."""
        run, _, stop = found.match.spans[-1]
        end, num = self._index.end_of(run, stop - 1), found.match.num_blocks
        is_whole = end is not None and self._is_whole(end, found.stands, num, tiers)
        return _cut(found, num)._replace(end=end) if is_whole else found

    def _is_whole(self, end: Run, stands: list[NDArray[np.bool_]], num_blocks: int, tiers: int) -> bool:
        """Whether these tiers have all of an end behind so many blocks, and windows stand there."""
        is_there = all(any(end.block(at + tier, 0) >= 0 for tier in range(tiers)) for at in self._layout.pages_of_place)
        # Where the row stands already, its windows do.
        sides = zip(self._layout.sides, stands, strict=True) if num_blocks else ()
        return is_there and all(side.is_state or its[num_blocks - 1] for side, its in sides)

    def _below(self, path: Path, match: Match, most: int) -> Iterator[tuple[int, Run]]:
        """The ends of the first `most` nodes of a match, and of the node before, with the number of nodes: longest first."""
        stop = most
        for run, first, last in reversed(first_of(match.spans, most)):
            for at in sorted(run.children, reverse=True):
                end = self._index.end_of(run, at) if first <= at < last else None
                if end is not None:
                    yield stop - last + at + 1, end
            stop -= last - first
        if (end := self._index.ends.get(path.prefix)) is not None:
            yield 0, end

    def take(self, row: int, have: int, end: Run) -> int:
        """Let the row, which had `have` blocks and has those before it, go on from an end. Returns the tokens won."""
        tables, growth = self._tables, self._growth
        column = tables.num_blocks.item(row)
        tables.ensure_columns(column + 1)
        for table, place, _ in self._layout.of_blocks:
            # First: what is drawn next must not evict it.
            growth.hold_source(table, end.block(place, 0))
        for side in self._layout.states:
            self._device.hold(end.blocks_in(side.place, 0, 1))
            if have:
                self._device.release(tables.blocks[side.table, row, :1])
            tables.put(side.table, row, 0, end.block(side.place, 0))
        for table, place, pages in self._layout.of_blocks:
            growth.copy_here(table, row, column, end.block(place, 0), pages)
        tables.let_move(row, True)
        won = len(end.tokens) // 4
        length = column * self._size + won
        tables.set_progress(row, length, length)
        return won
