"""A KV manager, the naive model and the shadow KV side by side: every operation runs on all, and is compared at once.

Each public method is one operation of the manager, or one misuse of it. Rows that are put in flight belong to the batch
that is being composed until `seal`; the oldest batch is confirmed, the latest cancelled. Moves and writes are queued
for a device that lags as far behind as the world says: a batch has written at the latest when it is confirmed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from paged.base.arguments import checked_integer
from paged.testing import invariants
from paged.testing.conformance import BrokenPromise, held_to
from paged.testing.content import typed
from paged.testing.event_reader import EventWatch
from paged.testing.naive_content import Block, Node
from paged.testing.naive_model import NaiveManager, NoRoom, Row
from paged.testing.protocol import capabilities_of
from paged.testing.rig import Rig
from paged.testing.shadow_kv import LateDevice, ShadowKV
from paged.testing.snapshots import snapshot
from paged.testing.world import MemoryWorld, manager_in


@dataclass(frozen=True, repr=False)
class ManagerWorld(MemoryWorld):
    """The sizes of a manager, in blocks and tokens."""

    num_blocks: int = 6
    least_load: int = 0
    """Tokens on the host that make a hit worth loading."""
    event_stride: int = 0
    """Calls from one reading of the events to the next; 0: there is no reader."""
    lag: int = 0
    """Moves and writes that the device may be behind by."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("least_load", "event_stride", "lag"):
            checked_integer(name, getattr(self, name), 0)


Builder = Callable[[ManagerWorld], Any]
Copy = tuple[Block, Block]
"""Source and destination, as the model knows them."""


def build_manager(world: ManagerWorld) -> Any:
    """Our own manager."""
    manager = manager_in(world)
    manager.load_where(lambda start, stop: stop - start >= world.least_load)
    return manager


