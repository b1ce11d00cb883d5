"""The memory manager as one would explain it on a whiteboard: blocks are Python objects, tables are lists, content is a tuple.

Written from the rules, not from any implementation: every block knows how often it is held and which content it carries, content
is looked up by comparing the whole prefix, and a list keeps what nobody uses, oldest first. Slow on purpose. Runs beside a real
manager and predicts what that one must show: hits, tables, ref counts, copies, what is free, cached and used in each tier, and
which content survives. It names no block ids; which of several free blocks is handed out is the real manager's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Node = tuple[object, tuple[int, ...]]
"""Content: the namespace, and all tokens from the first one to the end of the block."""


class NoRoom(Exception):
    """An operation wants more blocks than a tier can give; nothing has changed."""


@dataclass(eq=False)
class Block:
    """One block of either tier: references to it, and the node it carries if it has content."""

    refs: int = 0
    node: Node | None = None


@dataclass(eq=False)
class Row:
    """One sequence. `table` lies on the device, `tail` on the host, in that order; `scheduled` tokens are in flight."""

    tokens: list[int]
    namespace: object
    table: list[Block] = field(default_factory=list)
    computed: int = 0
    tail: list[Block] = field(default_factory=list)
    scheduled: int = 0
    reserved: int = 0
    batch: int = 0
    is_swapped: bool = False
    reads: bool = True
    writes: bool = True
    has_computed: bool = False
    """Whether it owes its blocks to more than lookups."""
    unconfirmed: tuple[int, int] | None = None
    behind: int | None = None
    """The first column of which the computed content is no node yet, if there is one: see `NaiveManager.confirm`."""
    """(batch, column): from this column on it shares blocks that the batch is still computing."""


class NaivePool:
    """One tier: how many blocks hold nothing, which ones are cached (oldest first), and where each node resides."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = num_blocks
        self.cached: list[Block] = []
        self.resident: dict[Node, Block] = {}
        self.evicted = 0
        # Called with each block whose content is forgotten here.
        self.leave: Callable[[Block], None] | None = None
        # How long content is to be kept: the lowest goes first.
        self.level: Callable[[Node | None], int] = lambda node: 0

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.free - len(self.cached)

    @property
    def available(self) -> int:
        """Blocks that can be drawn."""
        return self.free + len(self.cached)

    def draw(self) -> Block:
        """A block without content: a free one, else the one whose content was used least recently."""
        if self.free:
            self.free -= 1
        else:
            oldest = min(self.cached, key=lambda block: self.level(block.node))
            self.cached.remove(oldest)
            assert oldest.node is not None
            del self.resident[oldest.node]
            self.evicted += 1
            if self.leave is not None:
                self.leave(oldest)
        return Block(refs=1)

    def hold(self, block: Block) -> None:
        """One reference more; cached content that is used again leaves the list."""
        if block.refs == 0:
            self.cached.remove(block)
        block.refs += 1

    def release(self, block: Block) -> None:
        """One reference less; at 0 the block is the newest of the cached ones, or free if it carries nothing."""
        block.refs -= 1
        if block.refs == 0 and block.node is not None:
            self.cached.append(block)
        elif block.refs == 0:
            self.free += 1

    def touch(self, node: Node) -> None:
        """Content that nobody uses counts as used just now."""
        block = self.resident.get(node)
        if block is not None and block.refs == 0:
            self.cached.remove(block)
            self.cached.append(block)

    def forget_all(self) -> None:
        """Every cached block becomes free."""
        self.free += len(self.cached)
        self.cached.clear()
        self.resident.clear()


