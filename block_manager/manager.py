"""The block manager: the checked calls of the memory layer.

Every call is atomic: it succeeds, or raises a typed error and changes nothing. Data movement is returned as arrays of
block ids (`Moves`). The caller serialises calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged.base.arguments import (
    checked_flag,
    checked_integer,
    checked_level,
    int64_array,
    is_integer,
    keep_at_error,
    logical_time,
    token_array,
)
from paged.base.copying import Uncopyable
from paged.errors import InvalidConfig, InvalidTokens, MemoryClaimed, NothingInFlight, OutOfBlocks, RowInFlight

from .content_key import root_prefix
from .events import Event
from .flights import Flight
from .layout import PLAIN, LayerGroup, Layout
from .memory import Memory
from .moves import NO_MOVES, Moves, joined
from .sharing import Hit
from .tables import Rows
from .views import GroupTables, MemoryStats, TierView

RowsLike = int | Sequence[int] | Rows


class Admission(Enum):
    """Whether blocks can be had: now, later, or never, because even an empty pool is too small."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


def _counts(value: ArrayLike, rows: Rows, name: str) -> NDArray[np.int64]:
    """`value` as int64, one integer for each row: the same for all, or one each. Raises InvalidConfig."""
    array = int64_array(value)
    if array is None or array.shape not in ((), rows.shape):
        raise InvalidConfig(f"{name} has to be an int64, or {len(rows)} of them, one a row; got {value!r}.")
    return np.broadcast_to(array, rows.shape)