class ManagerRig(Rig):
    """Drives one manager; every method compares before it returns."""

    kind = "ManagerRig"

    def __init__(self, world: ManagerWorld, build: Builder = build_manager) -> None:
        super().__init__(world)
        self.build = build
        subject = build(world)
        able = capabilities_of(subject)
        self.manager = held_to("KVManager", subject)
        self.naive = NaiveManager(
            world.num_blocks,
            world.block_size,
            world.host_blocks,
            world.prefix_caching and able.prefix_cache,
            host_caching=world.keeps_content_on_host,
            least_load=world.least_load,
            shares_in_flight=able.sharing_in_flight,
        )
        self.shadow = ShadowKV(world.num_blocks, world.block_size, world.host_blocks)
        self.events_read = EventWatch(self.manager, world.event_stride, self.manager.cached_contents)
        self.device = LateDevice(self.shadow, world.lag)
        self.goes_ahead = able.rows_in_flight
        self.extends_hits = hasattr(subject, "extend_hit")
        self.ids: dict[Block, int] = {}
        self.host_ids: dict[Block, int] = {}
        self.now = 0
        self.num_kept = 0
        self.namespaces: dict[object, object] = {}
        self.roots: dict[object, bytes] = {}
        # Within a call of the rig that makes several of the manager's; and while their moves are left for later.
        self._is_nested = self._runs_later = False

    @property
    def rows(self) -> list[int]:
        """Rows that a sequence holds, rising."""
        return sorted(self.naive.rows)

    @property
    def idle_rows(self) -> list[int]:
        """Rows of which no batch that has not ended computes anything."""
        return [r for r in self.rows if not self.naive.rows[r].shares]

    @property
    def free_rows(self) -> list[int]:
        """Rows that may be changed now: all of them, unless the manager leaves rows alone that are in flight."""
        return self.rows if self.goes_ahead else self.idle_rows

    @property
    def device_rows(self) -> list[int]:
        """Such rows that lie on the device whole."""
        return [r for r in self.free_rows if not self.naive.rows[r].is_swapped]

    @property
    def flying_rows(self) -> list[int]:
        """Such rows on the device of which batches that have not ended compute something."""
        return [r for r in self.device_rows if self._loses_share(r, 0)]

    @property
    def swapped_rows(self) -> list[int]:
        """Such rows of which a part lies on the host."""
        return [r for r in self.free_rows if self.naive.rows[r].is_swapped]

    @property
    def placeable_rows(self) -> list[int]:
        """Rows that may be placed in the current batch, if only with tokens that they do not know yet."""
        return [r for r in self.device_rows if self.naive.batch not in self.naive.rows[r].shares]

    @property
    def startable_rows(self) -> list[int]:
        """Rows that could compute something that they know now."""
        return [r for r in self.placeable_rows if self.left(r)]

    @property
    def partial_rows(self) -> list[int]:
        """Rows on the device whose last block is not full: a fork shares it, and both will write it."""
        return [
            r
            for r in self.placeable_rows
            if self.naive.rows[r].launched % self.world.block_size and not self.unlearnt(r)
        ]

    def left(self, row: int) -> int:
        """Tokens that the row knows and that are not launched."""
        return max(0, len(self.naive.rows[row].tokens) - self.naive.rows[row].launched)

    def unlearnt(self, row: int) -> int:
        """Tokens that are launched and that the row does not know yet."""
        return len(self.naive.rows[row].coming)

    @property
    def num_out(self) -> int:
        """Batches that are out."""
        return len(self.naive.out)

    def blocks_to_keep(self, row: int) -> int:
        """Blocks of the row on the device that hold something."""
        state = self.naive.rows[row]
        return min(self.naive.blocks_for(state.launched), len(state.table))

    def add(self, tokens: list[int], namespace: object = None, reads: bool = True, writes: bool = True) -> int:
        """Add a sequence. Its hit has to be the longest prefix that is there, or none if it is not to read."""
        private = {name: value for name, value in (("reads", reads), ("writes", writes)) if not value}
        self._note("add", tokens, namespace, *((reads, writes) if private else ()))
        looked_up = self.manager.lookup(tokens, namespace)
        # 1 == True for Python's dictionaries, and the model is made of those; the manager has to tell them apart.
        self.namespaces[typed(namespace)] = namespace
        on_device, first_pending = self.naive.lookup(tokens, typed(namespace))
        behind = self.naive.lookup_on_host(tokens, typed(namespace), len(on_device)) if first_pending is None else []
        on_host = len(behind) * self.world.block_size
        number = int(self.manager.add(tokens, namespace=namespace, **private))
        self.naive.add(number, tokens, typed(namespace), **private)
        self.events["private row"] += len(private) > 0
        hit = len(on_device) * self.world.block_size
        self._content_moves()
        self.events["hit"] += hit > 0
        self.events["shared in flight"] += reads and first_pending is not None
        if reads and first_pending is not None:
            pending = {self.naive.device.pending.get(block.node, 0) for block in on_device if block.node is not None}
            self.events["shared with a batch that is out"] += not pending.isdisjoint(self.naive.out)
        found = []
        if looked_up.num_tokens != hit:
            found.append(f"lookup found {looked_up.num_tokens} tokens, the cache holds {hit}")
        if self.world.keeps_content_on_host and looked_up.host_tokens != on_host:
            found.append(f"lookup found {looked_up.host_tokens} more tokens on the host, which holds {on_host}")
        taken = list(self.manager.table(number))[: len(looked_up.blocks)]
        if reads and list(looked_up.blocks) != taken:
            found.append(f"lookup names {list(looked_up.blocks)}, add took {taken}")
        self._fail_on(found)
        self._compare()
        return number

    def visit(self, tokens: list[int], others: list[int]) -> None:
        """Add a row and free it, add another one and compute it: the copies of all these calls run together."""
        self._note("visit", tokens, others)
        self._is_nested = self._runs_later = True
        self.free([self.add(tokens)])
        row = self.add(others)
        self._runs_later = False
        if self.left(row):
            self.allocate([row], [self.left(row)])
        # Copies that no call has returned.
        self._content_moves()
        self._compare()
        self._is_nested = False

    def append(self, row: int, tokens: list[int]) -> None:
        """More known tokens; those that are launched already have the values that their batch computed."""
        self._note("append", row, tokens)
        state = self.naive.rows[row]
        self.events["append in flight"] += len(state.shares) > 0
        self._learn(row, state.coming[: len(tokens)] + tokens[len(state.coming) :])
        self._compare()

    def _learn(self, row: int, tokens: list[int]) -> None:
        self.events["learns later"] += self.unlearnt(row) > 0
        self.manager.append(row, tokens)
        self.naive.append(row, tokens)
        self.naive.accept(self._leader)

    def allocate(self, rows: Sequence[int], counts: Sequence[int], coming: Sequence[list[int]] = ()) -> None:
        """Place known tokens, `counts[i]` of them, in the batch that is being composed, and behind them `coming[i]`,
        whose values the row learns later; the device writes them."""
        coming = coming if any(coming) else ()
        self._note("allocate", list(rows), list(counts), *([[list(each) for each in coming]] if coming else []))
        columns = {row: self.manager.table(row).tolist() for row in rows}
        unknown = [len(each) for each in coming]
        named = {"unknown": unknown} if any(unknown) else {}
        totals = [count + more for count, more in zip(counts, unknown or [0] * len(rows), strict=True)]
        held = {row: list(self.naive.rows[row].table) for row in rows}
        moves, copies = self._both(
            lambda: self.manager.allocate(list(rows), totals, **named),
            lambda: self.naive.allocate(rows, totals, coming),
        )
        if copies is None:
            return
        wanted = sorted((columns[row][column], int(self.manager.table(row)[column])) for row, column in copies)
        if sorted(map(tuple, moves.device_to_device.tolist())) != wanted:
            self._fail_on([f"copies {moves.device_to_device.tolist()}, expected {wanted}"])
        self.events["copy on write"] += len(copies)
        self.events["copy of content"] += any(held[row][column].node is not None for row, column in copies)
        self.events["row in several batches"] += any(len(self.naive.rows[row].shares) > 1 for row in rows)
        self.events["unknown tokens"] += any(unknown)
        self._run(moves)
        for row in rows:
            self._write(row)
        self.naive.announce(rows, self._leader)
        self._compare()

    def _write(self, row: int) -> None:
        """The device computes the row's share of the batch that is being composed, and reads all before it."""
        state = self.naive.rows[row]
        table = np.array(self.manager.table(row))
        start, stop = state.shares[self.naive.batch]
        contents = self.shadow.contents.path(state.namespace, (state.tokens + state.coming)[:stop])
        slots = np.array(self.manager.slots(row, start, stop))
        if len(slots) != stop - start:
            self._fail_on([f"row {row}: slots({row}, {start}, {stop}) gave {len(slots)} of {stop - start}"])
        self._fail_on(self.device.write(self.naive.batch, slots, table, contents, f"row {row}"))
        self.ids.update(zip(state.table, table.tolist(), strict=False))

    def seal(self) -> None:
        """The batch is composed; what is allocated from now on belongs to the next one."""
        if self.naive.has_composed:
            self._note("seal")
            self.manager.next_batch()
            self.naive.next_batch()
            self._compare()

    def confirm(self) -> None:
        """The oldest batch has been computed, and the tokens that it was not to know have become known."""
        if not self.naive.batches:
            return
        self._note("confirm")
        batch = self.naive.batches[0]
        for row, state in self.naive.rows.items():
            end = state.shares.get(batch, (0, 0))[1]
            if end > len(state.tokens):
                self._learn(row, state.coming[: end - len(state.tokens)])
        self._fail_on(self.device.run_through(batch))
        self.events["confirm of a void share"] += any(
            row not in self.naive.rows.values() for row in self.naive.placed[batch]
        )
        switched, shared = self.naive.switched, self.naive.switched_shared
        gave_way = self.naive.gave_way
        self.manager.confirm()
        self.naive.confirm(self._leader)
        self.events["switch"] += self.naive.switched > switched
        self.events["switch of several tables"] += self.naive.switched_shared > shared
        self.events["pending node gave way"] += self.naive.gave_way > gave_way
        self._compare()

    def cancel(self) -> None:
        """Cancel the latest batch: what it wrote is garbage, and its moves have run."""
        if not self.naive.batches:
            return
        self._note("cancel")
        batch = self.naive.batches[-1]
        rows = [row for row in self.naive.rows.values() if batch in row.shares]
        self.events["cancel of pending nodes"] += batch in self.naive.device.pending.values()
        self.events["cancel of a swapped row"] += any(row.is_swapped for row in rows)
        self.events["cancel of a fork"] += any(row not in self.naive.placed[batch] for row in rows)
        self.events["cancel of a clipped share"] += any(
            (row.shares[batch][1] < row.launched or row.shares[batch][0] >= row.shares[batch][1]) for row in rows
        )
        self.events["host node that never gets full"] += any(self._gives_up_host_node(row, batch) for row in rows)
        self._fail_on(self.device.cancel(batch))
        lost = self.manager.cancel()
        sharers = self.naive.cancel()
        self.events["sharer gave up its table"] += len(sharers) > 0
        if isinstance(lost, dict) and set(lost) != sharers:
            self._fail_on([f"rows {sorted(lost)} lost what they shared, expected {sorted(sharers)}"])
        self._compare()

    def extend_hit(self, row: int) -> None:
        """Look again for content behind a row that holds only shared content; a row that computes may be left."""
        self._note("extend_hit", row)
        state = self.naive.rows[row]
        holds_nodes_only = len(state.table) * self.world.block_size == state.launched
        won = self.manager.extend_hit(row)
        if state.launched != state.computed:
            # Its own tokens come first.
            self._fail_on([f"row {row}: {won} tokens hit, and it is in flight"] if won else [])
            self._compare()
            return
        table = self.manager.table(row).tolist()
        self.naive.catch_up(state, self._leader, lambda column, block: self.ids.get(block) == table[column])
        if won or not (state.has_computed or not holds_nodes_only):
            expected = self.naive.extend_hit(state)
            self._content_moves()
            self._fail_on([f"row {row}: {won} more tokens hit, {expected} expected"] if won != expected else [])
            self.events["hit later"] += won > 0
        self._compare()

    def reserve(self, rows: Sequence[int], num_blocks: Sequence[int]) -> None:
        """Lookahead: tables of at least so many blocks."""
        self._note("reserve", list(rows), list(num_blocks))
        self._both(
            lambda: self.manager.reserve(list(rows), list(num_blocks)), lambda: self.naive.reserve(rows, num_blocks)
        )
        self._content_moves()
        self._compare()

    def truncate(self, row: int, num_blocks: int) -> None:
        """Give up a table's tail."""
        self._note("truncate", row, num_blocks)
        self.events["truncate in flight"] += self._loses_share(row, num_blocks * self.world.block_size)
        self.manager.truncate(row, num_blocks)
        self.naive.truncate(row, num_blocks)
        self._compare()

    def free(self, rows: Sequence[int]) -> None:
        """Rows end."""
        self._note("free", list(rows))
        self.events["free in flight"] += any(self._loses_share(row, 0) for row in rows)
        self.manager.free(list(rows))
        self.naive.free(rows)
        self._compare()

    def fork(self, row: int) -> int:
        """A second row over the same blocks."""
        self._note("fork", row)
        self.events["fork in flight"] += self._loses_share(row, 0)
        child = int(self.manager.fork(row))
        self._fail_on([f"fork returned row {child}, which is held"] if child in self.naive.rows else [])
        self.naive.fork(row, child)
        self.events["fork"] += 1
        self._compare()
        return child

    def swap_out(self, rows: Sequence[int], keep: int = 0) -> None:
        """Blocks from column `keep` on go to the host."""
        self._note("swap_out", list(rows), keep)
        moves, copies = self._both(
            lambda: self.manager.swap_out(list(rows), keep), lambda: self.naive.swap_out(rows, keep)
        )
        if copies is None:
            return
        self.events["swap out"] += 1
        self.events["swap out in flight"] += any(self._loses_share(row, 0) for row in rows)
        self.events["pending content on the host"] += len(self.naive.host.pending) > 0
        self._run(moves, to_host=copies)
        self._compare()

    def swap_in(self, rows: Sequence[int]) -> None:
        """Host tails return."""
        self._note("swap_in", list(rows))
        moves, copies = self._both(lambda: self.manager.swap_in(list(rows)), lambda: self.naive.swap_in(rows))
        if copies is None:
            return
        self.events["swap in"] += 1
        self.events["swap in in flight"] += any(self._loses_share(row, 0) for row in rows)
        self.events["several copied in"] += len(copies) > 1
        self._run(moves, to_device=copies)
        self._compare()

    def retain(self, tokens: list[int], namespace: object = None, priority: int = 1, lasts: int | None = None) -> None:
        """Keep a prompt's cached prefix longer than content of lower priority, for so many ticks (None: always)."""
        from paged.errors import UnknownContent

        self._note("retain", tokens, namespace, priority, lasts)
        self.namespaces[typed(namespace)] = namespace
        nodes = self.naive.prefix(tokens, typed(namespace))
        until = None if lasts is None else self.now + lasts
        call = partial(self.manager.retain, tokens, namespace, priority=priority, until=until)
        if not nodes:
            self._refused(call, UnknownContent, "retention of content that is not there")
        else:
            kept = self._allowed(call, UnknownContent, "content is there")
            found = [] if kept == len(nodes) * self.world.block_size else [f"{kept} tokens of {len(nodes)} blocks kept"]
            self._fail_on(found)
            self.num_kept += 1
            self.naive.retain(self.num_kept, nodes, priority, until)
            self.events["retain"] += 1
        self._compare()

    def expire(self, ticks: int) -> None:
        """Logical time goes on."""
        self._note("expire", ticks)
        self.now += ticks
        had = len(self.naive.ends)
        self.manager.expire(self.now)
        self.naive.expire(self.now)
        self.events["expired"] += len(self.naive.ends) < had
        self._compare()

    def reset_cache(self) -> None:
        """Forget all content, if nothing is used."""
        self._note("reset_cache")
        expected = self.naive.reset_cache()
        before = None if expected else snapshot(self.manager)
        done = self.manager.reset_cache()
        self._fail_on([f"reset_cache returned {done}, expected {expected}"] if done is not expected else [])
        self._fail_on(["a refused reset changed something"] if not done and snapshot(self.manager) != before else [])
        self._compare()

    def misuse(self, verb: str, *arguments: Any) -> None:
        """A call that no caller may make: a typed error, and nothing has changed."""
        from paged import PagedError

        self._note("misuse", verb, *arguments)
        error = self._refused(lambda: getattr(self.manager, verb)(*arguments), PagedError, f"{verb}{arguments}")
        self.events[f"misuse: {error}"] += 1

    def drain(self) -> None:
        """End every batch and every row: nothing may be left but cached content."""
        while self.naive.batches:
            self.confirm()
        if self.rows:
            self.free(self.rows)
        self._fail_on(self.device.finish())
        self._compare()
        self._fail_on(invariants.memory_at_rest(self.manager))

    def _both(self, real: Callable[[], Any], naive: Callable[[], Any]) -> tuple[Any, Any]:
        """One operation on both, and what each returns. Where the model has no room the real one has to say so and
        change nothing: (None, None)."""
        from paged.errors import OutOfBlocks

        try:
            expected = naive()
        except NoRoom:
            self._refused(real, OutOfBlocks, "an operation for which there is no room")
            self.events["no room"] += 1
            return None, None
        return self._allowed(real, OutOfBlocks, "there is room"), expected

    def _allowed(self, call: Callable[[], Any], error: type[Exception], why: str) -> Any:
        """Return what a call returns that may not be refused by this error."""
        try:
            return call()
        except error as refusal:
            self._fail_on([f"{why}, and yet: {refusal}"])

    def _refused(self, call: Callable[[], Any], error: type[Exception], what: str) -> str:
        """Make a call that has to raise this error, and to change nothing. Return the name of what it raises."""
        before, name = snapshot(self.manager), ""
        try:
            call()
        except error as refusal:
            name = type(refusal).__name__
        self._fail_on([] if name else [f"{what} was not refused"])
        self._fail_on(["7: a refused call changed something"] if snapshot(self.manager) != before else [])
        return name

    def _content_moves(self) -> None:
        """Run the copies of content that a call made which returns no moves."""
        if self._runs_later:
            return
        self._run(self.manager.take_moves() if self.world.keeps_content_on_host else None)

    def _run(self, moves: Any, *, to_host: Sequence[Copy] = (), to_device: Sequence[Copy] = ()) -> None:
        """Compare the copies between the tiers with the model's, and give them to the device."""
        offloaded, loaded = self.naive.take_copies()
        self.events["offload"] += len(offloaded) > 0
        self.events["load"] += len(loaded) > 0
        if moves is None:
            return
        self._fail_on(self._match(moves.device_to_host, [*offloaded, *to_host], self.ids, self.host_ids))
        self._fail_on(self._match(moves.host_to_device, [*loaded, *to_device], self.host_ids, self.ids))
        self._fail_on(self.device.move(moves))

    def _gives_up_host_node(self, row: Row, batch: int) -> bool:
        start, end = row.shares[batch]
        column = start // self.world.block_size - len(row.table)
        return (
            bool(start % self.world.block_size) and start < end and any(b.node for b in row.tail[max(0, column) :][:1])
        )

    def _loses_share(self, row: int, num_tokens: int) -> bool:
        """Whether a batch that has not ended computes tokens of the row from `num_tokens` on."""
        return any(start < end > num_tokens for start, end in self.naive.rows[row].shares.values())

    def _leader(self, node: Node, candidates: list[Block]) -> Block | None:
        """Which of these blocks with the same content the manager's lookups find; None if they find none."""
        namespace, tokens = node
        shown = self.manager.lookup([*tokens, 0], self.namespaces[namespace]).blocks.tolist()
        column = len(tokens) // self.world.block_size - 1
        return next((b for b in candidates if len(shown) > column and self.ids.get(b) == shown[column]), None)

    def _match(
        self, pairs: Any, copies: Sequence[Copy], sources: dict[Block, int], targets: dict[Block, int]
    ) -> list[str]:
        """Compare the real copies with the model's, source by source, and note where the destinations lie.

        A block is copied twice where one row has it as content and a fork knows only its beginning: in the order of the
        rows.
        """
        real: dict[int, list[int]] = {}
        for read, written in np.asarray(pairs).tolist():
            real.setdefault(read, []).append(written)
        expected = sorted(sources[source] for source, _ in copies)
        if sorted(read for read, written in real.items() for _ in written) != expected:
            return [f"blocks {sorted(np.asarray(pairs)[:, 0].tolist())} are copied, expected {expected}"]
        targets.update({target: real[sources[source]].pop(0) for source, target in copies})
        return []

    def _compare(self) -> None:
        """Compare the public state with the model and computed tokens with the shadow; ask for `check()`."""
        if self._runs_later:
            return
        self.naive.accept(self._leader)
        self.naive.forget_dead()
        # Read once: a subject may compute them anew each time.
        tables = {row: self.manager.table(row) for row in self.manager.rows.live.tolist()}
        contents = self.manager.cached_contents()
        found = invariants.memory_violations(self.manager, tables=tables, contents=contents)
        found += self._tallies()
        found += self._row_differences(tables)
        found += [f"check(): {violation}" for violation in self.manager.check()]
        if not found:
            found += self._content_differences(contents)
        if not found and self.device.is_idle:
            found += self._misplaced_nodes()
            for number in self.rows:
                found += self._misplaced(number, tables[number])
        self._fail_on(found or self.events_read.look())
        self._fail_on(self._poison_free())

    def _tallies(self) -> list[str]:
        found = []
        for tier, pool in (("device", self.naive.device), ("host", self.naive.host)):
            shown, expected = invariants.figures(self.manager, tier), (pool.free, len(pool.cached), pool.used)
            if shown != expected:
                found.append(f"{tier} free, cached, used: {shown}, expected {expected}")
        self.events["evict"] += self.naive.device.evicted > 0
        self.events["evict pending content"] += self.naive.device.evicted_pending > 0
        self.naive.device.evicted = self.naive.device.evicted_pending = 0
        return found

    def _row_differences(self, tables: invariants.Tables) -> list[str]:
        """How long each row is, which blocks it has and who else holds them."""
        if tables.keys() != self.naive.rows.keys():
            return [f"rows {sorted(tables)} are live, expected {self.rows}"]
        figures, found = self.manager.rows, []
        ref_counts, host_ref_counts = self.manager.device.ref_counts, self.manager.host.ref_counts
        columns = figures.num_tokens, figures.num_computed, figures.num_scheduled
        for number in self.rows:
            row, table = self.naive.rows[number], tables[number].tolist()
            shown = (*(int(column[number]) for column in columns), int(figures.num_on_host(number)))
            expected = (len(row.tokens), row.computed, row.launched - row.computed, len(row.tail))
            if shown != expected:
                found.append(f"row {number}: tokens, computed, scheduled, on host {shown}, expected {expected}")
            if len(table) != len(row.table):
                found.append(f"row {number}: {len(table)} blocks, expected {len(row.table)}")
                continue
            for column, (id, block) in enumerate(zip(table, row.table, strict=True)):
                if self.ids.setdefault(block, id) != id:
                    found.append(f"row {number}: block {id} at column {column}, expected {self.ids[block]}")
                refs = int(ref_counts[id])
                if refs != block.refs:
                    found.append(f"block {id}: ref count {refs}, expected {block.refs}")
            for block in row.tail:
                refs = int(host_ref_counts[self.host_ids[block]])
                if refs != block.refs:
                    found.append(f"host block {self.host_ids[block]}: ref count {refs}, expected {block.refs}")
        return found

    def _content_differences(self, contents: set[tuple[bytes, ...]]) -> list[str]:
        """Which content survives, whether two blocks of the model are one real block, and how long each is kept."""
        naive, found = self.naive, []
        tiers = [("", naive.device, contents)]
        if self.world.keeps_content_on_host:
            tiers.append((" on the host", naive.host, self.manager.cached_contents("host")))
        for where, pool, shown in tiers:
            expected = {self._path(node) for node in pool.confirmed}
            found += [f"content forgotten{where}: {path}" for path in expected - shown]
            found += [f"content that should be gone{where}: {path}" for path in shown - expected]
        for node, block in naive.device.resident.items():
            if node in naive.device.pending and self._leader(node, [block]) is None:
                found.append(f"content that batch {naive.device.pending[node]} computes is not found: {node[1]}")
        for pool, ids in ((naive.device, self.ids), (naive.host, self.host_ids)):
            held = {block for row in naive.rows.values() for block in (row.table if pool is naive.device else row.tail)}
            blocks = held | set(pool.resident.values())
            for block in [block for block in ids if block not in blocks]:
                del ids[block]
            if len(set(ids.values())) < len(ids):
                found.append("one block holds two contents")
        if self.num_kept:
            levels = self.manager.device.levels
            for node, block in naive.device.resident.items():
                # How long a used block is to be kept need not be known before no row uses it.
                if not block.refs and levels[self.ids[block]] != naive.level(node):
                    kept = levels[self.ids[block]]
                    found.append(f"node {node[1]} is kept at level {kept}, expected {naive.level(node)}")
        return found

    def _misplaced_nodes(self) -> list[str]:
        """Content that does not lie where it should, once the device has done everything."""
        found = []
        for pool, ids, tier in (
            (self.naive.device, self.ids, self.shadow.device),
            (self.naive.host, self.host_ids, self.shadow.host),
        ):
            for (namespace, tokens), block in pool.resident.items():
                slots = tier[ids[block]].tolist()
                if slots != self.shadow.contents.path(namespace, tokens)[-self.world.block_size :].tolist():
                    held = [self.shadow.contents.describe(content) for content in slots]
                    found.append(f"4: the block of node {tokens} holds {held}")
        return found

    def _misplaced(self, number: int, table: Any) -> list[str]:
        row = self.naive.rows[number]
        length = min(row.launched, len(row.table) * self.world.block_size)
        expected = self.shadow.contents.path(row.namespace, (row.tokens + row.coming)[:length])
        return self.shadow.mismatches(table, expected, f"row {number}")

    def _path(self, node: Node) -> tuple[bytes, ...]:
        """A node as `cached_contents` spells it: another manager of this world shows how it spells a namespace."""
        namespace, tokens = node
        if namespace not in self.roots:
            probe, size = self.build(self.world), self.world.block_size
            row = probe.add([0] * size, namespace=self.namespaces[namespace])
            probe.allocate([row], [size])
            probe.confirm()
            contents = probe.cached_contents()
            if not contents:
                raise BrokenPromise(
                    "a full block that was computed is not found: cached_contents() is empty. "
                    "A manager without a prefix cache says so: Capabilities(prefix_cache=False)."
                )
            self.roots[namespace] = next(iter(contents))[0]
        data, size = np.array(tokens, np.int32).tobytes(), 4 * self.world.block_size
        return (self.roots[namespace], *(data[i : i + size] for i in range(0, len(data), size)))

    def _poison_free(self) -> list[str]:
        return self.device.poison(
            set(range(self.world.num_blocks)) - set(self.ids.values()),
            set(range(self.world.host_blocks)) - set(self.host_ids.values()),
        )

    def _note(self, verb: str, *arguments: Any) -> None:
        if self._is_nested:
            return
        # As they are now: the naive model may go on writing to a list of tokens.
        self.calls.append((verb, tuple(list(each) if isinstance(each, list) else each for each in arguments)))
