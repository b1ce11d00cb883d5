"""Drafts by a smaller model, whose K and V lie in the same blocks as the larger one's.

    block 7 | K, V of the model | K, V of the draft model |     one table, one copy, one hit: what is true of a block is true of both

    step:  known tokens → draft → draft → draft          the smaller model, token by token; it computes the last one, too, for its K and V
           known tokens, draft, draft, draft             the larger one, all at once

By Y. Leviathan et al. and C. Chen et al., "speculative decoding" and "speculative sampling", 2022 and 2023, but for
what is kept: a draft that the larger model would have drawn with the same random number. So both draw with that
number.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.attention import StepTokens
from paged.decoding.drafter import ByWorth, Rows
from paged.model.runner import Runner
from paged.sampling.rows import Asked, RowSampling
from paged.scheduler import UNKNOWN_DRAFT, Batch, Drafts


class DraftModel(ByWorth):
    """Drafts for rows, `most` a row and step at most. The runner's pool has as many blocks as that of the model it guesses for."""

    def __init__(self, runner: Runner, sampling: RowSampling, most: int) -> None:
        super().__init__(most)
        self._runner, self._sampling = runner, sampling

    def propose(self, tokens: NDArray[np.int32], num_tokens: NDArray[np.int64], rows: Rows) -> Drafts | None:
        """As Drafter; how many, whose tokens `filled` says."""
        counts = self._lengths.of(rows)
        total = int(counts.sum())
        return Drafts(rows, counts, np.full(total, UNKNOWN_DRAFT, np.int32)) if total else None

    def move(self, batch: Batch) -> None:
        """As Drafter."""
        self._runner.move(batch)

    def filled(self, batch: Batch, asked: Asked) -> Batch:
        """As Drafter. Whatever the batch computes has K and V of this model, too, from now on."""
        if not batch.num_scheduled_tokens:
            return batch
        num_known, num_before = batch.num_tokens - batch.num_drafts, batch.seq_lens - batch.num_drafts
        starts = batch.query_start_loc[:-1]
        first_drafts = starts + num_known
        token_ids = batch.token_ids.copy()
        going = (batch.num_drafts > 0).nonzero()[0]
        nth = np.arange(len(token_ids)) - starts.repeat(batch.num_tokens)
        at = (nth < num_known.repeat(batch.num_tokens)).nonzero()[0]
        is_sampled = np.zeros(len(token_ids), np.bool_)
        is_sampled[first_drafts[going] - 1] = True
        logits = self._runner.forward(
            self._step(batch, np.arange(len(num_known)), at, num_known, num_before),
            token_ids[at],
            is_sampled[at],
            asked.prompt_len,
        )
        if not len(going):
            return batch
        for number in range(int(batch.num_drafts.max())):
            its = asked.of(going)
            places = num_before[going] - its.prompt_len + number
            at = first_drafts[going] + number
            token_ids[at] = self._sampling.guess(logits, its, places)
            goes_on = batch.num_drafts[going] > number + 1
            logits = self._runner.forward(
                self._step(batch, going, at, np.ones(len(going), np.int64), num_before[going] + number + 1),
                token_ids[at],
                goes_on,
                its.prompt_len,
            )
            going = going[goes_on]
        return msgspec.structs.replace(batch, token_ids=token_ids)

    def _step(
        self, batch: Batch, of: Rows, at: NDArray[np.int64], counts: NDArray[np.int64], seq_lens: NDArray[np.int64]
    ) -> StepTokens:
        """The batch's packed tokens `at`, so many of each of its rows `of`, which then have these lengths."""
        num_columns = -(-int(seq_lens.max(initial=1)) // self._runner.pool.block_size)
        return StepTokens(
            batch.positions[at],
            batch.slot_mapping[at],
            np.concatenate([[0], counts.cumsum()]),
            seq_lens,
            batch.block_tables[batch.rows[of], :num_columns],
            self._runner.pool.block_size,
        )
