"""What runs steps where the model lies: it keeps block tables and what steps sampled, and knows no scheduler.

    begin: table changes → copies        ready: tables, slots, tokens that a step before sampled        logits        keep

All that it knows of a step comes in a StepInput, which may have been in a file or on a wire.
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
    """A step as it runs: with every token that is known by now, int32 [T], and where each goes."""

    input: StepInput
    tokens: StepTokens
    token_ids: NDArray[np.int32]

    @property
    def is_sampled(self) -> NDArray[np.bool_]:
        """Bool [T]: the tokens that a row samples after: its last, each draft, and the one before them."""
        samples = self.input.samples
        if len(samples) == len(self.token_ids):
            return samples
        found = np.zeros(len(self.token_ids), np.bool_)
        counts = self.input.num_drafts[samples] + 1
        found[rising_from(self.tokens.query_start_loc[1:][samples] - counts, counts)] = True
        return found


class Worker:
    """Runs the steps of one scheduler on one runner, in their order: `begin` for each that is put out, and what follows for each that was
    not taken back. Not for several threads."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        # By group, int32 [rows, columns] or [rows, columns, pages]; what no step has named is stale.
        self._tables: list[NDArray[np.int32]] = []
        # What steps sampled, int32 [n] each, by number.
        self._sampled: dict[int, NDArray[np.int32]] = {}

    def begin(self, step: StepInput) -> None:
        """Take in what changed in the tables, and make the copies. Raises InvalidPool for a block that is not there, before anything is
        copied, and what a copy raises."""
        self._tables += [np.zeros((0, 0, *each.pages.shape[1:]), np.int32) for each in step.tables[len(self._tables) :]]
        self._tables = [_changed(table, its) for table, its in zip(self._tables, step.tables, strict=True)]
        self.runner.copy(step.moves)

    def ready(self, step: StepInput) -> ReadyStep:
        """Return a step that has begun, with the tokens that earlier steps sampled. Raises InvalidStep where one of those is not kept."""
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
        """float32 [k, vocabulary]: logits after the last token of each row that samples, and after each of the num_drafts tokens before it.
        `lengths` as of `Runner.forward`."""
        return self.runner.forward(step.tokens, step.token_ids, step.is_sampled, lengths)

    def read(
        self,
        step: ReadyStep,
        others: NDArray[np.bool_],
        stateful: NDArray[np.bool_],
        lengths: NDArray[np.int64] | None = None,
    ) -> Read:
        """As `logits`; and the same after `others`, and the hidden states of those that are `stateful`, both bool [T], tokens of the step."""
        return self.runner.read(step.tokens, step.token_ids, step.is_sampled, others, stateful, lengths)

    def keep(self, step: StepInput, tokens: NDArray[np.int32]) -> None:
        """What a step sampled, int32 [n], for steps after it. Forgets what no later step can go on from."""
        for number in [each for each in self._sampled if each < step.oldest]:
            del self._sampled[number]
        self._sampled[step.number] = tokens

    def _tokens_of(self, step: StepInput) -> StepTokens:
        starts, num_rows = step.seq_lens - step.num_tokens, len(step.rows)
        if len(step.token_ids) == num_rows:
            # Each row has one token, as in a decode.
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
    """The table with these entries, larger if it has to be."""
    if not len(its.rows):
        return table
    table = with_room(table, int(its.rows.max()) + 1, int(its.columns.max()) + 1)
    table[its.rows, its.columns] = its.pages
    return table
