"""What one step asks of a device, as five amounts.

Knows tokens. Does not know models, devices or seconds: a cost model turns the amounts into time.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

Amount: TypeAlias = float | NDArray[Any]
"""A number, or an array of one number a step; all amounts of a `StepWork` have one shape, or are numbers."""


class StepWork(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The work of one step, or of many steps at once.

    computed_tokens  tokens that go through the layers
    sampled_rows     rows whose logits are computed
    context_tokens   sum over the rows of their context's length after the step: tokens whose KV is read
    attended_pairs   sum over computed tokens of the positions that each attends to, itself included
    moved_tokens     tokens whose KV crosses the link to the host, in either direction
    """

    computed_tokens: Amount
    sampled_rows: Amount = 0.0
    context_tokens: Amount = 0.0
    attended_pairs: Amount = 0.0
    moved_tokens: Amount = 0.0

    @classmethod
    def of_rows(
        cls, num_tokens: ArrayLike, context_lens: ArrayLike, *, sampled_rows: float, moved_tokens: float = 0.0
    ) -> StepWork:
        """The work of one step that computes the last `num_tokens` [rows] of `context_lens` [rows] tokens of each row."""
        computed, context = np.asarray(num_tokens, np.float64), np.asarray(context_lens, np.float64)
        return cls(
            computed_tokens=float(computed.sum()),
            sampled_rows=sampled_rows,
            context_tokens=float(context.sum()),
            attended_pairs=float((computed * (2 * context - computed + 1)).sum() / 2),
            moved_tokens=moved_tokens,
        )
