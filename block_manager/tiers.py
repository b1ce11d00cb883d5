"""Swap: a row's blocks go to the host and come back.

Full blocks go as nodes, so that what already resides on the host is pinned and not copied again, and on return a node that
is still on the device is shared and not copied either. Only what has no node (a partial tail, everything without a prefix
cache) gets a host block of its own. Pins are references on the host pool; what they do not cover there is cached content and
gives way.
"""

from __future__ import annotations

import numpy as np

from .moves import Moves, pairs_of
from .offload import Offload
from .pool import Pool
from .prefix_index import PrefixIndex
from .runs import DEVICE, HOST, Blocks, Span, first_of
from .tables import Rows, Tables


class Tiers:
    """The host tails of swapped rows, and the two ways between the tiers."""

    def __init__(
        self, tables: Tables, device: Pool, host: Pool, index: PrefixIndex | None, offload: Offload | None
    ) -> None:
        self._tables = tables
        self._offload = offload
        self._device = device
        self._host = host
        self._index = index
        # row -> the host blocks that hold its blocks from num_blocks on, in order.
        self.tails: dict[int, Blocks] = {}

    def num_on_host(self, row: int) -> int:
        """Host blocks that the row holds."""
        return len(self.tails.get(row, ()))

    def host_blocks_wanted(self, rows: list[int], keep: int = 0) -> int:
        """Host blocks that swap_out of these rows would draw. Closes their open runs: nodes of closed ones go as nodes."""
        if self._index is not None:
            for row in rows:
                self._index.close_run(row)
        private: set[int] = set()
        nodes: set[tuple[int, int]] = set()
        for row in rows:
            for run, first, stop in self._nodes(row, keep):
                for at in range(first, stop):
                    block = run.block(HOST, at)
                    # A node on the host that no pin holds yet counts as drawn, too: pinning takes it out of what is available.
                    if block < 0 or self._host.num_refs(block) == 0:
                        nodes.add((run.id, at))
            private.update(self._private_blocks(row, keep).tolist())
        return len(nodes) + len(private)

    def device_blocks_wanted(self, rows: list[int]) -> int:
        """Device blocks that swap_in of these rows would take from what is available.

        What several of them share counts once, and a node that some other row holds on the device not at all.
        """
        tails = [self.tails[row] for row in rows if row in self.tails]
        if not tails:
            return 0
        blocks = np.unique(np.concatenate(tails))
        wanted = 0
        for block, offset in zip(blocks.tolist(), self._offsets(blocks), strict=True):
            if self._index is not None and offset >= 0:
                resident = self._index.block(DEVICE, self._host.run[block], offset)
                # A cached one is available now and used afterwards, as a drawn one is.
                wanted += resident < 0 or self._device.num_refs(resident) == 0
            else:
                wanted += 1
        return wanted

    def swap_out(self, rows: Rows, keep: int) -> Moves:
        """Blocks from column `keep` on go to the host. Raises OutOfBlocks, changing nothing."""
        self._host.require(self.host_blocks_wanted(rows.tolist(), keep))
        copied: dict[int, int] = {}
        pairs: list[tuple[int, int]] = []
        for row in rows.tolist():
            self._swap_out_row(row, keep, copied, pairs)
        for row in rows.tolist():
            self._give_up_device(row, keep)
        return Moves(device_to_host=pairs_of(pairs))

    def swap_in(self, rows: Rows) -> Moves:
        """The host tails come back. Raises OutOfBlocks, changing nothing."""
        self._device.require(self.device_blocks_wanted(rows.tolist()))
        for row in rows.tolist():
            # Before any tail is taken apart: there may be no memory for the table.
            self._tables.ensure_columns(int(self._tables.num_blocks[row]) + len(self.tails[row]))
        pairs: list[tuple[int, int]] = []
        loaded: dict[int, int] = {}
        returned: list[Blocks] = []
        for row in rows.tolist():
            returned.append(self._swap_in_row(row, loaded, pairs))
        for tail in returned:
            if self._offload is not None:
                # What returns may have pushed content out to the host, which must not go where these copies read.
                self._offload.keep_until_taken(tail)
            else:
                self._release_host(tail)
        return Moves(host_to_device=pairs_of(pairs))

    def drop(self, row: int) -> None:
        """The row needs its host tail no more."""
        tail = self.tails.pop(row, None)
        if tail is not None:
            self._tables.is_swapped[row] = False
            self._release_host(tail)

    def trim(self, row: int, keep: int) -> None:
        """The swapped row keeps its first `keep` blocks only, on the device and after that on the host."""
        tail, on_host = self.tails[row], max(keep - int(self._tables.num_blocks[row]), 0)
        if not on_host:
            self.drop(row)
        elif on_host < len(tail):
            self.tails[row] = tail[:on_host]
            self._release_host(tail[on_host:])

    def tail_is_node(self, row: int, column: int) -> bool:
        """Whether the swapped row's block at `column` is a host block that carries a node."""
        place = column - int(self._tables.num_blocks[row])
        tail = self.tails[row]
        return 0 <= place < len(tail) and bool(self._host.has_content(tail[place : place + 1])[0])

    def _release_host(self, tail: Blocks) -> None:
        # Tail first, so that the host evicts children before parents, too.
        self._host.release(tail[::-1].astype(np.int64))

    def _nodes(self, row: int, keep: int) -> list[Span]:
        """The row's nodes on the device from column `keep` on; what is on the host already stands behind them."""
        if self._index is None:
            return []
        path = self._index.paths[row]
        found = first_of(path.spans(keep), int(self._tables.num_blocks[row]) - keep)
        of_forks = self._index.nodes_of_forks(row)[max(0, keep - path.published) :]
        return found + [(run, at, at + 1) for run, at in of_forks]

    def _offsets(self, blocks: Blocks) -> list[int]:
        """The place of each host block's node in its run, -1 where it carries none."""
        return [-1] * len(blocks) if self._index is None else self._index.offsets(HOST, blocks)

    def _num_nodes(self, row: int) -> int:
        index = self._index
        return 0 if index is None else index.paths[row].published + len(index.nodes_of_forks(row))

    def _private_blocks(self, row: int, keep: int) -> Blocks:
        """Device blocks from column `keep` on that hold launched tokens and have no node."""
        tables = self._tables
        stop = min(-(-int(tables.num_launched[row]) // tables.block_size), int(tables.num_blocks[row]))
        return tables.blocks[0, row, max(keep, self._num_nodes(row)) : stop].astype(np.int64)

    def _swap_out_row(self, row: int, keep: int, copied: dict[int, int], pairs: list[tuple[int, int]]) -> None:
        tail: list[int] = []
        host, index, column = self._host, self._index, keep
        for run, first, stop in self._nodes(row, keep):
            assert index is not None
            for at in range(first, stop):
                block = run.block(HOST, at)
                if block >= 0:
                    host.hold(np.array([block], np.int64))
                else:
                    block = int(index.draw_for(HOST, [(run, at, at + 1)], 1)[0])
                    pairs.append((int(self._tables.blocks[0, row, column]), block))
                tail.append(block)
                column += 1
        for source in self._private_blocks(row, keep).tolist():
            if source in copied:
                # Forked rows that go together: their common partial block travels once.
                block = copied[source]
                host.hold(np.array([block], np.int64))
            else:
                block = copied[source] = int(host.draw(1)[0])
                pairs.append((source, block))
            tail.append(block)
        before = self.tails.get(row)
        blocks = np.array(tail, np.int64)
        self.tails[row] = blocks if before is None else np.concatenate([blocks, before])

    def _give_up_device(self, row: int, keep: int) -> None:
        tables = self._tables
        num_blocks = int(tables.num_blocks[row])
        # Lookahead blocks hold nothing to come back for.
        keep = min(keep, -(-int(tables.num_launched[row]) // tables.block_size))
        self._device.release(tables.blocks[0, row, keep:num_blocks][::-1].astype(np.int64))
        tables.set_num_blocks(row, keep)
        tables.reserved[row] = 0
        tables.is_swapped[row] = True

    def _swap_in_row(self, row: int, loaded: dict[int, int], pairs: list[tuple[int, int]]) -> Blocks:
        tables, device, host, index = self._tables, self._device, self._host, self._index
        tail = self.tails.pop(row)
        column = int(tables.num_blocks[row])
        for source, offset in zip(tail.tolist(), self._offsets(tail), strict=True):
            run = host.run[source] if index is not None and offset >= 0 else None
            block = -1
            if run is not None and index is not None:
                block = index.block(DEVICE, run, offset)
            elif source in loaded:
                block = loaded[source]
            if block >= 0:
                device.hold(np.array([block], np.int64))
            else:
                block = int(device.draw(1)[0])
                pairs.append((source, block))
                if run is not None and index is not None:
                    index.reside(DEVICE, run, offset, np.array([block]))
                else:
                    loaded[source] = block
            tables.blocks[0, row, column] = block
            column += 1
        tables.set_num_blocks(row, column)
        tables.is_swapped[row] = False
        return tail
