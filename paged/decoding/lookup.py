"""Drafts from a sequence's own text: what came after its last tokens, where they stood before.

    … the cat sat on the mat . the cat |         the last two tokens stood here before
          └─────┘ sat on the → drafts

A draft is right wherever the text repeats itself, and costs a token of a step where it is not. Found by A. Saxena, "Prompt lookup
decoding", 2023; transformers has it as `prompt_lookup_num_tokens`, vLLM as "ngram". How many are guessed follows what became of the last
ones, as in transformers' assisted generation. Knows tokens by row. Does not know logits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged.block_manager.growing import rising_from
from paged.scheduler import Drafts

Rows = NDArray[np.int64]

# So many tokens of a text are looked through, from its end.
_WINDOW = 4096
# The drafts of a row that has not guessed yet.
_FIRST = 2
# What all drafts right adds, and one wrong takes.
_MORE, _LESS = 2, 1


class PromptLookup:
    """Drafts for rows, `most` a row and step at most, after as many equal tokens as there are, from `least` to `longest`."""

    def __init__(self, most: int, *, longest: int = 3, least: int = 2) -> None:
        self._most, self._longest, self._least = most, longest, least
        self._allowed = np.zeros(0, np.int64)

    def begin(self, row: int, *, drafts: bool = True) -> None:
        """The row serves another sequence, or one that comes back, for which there may be drafts or not."""
        if row >= len(self._allowed):
            self._allowed = np.concatenate([self._allowed, np.zeros(row + 1, np.int64)])
        self._allowed[row] = min(_FIRST, self._most) if drafts else 0

    def propose(self, tokens: NDArray[np.int32], num_tokens: NDArray[np.int64], rows: Rows) -> Drafts | None:
        """Drafts for these rows by the tokens that each knows, int32 [all rows, stride], so many of each row; None where nothing came before."""
        lengths = num_tokens[rows]
        starts = np.maximum(lengths - _WINDOW, 0)
        # Ends of what may be like the end: all places but the last.
        counts = np.maximum(lengths - 1 - starts, 0)
        owners, at = np.arange(len(rows)).repeat(counts), rising_from(starts, counts)
        equal = np.zeros(len(owners), np.int64)
        going = np.arange(len(owners))
        for back in range(self._longest):
            here, its = at[going] - back, owners[going]
            its_rows = rows[its]
            there = lengths[its] - 1 - back
            same = (here >= 0) & (tokens[its_rows, np.maximum(here, 0)] == tokens[its_rows, np.maximum(there, 0)])
            going = going[same]
            equal[going] = back + 1
        found = (equal >= self._least).nonzero()[0]
        if not len(found):
            return None
        # The longest, and of equally long ones the latest.
        best = np.full(len(rows), -1, np.int64)
        order = np.lexsort((at[found], equal[found], owners[found]))
        best[owners[found][order]] = at[found][order]
        guessed = np.where(best >= 0, np.minimum(lengths - 1 - best, self._allowed[rows]), 0)
        return Drafts(rows, guessed, tokens[rows.repeat(guessed), rising_from(best + 1, guessed)])

    def learn(self, rows: Rows, num_guessed: NDArray[np.int64], num_right: NDArray[np.int64]) -> None:
        """So many drafts of each of these rows were tried, and so many were right."""
        tried = num_guessed > 0
        rows, change = rows[tried], np.where((num_right == num_guessed)[tried], _MORE, -_LESS)
        self._allowed[rows] = np.clip(self._allowed[rows] + change, 1, self._most)
