"""Lookahead decoding: short runs are guessed ahead of their place, one token of each per step, until one of them comes true.

    known | run that began so before | chain | chain | chain        each chain is computed in every step, and what follows it is its
      17  |   5   9   2              | 8 4 4 | 1 6 3 | …            next token: 8 4 4 → 7 makes the run 8 4 4 7, kept by its first token,
                                                                   and the chain 4 4 7

By Y. Fu et al., "Break the sequential dependency of LLM inference using lookahead decoding", 2024, whose window of
Jacobi iterations is these chains, side by side and several runs checked at once, by an attention mask of its own.
Here one run is checked, and the chains follow it, all of one sequence: nothing is needed that drafts do not have, and
a chain sees those before it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged.base.growing import rising_from
from paged.decoding.drafter import Drafter, Rows, Tried, latest_of
from paged.scheduler import Drafts

# Tokens of a run, and how many of a row are kept.
_RUN = 4
_KEPT = 512
_CHAIN = _RUN - 1
# Chains begin with tokens of the row's own text, so far from each other.
_STRIDE = 7919


class Lookahead(Drafter):
    """Drafts for rows: a run of up to three tokens, and chains of three behind it, `most` tokens of both; at least 6."""

    def __init__(self, most: int) -> None:
        super().__init__(_CHAIN)
        self._num_chains = (most - _CHAIN) // _CHAIN
        # By row: its chains, whether it has any; runs in a ring, and how many came.
        self._chains = np.zeros((0, self._num_chains, _CHAIN), np.int32)
        self._has_begun = np.zeros(0, np.bool_)
        self._runs = np.zeros((0, _KEPT, _RUN), np.int32)
        self._num_runs = np.zeros(0, np.int64)
        # Tokens of a run that each row tries in the step that is being made.
        self._tried = np.zeros(0, np.int64)

    def begin(self, row: int, *, drafts: bool = True) -> None:
        """As Drafter."""
        super().begin(row, drafts=drafts)
        if row >= len(self._num_runs):
            for name in ("_chains", "_has_begun", "_runs", "_num_runs", "_tried"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros((row + 1, *column.shape[1:]), column.dtype)]))
        self._has_begun[row], self._num_runs[row] = False, 0

    def propose(self, tokens: NDArray[np.int32], num_tokens: NDArray[np.int64], rows: Rows) -> Drafts | None:
        """As Drafter."""
        allowed = self._allowed[rows]
        rows, allowed = rows[allowed > 0], allowed[allowed > 0]
        if not len(rows):
            return None
        lengths = num_tokens[rows]
        self._begin_chains(tokens, rows, lengths)
        found, which = (self._runs[rows, :, 0] == tokens[rows, lengths - 1][:, None]).nonzero()
        is_one = which < self._num_runs[rows[found]]
        found, which = found[is_one], which[is_one]
        # How many runs came after it.
        ages = (self._num_runs[rows[found]] - 1 - which) % _KEPT
        best = latest_of(found, -ages, which, len(rows))
        ahead = np.where(best >= 0, allowed, 0)
        self._tried[rows] = ahead
        # The chains take the places of the run's tokens that are not tried.
        lines = np.empty((len(rows), _CHAIN + self._num_chains * _CHAIN), np.int32)
        lines[:, :_CHAIN] = self._runs[rows, best, 1:]
        places = ahead[:, None] + np.arange(self._num_chains * _CHAIN)
        lines[np.arange(len(rows))[:, None], places] = self._chains[rows].reshape(len(rows), -1)
        counts = ahead + self._num_chains * _CHAIN
        owners = np.arange(len(rows)).repeat(counts)
        return Drafts(rows, counts, lines[owners, rising_from(np.zeros(len(rows), np.int64), counts)])

    def learn(self, tried: Tried) -> None:
        """As Drafter. A chain and the token behind it are a run; the run without its first token is the next chain."""
        rows = tried.rows
        ahead = np.minimum(self._tried[rows], tried.counts)
        is_run = ahead > 0
        self._adapt(rows[is_run], ahead[is_run], np.minimum(tried.num_right, ahead)[is_run])
        # Drafts may have been cut: a part of a chain teaches nothing.
        num_whole = np.minimum((tried.counts - ahead) // _CHAIN, self._num_chains)
        owners, which = np.arange(len(rows)).repeat(num_whole), rising_from(np.zeros(len(rows), np.int64), num_whole)
        first_chosen = (tried.counts + 1).cumsum() - (tried.counts + 1)
        after = tried.chosen[first_chosen[owners] + ahead[owners] + (which + 1) * _CHAIN]
        its = rows[owners]
        runs = np.concatenate([self._chains[its, which], after[:, None]], 1)
        self._runs[its, (self._num_runs[its] + which) % _KEPT] = runs
        self._num_runs[rows] += num_whole
        self._chains[its, which] = runs[:, 1:]

    def _begin_chains(self, tokens: NDArray[np.int32], rows: Rows, lengths: NDArray[np.int64]) -> None:
        fresh = ~self._has_begun[rows]
        if fresh.any():
            rows, lengths = rows[fresh], lengths[fresh]
            places = np.arange(1, self._num_chains * _CHAIN + 1) * _STRIDE % lengths[:, None]
            self._chains[rows] = tokens[rows[:, None], places].reshape(len(rows), self._num_chains, _CHAIN)
            self._has_begun[rows] = True
