"""Many steps at once, in which the same rows compute a token each: calls that trust their caller, as those of a step do.

Knows how far the blocks that can be drawn reach, and what so many steps leave behind. Does not know what could end a stretch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .tables import Rows
from .trusted import TrustedCalls


class StretchCalls(TrustedCalls):
    """What a caller asks of a stretch, and taking it."""

    @property
    def may_skip(self) -> bool:
        """Whether `skip_decodes` can be asked for: nothing is to be copied, and no content ends by time."""
        return not self._growth.any_shared_tail and self._offload is None and self.retentions.next_end == np.inf

    def go_alone(self, rows: Rows) -> bool:
        """Whether these rows stand in blocks of their own, so that what they compute next they neither find in the cache nor leave to
        another row of their batch, as long as no block is looked up (`most_decodes`)."""
        index, num_blocks = self._index, self._tables.num_blocks
        return index is None or not any(index.may_find_next(row, num_blocks.item(row)) for row in rows.tolist())

    def most_decodes(self, rows: Rows, limit: int) -> int:
        """How many tokens, at most `limit`, each of these rows can compute one by one with the blocks that can be drawn, before one of
        them has to look a full block up."""
        tables, index, size = self._tables, self._index, self.block_size
        computed = tables.num_computed[rows]
        if index is not None and index.num_attentive:
            asking = index.attentive(rows)
            if len(asking):
                limit = min(limit, size - 1 - int((computed[asking] % size).max()))
        if limit < 1:
            return 0
        spare = tables.num_blocks[rows] * size - computed
        available = self.num_unpromised
        if int(spare.max()) < size:
            # Each row draws a block every `size` steps, the one with the least room first: the draw that fails is known.
            rounds, place = divmod(available, len(rows))
            return min(limit, rounds * size + int(np.partition(spare, place)[place]))
        # Mostly there is room for all of them: that is asked first.
        least, most, middle = 0, limit, limit
        while least < most:
            if int((-(-np.maximum(middle - spare, 0) // size)).sum()) <= available:
                least = middle
            else:
                most = middle - 1
            middle = (least + most + 1) // 2
        return least

    def skip_decodes(self, rows: Rows, tokens: NDArray[np.int32]) -> NDArray[np.int64]:
        """`place_decodes`, `commit`, `settle` and `extend` for each column of `tokens`, int32 [n, k]: what the first n
        of these rows sampled, one batch after the other. The others go on in what they know. The caller has seen by `most_decodes` that
        they can. Returns the blocks that each batch drew, int64 [k]."""
        tables, size, num_steps = self._tables, self.block_size, tokens.shape[1]
        computed = tables.num_computed[rows]
        have = tables.num_blocks[rows].astype(np.int64)
        # In step j of these a row computes its token number computed + j: the steps in which that one begins a block.
        first = have * size - computed
        counts = -(-np.maximum(num_steps - first, 0) // size)
        places = np.repeat(np.arange(len(rows)), counts)
        nth = np.arange(len(places)) - np.repeat(counts.cumsum() - counts, counts)
        steps = first[places] + nth * size
        order = np.argsort(steps, kind="stable")
        places, columns, steps = places[order], (have[places] + nth)[order], steps[order]
        self._longest = int(tables.num_tokens.max()) + num_steps
        tables.ensure_tokens(self._longest + 1)
        start = self._batch
        if len(steps):
            self._draw_ahead(rows[places], columns, start + steps)
        self._begin_batch(start + num_steps)
        tables.num_launched[rows] = tables.num_computed[rows] = computed + num_steps
        rows, ends = rows[: len(tokens)], computed[: len(tokens)] + 1
        tables.tokens[rows[:, None], ends[:, None] + np.arange(num_steps)] = tokens
        tables.num_tokens[rows] = ends + num_steps
        tables.last_token[rows] = tokens[:, -1]
        return np.bincount(steps, minlength=num_steps)

    def _draw_ahead(self, rows: Rows, columns: NDArray[np.int64], batches: NDArray[np.int64]) -> None:
        """A block for each of these places in tables, whose batches, int64 [n], rise: one draw evicts in the order in which so many would.

        A block that is evicted in a later batch lay idle, and its node lived, for so many steps longer.
        """
        device = self._device
        evicted, first = device.num_evicted, int(batches[0])
        self._begin_batch(first)
        self._growth.promise_one_each(rows, columns)
        self._growth.draw_promised()
        if count := device.num_evicted - evicted:
            later = int(batches[-count:].sum()) - count * first
            device.idle_steps += later
            if self._index is not None:
                self._index.lifetime_steps += later
