"""What a scheduler asks of content, and says of it: calls that trust their caller, as those of a step do.

Knows the cached prefix of tokens and of rows. Does not know requests or namespaces, but as the bytes of a root.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .stats import HitFigures
from .trusted_moves import MoveCalls


class TrustedContentCalls(MoveCalls):
    """Lookups of prompts that wait and of rows that go on, and content that came from elsewhere or is to stay."""

    def has_first(self, tokens: NDArray[np.int32], root: bytes) -> bool:
        """Whether the first block of these tokens may be in the cache: if not, nothing of them is."""
        return self._index is not None and self._index.has_first(root, tokens[: self.block_size].tobytes())

    def held_prefix(self, tokens: NDArray[np.int32], root: bytes, *, confirmed: bool = False) -> int:
        """Blocks of the cached prefix that some row holds already, so that sharing them takes nothing from what is available.

        With `confirmed`, only those that no batch is still computing. Changes nothing.
        """
        index = self._index
        if index is None or not self.has_first(tokens, root):
            return 0
        match = index.match(None, root, tokens.tobytes(), (len(tokens) - 1) // self.block_size)
        blocks = index.blocks_of(match)
        if confirmed and match.first_pending >= 0:
            blocks = blocks[: match.first_pending]
        return int(np.count_nonzero(self._device.state[blocks] > 0))

    def may_be_found(self, tokens: NDArray[np.int32], root: bytes) -> bool:
        """Whether what some row computes next may be what follows the cached prefix of these tokens: it ends where an open run does."""
        index = self._index
        if index is None or not self.has_first(tokens, root):
            return False
        match = index.match(None, root, tokens.tobytes(), (len(tokens) - 1) // self.block_size)
        if not match.segments:
            return True
        run, offset, count = match.segments[-1]
        return run.row >= 0 and offset + count >= index.confirmed_length(run)

    def extend_hit(self, row: int, *, count: bool = True, room: int | None = None) -> int:
        """Look up what follows the row's blocks, which all are nodes, and take what is found. Returns the tokens won.

        Does nothing for a row with blocks beyond its nodes: what it has computed itself it need not find. What only the host has is
        loaded into `room` blocks at most (None: as many as can be drawn).
        """
        return 0 if self._sharing is None else self._sharing.extend_hit(row, count=count, room=room)

    def is_unconfirmed(self, row: int) -> bool:
        """Whether the row shares a block that a batch which has not ended is still computing."""
        return self._sharing is not None and self._sharing.is_unconfirmed(row)

    def set_computed(self, row: int, num_computed: int) -> None:
        """The first `num_computed` tokens of the row are in its blocks, written elsewhere; full blocks become nodes."""
        self._tables.set_progress(row, num_computed)
        self._publish(row)

    def retain_row(self, row: int, level: int, until: float | None) -> None:
        """`retain` of all that the row has computed and that is content by now; nothing if there is none, or if it has ended by now."""
        if self._index is None:
            return
        last = self._index.last_node(row)
        if last is None:
            return
        if until is None or until > self.retentions.now:
            self.retentions.retain([(*last, 1)], level, until)

    def hit_figures(self) -> HitFigures:
        """The lookups' figures, at no cost."""
        sharing = self._sharing
        if sharing is None:
            return HitFigures()
        return HitFigures(
            self._queries, self._query_tokens, sharing.hit_tokens, sharing.pending_hit_tokens, sharing.host_hit_tokens
        )
