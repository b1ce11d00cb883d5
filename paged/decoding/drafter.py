"""The base of drafters, which propose drafts before a step, fill in those that a model computes, and learn which were right.

    propose → the scheduler keeps what fits → filled → the step → learn

A draft is right if it is what would have been chosen without it, so whatever is guessed, answers are the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.block_manager import Moves
from paged.model.worker import ReadyStep
from paged.sampling.rows import Asked
from paged.scheduler import Drafts

Rows = NDArray[np.int64]

# The drafts of a row that has not guessed yet.
_FIRST = 2
# What all drafts right adds, and one wrong takes.
_MORE, _LESS = 2, 1


class Tried(NamedTuple):
    """The result of the drafts of k rows in a step.

    rows    int64 [k]
    counts  int64 [k]; drafts of each, at least one, of which the first num_right, int64 [k], were right
    chosen  int32 [(counts + 1).sum()], packed: what follows the last known token of each, and each of its drafts
    """

    rows: Rows
    counts: NDArray[np.int64]
    num_right: NDArray[np.int64]
    chosen: NDArray[np.int32]


class Drafter:
    """Guesses tokens of rows. A row gets `most` drafts at most: more while all are right, fewer when one is not, as in transformers' assisted
    generation; its first drafts are few. This base makes no copies and fills nothing in, as suits drafts that are known from text."""

    def __init__(self, most: int) -> None:
        self._most = most
        # By row, the most drafts of its next step; 0 for a row that gets none.
        self._allowed = np.zeros(0, np.int64)

    def begin(self, row: int, *, drafts: bool = True) -> None:
        """Note that the row serves another sequence, or one that comes back."""
        if row >= len(self._allowed):
            self._allowed = np.concatenate([self._allowed, np.zeros(row + 1, np.int64)])
        self._allowed[row] = min(_FIRST, self._most) if drafts else 0

    def propose(self, tokens: NDArray[np.int32], num_tokens: NDArray[np.int64], rows: Rows) -> Drafts | None:
        """Return drafts for these rows, or None. Row r knows the first `num_tokens[r]` of `tokens[r]`, int32 [all rows, stride]. A draft may
        be UNKNOWN_DRAFT: `filled` computes it."""
        raise NotImplementedError

    def copy(self, moves: Moves) -> None:
        """Make the copies of a step, which come before it."""

    def filled(self, step: ReadyStep, asked: Asked) -> ReadyStep:
        """Return the step with every draft's token, before it runs; `asked` says how each of its rows is sampled."""
        return step

    def learn(self, tried: Tried) -> None:
        """Take the result of a step's drafts."""
        self._adapt(tried.rows, tried.counts, tried.num_right)

    def _adapt(self, rows: Rows, num_tried: NDArray[np.int64], num_right: NDArray[np.int64]) -> None:
        """Change the most drafts of these rows by how many of theirs were tried, and were right."""
        change = np.where(num_right == num_tried, _MORE, -_LESS)
        self._allowed[rows] = np.clip(self._allowed[rows] + change, 1, self._most)


def latest_of(
    owners: NDArray[np.int64], ranks: NDArray[np.int64], at: NDArray[np.int64], num: int
) -> NDArray[np.int64]:
    """Return for each of `num` owners the place `at` of its find with the highest rank, the latest of equal ones; -1: it has none."""
    best = np.full(num, -1, np.int64)
    order = np.lexsort((at, ranks, owners))
    best[owners[order]] = at[order]
    return best
