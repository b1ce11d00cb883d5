"""The work of one step for a device, as a few amounts; the protocol of a cost model, which gives its seconds; and the token budget that suits one."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged.errors import InvalidConfig
from paged.model.tiling import Tiling
from paged.scheduler import Costs
from paged.study.limits import NotNegative, check

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
        cls, num_tokens: ArrayLike, seq_lens: ArrayLike, *, sampled_rows: float, spans: Spans = ()
    ) -> "StepWork":
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
    def of_steps(cls, steps: "Sequence[StepWork]") -> "StepWork":
        """Return steps as columns, float64 [steps]."""
        return cls(**{name: np.array([getattr(step, name) for step in steps]) for name in cls.__struct_fields__})

    def picked(self, chosen: NDArray[np.bool_]) -> "StepWork":
        """Return the chosen steps of columns; `chosen` is bool [steps]."""
        return StepWork(**{name: getattr(self, name)[chosen] for name in self.__struct_fields__})


LEAST_BUDGET, MOST_BUDGET = 128, 8192
"""The smallest and the largest budget to choose, in tokens; all are powers of two, rounded up to whole blocks."""
_LEAST_SUITING = 256
_SLOWER = 2
"""In a step that takes so many times as long as one of a single token, reading the weights is the smaller part."""


class CostModel(Protocol):
    """Time for a simulator, and prices for its scheduler, so that both go by one clock."""

    @property
    def tiling(self) -> Tiling | None:
        """The tiles to count in a step's work; None: no tiles."""

    @property
    def spans(self) -> Spans:
        """How far the model's layers attend, by which contexts and pairs are counted; empty: all layers to all of the context."""

    def seconds(self, work: StepWork) -> Any:
        """Return the seconds of a step with this work; an array if any amount is one. A step without work takes none."""

    def costs(self, block_size: int) -> Costs:
        """Return the costs by which the scheduler weighs swapping against recomputing."""


def budgets(block_size: int) -> tuple[int, ...]:
    """Return the budgets to choose from, rising: powers of two in whole blocks, so that few chunks end inside a block."""
    powers = (1 << bits for bits in range(LEAST_BUDGET.bit_length() - 1, MOST_BUDGET.bit_length()))
    return tuple(dict.fromkeys(-(-power // block_size) * block_size for power in powers))


def suiting_budget(cost_model: CostModel, *, max_sequences: int, block_size: int) -> int:
    """Return the smallest budget whose full step of prompts takes twice as long as a step of one token, or the largest of `budgets`.

    In smaller steps, reading the weights takes most of the time, so a smaller budget computes prompts no sooner. The budget is at least 256, and
    at least twice `max_sequences`, so that half a step is left for prompts while every row decodes.
    """
    choices = budgets(block_size)
    least = max(_LEAST_SUITING, 2 * max_sequences)
    one = _prompt_seconds(cost_model, 1)
    suiting = (budget for budget in choices if budget >= least and _prompt_seconds(cost_model, budget) >= _SLOWER * one)
    return next(suiting, choices[-1])


def _prompt_seconds(cost_model: CostModel, tokens: int) -> float:
    """Return the seconds of a step that computes one prompt of so many tokens."""
    return float(cost_model.seconds(StepWork.of_rows([tokens], [tokens], sampled_rows=1, spans=cost_model.spans)))


class StepTime(msgspec.Struct, frozen=True):
    """A plain roofline:

        seconds = max(weights + context · attended tokens, token · computed tokens) + swap · moved tokens

    The first term is memory traffic (the weights once a step, the KV of every token attended to), the second arithmetic, the third the
    link to the host. The defaults are a model of 8 billion parameters in bf16 (16 GB of weights, 128 KiB of KV a token) on one H100:
    3.35 TB/s, 500 TFLOP/s of arithmetic reached, 25 GB/s to the host. All are published figures or round numbers, none was measured. Raises InvalidConfig.
    """

    weights_ms: NotNegative = 4.8
    context_us: NotNegative = 0.039
    token_us: NotNegative = 32.0
    swap_us: NotNegative = 5.2

    tiling: ClassVar[Tiling | None] = None
    spans: ClassVar[Spans] = ()

    def __post_init__(self) -> None:
        check(self)
        if self.weights_ms == 0 and self.token_us == 0:
            raise InvalidConfig("weights_ms and token_us are both 0; a step that computes must take time")

    def seconds(self, work: StepWork) -> Any:
        """Return the seconds of a step; arrays give an array, float64 [n]."""
        computed = work.computed_tokens
        memory = (self.weights_ms * 1e-3 + self.context_us * 1e-6 * work.context_tokens) * (computed > 0)
        arithmetic = self.token_us * 1e-6 * computed
        larger = np.maximum(memory, arithmetic) if isinstance(memory, np.ndarray) else max(memory, arithmetic)
        return larger + self.swap_us * 1e-6 * work.moved_tokens

    def costs(self, block_size: int) -> Costs:
        """Return the costs by which the scheduler weighs swapping against recomputing."""
        return Costs(
            seconds_per_swapped_block=self.swap_us * 1e-6 * block_size,
            seconds_per_token=self.token_us * 1e-6,
            attention_knee=math.inf,
        )
