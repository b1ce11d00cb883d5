"""What one step asks of a device, as a few amounts."""

from __future__ import annotations

from collections.abc import Sequence
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

    of these, of the rows that compute one token and sample after it, which kernels treat differently from the rest of a prompt:

        decode_rows      how many
        decode_context   sum over them of their context's length
        longest_decode   the longest of these contexts

        and for an engine that computes in tiles (`Tiling`); 0 where nobody counted them:

        tiles            forward passes
        sampling_tiles   of them, those with a row that samples: logits of all their places are computed
        tile_context     sum over the tiles of the longest context in each, in whole pieces: what each of its places goes over
    """

    computed_tokens: Amount
    sampled_rows: Amount = 0.0
    context_tokens: Amount = 0.0
    attended_pairs: Amount = 0.0
    moved_tokens: Amount = 0.0
    decode_rows: Amount = 0.0
    decode_context: Amount = 0.0
    longest_decode: Amount = 0.0
    tiles: Amount = 0.0
    sampling_tiles: Amount = 0.0
    tile_context: Amount = 0.0

    @classmethod
    def of_rows(
        cls, num_tokens: ArrayLike, seq_lens: ArrayLike, *, sampled_rows: float, moved_tokens: float = 0.0
    ) -> StepWork:
        """The work of one step that computes the last `num_tokens` [rows] of `seq_lens` [rows] tokens of each row."""
        computed, context = np.asarray(num_tokens, np.float64), np.asarray(seq_lens, np.float64)
        decoding = context[computed == 1]
        return cls(
            computed_tokens=float(computed.sum()),
            sampled_rows=sampled_rows,
            context_tokens=float(context.sum()),
            attended_pairs=float((computed * (2 * context - computed + 1)).sum() / 2),
            moved_tokens=moved_tokens,
            decode_rows=float(len(decoding)),
            decode_context=float(decoding.sum()),
            longest_decode=float(decoding.max(initial=0)),
        )

    @classmethod
    def of_steps(cls, steps: Sequence[StepWork]) -> StepWork:
        """Steps as columns, float64 [steps]."""
        return cls(**{name: np.array([getattr(step, name) for step in steps]) for name in cls.__struct_fields__})

    def picked(self, chosen: NDArray[np.bool_]) -> StepWork:
        """Some of the steps of columns; `chosen` is bool [steps]."""
        return StepWork(**{name: getattr(self, name)[chosen] for name in self.__struct_fields__})
