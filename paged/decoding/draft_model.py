"""Drafts by a smaller model, whose K and V lie in the same blocks as the larger one's.

    block 7 | K, V of the model | K, V of the draft model |     one table, one copy, one hit: what is true of a block is true of both

    step:  known tokens → draft → draft → draft          the smaller model, token by token; it computes the last one, too, for its K and V
           known tokens, draft, draft, draft             the larger one, all at once

By Y. Leviathan et al. and C. Chen et al., "speculative decoding" and "speculative sampling", 2022 and 2023. Unlike there,
both models draw with the same random number, and a draft is kept if the larger one draws the same token.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged.attention import StepTokens
from paged.block_manager import Moves
from paged.decoding.drafter import Drafter, Rows
from paged.model.runner import Runner
from paged.model.worker import ReadyStep
from paged.sampling.rows import Asked, RowSampling
from paged.scheduler import UNKNOWN_DRAFT, Drafts


class DraftModel(Drafter):
    """Drafts by the smaller model, which the runner runs. Its pool has as many blocks as the larger one's."""

    def __init__(self, runner: Runner, sampling: RowSampling, most: int) -> None:
        super().__init__(most)
        self._runner, self._sampling = runner, sampling

    def propose(self, tokens: NDArray[np.int32], num_tokens: NDArray[np.int64], rows: Rows) -> Drafts | None:
        """As Drafter. Each draft is UNKNOWN_DRAFT."""
        counts = self._allowed[rows]
        total = int(counts.sum())
        return Drafts(rows, counts, np.full(total, UNKNOWN_DRAFT, np.int32)) if total else None

    def copy(self, moves: Moves) -> None:
        """As Drafter."""
        self._runner.copy(moves)

    def filled(self, step: ReadyStep, asked: Asked) -> ReadyStep:
        """As Drafter. Computes this model's K and V of all tokens of the step."""
        if not len(step.token_ids):
            return step
        given = step.input
        num_known, num_before = given.num_tokens - given.num_drafts, given.seq_lens - given.num_drafts
        starts = step.tokens.query_start_loc[:-1]
        first_drafts = starts + num_known
        token_ids = step.token_ids.copy()
        going = (given.num_drafts > 0).nonzero()[0]
        nth = np.arange(len(token_ids)) - starts.repeat(given.num_tokens)
        at = (nth < num_known.repeat(given.num_tokens)).nonzero()[0]
        is_sampled = np.zeros(len(token_ids), np.bool_)
        is_sampled[first_drafts[going] - 1] = True
        logits = self._runner.forward(
            _part(step.tokens, np.arange(len(num_known)), at, num_known, num_before),
            token_ids[at],
            is_sampled[at],
            asked.prompt_len,
        )
        if not len(going):
            return step
        for number in range(int(given.num_drafts.max())):
            its = asked.of(going)
            places = num_before[going] - its.prompt_len + number
            at = first_drafts[going] + number
            token_ids[at] = self._sampling.guess(logits, its, places)
            goes_on = given.num_drafts[going] > number + 1
            logits = self._runner.forward(
                _part(step.tokens, going, at, np.ones(len(going), np.int64), num_before[going] + number + 1),
                token_ids[at],
                goes_on,
                its.prompt_len,
            )
            going = going[goes_on]
        return step._replace(token_ids=token_ids)


def _part(
    tokens: StepTokens, of: Rows, at: NDArray[np.int64], counts: NDArray[np.int64], seq_lens: NDArray[np.int64]
) -> StepTokens:
    """Return the tokens `at` as a step: `counts[i]` of sequence `of[i]`, which then has `seq_lens[i]` tokens."""
    num_columns = -(-int(seq_lens.max(initial=1)) // tokens.block_size)
    return StepTokens(
        tokens.positions[at],
        tokens.slot_mapping[at],
        np.concatenate([[0], counts.cumsum()]),
        seq_lens,
        tokens.block_tables[of, :num_columns],
        tokens.block_size,
    )
