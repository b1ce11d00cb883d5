"""Unchecked lookups, retentions and events of the prefix cache, for token arrays and encoded namespaces."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.errors import UnknownContent

from .events import EventLog
from .prefix_index import NOTHING, Match, PrefixIndex
from .row_ends import RowEnds
from .runs import DEVICE, HOST, Blocks, Path, Run, first_of, num_nodes
from .side_content import HitEnd, SideContent, Stands
from .tables import Tables
from .tiers import Offload


class Hit(NamedTuple):
    """The cached prefix of a prompt: `num_tokens` in device `blocks`, int64 [n], and `host_tokens` after them that only
    the host has (0 without `host_caching`)."""

    num_tokens: int
    blocks: Blocks
    host_tokens: int = 0


class Content:
    """The content of both tiers."""

    def __init__(self, tables: Tables, index: PrefixIndex, offload: Offload | None, pages: int) -> None:
        self._tables, self._index, self._offload = tables, index, offload
        # As in Sharing.
        self.sides: SideContent | None = None
        self.ends: RowEnds | None = None
        # Pages of a block of the full group.
        self._pages = pages
        self.retentions = index.retentions
        # None until events are read.
        self._events: EventLog | None = None

    def _match(self, tokens: NDArray[np.int32], root: bytes) -> Match:
        """The prefix of these tokens, but never all of them, that is on the device."""
        if not self.has_first(tokens, root):
            # Without a copy of the tokens.
            return NOTHING
        found = self._index.match(Path(root), tokens.tobytes(), (len(tokens) - 1) // self._tables.block_size)
        return found if self.sides is None else self.sides.longest(found, self.sides.stands(found, 0))

    def _hit(
        self, sides: SideContent, tokens: NDArray[np.int32], root: bytes
    ) -> tuple[Match, Stands, Match, Run | None]:
        """What the full group has of these tokens, where each side stands in it, and the hit, with the end of a row that it
        goes on to."""
        path = Path(root)
        found = self._index.match(path, tokens.tobytes(), (len(tokens) - 1) // self._tables.block_size)
        stands = sides.stands(found, 0)
        hit, end = sides.longest(found, stands), None
        if self.ends is not None:
            hit, end = self.ends.find(path, tokens, 0, found, hit)
        return found, stands, hit, end

    def hit_end(self, tokens: NDArray[np.int32], root: bytes) -> HitEnd:
        """Where a lookup of these tokens would end now, if there are sides."""
        assert self.sides is not None, "there are sides"
        found, stands, hit, end = self._hit(self.sides, tokens, root)
        return self.sides.hit_end(found, hit, stands, end, sought=(len(tokens) - 1) // self._tables.block_size)

    def lookup(self, tokens: NDArray[np.int32], root: bytes) -> Hit:
        """The cached prefix of a prompt in full blocks, at most len(tokens) - 1 tokens. Changes and counts nothing."""
        index, size, on_host = self._index, self._tables.block_size, 0
        if self.sides is not None and self.has_first(tokens, root):
            _, _, match, end = self._hit(self.sides, tokens, root)
            if end is not None:
                blocks = [*index.blocks_of(DEVICE, match.spans), end.block(DEVICE, 0)]
                return Hit(match.num_blocks * size + len(end.tokens) // 4, np.array(blocks))
        else:
            match = self._match(tokens, root)
        if self._offload is not None and match.first_pending < 0:
            on_host = index.match(Path(root), tokens.tobytes(), (len(tokens) - 1) // size, HOST, match).num_blocks
        return Hit(match.num_blocks * size, index.blocks_of(DEVICE, match.spans).copy(), on_host * size)

    def has_first(self, tokens: NDArray[np.int32], root: bytes) -> bool:
        """Whether the first block of these tokens may be cached: if not, nothing of them is."""
        runs = self._index.runs
        return bool(runs) and root + tokens[: self._tables.block_size].tobytes() in runs

    def held_prefix(self, tokens: NDArray[np.int32], root: bytes, *, confirmed: bool = False) -> int:
        """Blocks of the cached prefix that rows hold already: sharing them takes nothing from what is available. With
        `confirmed`, only those that no batch is still computing. Changes nothing."""
        match = self._match(tokens, root)
        if not match.spans:
            # Asked of the first waiting request in every step.
            return 0
        blocks = self._index.blocks_of(DEVICE, match.spans)
        if confirmed and match.first_pending >= 0:
            blocks = blocks[: match.first_pending]
        return int(np.count_nonzero(self._index.pools[DEVICE].state[blocks] > 0)) * self._pages

    def may_be_found(self, tokens: NDArray[np.int32], root: bytes) -> bool:
        """Whether the cached prefix of these tokens ends where an open run does: its row may compute what follows."""
        spans = self._match(tokens, root).spans
        if not spans:
            return self.has_first(tokens, root)
        run, _, stop = spans[-1]
        return run.row >= 0 and stop >= self._index.confirmed_length(run)

    def retain(self, tokens: NDArray[np.int32], root: bytes, level: int, until: float | None) -> int:
        """`BlockManager.retain`. Raises UnknownContent, or InvalidConfig for `until`."""
        path, data, limit = Path(root), tokens.tobytes(), len(tokens) // self._tables.block_size
        match = self._index.match(path, data, limit)
        if match.first_pending >= 0:
            spans = first_of(match.spans, match.first_pending)
        else:
            spans = match.spans + self._index.match(path, data, limit, HOST, match).spans
        if not spans:
            raise UnknownContent(len(tokens))
        run, _, stop = spans[-1]
        self.retentions.retain(run, stop - 1, level, until)
        return num_nodes(spans) * self._tables.block_size

    def retain_row(self, row: int, level: int, until: float | None) -> None:
        """`retain` the confirmed content of the row; do nothing if it has none, or if `until` has passed."""
        last = self._index.last_node(row)
        if last is not None and (until is None or until > self.retentions.now):
            self.retentions.retain(*last, level, until)

    def reset(self) -> bool:
        """Forget all content. Return False and change nothing while any block of either tier is used."""
        if any(pool.num_used for pool in self._index.pools):
            return False
        self._index.clear()
        return True

    def event_log(self) -> EventLog:
        """The log of events, which the first call begins."""
        if self._events is None:
            self._events = EventLog(self._index, self._tables)
        return self._events
