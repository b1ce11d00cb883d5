"""The worker: runs steps where the model lies. It keeps block tables and sampled tokens, and has no scheduler.

    begin: table changes → copies        ready: tables, slots, tokens that an earlier step sampled        logits        keep

Everything about a step comes in its StepInput, which may come from a file or over a wire.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paged.attention import StepTokens
from paged.base.growing import rising, rising_from, with_room
from paged.errors import InvalidStep
from paged.model.runner import Read, Runner
from paged.model.step_input import PageChanges, StepInput


class ReadyStep(NamedTuple):
    """A step that can run: its token ids, int32 [T], with those that earlier steps sampled, and where each token goes."""

    input: StepInput
    tokens: StepTokens
    token_ids: NDArray[np.int32]

    @property
    def is_sampled(self) -> NDArray[np.bool_]:
        """Bool [T]: tokens after which a row samples: its last one, or its drafts and the token before them."""
        samples = self.input.samples
        if len(samples) == len(self.token_ids):
            return samples
        found = np.zeros(len(self.token_ids), np.bool_)
        counts = self.input.num_drafts[samples] + 1
        found[rising_from(self.tokens.query_start_loc[1:][samples] - counts, counts)] = True
        return found


class Worker:
    """Runs the steps of one scheduler on one runner, in their order: `begin` for each step, and the other calls for each that is not taken back.
    Not for several threads."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        # By group, int32 [rows, columns] or [rows, columns, pages]; entries that no step has set are stale.
        self._tables: list[NDArray[np.int32]] = []
        # By number of the step, the tokens that it sampled, int32 [n].
        self._sampled: dict[int, NDArray[np.int32]] = {}

    def begin(self, step: StepInput) -> None:
        """Apply the step's table changes, and make its copies. Raises InvalidPool, before anything is copied, for a copy from or to a block that the pool
        does not have, and what a copy raises."""
        self._tables += [np.zeros((0, 1, *each.pages.shape[1:]), np.int32) for each in step.tables[len(self._tables) :]]
        self._tables = [_changed(table, its) for table, its in zip(self._tables, step.tables, strict=True)]
        self.runner.copy(step.moves)

    def ready(self, step: StepInput) -> ReadyStep:
        """Return a step that has begun, with the tokens that earlier steps sampled. Raises InvalidStep for a token that no step kept here sampled."""
        token_ids = step.token_ids
        if len(step.sources):
            token_ids = token_ids.copy()
            for number in np.unique(step.sources[:, 1]).tolist():
                if number not in self._sampled:
                    raise InvalidStep(
                        f"step {step.number} goes on from step {number}, of which no tokens are kept here."
                    )
                (places, _, theirs), sampled = step.sources[step.sources[:, 1] == number].T, self._sampled[number]
                if theirs.max() >= len(sampled):
                    raise InvalidStep(
                        f"step {step.number} takes token {theirs.max()} of step {number}, which sampled {len(sampled)}."
                    )
                token_ids[places] = sampled[theirs]
        return ReadyStep(step, self._tokens_of(step), token_ids)

    def logits(self, step: ReadyStep, lengths: NDArray[np.int64] | None = None) -> Tensor:
        """Run the step. Return logits after each token of `is_sampled`, float32 [k, vocabulary]. `lengths`: as for `Runner.forward`."""
        return self.runner.forward(step.tokens, step.token_ids, step.is_sampled, lengths)

    def read(
        self,
        step: ReadyStep,
        others: NDArray[np.bool_],
        stateful: NDArray[np.bool_],
        lengths: NDArray[np.int64] | None = None,
    ) -> Read:
        """Run the step. Return its logits as `logits` does, those after the tokens `others`, and the hidden states of the tokens `stateful`, both
        bool [T]."""
        return self.runner.read(step.tokens, step.token_ids, step.is_sampled, others, stateful, lengths)

    def keep(self, step: StepInput, tokens: NDArray[np.int32]) -> None:
        """Keep the tokens that a step sampled, int32 [n], for later steps. Forget those of steps before `step.oldest`."""
        for number in [each for each in self._sampled if each < step.oldest]:
            del self._sampled[number]
        self._sampled[step.number] = tokens

    def _tokens_of(self, step: StepInput) -> StepTokens:
        starts, num_rows = step.seq_lens - step.num_tokens, len(step.rows)
        if len(step.token_ids) == num_rows:
            # A decode: each row has one token.
            positions, query_start_loc, owners = starts, rising(num_rows + 1), rising(num_rows)
        else:
            positions = rising_from(starts, step.num_tokens)
            query_start_loc = np.concatenate([[0], step.num_tokens.cumsum()])
            owners = rising(num_rows).repeat(step.num_tokens)
        block_size = self.runner.pool.block_size
        num_columns = -(-int(step.seq_lens.max(initial=1)) // block_size)
        tables = [each[step.rows, :num_columns] for each in self._tables]
        if tables[0].ndim == 2:
            columns, within = np.divmod(positions, block_size)
            slots = tables[0][owners, columns].astype(np.int64) * block_size + within
            return StepTokens(positions, slots, query_start_loc, step.seq_lens, tables[0], block_size)
        states, of_states = None, self.runner.pool.state_group
        if of_states is not None:
            assert step.reads is not None, "a model with states reads them"
            states = step.reads, tables[of_states][:, 0]
        attended = tuple(None if i == of_states else each for i, each in enumerate(tables))
        at = positions, query_start_loc, step.seq_lens
        return StepTokens.of_groups(*at, attended, block_size, states, step.written_from)


def _changed(table: NDArray[np.int32], its: PageChanges) -> NDArray[np.int32]:
    """Set these entries of a table, and return it, grown if they do not fit."""
    if not len(its.rows):
        return table
    table = with_room(table, int(its.rows.max()) + 1, int(its.columns.max()) + 1)
    table[its.rows, its.columns] = its.pages
    return table
