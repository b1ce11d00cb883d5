"""What a scheduler asks of memory in every step, and all that such a step may change.

Arguments are vouched for, not checked: a wrong row or count corrupts the tables, and check() tells. A caller that is not sure takes
the calls of BlockManager, which check first and come here then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.base.growing import rising_from

from .check import violations_of
from .content import Content
from .flights import Flight, Flights, Share
from .growth import NO_CHANGES, Growth, TableChanges
from .moves import NO_MOVES, Moves
from .pool import Pool
from .prefix_index import PrefixIndex
from .sharing import Sharing, truncate_table
from .tables import Rows, Tables
from .tiers import Offload, Tiers
from .views import RowView


class Composed(NamedTuple):
    """One batch as it was put out.

    number        counts batches
    flight        its shares
    is_empty      there was nothing to put out; what changed is told with the next one
    moves         copies of content between the tiers that it brings along
    slots         int64: of each decode the slots of its next positions, packed
    last_tokens   int32 [n]: the last token that each decode knows
    changes       of block tables since the last batch
    """

    number: int
    flight: Flight
    is_empty: bool
    moves: Moves
    slots: NDArray[np.int64]
    last_tokens: NDArray[np.int32]
    changes: TableChanges


class Memory:
    """The state of the memory layer, and the unchecked calls on it.

    Arrays that it shows are read-only views of the live columns, valid until a row is added or told more tokens, unless said to be copies.
    """

    def __init__(
        self, num_blocks: int, block_size: int, host_blocks: int, prefix_caching: bool, host_caching: bool
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_host_blocks = host_blocks
        self.prefix_caching = prefix_caching
        self.tables = Tables(self.block_size, num_columns=min(64, self.num_blocks))
        self.device = Pool(self.num_blocks, "device")
        self.host = Pool(self.num_host_blocks, "host")
        self.flights = Flights()
        self.index = PrefixIndex(self.tables, self.flights, self.device, self.host) if prefix_caching else None
        self.host_caching = host_caching
        self.offload: Offload | None = None
        if host_caching and self.index is not None:
            self.offload = Offload(self.index)
        self.tiers = Tiers(self.tables, self.device, self.host, self.index, self.offload)
        self.growth = Growth(self.tables, self.device)
        self.rows = RowView(self.tables, self.tiers)
        self.sharing = (
            Sharing(self.tables, self.flights, self.device, self.index, self.growth, self.tiers, self.offload)
            if self.index
            else None
        )
        self.content = Content(self.tables, self.device, self.host, self.index, self.offload, self.sharing)
        # Number of the batch that is being composed.
        self.batch = 1
        # Whether any row may hold blocks beyond its tokens.
        self._any_reserved = False
        # No row knows more tokens than this.
        self._longest = 0

    def add_counted(
        self, tokens: NDArray[np.int32], root: bytes, *, count: bool = True, reads: bool = True, writes: bool = True
    ) -> int:
        """`add` for tokens that are an array already and a namespace that is encoded (`root_prefix`).

        With `count` off the lookup is left out of the hit figures: a sequence that returns has been counted before; one that does not
        read looks nothing up.
        """
        row = self.tables.open(tokens)
        self._longest = max(self._longest, len(tokens))
        if self.sharing is None:
            return row
        self.sharing.index.open_path(row, root, reads=reads, writes=writes)
        try:
            found = self.sharing.extend_hit(row, count=count)
        except MemoryError:
            self.release(row)
            raise
        if count and reads:
            self.content.count_lookup(len(tokens), found)
        return row

    def admit(self, tokens: NDArray[np.int32], root: bytes, most: int) -> tuple[int, int, int]:
        """`add_counted` and `place_one` of at most `most` tokens in one: what an ordinary request needs to come in.

        The caller has seen that the blocks are there. They are promised: `Growth.draw_promised` has to come before a table is read,
        or calls anything but `admit`. Returns (row, tokens found, tokens placed).
        """
        sharing, size = self.sharing, self.block_size
        row, num_tokens = self.tables.open(tokens), len(tokens)
        if num_tokens > self._longest:
            self._longest = num_tokens
        computed = 0
        if sharing is not None:
            index = sharing.index
            key = root + tokens[:size].tobytes()
            if key not in index.runs and num_tokens >= size and most >= size:
                index.open_run(row, index.open_path(row, root), key)
            else:
                index.open_path(row, root)
                if key in index.runs:
                    self.growth.evict_promised()
                    try:
                        computed = sharing.extend_hit(row, first_is_known=True)
                    except MemoryError:
                        self.release(row)
                        raise
            self.content.count_lookup(num_tokens, computed)
        end = min(computed + most, num_tokens)
        have, wanted = computed // size, -(-end // size)
        if wanted > have:
            self.growth.promise_one(row, have, wanted)
        self._launch_one(row, computed, end)
        return row, computed, end - computed

    def take_moves(self) -> Moves:
        """Copies of content that were planned since the last call."""
        return NO_MOVES if self.offload is None else self.offload.take_moves()

    def extend(self, rows: Rows, tokens: NDArray[np.int32], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """One more known token for each of these distinct rows, int32 [n], after the `ends` that they know, int64 [n].

        Returns how many they know then. The caller vouches for all three.
        """
        tables = self.tables
        self._longest += 1
        if self._longest >= tables.tokens.shape[1]:
            # An upper bound that rises by one a call; only when it seems to be reached is it worth a look at the rows.
            self._longest = int(tables.num_tokens.max()) + 1
            tables.ensure_tokens(self._longest + 1)
        totals = ends + 1
        tables.tokens[rows, ends] = tokens
        tables.num_tokens[rows] = totals
        tables.last_token[rows] = tokens
        return totals

    def extend_by(self, rows: Rows, tokens: NDArray[np.int32], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """`counts[i]` more known tokens, int64 [n], for each of these distinct rows, packed in `tokens`. Returns how many they know then."""
        tables = self.tables
        known = tables.num_tokens[rows]
        totals = known + counts
        if not len(tokens):
            return totals
        self._longest = max(self._longest, int(totals.max()))
        tables.ensure_tokens(self._longest + 1)
        stops = counts.cumsum()
        # One index for both dimensions costs half of two.
        tables.tokens.reshape(-1)[rising_from(rows * tables.tokens.shape[1] + known, counts)] = tokens
        tables.num_tokens[rows] = totals
        if int(counts.min()) > 0:
            tables.last_token[rows] = tokens[stops - 1]
        else:
            has_new = counts > 0
            tables.last_token[rows[has_new]] = tokens[stops[has_new] - 1]
        return totals

    def place(self, rows: Rows, starts: NDArray[np.int64], ends: NDArray[np.int64], *, one_each: bool = False) -> Moves:
        """Put tokens `starts[i]` to `ends[i]` - 1 of these distinct rows, which are launched to `starts`, in flight; `one_each`: they are
        one of each row.

        Their blocks are promised: `Growth.draw_promised` has to come before a table is read, or calls anything but `admit`. Returns the copies
        of partial blocks that others hold. Raises OutOfBlocks, changing nothing.
        """
        tables, growth = self.tables, self.growth
        have = tables.num_blocks[rows]
        short = (ends > have * self.block_size).nonzero()[0]
        wanted = None if one_each else -(-ends[short] // self.block_size)
        moves = NO_MOVES
        if growth.any_shared_tail:
            num_grown = len(short) if wanted is None else int((wanted - have[short]).sum())
            moves = growth.copy_shared_tails(rows, num_grown)
        if len(short):
            growth.promise(rows[short], have[short], wanted)
        self._launch(rows, starts, ends)
        return moves

    def place_one(self, row: int, count: int) -> Moves:
        """`place` for one row, and its blocks at once."""
        tables = self.tables
        start, have = tables.num_launched.item(row), tables.num_blocks.item(row)
        if self.growth.any_shared_tail:
            moves = self.place(np.array([row]), np.array([start]), np.array([start + count]))
            self.growth.draw_promised()
            return moves
        wanted = -(-(start + count) // self.block_size)
        if wanted > have:
            self.growth.promise_one(row, have, wanted)
            self.growth.draw_promised()
        self._launch_one(row, start, start + count)
        return NO_MOVES

    def begin_batch(self, number: int) -> None:
        """What is placed from now on is in the batch of this number."""
        self.batch = number
        self.device.free_list.now = self.host.free_list.now = number
        self.flights.begin(number)
        if self.index is not None:
            self.index.batch = number

    def _launch_one(self, row: int, start: int, end: int) -> None:
        """`_launch` of one row."""
        index = self.index
        self.tables.num_launched[row] = end
        self.flights.composed.place_one(row, start, end)
        if index is not None and not index.is_lazy[row]:
            self._begin_pending(index, row, end)

    def _launch(self, rows: Rows, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """The batch computes these rows, whose blocks are theirs or promised, from `starts` to `ends`; those that are not lazy look up
        what comes next."""
        self.tables.num_launched[rows] = ends
        self.flights.composed.place(rows, starts, ends)
        index = self.index
        if index is not None and index.num_attentive:
            places = index.attentive(rows).tolist()
            if len(places) > 1:
                # What has been computed becomes content before another row of this batch is to compute the same.
                places.sort(key=lambda place: not index.is_behind(int(rows[place])))
            for place in places:
                self._begin_pending(index, int(rows[place]), int(ends[place]))

    def _begin_pending(self, index: PrefixIndex, row: int, end: int) -> None:
        # Tokens without values are no content.
        end = min(end, self.tables.num_tokens.item(row))
        if index.fills_next(row, end):
            # First of all: what is evicted is known no more, and this row computes it for others, too.
            self.growth.evict_promised()
            index.begin_pending(row, end)

    def lengthen(self, rows: Rows, ends: NDArray[np.int64], have: NDArray[np.int64], needs: NDArray[np.int64]) -> None:
        """These rows, the decodes of this batch, compute up to `ends`, int64 [n]: drafts behind the token that they were placed for. Beside
        the blocks that they `have`, those promised to them among them, `needs` more are promised to each."""
        short = needs.nonzero()[0]
        if len(short):
            self.growth.promise(rows[short], have[short], have[short] + needs[short])
        self.tables.num_launched[rows] = ends
        self.flights.composed.lengthen(rows, ends)

    def reject(self, rows: Rows, ends: NDArray[np.int64]) -> None:
        """Drafts of these rows beyond `ends`, int64 [n], were wrong: their slots will be overwritten, blocks with nothing else go back."""
        tables = self.tables
        is_swapped = tables.is_swapped[rows]
        if is_swapped.any():
            for row, end in zip(rows[is_swapped].tolist(), ends[is_swapped].tolist(), strict=True):
                if end < tables.num_launched[row]:
                    self._fall_back(Share(row, end, end))
            rows, ends = rows[~is_swapped], ends[~is_swapped]
        launched = np.minimum(tables.num_launched[rows], ends)
        tables.num_launched[rows] = launched
        places = (launched <= (tables.num_blocks[rows] - 1) * self.block_size).nonzero()[0]
        if not len(places):
            return
        rows, launched = rows[places], launched[places]
        excess = tables.num_blocks[rows] - np.maximum(-(-launched // self.block_size), tables.reserved[rows])
        places = (excess > 0).nonzero()[0]
        while len(places):
            longer = rows[places]
            columns = tables.num_blocks[longer] - 1
            self.device.release(tables.blocks[0, longer, columns].astype(np.int64))
            tables.num_blocks[longer] = columns
            excess[places] -= 1
            last = np.maximum(columns - 1, 0)
            tables.slot_base[longer] = (tables.blocks[0, longer, last] - last) * np.int64(self.block_size)
            places = places[excess[places] > 0]

    def copy_content(self, may_copy: bool) -> None:
        """Let content be copied between the tiers until the batch is put out, or do not: not while copies of an earlier one are still to run.
        Between two batches nothing is, unless this says so."""
        if self.offload is not None:
            self.offload.is_open = may_copy

    def commit(
        self,
        decodes: Rows,
        positions: NDArray[np.int64],
        counts: NDArray[np.int64] | None,
        now: float,
        *,
        has_more: bool,
    ) -> Composed:
        """Put the batch, of logical time `now`, out: draw what was promised, and say all that an engine needs of memory. What is placed
        from now on is another batch.

        `decodes` are the rows that `place` placed first, int64 [n], `positions` what they compute, packed, `counts[i]` of row i (None:
        one each); `has_more`: the batch is one though no row may be in it. The caller has seen that nothing ends by `now` (`retentions.next_end`).
        """
        self.growth.draw_promised()
        self.content.retentions.now = max(self.content.retentions.now, now)
        number, moves = self.batch, NO_MOVES if self.offload is None else self.offload.take_moves()
        flight, changes = self.flights.composed, NO_CHANGES
        is_empty = not (flight.is_used or has_more or len(moves))
        if not is_empty:
            # No engine runs an empty batch, so that one leaves the changes to the next.
            changes = self.growth.take_changes()
            self.growth.release_copied()
            self.flights.seal()
        self.begin_batch(number + 1)
        if self.offload is not None:
            self.copy_content(False)
        return Composed(
            number,
            flight,
            is_empty,
            moves,
            self._slots(decodes, positions, counts),
            self.tables.last_token[decodes],
            changes,
        )

    def end_step(
        self, flight: Flight, rows: Rows, tokens: NDArray[np.int32], ends: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """`settle`, and `extend` by what the batch sampled: one call a step."""
        self.settle(flight)
        return self.extend(rows, tokens, ends)

    def is_placed(self, row: int) -> bool:
        """Whether the row is in the batch that is being composed."""
        return self.flights.composed.has(row)

    def fork_of(self, row: int) -> int:
        """`fork` of a row that the caller vouches for."""
        tables, index = self.tables, self.index
        launched = tables.content_end(row)
        num_blocks = -(-launched // self.block_size)
        child = tables.open(tables.tokens[row, : tables.num_tokens[row]])
        if index is not None:
            index.fork_path(row, child)
        if num_blocks:
            blocks = tables.blocks[0, row, :num_blocks].astype(np.int64)
            self.device.hold(blocks)
            self.growth.write(child, 0, blocks)
        tables.num_launched[child] = launched
        tables.num_computed[child] = min(launched, int(tables.num_computed[row]))
        self.flights.inherit(row, child, launched)
        if launched % self.block_size:
            tables.shares_tail[row] = tables.shares_tail[child] = True
            self.growth.any_shared_tail = True
        if self.sharing is not None:
            self.sharing.share_fork(row, child)
        return child

    def fork_to_write(self, row: int) -> tuple[int, Moves]:
        """A fork of a row that no batch computes, and the copy of its partial block, which would be made when one of both writes it. Raises
        OutOfBlocks, changing nothing."""
        tables, growth = self.tables, self.growth
        if tables.num_launched[row] % self.block_size:
            self.device.require(1)
        shared_it_before = tables.shares_tail.item(row)
        child = self.fork_of(row)
        moves = growth.copy_shared_tails(np.array([child]), 0)
        # Only the child stood in its way.
        tables.shares_tail[row] = shared_it_before
        growth.any_shared_tail = bool(tables.shares_tail.any())
        return child, moves

    def give_up_from(self, row: int, num_tokens: int) -> None:
        """What batches that are out compute of the row from token `num_tokens` on is void: it is launched to there at most."""
        self.flights.clip(row, num_tokens)
        self._fall_back(Share(row, num_tokens, num_tokens))
        self._note_shared_tail(row)

    def _slots(self, rows: Rows, positions: NDArray[np.int64], counts: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """int64 [n]: the slots of `counts[i]` rising positions of `rows[i]`, packed (None: of one of each)."""
        tables, size = self.tables, self.block_size
        slots: NDArray[np.int64] = tables.slot_base[rows]
        first = positions
        if counts is not None:
            slots = slots.repeat(counts)
            first = positions[counts.cumsum() - counts]
        slots += positions
        if counts is None and not self._any_reserved:
            return slots
        # That holds in a row's last block, where most of them are.
        is_other = first < (tables.num_blocks[rows] - 1) * size
        if is_other.any():
            if counts is not None:
                rows, is_other = rows.repeat(counts), is_other.repeat(counts)
            at = positions[is_other]
            columns = at // size
            slots[is_other] = (tables.blocks[0, rows[is_other], columns] - columns) * np.int64(size) + at
        return slots

    def settle(self, flight: Flight) -> None:
        """The batch, the oldest that is out, ran: what it computed is confirmed, full blocks are nodes, duplicates go back."""
        tables, index = self.tables, self.index
        self.flights.end(flight)
        rows, _, ends = flight.columns()
        if flight.has_drafts or flight.held is not None or flight.is_fork is not None:
            # Rejected drafts are not launched any more, and what has no value is not computed.
            ends = np.minimum(ends, np.minimum(tables.num_launched[rows], tables.num_tokens[rows]))
            np.maximum.at(tables.num_computed, rows, ends)
        else:
            tables.num_computed[rows] = ends
        if index is None:
            return
        index.confirm(flight.number)
        if index.num_attentive:
            for place in index.attentive(flight.rows).tolist():
                if flight.holds(place):
                    self._publish(flight.rows.item(place))
        if self.sharing is not None:
            self.sharing.forget_sharers(flight.number)

    def _publish(self, row: int) -> None:
        # A swapped row has no device block that could carry a node.
        if self.sharing is not None and not self.tables.is_swapped[row]:
            self.sharing.publish(row)

    def take_back(self, flight: Flight) -> dict[int, int]:
        """The batch, the latest that is out, did not run: rows fall back to where it began, pending nodes are withdrawn.

        A row that shared such a node gives up its table from there on. Returns, for each such row, the hit tokens that it gave up and
        that had been counted.
        """
        index, sharing = self.index, self.sharing
        if sharing is not None:
            sharing.cut_sharers(flight)
        shares = flight.shares()[::-1]
        for share in shares:
            self._fall_back(share)
        for share in shares:
            # Whether a tail is shared is known when all have given back what they lose.
            self._note_shared_tail(share.row)
        self.flights.end(flight)
        if index is None or sharing is None:
            return {}
        index.withdraw(flight.number)
        sharing.hand_down(flight.number)
        return sharing.take_lost_hits()

    def _fall_back(self, share: Share) -> None:
        tables, size = self.tables, self.block_size
        row, stays, _ = share
        if tables.is_swapped[row] and stays % size and self.tiers.tail_is_node(row, stays // size):
            # A node that never becomes full is no place for a private tail.
            stays -= stays % size
            self.flights.clip(row, stays)
        tables.fall_back(row, stays)
        if self.index is not None:
            self.index.fall_back(row)
        keep = -(-tables.num_launched.item(row) // size)
        if tables.is_swapped[row]:
            self.tiers.trim(row, keep)
        self.growth.give_back(row, max(keep, int(tables.reserved[row])))

    def _note_shared_tail(self, row: int) -> None:
        """The row's last block may be partial now and others' as well: full a moment ago, or on the host."""
        tables = self.tables
        column, offset = divmod(tables.num_launched.item(row), self.block_size)
        if offset and column < tables.num_blocks[row] and self.device.num_refs(tables.blocks.item(0, row, column)) > 1:
            tables.shares_tail[row] = True
            self.growth.any_shared_tail = True

    def release(self, row: int) -> None:
        """`free` of one row that the caller vouches for."""
        tables = self.tables
        num_blocks = tables.num_blocks.item(row)
        first, stop = (0, 0) if self.index is None else self.index.release_path(row)
        if self.flights.outstanding or self.flights.composed.is_used:
            self.flights.leave(row)
        if tables.is_swapped[row]:
            self.tiers.drop(row)
        # Apart, because a release of blocks that look alike is one read and one write.
        if stop < num_blocks:
            self.growth.release(row, stop, num_blocks)
        if first:
            self.growth.release(row, 0, min(first, num_blocks))
        tables.close(row)

    def append_row(self, row: int, tokens: NDArray[np.int32]) -> None:
        """`append` of tokens that the caller vouches for."""
        self.tables.extend(row, tokens)
        self._longest = max(self._longest, int(self.tables.num_tokens[row]))

    def reserve_rows(self, rows: Rows, num_blocks: NDArray[np.int64]) -> None:
        """`reserve` of rows that the caller vouches for. Raises OutOfBlocks, changing nothing."""
        have = self.tables.num_blocks[rows]
        short = (num_blocks > have).nonzero()[0]
        if len(short):
            self.growth.promise(rows[short], have[short], num_blocks[short])
            self.growth.draw_promised()
        self.tables.reserved[rows] = np.maximum(self.tables.reserved[rows], num_blocks)
        self._any_reserved = True

    def truncate_row(self, row: int, num_blocks: int) -> None:
        """`truncate` to blocks that the caller vouches for."""
        if self.sharing is not None:
            self.sharing.truncate(row, num_blocks)
        else:
            truncate_table(self.tables, self.flights, self.growth, self.tiers, row, num_blocks)

    def shrink(self, row: int, reserved: int) -> None:
        """The row reserves only `reserved` blocks from now on; what it holds beyond them and its tokens goes back."""
        self.tables.reserved[row] = reserved
        self.growth.give_back(row, max(-(-int(self.tables.num_launched[row]) // self.block_size), reserved))

    def take_from_host(self, rows: Rows) -> Moves:
        """`swap_in` of rows that the caller vouches for, with its own copies only. Raises OutOfBlocks, changing nothing."""
        rows = rows[self.tables.is_swapped[rows]]
        before = self.tables.num_blocks[rows]
        moves = self.tiers.swap_in(rows)
        for row, start in zip(rows.tolist(), before.tolist(), strict=True):
            self.growth.note(row, start, int(self.tables.num_blocks[row]))
            self._note_shared_tail(row)
        return moves

    def load_where(self, is_worth_loading: Callable[[int, int], bool]) -> None:
        """A hit on content that only the host has is loaded where this says so, given the first position and the one after the
        last; the rest is computed. Without it all is loaded."""
        if self.offload is not None:
            self.offload.is_worth_loading = is_worth_loading

    def extend_hit(self, row: int, *, count: bool = True, room: int | None = None) -> int:
        """Look up what follows the row's blocks, which all are nodes, and take what is found. Returns the tokens won.

        Does nothing for a row with blocks beyond its nodes: what it has computed itself it need not find. What only the host has is
        loaded into `room` blocks at most (None: as many as can be drawn).
        """
        return 0 if self.sharing is None else self.sharing.extend_hit(row, count=count, room=room)

    def is_unconfirmed(self, row: int) -> bool:
        """Whether the row shares a block that a batch which has not ended is still computing."""
        return self.sharing is not None and self.sharing.is_unconfirmed(row)

    def set_computed(self, row: int, num_computed: int) -> None:
        """The first `num_computed` tokens of the row are in its blocks, written elsewhere; full blocks become nodes."""
        self.tables.set_progress(row, num_computed)
        self._publish(row)

    def check(self) -> list[str]:
        """Every violation of the memory layer's invariants, recomputed from the tables; empty when all is well."""
        held, held_host = self.device.kept.copy(), Counter[int]()
        held.update(self.growth.copied())
        if self.offload is not None:
            held_host.update(self.offload.held().tolist())
        found = violations_of(
            self.tables, self.flights, self.device, self.host, self.index, self.tiers, held, held_host
        )
        if self.growth.num_promised:
            found.append(f"6: {self.growth.num_promised} blocks are promised to rows and not drawn.")
        return found
