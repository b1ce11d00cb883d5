"""Drafts from a sequence's own text: what came after its last tokens, where they stood before.

    … the cat sat on the mat . the cat |         the last two tokens stood here before
          └─────┘ sat on the → drafts

A draft is right wherever the text repeats itself, and costs one token of a step where it does not. By A. Saxena,
"Prompt lookup decoding", 2023; transformers has it as `prompt_lookup_num_tokens`, vLLM as "ngram".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged.base.growing import rising_from
from paged.decoding.drafter import Drafter, Rows, latest_of
from paged.scheduler import Drafts

# Tokens at the end of a text that are searched.
_WINDOW = 4096
# Equal tokens that an earlier occurrence has at least, and that are compared at most.
_LEAST, _MOST = 2, 3


class PromptLookup(Drafter):
    """Drafts what followed the latest place that has the most last tokens in common, two or three of them."""

    def propose(self, tokens: NDArray[np.int32], num_tokens: NDArray[np.int64], rows: Rows) -> Drafts | None:
        """As Drafter."""
        lengths = num_tokens[rows]
        starts = np.maximum(lengths - _WINDOW, 0)
        # Where equal tokens may end: everywhere but at the end.
        counts = np.maximum(lengths - 1 - starts, 0)
        owners, at = np.arange(len(rows)).repeat(counts), rising_from(starts, counts)
        equal = np.zeros(len(owners), np.int64)
        going = np.arange(len(owners))
        for back in range(_MOST):
            here, its = at[going] - back, owners[going]
            its_rows = rows[its]
            there = lengths[its] - 1 - back
            same = (here >= 0) & (tokens[its_rows, np.maximum(here, 0)] == tokens[its_rows, np.maximum(there, 0)])
            going = going[same]
            equal[going] = back + 1
        found = (equal >= _LEAST).nonzero()[0]
        if not len(found):
            return None
        best = latest_of(owners[found], equal[found], at[found], len(rows))
        guessed = np.where(best >= 0, np.minimum(lengths - 1 - best, self._allowed[rows]), 0)
        return Drafts(rows, guessed, tokens[rows.repeat(guessed), rising_from(best + 1, guessed)])
