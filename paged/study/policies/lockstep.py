"""Batches whose rows all compute the same positions, as a model does that takes one rectangle of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paged.block_manager import Memory
from paged.scheduler.composition import Composition
from paged.scheduler.queues import Queues
from paged.scheduler.request import RequestState
from paged.scheduler.rows import Counts, Rows
from paged.scheduler.state import State


class Lockstep(Composition):
    """All rows compute up to the batch's first position, and then one token a step, even in the middle of a prompt. A row that a prefix hit put
    ahead stays ahead.

    With `is_padded` the batch begins with its longest prompt, as if shorter ones were padded, else with its shortest.
    """

    one_token_each = True

    def __init__(self, policy: str, *, is_padded: bool) -> None:
        self._policy, self._is_padded = policy, is_padded
        # Tokens that the rows of this batch compute before they go on in lockstep.
        self._first = 0

    def begin_batch(self, requests: Sequence[RequestState]) -> None:
        """Take these waiting requests as the next batch, beside which nothing runs."""
        known = [len(tokens) for request in requests for tokens in request.tokens if tokens is not None]
        self._first = max(known) if self._is_padded else min(known)

    def wanted(self, manager: Memory, rows: Rows, todo: Counts) -> Counts:
        lacks = self._first - manager.rows.num_launched[rows]
        is_behind = lacks > 0
        if is_behind.any():
            return np.where(is_behind, np.minimum(todo, lacks), 0)
        return np.minimum(todo, 1)

    def reason(self, queues: Queues) -> str | None:
        if not queues.running.num:
            return None
        return f"policy {self._policy} admits the next batch when the last request of this one has ended."

    def walking(self, state: State, rows: Rows) -> tuple[Rows, int] | None:
        """Return the rows of the next step, decodes first, and how many of them decode, if some rows walk through their prompts a token a step. None
        if none does, or if the next step cannot be foreseen."""
        manager = state.manager
        computed = manager.rows.num_computed[rows]
        todo = manager.rows.num_tokens[rows] - computed
        if (computed < self._first).any() or (todo < 1).any():
            return None
        decodes, walkers = rows[todo == 1], rows[todo > 1]
        if not len(walkers) or not _go_alone(manager, walkers):
            return None
        return np.concatenate([decodes, walkers]), len(decodes)


def _go_alone(memory: Memory, rows: Rows) -> bool:
    """Whether no row looks up a block in its next step, or leaves one to another row of its batch, unless it fills a block."""
    index, num_blocks = memory.index, memory.tables.num_blocks
    if not memory.prefix_caching:
        return True
    paths = [(row, index.paths[row]) for row in rows.tolist()]
    return all(
        path.open is not None or (path.published != num_blocks[row] and not index.is_behind(row)) for row, path in paths
    )
