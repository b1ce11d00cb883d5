"""The memory manager as explained on a whiteboard: blocks are objects, tables are lists, content is a tuple.

Written from the rules, not from an implementation, and slow on purpose: content is looked up by comparing the whole
prefix. Runs beside a real manager and predicts what that one must show: hits, tables, watermarks, ref counts, copies,
how much of each tier is free, cached and used, and which content survives. Blocks have no ids here: which free block is
drawn is the real manager's choice.

Two more choices are the manager's, and `Shown` tells what it chose: which of several blocks with the same content
lookups find, and when a row publishes content that another row had published before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from paged.testing.naive_content import Block, NaiveContent, NaivePool, Node

Shown = Callable[[Node, list[Block]], Block | None]
"""Which of these blocks the manager's lookups find for the node; None if they find none of them."""


class NoRoom(Exception):
    """An operation wants more blocks than a tier can give; nothing has changed."""


def _none(node: Node, blocks: list[Block]) -> Block | None:
    """A manager whose rows publish where they have to, and nowhere else."""
    return None


@dataclass(eq=False)
class Row:
    """One sequence. Its blocks are those of `table`, on the device, then those of `tail`, on the host.

    `shares`: the tokens [start, end) that each batch which has not ended computes of the row, or of the row that it was
    forked from; empty once the row gave up its blocks from `start` on. `coming`: values of launched tokens that the row
    learns later.
    """

    tokens: list[int]
    namespace: object
    table: list[Block] = field(default_factory=list)
    tail: list[Block] = field(default_factory=list)
    launched: int = 0
    computed: int = 0
    shares: dict[int, tuple[int, int]] = field(default_factory=dict)
    coming: list[int] = field(default_factory=list)
    reserved: int = 0
    is_swapped: bool = False
    reads: bool = True
    writes: bool = True
    published: int = 0
    """Leading blocks that it knows to be nodes: of a block that forks share, at first only one of them does."""
    carried: set[Node] = field(default_factory=set)
    """Nodes that became pending in its blocks."""
    has_computed: bool = False
    """Whether any of its blocks was computed, not found."""

    @property
    def content_end(self) -> int:
        """Tokens that are launched and known, and so may be content."""
        return min(len(self.tokens), self.launched)

    def set_back(self, num_tokens: int, num_blocks: int) -> None:
        """Set the row back to its first so many tokens, in so many blocks: no batch computes any beyond."""
        self.launched, self.computed = min(self.launched, num_tokens), min(self.computed, num_tokens)
        self.published = min(self.published, num_blocks)
        del self.coming[max(0, self.launched - len(self.tokens)) :]
        self.shares = {batch: (start, min(end, num_tokens)) for batch, (start, end) in self.shares.items()}


