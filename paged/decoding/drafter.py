"""What a drafter does: rows begin, drafts are proposed before a step, those that have to be computed are filled in with it, and it learns
which were right.

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


class DraftLengths:
    """The number of drafts for each row, `most` at most: more while all are right, fewer when one is not, as in transformers' assisted generation.
    A row's first drafts are few."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._allowed = np.zeros(0, np.int64)

    def begin(self, row: int, *, drafts: bool = True) -> None:
        """As Drafter."""
        if row >= len(self._allowed):
            self._allowed = np.concatenate([self._allowed, np.zeros(row + 1, np.int64)])
        self._allowed[row] = min(_FIRST, self._most) if drafts else 0

    def of(self, rows: Rows) -> NDArray[np.int64]:
        """Drafts of each row at most, 0 for one that gets none."""
        return self._allowed[rows]

    def learn(self, rows: Rows, num_guessed: NDArray[np.int64], num_right: NDArray[np.int64]) -> None:
        """Take the numbers of drafts of these rows that were tried, and that were right."""
        change = np.where(num_right == num_guessed, _MORE, -_LESS)
        self._allowed[rows] = np.clip(self._allowed[rows] + change, 1, self._most)


class Drafter:
    """Guesses tokens of rows, and gives each row as many drafts as it is worth, `most` at most. As it is, it makes no copies and fills nothing in: for
    drafters that propose tokens they know from text."""

    def __init__(self, most: int) -> None:
        self._lengths = DraftLengths(most)

    def begin(self, row: int, *, drafts: bool = True) -> None:
        """Note that the row serves another sequence, or one that comes back."""
        self._lengths.begin(row, drafts=drafts)

    def propose(self, tokens: NDArray[np.int32], num_tokens: NDArray[np.int64], rows: Rows) -> Drafts | None:
        """Drafts for these rows by the tokens that each knows, int32 [all rows, stride], so many of each row; None where there are none.
        Token ids may be UNKNOWN_DRAFT: then `filled` says them."""
        raise NotImplementedError

    def copy(self, moves: Moves) -> None:
        """Make the copies of a step, which come before it."""

    def filled(self, step: ReadyStep, asked: Asked) -> ReadyStep:
        """The step with every draft's token, before it runs; `asked` says how each of its rows is sampled."""
        return step

    def learn(self, tried: Tried) -> None:
        """Take the result of a step's drafts."""
        self._lengths.learn(tried.rows, tried.counts, tried.num_right)


def latest_of(
    owners: NDArray[np.int64], ranks: NDArray[np.int64], at: NDArray[np.int64], num: int
) -> NDArray[np.int64]:
    """Of what is found for each of `num` owners, where the one of the highest rank is, the latest of equal ones; -1 where nothing is."""
    best = np.full(num, -1, np.int64)
    order = np.lexsort((at, ranks, owners))
    best[owners[order]] = at[order]
    return best
