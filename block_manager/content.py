"""Unchecked lookups, retentions and events of the prefix cache, for token arrays and encoded namespaces."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.errors import UnknownContent

from .events import EventLog
from .pool import Pool
from .prefix_index import PrefixIndex
from .retention import Retentions
from .runs import DEVICE, HOST, Blocks, Path, Span, first_of, num_nodes
from .sharing import Sharing
from .stats import WINDOW, HitFigures
from .tables import Tables
from .tiers import Offload


class Hit(NamedTuple):
    """The cached prefix of a prompt: `num_tokens` in device `blocks`, int64 [n], and `host_tokens` after them that only
    the host has (0 without `host_caching`)."""

    num_tokens: int
    blocks: Blocks
    host_tokens: int = 0


class Content:
    """The content of both tiers; none without an index. `recent`: tokens asked for and found, of the latest lookups."""

    def __init__(
        self,
        tables: Tables,
        device: Pool,
        host: Pool,
        index: PrefixIndex | None,
        offload: Offload | None,
        sharing: Sharing | None,
    ) -> None:
        self._tables, self._device, self._host = tables, device, host
        self._index, self._offload, self._sharing = index, offload, sharing
        self.retentions = Retentions(()) if index is None else index.retentions
        # None until events are read.
        self._events: EventLog | None = None
        self._queries = self._query_tokens = 0
        self.recent: deque[tuple[int, int]] = deque(maxlen=WINDOW)

    def lookup(self, tokens: NDArray[np.int32], root: bytes) -> Hit:
        """The cached prefix of a prompt in full blocks, at most len(tokens) - 1 tokens. Changes and counts nothing."""
        index, size = self._index, self._tables.block_size
        if index is None:
            return Hit(0, np.empty(0, np.int64))
        path, data, limit = Path(root), tokens.tobytes(), (len(tokens) - 1) // size
        match = index.match(path, data, limit)
        on_host = 0
        if self._offload is not None and match.first_pending < 0:
            on_host = index.match(path, data, limit, HOST, match).num_blocks
        return Hit(match.num_blocks * size, index.blocks_of(DEVICE, match.spans).copy(), on_host * size)

    def has_first(self, tokens: NDArray[np.int32], root: bytes) -> bool:
        """Whether the first block of these tokens may be cached: if not, nothing of them is."""
        return self._index is not None and root + tokens[: self._tables.block_size].tobytes() in self._index.runs

    def held_prefix(self, tokens: NDArray[np.int32], root: bytes, *, confirmed: bool = False) -> int:
        """Blocks of the cached prefix that rows hold already: sharing them takes nothing from what is available. With
        `confirmed`, only those that no batch is still computing. Changes nothing."""
        index = self._index
        if index is None or not self.has_first(tokens, root):
            return 0
        match = index.match(Path(root), tokens.tobytes(), (len(tokens) - 1) // self._tables.block_size)
        blocks = index.blocks_of(DEVICE, match.spans)
        if confirmed and match.first_pending >= 0:
            blocks = blocks[: match.first_pending]
        return int(np.count_nonzero(self._device.state[blocks] > 0))

    def may_be_found(self, tokens: NDArray[np.int32], root: bytes) -> bool:
        """Whether the cached prefix of these tokens ends where an open run does: its row may compute what follows."""
        index = self._index
        if index is None or not self.has_first(tokens, root):
            return False
        match = index.match(Path(root), tokens.tobytes(), (len(tokens) - 1) // self._tables.block_size)
        if not match.spans:
            return True
        run, _, stop = match.spans[-1]
        return run.row >= 0 and stop >= index.confirmed_length(run)

    def retain(self, tokens: NDArray[np.int32], root: bytes, level: int, until: float | None) -> int:
        """`BlockManager.retain`. Raises UnknownContent, or InvalidConfig for `until`."""
        spans: list[Span] = []
        if self._index is not None:
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
        last = None if self._index is None else self._index.last_node(row)
        if last is not None and (until is None or until > self.retentions.now):
            self.retentions.retain(*last, level, until)

    def reset(self) -> bool:
        """Forget all content. Return False and change nothing while any block of either tier is used."""
        if self._device.num_used or self._host.num_used:
            return False
        if self._index is not None:
            self._index.clear()
        return True

    def event_log(self) -> EventLog | None:
        """The log of events, which the first call begins; None without a prefix cache."""
        if self._events is None and self._index is not None:
            self._events = EventLog(self._index, self._tables)
        return self._events

    def count_lookup(self, num_tokens: int, found: int) -> None:
        self._queries += 1
        self._query_tokens += num_tokens
        self.recent.append((num_tokens, found))

    def hit_figures(self) -> HitFigures:
        sharing = self._sharing
        if sharing is None:
            return HitFigures()
        return HitFigures(
            self._queries, self._query_tokens, sharing.hit_tokens, sharing.pending_hit_tokens, sharing.host_hit_tokens
        )