class NaiveManager(NaiveContent):
    """The rules of the memory layer; rows are numbered by the real manager, options are `NaiveContent`'s."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rows: dict[int, Row] = {}
        # The batch that is being composed; those that are out, oldest first; and the rows that were placed in each, in
        # order.
        self.batch = 1
        self.out: list[int] = []
        self.placed: dict[int, list[Row]] = {}
        self.switched = self.switched_shared = self.gave_way = 0

    @property
    def has_composed(self) -> bool:
        """Whether any row was placed in the batch that is being composed."""
        return self.batch in self.placed

    @property
    def batches(self) -> list[int]:
        """Batches that have not ended and have rows, oldest first."""
        return [*self.out, self.batch] if self.has_composed else self.out

    def next_batch(self) -> None:
        """End the composing: what is allocated from now on belongs to another batch."""
        if self.has_composed:
            self.out.append(self.batch)
        self.batch += 1

    def add(
        self, number: int, tokens: Sequence[int], namespace: object, *, reads: bool = True, writes: bool = True
    ) -> int:
        """Add a row with its prefix hit. Return the hit in tokens."""
        row = self.rows[number] = Row(list(tokens), namespace, reads=reads, writes=writes)
        return self.extend_hit(row)

    def extend_hit(self, row: Row) -> int:
        """Give the row what the cache holds after its own blocks. Return the tokens won."""
        if not row.reads:
            return 0
        found, first_pending = self.lookup(row.tokens, row.namespace, len(row.table))
        for block in found:
            self.device.hold(block)
            row.table.append(block)
        loaded = 0 if first_pending is not None else self._load(row)
        if found or loaded:
            row.published = len(row.table)
            row.launched = row.computed = len(row.table) * self.block_size
        return (len(found) + loaded) * self.block_size

    def _load(self, row: Row) -> int:
        """Load what follows on the host, as much as there is room for, if that is worth it. Return the blocks won."""
        sources = self.lookup_on_host(row.tokens, row.namespace, len(row.table))[: self.device.available]
        if not sources or len(sources) * self.block_size < self.least_load:
            return 0
        for source in sources:
            self.host.hold(source)
        self._touched += reversed(sources)
        for source in sources:
            block = self.device.draw()
            self.loaded.append((source, block))
            row.table.append(block)
        for source, block in zip(sources, row.table[-len(sources) :], strict=True):
            assert source.node is not None
            self.device.carry(source.node, block, None)
        return len(sources)

    def allocate(
        self, numbers: Sequence[int], counts: Sequence[int], coming: Sequence[Sequence[int]] = ()
    ) -> list[tuple[int, int]]:
        """Place `counts[i]` tokens of each row in the batch that is being composed; the last ones are `coming[i]`,
        which the row learns later.

        Return the copies made, as (row number, column). Raises NoRoom, changing nothing.
        """
        if self._blocks_wanted(numbers, counts) > self.device.available:
            raise NoRoom
        copies: list[tuple[int, int]] = []
        sources: list[Block] = []
        for number in numbers:
            row = self.rows[number]
            column = row.launched // self.block_size
            if not row.launched % self.block_size:
                continue
            source = row.table[column]
            if source.refs > 1 or source.node is not None:
                copies.append((number, column))
                row.table[column] = self.device.draw()
                if source.refs > 1:
                    self.device.release(source)
                else:
                    sources.append(source)
        for place, (number, count) in enumerate(zip(numbers, counts, strict=True)):
            row = self.rows[number]
            end = row.launched + count
            self._grow(row, self.blocks_for(end))
            row.shares[self.batch] = row.launched, end
            row.launched = end
            row.coming += coming[place] if coming else []
            self.placed.setdefault(self.batch, []).append(row)
        for source in sources:
            # Last: this call must not draw what it copies from.
            self.device.release(source)
        return copies

    def append(self, number: int, tokens: Sequence[int]) -> None:
        """Append known tokens; those that are launched have the values that are coming."""
        row = self.rows[number]
        assert row.coming[: len(tokens)] == list(tokens)[: len(row.coming)]
        row.tokens += tokens
        del row.coming[: len(tokens)]

    def announce(self, numbers: Sequence[int], shown: Shown = _none) -> None:
        """Publish the full blocks that rows compute which were just placed, as pending nodes, up to the first that is
        known already.

        Where two of them compute the same content, the manager chooses whose block it is.
        """
        if not (self.prefix_caching and self.shares_in_flight):
            return
        # Content that was evicted for these rows is gone, also where they compute it again.
        self.forget_dead()
        # A row of another batch may publish now what was evicted here.
        self.accept(shown)
        known = self.living_nodes()
        candidates: dict[Node, list[tuple[Row, int]]] = {}
        for row in (self.rows[number] for number in numbers):
            self._look_again(row)
            for column in self._unpublished(row):
                candidates.setdefault(self.node(row.namespace, row.tokens, column + 1), []).append((row, column))
        # Parents first.
        for node in sorted(candidates, key=lambda node: len(node[1])):
            standing = [(row, column) for row, column in candidates[node] if row.published == column]
            if standing and node not in known:
                blocks = [row.table[column] for row, column in standing]
                block = shown(node, blocks) or blocks[0]
                self._carry(node, *standing[blocks.index(block)])

    def accept(self, shown: Shown) -> None:
        """Publish full blocks that could be content and are not, where the manager did: when is its choice."""
        if not (self.prefix_caching and self.shares_in_flight):
            return
        # Of a block that forks share, the one that computes in this batch has published it.
        placed = self.placed.get(self.batch, [])
        for row in sorted(self.rows.values(), key=lambda row: not any(row is other for other in placed)):
            for column in self._unpublished(row):
                node, block = self.node(row.namespace, row.tokens, column + 1), row.table[column]
                if node in self.device.resident or shown(node, [block]) is None:
                    break
                self._carry(node, row, column)

    def confirm(self, shown: Shown = _none) -> None:
        """Confirm the oldest batch and its nodes; computed blocks become nodes, or give way to one that is there."""
        batch = self._end(0)
        self.device.confirm(batch)
        self.host.confirm(batch)
        for row in self.rows.values():
            start, end = row.shares.pop(batch, (0, 0))
            if start < end:
                row.computed = max(row.computed, min(end, row.content_end))
                row.has_computed = True
        for row in self.placed.pop(batch):
            if row in self.rows.values():
                self._publish(row, shown)

    def _publish(
        self, row: Row, shown: Shown, switches: Callable[[int, Block], bool] = lambda column, block: True
    ) -> None:
        """Publish the row's computed blocks; tables that name a duplicate of a confirmed node's block name that block
        instead.

        Where a later batch has the same content pending in another block, the manager chooses which of the two lookups
        find.
        """
        self._look_again(row)
        for column in self._unpublished(row):
            if (column + 1) * self.block_size > row.computed:
                return
            node, block = self.node(row.namespace, row.tokens, column + 1), row.table[column]
            there = self.device.resident.get(node)
            if there is not None and node not in self.device.pending:
                if not switches(column, there):
                    return
                self._switch(block, there)
                self._look_again(row)
                continue
            if (there is not None or self._is_pending_on_host(node)) and shown(node, [block]) is None:
                return
            self._give_way(node)
            self._carry(node, row, column)

    def _is_pending_on_host(self, node: Node) -> bool:
        """Whether the node, or one behind it, is pending on the host."""
        namespace, tokens = node
        return any(each[0] == namespace and each[1][: len(tokens)] == tokens for each in self.host.pending)

    def catch_up(self, row: Row, shown: Shown, switches: Callable[[int, Block], bool]) -> None:
        """Publish what the row could not before, as far as the manager did, by `switches` and `shown`."""
        if self.prefix_caching:
            self._publish(row, shown, switches)

    def cancel(self) -> set[int]:
        """Cancel the latest batch: set rows back, withdraw nodes, cut rows that share those. Return the rows cut."""
        batch = self._end(-1)
        self.placed.pop(batch)
        tiers = self.device, self.host
        lost = {node for pool in tiers for node, number in pool.pending.items() if number == batch}
        sharers = set()
        for number, row in self.rows.items():
            start, end = row.shares.get(batch, (0, 0))
            columns = [i for i, block in enumerate(row.table + row.tail) if self._node_at(row, i, block) in lost]
            if columns and (start >= end or columns[0] < start // self.block_size):
                self._cut(row, columns[0])
                sharers.add(number)
            start, end = row.shares.pop(batch, (0, 0))
            if start < end:
                self._set_back(row, start)
        for pool in tiers:
            for node in lost & pool.resident.keys():
                pool.withdraw(node)
        return sharers

    def _set_back(self, row: Row, num_tokens: int) -> None:
        """Set the row back to its first so many tokens; blocks that it reserved stay."""
        column = num_tokens // self.block_size
        on_host = row.tail[column - len(row.table) :][:1] if column >= len(row.table) else []
        if num_tokens % self.block_size and any(block.node is not None for block in on_host):
            # The block on the host was to be a node, and never gets full: it cannot hold the row's private tokens.
            num_tokens = column * self.block_size
        row.set_back(num_tokens, num_tokens // self.block_size)
        keep = self.blocks_for(row.launched)
        self._trim(row, keep)
        self._shrink(row, max(keep, row.reserved))

    def reserve(self, numbers: Sequence[int], num_blocks: Sequence[int]) -> None:
        """Draw blocks until the tables hold so many. Raises NoRoom, changing nothing."""
        short = [max(0, n - len(self.rows[r].table)) for r, n in zip(numbers, num_blocks, strict=True)]
        if sum(short) > self.device.available:
            raise NoRoom
        for number, wanted in zip(numbers, num_blocks, strict=True):
            row = self.rows[number]
            self._grow(row, wanted)
            row.reserved = max(row.reserved, wanted)

    def truncate(self, number: int, num_blocks: int) -> None:
        """Release the table's tail, and all that the row has on the host, which lies behind it."""
        self._cut(self.rows[number], num_blocks)

    def free(self, numbers: Sequence[int]) -> None:
        """End rows, releasing the blocks of each tail first. Batches that are out compute them all the same."""
        for number in numbers:
            self._cut(self.rows.pop(number), 0)

    def fork(self, number: int, child: int) -> None:
        """Add a second row over the blocks with launched and known tokens, the partial one included."""
        row = self.rows[number]
        end = row.content_end
        table = row.table[: self.blocks_for(end)]
        for block in table:
            self.device.hold(block)
        shares = {
            batch: (start, min(stop, end)) for batch, (start, stop) in row.shares.items() if start < min(stop, end)
        }
        self.rows[child] = Row(
            list(row.tokens), row.namespace, table, launched=end, computed=min(end, row.computed), shares=shares,
            reads=row.reads, writes=row.writes, published=min(row.published, end // self.block_size), has_computed=row.has_computed,
            carried=set(row.carried),
        )  # fmt: skip

    def swap_out(self, numbers: Sequence[int], keep: int) -> list[tuple[Block, Block]]:
        """Move blocks from column `keep` on to the host; nodes that are there already are only held.

        Return the copies, (device block, host block). Raises NoRoom, changing nothing.
        """
        leaving = (each for number in numbers for each in self._leaving(self.rows[number], keep))
        if self._wanted(self.host, leaving) > self.host.available:
            raise NoRoom
        copied: list[tuple[Block, Block]] = []
        private: dict[Block, Block] = {}
        for number in numbers:
            row, tail = self.rows[number], []
            for block, node in self._leaving(row, keep):
                there = private.get(block) if node is None else self.host.resident.get(node)
                if there is not None:
                    self.host.hold(there)
                else:
                    there = self.host.draw()
                    copied.append((block, there))
                    if node is None:
                        private[block] = there
                    else:
                        self.host.carry(node, there, self.device.pending.get(node))
                tail.append(there)
            row.tail = tail + row.tail
        for number in numbers:
            row = self.rows[number]
            row.reserved, row.is_swapped = 0, True
            self._shrink(row, keep)
        return copied

    def swap_in(self, numbers: Sequence[int]) -> list[tuple[Block, Block]]:
        """Move host tails back, onto the device block of their node where it has one.

        Return the copies, (host block, device block). Raises NoRoom, changing nothing.
        """
        rows = [self.rows[number] for number in numbers]
        if (
            self._wanted(self.device, ((block, block.node) for row in rows for block in row.tail))
            > self.device.available
        ):
            raise NoRoom
        loaded: dict[Block, Block] = {}
        for row in rows:
            for block in row.tail:
                there = self.device.resident.get(block.node) if block.node is not None else loaded.get(block)
                if there is not None:
                    self.device.hold(there)
                else:
                    there = loaded[block] = self.device.draw()
                    if block.node is not None:
                        self.device.carry(block.node, there, self.host.pending.get(block.node))
                row.table.append(there)
        for row in rows:
            for block in reversed(row.tail):
                if self.host_caching:
                    # Read by copies of this very call.
                    self._touched.append(block)
                else:
                    self.host.release(block)
            row.tail, row.is_swapped = [], False
        return list(loaded.items())

    def reset_cache(self) -> bool:
        """Forget all content, unless a block of either tier is used."""
        if self.device.used or self.host.used:
            return False
        self.device.forget_all()
        self.host.forget_all()
        return True

    def _wanted(self, pool: NaivePool, blocks: Iterable[tuple[Block, Node | None]]) -> int:
        """How many available blocks these take: one for each private block, and each node without a used block."""
        wanted: set[object] = set()
        for block, node in blocks:
            there = None if node is None else pool.resident.get(node)
            if there is None or there.refs == 0:
                wanted.add(block if node is None else node)
        return len(wanted)

    def _blocks_wanted(self, numbers: Sequence[int], counts: Sequence[int]) -> int:
        wanted = 0
        refs: dict[object, int] = {}
        for number, count in zip(numbers, counts, strict=True):
            row = self.rows[number]
            wanted += max(0, self.blocks_for(row.launched + count) - len(row.table))
            if row.launched % self.block_size:
                block = row.table[row.launched // self.block_size]
                refs.setdefault(block, block.refs)
                wanted += refs[block] > 1 or block.node is not None
                refs[block] -= 1
        return wanted

    def _end(self, place: int) -> int:
        """Take the oldest batch (place 0) or the latest one with rows (-1) from those out. Return its number."""
        if self.has_composed and (place or not self.out):
            self.next_batch()
        return self.out.pop(place)

    def _node_at(self, row: Row, column: int, block: Block) -> Node | None:
        """The node of the row's block at this column; None where a fork knows only the block's beginning."""
        return block.node if column < row.content_end // self.block_size else None

    def _leaving(self, row: Row, keep: int) -> Iterator[tuple[Block, Node | None]]:
        """The row's blocks from column `keep` on that hold tokens, with the node that each carries for it: one that a
        fork of the row has pending in a block that they share is the row's only once it is confirmed."""
        for column, block in list(enumerate(row.table))[keep : self.blocks_for(row.launched)]:
            node = self._node_at(row, column, block)
            is_its_own = node not in self.device.pending or column < row.published or node in row.carried
            yield block, node if is_its_own else None

    def _num_published(self, row: Row) -> int:
        """Blocks of the row from the first one on that are nodes."""
        for column, block in enumerate(row.table):
            if self._node_at(row, column, block) is None:
                return column
        return len(row.table)

    def _unpublished(self, row: Row) -> range:
        """Columns of the row that are full of launched and known tokens, and are no nodes yet."""
        if not (self.prefix_caching and row.writes) or row.is_swapped:
            return range(0)
        return range(self._num_published(row), min(row.content_end // self.block_size, len(row.table)))

    def _carry(self, node: Node, row: Row, column: int) -> None:
        """Make the row's block the residence of the node, pending on the batch that writes its last token."""
        last = (column + 1) * self.block_size - 1
        batches = [batch for batch, (start, end) in row.shares.items() if start <= last < end]
        block = row.table[column]
        self.device.carry(node, block, max(batches, default=None))
        row.carried.add(node)
        if block.refs == 1 and row.published == column:
            row.published = column + 1

    def _look_again(self, row: Row) -> None:
        """Let the row know its confirmed nodes, whichever row published them."""
        row.published = min(row.published, self._num_published(row))
        while row.published < self._num_published(row) and row.table[row.published].node not in self.device.pending:
            row.published += 1

    def _switch(self, duplicate: Block, there: Block) -> None:
        self.switched += 1
        self.switched_shared += duplicate.refs > 1
        for row in self.rows.values():
            if duplicate in row.table:
                self.device.hold(there)
                row.table[row.table.index(duplicate)] = there
                self.device.release(duplicate)

    def _give_way(self, node: Node) -> None:
        """Withdraw this node and those behind it where they are pending."""
        namespace, tokens = node
        for other in [n for n in self.device.pending if n[0] == namespace and n[1][: len(tokens)] == tokens]:
            self.gave_way += 1
            for pool in (self.device, self.host):
                if other in pool.pending:
                    pool.withdraw(other)

    def _cut(self, row: Row, keep: int) -> None:
        """Release the row's blocks from column `keep` on; what batches compute there is lost."""
        self._trim(row, keep)
        self._shrink(row, keep)
        row.reserved = min(row.reserved, keep)
        row.set_back(keep * self.block_size, keep)

    def _trim(self, row: Row, keep: int) -> None:
        """Release the row's host blocks behind its first `keep` blocks."""
        if row.is_swapped:
            while len(row.tail) > max(0, keep - len(row.table)):
                self.host.release(row.tail.pop())
            row.is_swapped = keep > len(row.table)

    def _grow(self, row: Row, num_blocks: int) -> None:
        while len(row.table) < num_blocks:
            row.table.append(self.device.draw())

    def _shrink(self, row: Row, num_blocks: int) -> None:
        """Release the table's tail, last block first."""
        while len(row.table) > num_blocks:
            self.device.release(row.table.pop())
