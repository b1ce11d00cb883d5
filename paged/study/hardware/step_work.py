"""The work of one step for a device, as a few amounts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

Amount: TypeAlias = float | NDArray[Any]
"""A number, or an array of one number a step; all amounts of a `StepWork` have one shape, or are numbers."""


class Span(NamedTuple):
    """The layers that attend to the same part of the context: all of it, a window or a chunk (`kind` and `reach` as in `Layers`).

    of_bytes  their share of the bytes of a token's K and V
    of_pairs  their share of the layers with attention
    """

    kind: str
    reach: int
    of_bytes: float
    of_pairs: float

    def read(self, starts: NDArray[Any], ends: NDArray[Any]) -> NDArray[Any]:
        """Return the tokens whose K and V are read to compute the tokens from `starts` to `ends` − 1, int64 [n]."""
        if self.kind == "window":
            return np.minimum(ends, ends - starts + self.reach - 1)
        return ends - (starts // self.reach * self.reach if self.kind == "chunk" else 0)

    def pairs_before(self, ends: NDArray[Any]) -> NDArray[Any]:
        """Return the positions that the first `ends` tokens attend to in all, each itself included, int64 [n]."""
        if self.kind == "window":
            short = np.minimum(ends, self.reach)
            return short * (short + 1) // 2 + (ends - short) * self.reach
        chunks, rest = divmod(ends, self.reach) if self.kind == "chunk" else (0, ends)
        return chunks * (self.reach * (self.reach + 1) // 2) + rest * (rest + 1) // 2


Spans: TypeAlias = tuple[Span, ...]
"""How far a model's layers attend, by kind of layer; empty: all layers to all of the context."""


def mean_read(spans: Spans, starts: NDArray[Any], ends: NDArray[Any]) -> NDArray[Any]:
    """Return the tokens read for each row that computes the tokens from `starts` to `ends` − 1: the mean over layers, by bytes."""
    if not spans:
        return ends
    return np.sum([span.of_bytes * span.read(starts, ends) for span in spans], axis=0)


def mean_pairs(spans: Spans, starts: NDArray[Any], ends: NDArray[Any]) -> float:
    """Return the pairs of positions that these rows attend to: the mean over layers."""
    return sum(
        span.of_pairs * float((span.pairs_before(ends) - span.pairs_before(starts)).sum())
        for span in spans or (Span("full", 0, 1.0, 1.0),)
    )


class StepWork(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The work of one step, or of many steps at once.

        computed_tokens  tokens that go through the layers
        rows             rows that compute any: of each, layers with a state read and write it once
        sampled_rows     rows whose logits are computed
        context_tokens   sum over the rows of their context's length after the step: tokens whose KV is read
        attended_pairs   sum over computed tokens of the positions that each attends to, itself included
        moved_tokens     tokens whose KV crosses the link to the host, in either direction

    If layers attend to parts of the context (`Spans`), contexts and pairs are means over the layers. Of the rows that compute one token and sample,
    which kernels treat differently from a prompt's chunk:

        decode_rows      how many
        decode_context   sum over them of their context's length
        longest_decode   the longest of these contexts

    For an engine that computes in tiles (`Tiling`); else 0:

        tiles            forward passes
        sampling_tiles   of them, those with a row that samples: logits of all their places are computed
        tile_context     sum over the tiles of the longest context in each, in whole pieces: each place of a tile goes over all of it
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
    rows: Amount = 0.0

    @classmethod
    def of_rows(
        cls,
        num_tokens: ArrayLike,
        seq_lens: ArrayLike,
        *,
        sampled_rows: float,
        spans: Spans = (),
    ) -> StepWork:
        """Return the work of a step that computes the last `num_tokens` [rows] of `seq_lens` [rows] tokens of each row."""
        computed, ends = np.asarray(num_tokens, np.float64), np.asarray(seq_lens, np.float64)
        context = mean_read(spans, ends - computed, ends)
        decoding = context[computed == 1]
        return cls(
            computed_tokens=float(computed.sum()),
            sampled_rows=sampled_rows,
            context_tokens=float(context.sum()),
            attended_pairs=mean_pairs(spans, ends - computed, ends),
            decode_rows=float(len(decoding)),
            decode_context=float(decoding.sum()),
            longest_decode=float(decoding.max(initial=0)),
            rows=float(len(computed)),
        )

    @classmethod
    def of_steps(cls, steps: Sequence[StepWork]) -> StepWork:
        """Return steps as columns, float64 [steps]."""
        return cls(**{name: np.array([getattr(step, name) for step in steps]) for name in cls.__struct_fields__})

    def picked(self, chosen: NDArray[np.bool_]) -> StepWork:
        """Return the chosen steps of columns; `chosen` is bool [steps]."""
        return StepWork(**{name: getattr(self, name)[chosen] for name in self.__struct_fields__})