class BlockManager(Uncopyable):
    """Block tables over a pool of `num_blocks` blocks of `block_size` tokens, and `host_blocks` more to swap to.

    With `host_caching`, content evicted from the device stays on the host while there is room, and a hit loads it back.
    `groups` are the kinds of layers: `num_blocks` then counts pages, and a group says how many pages its block takes.
    `row_ends`, for models with states: a row may begin where another ended within a block, and copies that block.
    `takes_ahead`: where a window or state ended a hit, rows still share full blocks behind it, and write only from
    `GroupTables.written_from` on. Run moves in the order of the calls that return them; a call that returns none may
    leave some for `take_moves`. Calls between two `next_batch` belong to one step, whose rows may share what others of
    it compute. To read: `rows` has the columns of the rows, `device` and `host` the blocks of each tier. Raises
    InvalidConfig for sizes below 1 (`host_blocks`: below 0), and for switches that are no bool.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        host_blocks: int = 0,
        prefix_caching: bool = True,
        host_caching: bool = False,
        groups: Sequence[LayerGroup] = PLAIN,
        row_ends: bool = True,
        takes_ahead: bool = True,
    ) -> None:
        self.num_blocks = num_blocks = checked_integer("num_blocks", num_blocks, 1, 2**31)
        self.block_size = block_size = checked_integer("block_size", block_size, 1, 2**31)
        self.num_host_blocks = host_blocks = checked_integer("host_blocks", host_blocks, 0, 2**31)
        self.prefix_caching = prefix_caching = checked_flag("prefix_caching", prefix_caching)
        self.host_caching = host_caching = checked_flag("host_caching", host_caching)
        if (num_blocks + host_blocks) * block_size >= 2**62:
            raise InvalidConfig("more slots than int64 can number.")
        if host_caching and not (host_blocks and prefix_caching):
            raise InvalidConfig(
                f"host_caching keeps content in host blocks; got host_blocks {host_blocks}, prefix_caching {prefix_caching}."
            )
        if not isinstance(groups, Sequence) or not all(isinstance(group, LayerGroup) for group in groups):
            raise InvalidConfig(f"groups has to be a sequence of LayerGroup; got {groups!r}.")
        # The groups, and their counts of pages.
        self.layout = layout = Layout(groups, block_size, keeps=prefix_caching)
        switches = host_caching, checked_flag("row_ends", row_ends), checked_flag("takes_ahead", takes_ahead)
        self._memory = memory = Memory(layout, num_blocks, host_blocks, *switches)
        self.rows, self.device, self.host = memory.rows, TierView(memory.device), TierView(memory.host)
        self._is_claimed = False

    def claim(self) -> Memory:
        """Give the memory and its unchecked calls to a scheduler. From then on, calls here that change rows or batches,
        or what is loaded, raise MemoryClaimed. Calls that read stay open, and so do `retain`, `expire` and
        `reset_cache`. Raises InvalidConfig if another scheduler has the memory, or rows are open."""
        if self._is_claimed or len(self.rows.live):
            raise InvalidConfig("this manager is in use; a scheduler needs one for itself.")
        self._is_claimed = True
        return self._memory

    def _own(self, call: str) -> Memory:
        """The memory, for a call that changes it. Raises MemoryClaimed."""
        if self._is_claimed:
            raise MemoryClaimed(call)
        return self._memory

    def admission(self, num_blocks: int, *, watermark: int = 0) -> Admission:
        """OK if `num_blocks` more device blocks can be drawn and `watermark` stay; NEVER if an empty pool is too small;
        else LATER. While no block is used the watermark does not count. Raises InvalidConfig for negative numbers."""
        num_blocks, watermark = checked_integer("num_blocks", num_blocks, 0), checked_integer("watermark", watermark, 0)
        if num_blocks > self.num_blocks:
            return Admission.NEVER
        kept = watermark if self._memory.device.num_used else 0
        return Admission.OK if num_blocks + kept <= self._memory.device.num_available else Admission.LATER

    def must_fit(self, pool: Any) -> None:
        """Raise InvalidConfig unless a pool of tensors has the same `num_blocks`, `block_size` and `num_host_blocks`.
        If it has a `host_block_size`, that must equal `block_size`: a block moves between the tiers as a whole."""
        size = getattr(pool, "block_size", None)
        if (host_size := getattr(pool, "host_block_size", size)) != size:
            raise InvalidConfig(
                f"host blocks hold {host_size} tokens and device blocks {size}; a block moves whole, so they have to be of one size."
            )
        for name in ("block_size", "num_blocks", "num_host_blocks"):
            if (its := getattr(pool, name, None)) != (ours := getattr(self, name)):
                raise InvalidConfig(f"the pool has {name} {its}; the manager counts {ours}.")

    def next_batch(self) -> int:
        """Begin another batch, which runs after the earlier ones; `allocate` now fills it. Returns its number."""
        memory = self._own("next_batch")
        memory.begin_batch(memory.batch + 1)
        return memory.batch

    def add(
        self,
        tokens: Any,
        *,
        namespace: Any = None,
        reads: bool = True,
        writes: bool = True,
        keep_at: Sequence[int] = (),
    ) -> int:
        """Open a row for a sequence that knows these tokens, and give it the blocks of its cached prefix. Returns the
        row; its `num_computed` is the hit. Draws blocks only to load content from the host. Without `reads` the row
        computes all tokens (prompt log-probabilities); without `writes` no other row shares them. `keep_at`: lengths
        after which other prompts may go on; `next_end` ends shares there. Raises InvalidTokens, InvalidNamespace or
        InvalidConfig (`reads`, `writes`: no bool; `keep_at`: a wrong length, or over MOST_KEPT_AT)."""
        memory = self._own("add")
        reads, writes = checked_flag("reads", reads), checked_flag("writes", writes)
        prompt = self._prompt(tokens)
        if (wrong := keep_at_error(keep_at, len(prompt))) is not None:
            raise InvalidConfig(wrong)
        return memory.add_counted(prompt, root_prefix(namespace), reads=reads, writes=writes, keep_at=keep_at)

    def next_end(self, row: int, end: int) -> int:
        """Where a share of the row that begins at its launched tokens should end, at most at `end`: its states are then
        kept where other prompts may begin. Raises UnknownRow or InvalidConfig."""
        row, end = self._memory.tables.one(row), checked_integer("end", end, 0)
        return self._memory.next_end(row, self._memory.tables.num_launched.item(row), end)

    def append(self, row: int, tokens: Any) -> None:
        """Add known tokens to the row. Raises UnknownRow or InvalidTokens."""
        memory = self._own("append")
        row, array = memory.tables.one(row, allow_swapped=True), token_array(tokens)
        memory.extend_by(np.array([row]), array, np.array([len(array)]))

    def allocate(self, rows: RowsLike, counts: ArrayLike, *, unknown: ArrayLike = 0) -> Moves:
        """Put `counts[i]` more tokens of `rows[i]` in flight in the composed batch: draw blocks, copy shared tails.

        A row may be in several outstanding batches, once in each. Its last `unknown[i]` tokens have no values yet:
        earlier batches sample them, or they are drafts. They become content only after `append`. Raises UnknownRow,
        DuplicateRow, RowInFlight (it is in this batch already), RowSwapped, InvalidTokens (a count below 1, or above
        the known tokens not launched yet and `unknown`) or OutOfBlocks, changing nothing.
        """
        memory = self._own("allocate")
        tables = memory.tables
        array = tables.checked(rows)
        wanted, beyond = _counts(counts, array, "counts"), _counts(unknown, array, "unknown")
        if not len(array):
            # A batch without rows would have to be confirmed.
            return NO_MOVES
        for row in array.tolist():
            if memory.is_placed(row):
                raise RowInFlight(row)
        known = tables.num_tokens[array] - tables.num_launched[array]
        is_wrong = (
            (wanted < 1) | (beyond < 0) | (wanted > beyond + np.maximum(known, 0)) | (wanted > np.iinfo(np.int32).max)
        )
        if is_wrong.any():
            i = int(is_wrong.nonzero()[0][0])
            raise InvalidTokens(
                f"row {array[i]}: {wanted[i]} tokens wanted in flight, {beyond[i]} of them unknown; it knows {max(known[i], 0)} that are "
                "not launched."
            )
        launched = tables.num_launched[array]
        memory.place(array, launched, launched + wanted)
        memory.growth.draw_promised()
        memory.keep_states()
        return memory.growth.copies.take()

    def confirm(self) -> int:
        """End the oldest outstanding batch, or without one the composed batch, which has run: confirm its tokens, make
        nodes of full blocks, release duplicates. Returns its number. Raises NothingInFlight, or InvalidTokens if tokens
        of a row in this batch are still unknown: `append` them first."""
        memory = self._own("confirm")
        flight = self._ending(0)
        known = memory.tables.num_tokens
        for row, _, end in flight.shares():
            if min(end, int(memory.tables.num_launched[row])) > known[row]:
                raise InvalidTokens(
                    f"row {row}: batch {flight.number} computes its tokens up to {end}, and {known[row]} are known; append the others first."
                )
        memory.settle(flight)
        return flight.number

    def cancel(self) -> dict[int, int]:
        """Take back the latest batch, composed or outstanding: release its blocks, withdraw its pending nodes, truncate
        rows that share these. Returns the counted hit tokens that each such row lost. Raises NothingInFlight."""
        return self._own("cancel").take_back(self._ending(-1))

    def _ending(self, place: int) -> Flight:
        flights = self._memory.flights
        if flights.composed.is_used and (place or not flights.outstanding):
            self.next_batch()
        if not flights.outstanding:
            raise NothingInFlight
        return flights.outstanding[place]

    def reserve(self, rows: RowsLike, num_blocks: ArrayLike) -> None:
        """Draw blocks until each table holds at least `num_blocks[i]`. A cancel leaves them, unless it takes states
        back. Raises UnknownRow, DuplicateRow, RowSwapped, InvalidConfig (negative) or OutOfBlocks, changing nothing."""
        memory = self._own("reserve")
        array = memory.tables.checked(rows)
        wanted = _counts(num_blocks, array, "num_blocks")
        if (wanted < 0).any():
            raise InvalidConfig(f"a table cannot hold {wanted.min()} blocks.")
        if (wanted > self.num_blocks).any():
            # As Python integers: the sum of such numbers may not fit into 64 bits.
            missing = np.maximum(wanted - memory.tables.num_blocks[array], 0)
            raise OutOfBlocks(sum(missing.tolist()), self.device.num_available)
        memory.reserve_rows(array, wanted)

    def truncate(self, row: int, num_blocks: int) -> None:
        """Release the row's blocks from column `num_blocks` on, on the host too; void what batches compute there.
        Raises UnknownRow, or InvalidConfig (below 0, past the table's end, or windows or states cannot stand there)."""
        memory = self._own("truncate")
        row = memory.tables.one(row, allow_swapped=True)
        have = int(memory.tables.num_blocks[row])
        if not is_integer(num_blocks) or not 0 <= num_blocks <= have:
            raise InvalidConfig(f"row {row}: cannot truncate to {num_blocks} blocks; its table has {have}.")
        length = min(int(num_blocks) * self.block_size, int(memory.tables.num_launched[row]))
        if not memory.growth.is_restart(row, length):
            raise InvalidConfig(f"row {row} cannot stand at {length} tokens: its windows or states are further on.")
        memory.sharing.truncate(row, int(num_blocks))

    def free(self, rows: RowsLike) -> None:
        """End rows, in flight or not. Releases blocks tail first. Raises UnknownRow, DuplicateRow, changing nothing."""
        memory = self._own("free")
        for row in memory.tables.checked(rows, allow_swapped=True).tolist():
            memory.release(row)

    def fork(self, row: int) -> int:
        """Open a row with the same tokens. It shares all blocks with launched tokens, and is in the same batches up to
        its known tokens. The first row to write a shared partial block copies it. Raises UnknownRow, RowSwapped, or, if
        there are states, RowInFlight for a row in flight past its known tokens."""
        memory = self._own("fork")
        row = memory.tables.one(row)
        if memory.layout.states and memory.tables.content_end(row) < memory.tables.num_launched[row]:
            raise RowInFlight(row)
        return memory.fork_of(row)

    def swap_out(self, rows: RowsLike, keep: int = 0) -> Moves:
        """Move the rows' blocks from column `keep` on, at 0 with their states, to the host, after outstanding batches.
        Raises UnknownRow, DuplicateRow, InvalidConfig or OutOfBlocks (tier "host"), changing no row or content."""
        memory = self._own("swap_out")
        array = memory.tables.checked(rows, allow_swapped=True)
        least = int(memory.tables.num_blocks[array].min()) if len(array) else 0
        if not is_integer(keep) or not 0 <= keep <= least:
            raise InvalidConfig(f"cannot keep {keep} blocks; the shortest of these tables has {least}.")
        moves = memory.tiers.swap_out(array, int(keep))
        return joined([memory.growth.copies.take(), moves])

    def swap_in(self, rows: RowsLike) -> Moves:
        """Move the rows' host blocks back. Raises UnknownRow, DuplicateRow or OutOfBlocks, changing nothing."""
        memory = self._own("swap_in")
        array = memory.tables.checked(rows, allow_swapped=True)
        moves = memory.tiers.swap_in(array)
        return joined([memory.growth.copies.take(), moves])

    def take_moves(self) -> Moves:
        """Return the copies of content that calls without moves planned. Run them before the batch's forward pass.
        Always empty without `host_caching` and ends of rows."""
        return self._own("take_moves").growth.copies.take()

    def table(self, row: int) -> NDArray[np.int32]:
        """The row's device blocks in order, int32 [n]; a copy. Raises UnknownRow."""
        return self.rows.table(self._memory.tables.one(row, allow_swapped=True))

    def slots(self, row: int, start: int, stop: int) -> NDArray[np.int64]:
        """Slots of positions `start` to `stop` - 1, int64. Raises UnknownRow, or InvalidConfig past the table."""
        row = self._memory.tables.one(row, allow_swapped=True)
        held = int(self._memory.tables.num_blocks[row]) * self.block_size
        if not (is_integer(start) and is_integer(stop) and 0 <= start <= stop <= held):
            raise InvalidConfig(f"row {row}: positions {start} to {stop} are not in its {held} slots.")
        positions = np.arange(int(start), int(stop))
        return self._memory.slots(np.array([row]), positions, np.array([len(positions)]))

    def stats(self) -> MemoryStats:
        """Figures of this moment."""
        memory, device, host = self._memory, self.device, self.host
        sharing, offload = memory.sharing, memory.offload
        return MemoryStats(
            num_blocks=self.num_blocks,
            free=device.num_free,
            cached=device.num_cached,
            used=device.num_used,
            host_blocks=self.num_host_blocks,
            host_free=host.num_free,
            host_cached=host.num_cached,
            host_used=host.num_used,
            usage=device.usage,
            fragmentation=memory.fragmentation(),
            queries=sharing.queries,
            query_tokens=sharing.query_tokens,
            hit_tokens=sharing.hit_tokens,
            pending_hit_tokens=sharing.pending_hit_tokens,
            host_hit_tokens=sharing.host_hit_tokens,
            recent_query_tokens=sum(tokens for tokens, _ in sharing.recent),
            recent_hit_tokens=sum(found for _, found in sharing.recent),
            evicted_blocks=memory.device.num_evicted,
            idle_steps=memory.device.idle_steps,
            lifetime_steps=memory.index.lifetime_steps,
            offloaded_blocks=offload.offloaded_blocks if offload else 0,
            loaded_blocks=offload.loaded_blocks if offload else 0,
            groups=memory.group_stats(),
        )

    def check(self) -> list[str]:
        """Violations of the memory layer's invariants, recomputed from the tables. Empty if all is well."""
        return self._memory.check()

    def lookup(self, tokens: Any, namespace: Any = None) -> Hit:
        """The cached prefix of a prompt. Changes and counts nothing. Raises InvalidTokens or InvalidNamespace."""
        return self._memory.content.lookup(self._prompt(tokens), root_prefix(namespace))

    def retain(self, tokens: Any, namespace: Any = None, *, priority: int = 1, until: float | None = None) -> int:
        """Keep the cached prefix of these tokens, on both tiers, longer than content of lower `priority` (1 to 3; 0 is
        not retained). `until`: a logical time (`expire`); None: while it is cached. Returns the prefix's tokens. Raises
        InvalidTokens, InvalidNamespace, InvalidConfig (priority, until), or UnknownContent: nothing is cached."""
        level = checked_level(priority)
        return self._memory.content.retain(self._prompt(tokens), root_prefix(namespace), level, until)

    def expire(self, now: float) -> None:
        """End the retentions until the logical time `now` or earlier. A `now` before an earlier call's changes nothing.
        Raises InvalidConfig for NaN and for what is no number."""
        self._memory.content.retentions.expire(logical_time("now", now))

    def reset_cache(self) -> bool:
        """Forget all content. Return False and change nothing while any block of either tier is used or pinned."""
        return self._memory.content.reset()

    def block_hashes(self, row: int) -> list[bytes]:
        """Chained SHA-256 of the row's nodes in order: of equal content equal in every process. Raises UnknownRow."""
        return self._memory.index.hashes(self._memory.tables.one(row, allow_swapped=True))

    def take_events(self, *, restart_points: bool = False) -> list[Event]:
        """Return what each tier stored and removed since the last call, parents stored before children. The first call
        returns all content and begins the record. All events, applied from empty, give exactly the confirmed content of
        both tiers. `restart_points`: from this call on report also where prompts can begin, in a model whose layers are
        of several kinds. Returns nothing without full layers or a prefix cache."""
        if not self.prefix_caching:
            return []
        return self._memory.content.event_log().take(restart_points=restart_points)

    def events_snapshot(self) -> list[Event]:
        """All that `take_events` returned and that still holds, for a reader that starts late. Later events follow."""
        return self._memory.content.event_log().snapshot() if self.prefix_caching else []

    def cached_contents(self, tier: Literal["device", "host"] = "device") -> set[tuple[bytes, ...]]:
        """Every confirmed node in a tier: encoded namespace, then each block's token bytes. Raises InvalidConfig."""
        if tier not in ("device", "host"):
            raise InvalidConfig(f'tier has to be "device" or "host"; got "{tier}".')
        return self._memory.index.contents(tier) if self._memory.layout.full_pages else set()

    def extend_hit(self, row: int) -> int:
        """Take content behind the row's blocks, if all are nodes. Returns tokens. Raises UnknownRow or RowSwapped."""
        memory = self._own("extend_hit")
        return memory.sharing.extend_hit(memory.tables.one(row))

    def load_where(self, is_worth_loading: Callable[..., bool]) -> None:
        """Load content that only the host has where `is_worth_loading(start, end)` of its positions; by default always.
        Where layers are of several kinds it gets (start, end, pages): copy these pages, or compute the positions?"""
        memory, plain = self._own("load_where"), is_worth_loading
        memory.load_where((lambda start, end, _: plain(start, end)) if memory.layout.is_plain else is_worth_loading)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the pool can hold."""
        return self._memory.layout.tokens_in(self.num_blocks)

    def groups(self) -> tuple[GroupTables, ...]:
        """For each layer group, the pages of the composed batch's rows, and where their states are read and written.
        Rows are in the order of their placement. Valid until the next call that changes rows."""
        memory = self._own("groups")
        memory.flights.composed.pack()
        return memory.group_tables(memory.flights.composed)

    def group_pages(self, group: int, row: int) -> NDArray[np.int32]:
        """The pages of the row's blocks in a group, int32 [columns, pages]; -1 in columns that a window or chunk
        released. A state has one column. Raises UnknownRow, or InvalidConfig if there is no such group."""
        memory = self._memory
        group = checked_integer("group", group, 0, len(memory.layout.groups))
        row = memory.tables.one(row, allow_swapped=True)
        pages: NDArray[np.int32] = GroupTables(memory.growth, group, np.array([row]), memory.flights.composed).tables[0]
        return pages

    def _prompt(self, tokens: Any) -> NDArray[np.int32]:
        array = token_array(tokens)
        if not len(array):
            raise InvalidTokens("a sequence needs at least one token.")
        return array