class NaiveManager:
    """The rules of the memory layer. Rows are keyed by whatever number the real manager gave them."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        host_blocks: int = 0,
        prefix_caching: bool = True,
        *,
        host_caching: bool = False,
        least_load: int = 0,
        shares_in_flight: bool = True,
    ) -> None:
        """`host_caching`: content that leaves the device goes to the host; a hit on `least_load` tokens there or more is loaded.

        Unless it `shares_in_flight`, content can be found once it has been computed, and not before.
        """
        self.block_size = block_size
        self.host_caching = host_caching
        self.least_load = least_load
        self.shares_in_flight = shares_in_flight
        self.prefix_caching = prefix_caching
        self.device = NaivePool(num_blocks)
        self.host = NaivePool(host_blocks)
        self.rows: dict[int, Row] = {}
        self.batch = 1
        self.pending: dict[Node, tuple[Row, Block]] = {}
        self.switched = self.switched_shared = 0
        # Copies of content that the call under way makes, (source, destination), and the host blocks that they touch.
        self.offloaded: list[tuple[Block, Block]] = []
        self.loaded: list[tuple[Block, Block]] = []
        self._touched: list[Block] = []
        # Pins and retentions by number: blocks of both tiers that a pin holds; nodes in order, and their level; when each ends.
        self.pins: dict[int, list[tuple[NaivePool, Block]]] = {}
        self.retentions: dict[int, tuple[list[Node], int]] = {}
        self.ends: dict[int, float] = {}
        self.device.level = self.host.level = self.level
        if host_caching:
            self.device.leave = self._offload

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def node(self, namespace: object, tokens: Sequence[int], num_blocks: int) -> Node:
        """The content of the last of the first `num_blocks` blocks."""
        return namespace, tuple(tokens[: num_blocks * self.block_size])

    def next_batch(self) -> None:
        """What is allocated from now on belongs to another batch and does not see what this one has pending."""
        self.batch += 1

    def lookup(self, tokens: Sequence[int], namespace: object, have: int = 0) -> tuple[list[Block], int | None]:
        """Blocks after the first `have` that hold this prompt, all but its last token at most; the first pending one's index."""
        found: list[Block] = []
        first_pending = None
        for num_blocks in range(have + 1, (len(tokens) - 1) // self.block_size + 1):
            node = self.node(namespace, tokens, num_blocks)
            if node in self.device.resident:
                found.append(self.device.resident[node])
            elif node in self.pending and self.pending[node][0].batch == self.batch:
                if first_pending is None:
                    first_pending = have + len(found)
                found.append(self.pending[node][1])
            else:
                break
        return found, first_pending

    def lookup_on_host(self, tokens: Sequence[int], namespace: object, have: int) -> list[Block]:
        """Host blocks that hold this prompt after its first `have` blocks, all but its last token at most."""
        found: list[Block] = []
        if not self.host_caching:
            return found
        for num_blocks in range(have + 1, (len(tokens) - 1) // self.block_size + 1):
            there = self.host.resident.get(self.node(namespace, tokens, num_blocks))
            if there is None:
                break
            found.append(there)
        return found

    def take_copies(self) -> tuple[list[tuple[Block, Block]], list[tuple[Block, Block]]]:
        """(to the host, to the device): the copies of content that the last call made. Until now nobody else could have the host
        blocks that they read or write."""
        copies = self.offloaded, self.loaded
        touched, self._touched, self.offloaded, self.loaded = self._touched, [], [], []
        for block in touched:
            self.host.release(block)
        return copies

    def prefix(self, tokens: Sequence[int], namespace: object) -> list[Node]:
        """The nodes of a prompt from the first one on, each in one tier at least."""
        found: list[Node] = []
        for num_blocks in range(1, len(tokens) // self.block_size + 1):
            node = self.node(namespace, tokens, num_blocks)
            if node not in self.device.resident and node not in self.host.resident:
                break
            found.append(node)
        return found

    def pin(self, number: int, nodes: Sequence[Node], until: float | None) -> None:
        """Hold what the prefix lies in, on the device where it can be."""
        held = [(pool := self.device if n in self.device.resident else self.host, pool.resident[n]) for n in nodes]
        for pool, block in held:
            pool.hold(block)
        self.pins[number] = held
        if until is not None:
            self.ends[number] = until

    def unpin(self, number: int) -> None:
        """The pin ends."""
        for pool, block in reversed(self.pins.pop(number)):
            pool.release(block)
        self.ends.pop(number, None)

    def retain(self, number: int, nodes: list[Node], level: int, until: float | None) -> None:
        """These nodes, a prefix, go after all of a lower level. What is at this level by now is as new as what was raised to it: a parent
        must not go before its child."""
        self.retentions[number] = nodes, level
        if until is not None:
            self.ends[number] = until
        self._touch([node for node in nodes if self.level(node) == level])

    def expire(self, now: float) -> None:
        """What ends by now has ended, in order."""
        for _, number in sorted((when, number) for number, when in self.ends.items() if when <= now):
            if number in self.pins:
                self.unpin(number)
                continue
            del self.ends[number]
            before = {node: self.level(node) for node in self.retentions.get(number, ([], 0))[0]}
            self.retentions.pop(number, None)
            self._touch([node for node in before if self.level(node) != before[node]])

    def level(self, node: Node | None) -> int:
        """The highest level at which somebody keeps it."""
        return max((level for nodes, level in self.retentions.values() if node in nodes), default=0)

    def forget_dead(self) -> None:
        """A node that is nowhere, with nothing below it, is known no more: what becomes of the same tokens later is another one."""
        lives = self._living_nodes()
        for number, (nodes, level) in list(self.retentions.items()):
            self.retentions[number] = [node for node in nodes if node in lives], level

    def _touch(self, nodes: list[Node]) -> None:
        for node in reversed(nodes):
            self.device.touch(node)
            self.host.touch(node)

    def _living_nodes(self) -> set[Node]:
        """Nodes that reside somewhere, are being computed, or have one below them that does."""
        known = [*self.device.resident, *self.host.resident, *self.pending]
        return {(n, tokens[:end]) for n, tokens in known for end in range(0, len(tokens) + 1, self.block_size)}

    def add(
        self, number: int, tokens: Sequence[int], namespace: object, *, reads: bool = True, writes: bool = True
    ) -> int:
        """A new row with its prefix hit. Returns the hit in tokens."""
        row = self.rows[number] = Row(list(tokens), namespace, reads=reads, writes=writes)
        return self.extend_hit(row)

    def extend_hit(self, row: Row) -> int:
        """The row takes what the cache holds after its own blocks. Returns the tokens won."""
        if not row.reads:
            return 0
        found, first_pending = self.lookup(row.tokens, row.namespace, len(row.table))
        for block in found:
            self.device.hold(block)
            row.table.append(block)
        if found:
            row.computed = len(row.table) * self.block_size
        if first_pending is not None:
            row.unconfirmed = (self.batch, first_pending)
            return len(found) * self.block_size
        return (len(found) + self._load(row)) * self.block_size

    def _load(self, row: Row) -> int:
        """What follows on the host comes back, as much as there is room for, if that is enough. Returns the blocks won."""
        sources = self.lookup_on_host(row.tokens, row.namespace, len(row.table))[: self.device.available]
        if not sources or len(sources) * self.block_size < self.least_load:
            return 0
        for source in sources:
            self.host.hold(source)
        self._touched += reversed(sources)
        for source in sources:
            block = self.device.draw()
            block.node = source.node
            self.loaded.append((source, block))
            row.table.append(block)
        for block in row.table[-len(sources) :]:
            assert block.node is not None
            self.device.resident[block.node] = block
        row.computed = len(row.table) * self.block_size
        return len(sources)

    def _offload(self, block: Block) -> None:
        """Content is about to be forgotten on the device: the host keeps it, if it has a block for it."""
        assert block.node is not None
        # Copied by calls whose moves run together with this one's: it goes before it has come.
        self.loaded = [(source, target) for source, target in self.loaded if target is not block]
        there = self.host.resident.get(block.node)
        if there is not None:
            self.host.hold(there)
        elif self.host.available:
            there = self.host.draw()
            there.node = block.node
            self.host.resident[block.node] = there
            self.offloaded.append((block, there))
        else:
            return
        self._touched.append(there)

    def allocate(self, numbers: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int]]:
        """Put tokens in flight. Returns the copies made, as (row number, column). Raises NoRoom, changing nothing."""
        if self._blocks_wanted(numbers, counts) > self.device.available:
            raise NoRoom
        copies: list[tuple[int, int]] = []
        for number in numbers:
            row = self.rows[number]
            column = row.computed // self.block_size
            if row.computed % self.block_size and row.table[column].refs > 1:
                copies.append((number, column))
                copy = self.device.draw()
                self.device.release(row.table[column])
                row.table[column] = copy
        for number, count in zip(numbers, counts, strict=True):
            row = self.rows[number]
            self._grow(row, self.blocks_for(row.computed + count))
            row.scheduled, row.batch = count, self.batch
        return copies

    def announce(self, numbers: Sequence[int], leader: Callable[[Node, list[Block]], Block | None]) -> None:
        """The full blocks that these rows compute are pending, up to the first whose content somebody has or is computing.

        Where two rows of one batch compute the same content, `leader` says whose block it will be: the manager may choose. A row that was
        placed before them, and whose content somebody had then, may lead now that this was evicted; or not.
        """
        if not (self.prefix_caching and self.shares_in_flight):
            return
        # What these rows' blocks were taken from is known no more, also where they compute the same again.
        self.forget_dead()
        rows = [self.rows[number] for number in numbers if self.rows[number].writes]
        computing: dict[Node, list[Block]] = {}
        lives = self._living_nodes()
        for row in list(rows):
            if row.behind is not None and self.node(row.namespace, row.tokens, row.behind + 1) in lives:
                rows.remove(row)
            else:
                self.catch_up(row)
        before = [r for n, r in self.rows.items() if r.batch == self.batch and r.writes and n not in numbers]
        for row in [*rows, *before]:
            for node, block in self._computing(row):
                computing.setdefault(node, []).append(block)
        for row in [*rows, *before]:
            for node, block in self._computing(row):
                candidates = computing[node]
                if node in lives:
                    break
                if row in before or len(candidates) > 1:
                    shown = leader(node, candidates)
                    if block is not (shown or (candidates[0] if row in rows else None)):
                        break
                self.pending[node] = (row, block)

    def confirm(self, numbers: Sequence[int], is_shown: Callable[[Node], bool] = lambda node: True) -> None:
        """What is in flight was computed: full blocks become nodes, and a duplicate gives way to the block that is there.

        Content that a later batch has pending, and that others share there already, has two blocks to choose from: `is_shown` says
        whether the manager has made a node of the confirmed one. If not, its row tries again later.
        """
        for node, (row, block) in self.pending.items():
            if row.batch and row in [self.rows[number] for number in numbers] and node not in self.device.resident:
                self.device.resident[node], block.node = block, node
        for number in numbers:
            row = self.rows[number]
            first = row.computed // self.block_size if row.behind is None else row.behind
            row.computed += row.scheduled
            row.has_computed = True
            self._withdraw(row)
            self._publish_all(row, first, is_shown)
        for row in self.rows.values():
            still_computing = row.unconfirmed is not None and any(
                r.batch == row.unconfirmed[0] for r in self.rows.values()
            )
            row.unconfirmed = row.unconfirmed if still_computing else None

    def catch_up(self, row: Row, is_shown: Callable[[Node], bool] = lambda node: True) -> None:
        """What the row computed, and could not make nodes of, is looked at again."""
        if row.behind is not None:
            self._publish_all(row, row.behind, is_shown)

    def cancel(self, numbers: Sequence[int]) -> None:
        """What is in flight was not computed. Rows that share it fall back to what is confirmed, their own blocks behind included."""
        for number in reversed(numbers):
            row = self.rows.get(number)
            if row is not None and row.batch:
                self._cancel(row)

    def reserve(self, numbers: Sequence[int], num_blocks: Sequence[int]) -> None:
        """The tables hold at least so many blocks. Raises NoRoom, changing nothing."""
        short = [max(0, n - len(self.rows[r].table)) for r, n in zip(numbers, num_blocks, strict=True)]
        if sum(short) > self.device.available:
            raise NoRoom
        for number, wanted in zip(numbers, num_blocks, strict=True):
            row = self.rows[number]
            self._grow(row, wanted)
            row.reserved = max(row.reserved, wanted)

    def truncate(self, number: int, num_blocks: int) -> None:
        """Give up the table's tail, and all of the row that lies on the host, which is behind it."""
        row = self.rows[number]
        for block in reversed(row.tail):
            self.host.release(block)
        row.tail.clear()
        row.is_swapped = False
        self._shrink(row, num_blocks)
        row.reserved = min(row.reserved, num_blocks)
        row.computed = min(row.computed, num_blocks * self.block_size)
        row.behind = None if row.behind is None or row.behind >= num_blocks else row.behind

    def free(self, numbers: Sequence[int]) -> None:
        """Rows end, each giving its blocks back tail first."""
        for number in numbers:
            self.truncate(number, 0)
            del self.rows[number]

    def fork(self, number: int, child: int) -> None:
        """A second row over the same blocks, the partial one included."""
        row = self.rows[number]
        table = row.table[: self.blocks_for(row.computed)]
        for block in table:
            self.device.hold(block)
        self.rows[child] = Row(list(row.tokens), row.namespace, table, row.computed)
        self.rows[child].reads, self.rows[child].writes = row.reads, row.writes
        self.rows[child].unconfirmed, self.rows[child].has_computed = row.unconfirmed, row.has_computed
        self.rows[child].behind = row.behind

    def swap_out(self, numbers: Sequence[int], keep: int) -> list[tuple[Block, Block]]:
        """Blocks from column `keep` on go to the host, nodes that are there already only pinned.

        Returns the copies, (device block, host block). Raises NoRoom, changing nothing.
        """
        if self._host_blocks_wanted(numbers, keep) > self.host.available:
            raise NoRoom
        copied: dict[Block, Block] = {}
        for number in numbers:
            row, tail = self.rows[number], []
            for block in row.table[keep : self.blocks_for(row.computed)]:
                there = self.host.resident.get(block.node) if block.node is not None else copied.get(block)
                if there is not None:
                    self.host.hold(there)
                else:
                    there = self.host.draw()
                    copied[block] = there
                    there.node = block.node
                    if block.node is not None:
                        self.host.resident[block.node] = there
                tail.append(there)
            row.tail = tail + row.tail
        for number in numbers:
            row = self.rows[number]
            row.reserved, row.is_swapped = 0, True
            self._shrink(row, keep)
        return list(copied.items())

    def swap_in(self, numbers: Sequence[int]) -> list[tuple[Block, Block]]:
        """Host tails return, onto the device block of their node where it has one.

        Returns the copies, (host block, device block). Raises NoRoom, changing nothing.
        """
        rows = [self.rows[number] for number in numbers]
        if self.device_blocks_wanted(rows) > self.device.available:
            raise NoRoom
        loaded: dict[Block, Block] = {}
        for row in rows:
            for block in row.tail:
                there = self.device.resident.get(block.node) if block.node is not None else loaded.get(block)
                if there is not None:
                    self.device.hold(there)
                else:
                    there = self.device.draw()
                    there.node = block.node
                    loaded[block] = there
                    if block.node is not None:
                        self.device.resident[block.node] = there
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

    def device_blocks_wanted(self, rows: Sequence[Row]) -> int:
        """What a return takes from the available blocks: nodes without a used device block once each, private blocks once each."""
        wanted: set[object] = set()
        for block in (block for row in rows for block in row.tail):
            there = self.device.resident.get(block.node) if block.node is not None else None
            if there is None or there.refs == 0:
                wanted.add(block.node if block.node is not None else block)
        return len(wanted)

    def _host_blocks_wanted(self, numbers: Sequence[int], keep: int) -> int:
        wanted: set[object] = set()
        for row in (self.rows[number] for number in numbers):
            for block in row.table[keep : self.blocks_for(row.computed)]:
                there = self.host.resident.get(block.node) if block.node is not None else None
                if there is None or there.refs == 0:
                    wanted.add(block.node if block.node is not None else block)
        return len(wanted)

    def _blocks_wanted(self, numbers: Sequence[int], counts: Sequence[int]) -> int:
        wanted = 0
        refs: dict[object, int] = {}
        for number, count in zip(numbers, counts, strict=True):
            row = self.rows[number]
            wanted += max(0, self.blocks_for(row.computed + count) - len(row.table))
            if row.computed % self.block_size:
                block = row.table[row.computed // self.block_size]
                refs.setdefault(block, block.refs)
                wanted += refs[block] > 1
                refs[block] -= 1
        return wanted

    def _computing(self, row: Row) -> list[tuple[Node, Block]]:
        """The full blocks that the row has in flight, with their content to be."""
        columns = range(row.computed // self.block_size, (row.computed + row.scheduled) // self.block_size)
        return [(self.node(row.namespace, row.tokens, column + 1), row.table[column]) for column in columns]

    def _withdraw(self, row: Row) -> None:
        """The row has nothing pending and nothing in flight any more."""
        self.pending = {node: entry for node, entry in self.pending.items() if entry[0] is not row}
        row.scheduled = row.batch = 0

    def _publish_all(self, row: Row, first: int, is_shown: Callable[[Node], bool] = lambda node: True) -> None:
        """The row's computed blocks from column `first` on become nodes, up to one that the manager does not show yet."""
        row.behind = None
        if not (self.prefix_caching and row.writes):
            return
        for column in range(first, row.computed // self.block_size):
            node = self.node(row.namespace, row.tokens, column + 1)
            other, pending = self.pending.get(node, (row, row.table[column]))
            if other is not row and node not in self.device.resident:
                if pending.refs > 1 and not is_shown(node):
                    row.behind = column
                    return
                self._give_way(other, node)
            self._publish(row, column)

    def _give_way(self, row: Row, node: Node) -> None:
        """The row's content from this node on is pending no more."""
        namespace, tokens = node
        self.pending = {
            (n, t): entry
            for (n, t), entry in self.pending.items()
            if entry[0] is not row or n != namespace or t[: len(tokens)] != tokens
        }

    def _publish(self, row: Row, column: int) -> None:
        node, block = self.node(row.namespace, row.tokens, column + 1), row.table[column]
        there = self.device.resident.setdefault(node, block)
        if there is block:
            block.node = node
            return
        self.switched += 1
        self.switched_shared += block.refs > 1
        for other in self.rows.values():
            if block in other.table:
                self.device.hold(there)
                other.table[column] = there
                self.device.release(block)

    def _cancel(self, row: Row) -> None:
        unconfirmed = row.table[row.computed // self.block_size :]
        for other in reversed(list(self.rows.values())):
            if other is not row and other.unconfirmed is not None and other.unconfirmed[0] == row.batch:
                column = other.unconfirmed[1]
                if any(block in unconfirmed for block in other.table[column:]):
                    if other.batch:
                        self._cancel(other)
                    self._shrink(other, min(column, len(other.table)))
                    other.computed = min(other.computed, column * self.block_size)
                    other.reserved = min(other.reserved, column)
                    other.unconfirmed = None
        self._withdraw(row)
        self._shrink(row, min(len(row.table), max(self.blocks_for(row.computed), row.reserved)))

    def _grow(self, row: Row, num_blocks: int) -> None:
        while len(row.table) < num_blocks:
            row.table.append(self.device.draw())

    def _shrink(self, row: Row, num_blocks: int) -> None:
        """The table's tail goes back, last block first."""
        while len(row.table) > num_blocks:
            self.device.release(row.table.pop())
