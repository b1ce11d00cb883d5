"""Seconds of a step from timed kernels.

    seconds = dense layers (tokens, padded as the engine pads) + LM head and sampler (rows) + attention + host + KV over the host link

Attention is tabulated for one chunk of a prompt beside sequences that decode at one length. Other steps are reduced to that: chunks of several
prompts count as one chunk with as many pairs of positions, and sequences of several lengths as so many of their mean length. If the extra time
of different lengths was measured, it is added.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.errors import InvalidConfig
from paged.model.tiling import Tiling
from paged.scheduler import Costs
from paged.study.hardware.roofline import Part, Roofline
from paged.study.hardware.step_work import Spans, StepWork
from paged.study.limits import NotNegative, check

MOST_TOKENS = 8192
"""Tokens of a step up to which its dense layers are tabulated; beyond, the slope of the last thousand goes on."""
MOST_ROWS = 2048
"""The same for a step's sequences, for the LM head."""
_SLOPE = 2048
Numbers = NDArray[np.float64]


class Launching(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine adds to a step's kernels.

    host_s       seconds of each step in which the device waits for the host
    graph_sizes  numbers of tokens for which a CUDA graph was captured, ascending: a step is padded to the next one, above the last to none
    """

    host_s: NotNegative = 0.0
    graph_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check(self)
        if any(size < 1 for size in self.graph_sizes) or list(self.graph_sizes) != sorted(set(self.graph_sizes)):
            raise InvalidConfig(f"graph_sizes is {self.graph_sizes}; sizes are above 0 and rise")

    def padded(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens that kernels compute, int64; 0 stays 0."""
        if not self.graph_sizes:
            return tokens
        sizes = np.array(self.graph_sizes, np.int64)
        place = np.searchsorted(sizes, tokens)
        return np.where((tokens > 0) & (place < len(sizes)), sizes[np.minimum(place, len(sizes) - 1)], tokens)


class Attention(Protocol):
    """Seconds of all layers' attention."""

    def at(self, chunk: Any, before: Any, rows: Any, length: Any) -> Any:
        """Return the seconds of a prompt's chunk after `before` tokens, beside `rows` sequences that decode at `length` tokens; arrays give an array."""


class Layers(Protocol):
    """One model's layers on a device, by any kind of timing."""

    @property
    def about(self) -> str:
        """What was timed, and by whom, in one line."""

    @property
    def skew(self) -> float:
        """How much longer sequences of different lengths take beside a chunk: the share of the way from all at the mean length to all as long as the
        longest; 0: not measured."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The parts of an answer that are not measured, a sentence each."""

    @property
    def attention(self) -> Attention:
        """Attention of all layers."""

    def dense_seconds(self, tokens: Numbers) -> Numbers:
        """Return the seconds of all layers but attention, LM head and sampler, for 1 token or more; without the experts that data-parallel ranks share."""

    def shared_seconds(self, tokens: Numbers) -> Numbers:
        """Return the seconds of the experts that data-parallel ranks share, and of the exchange of tokens; `tokens` are those of all ranks."""

    def head_seconds(self, rows: Numbers) -> Numbers:
        """Return the seconds of LM head and sampler, for 1 sequence or more."""


@dataclass(frozen=True)
class MeasuredStep:
    """A cost model from `Layers`. The roofline of the same model and device gives what was not timed: the host link, and the gain of a faster device."""

    layers: Layers
    roofline: Roofline
    launching: Launching = field(default_factory=Launching)

    tiling: ClassVar[Tiling | None] = None

    @property
    def spans(self) -> Spans:
        return self.roofline.spans

    @property
    def is_lockstep(self) -> bool:
        """Whether data-parallel ranks share experts, and so step `together`."""
        return self.roofline.is_lockstep

    def seconds(self, work: StepWork) -> Any:
        """Return the seconds of a step with this work; arrays give an array. A step that computes and moves nothing takes none."""
        amounts = (work.computed_tokens, work.context_tokens, work.moved_tokens, work.sampled_rows)
        if any(isinstance(amount, np.ndarray) for amount in amounts):
            return self._of_arrays(work)
        return self._own(work) + self._shared_by_all(work.computed_tokens)

    def _own(self, work: StepWork) -> Any:
        """Return the seconds of a step without the part that data-parallel ranks do together."""
        tokens: Any = work.computed_tokens
        sampled: Any = work.sampled_rows
        pairs: Any = work.attended_pairs
        moved = self.roofline.moved_seconds(work.moved_tokens) if work.moved_tokens else 0.0
        if not tokens:
            return moved + (self._host_s if work.moved_tokens else 0.0)
        rows: Any = work.decode_rows
        length = work.decode_context / rows if rows else 0.0
        chunk = tokens - rows
        before, share = 0.0, 1.0
        at = self.layers.attention.at
        if chunk:
            before, share = _one_chunk(chunk, pairs - work.decode_context)
        seconds = at(chunk, before, rows, length)
        if share < 1.0:
            seconds -= (1 - share) * max(at(chunk, 0.0, 0, 0.0) - at(min(chunk, 16), 0.0, 0, 0.0), 0.0)
        if self.layers.skew and rows and chunk:
            longer = at(chunk, before, rows, float(work.longest_decode)) - at(chunk, before, rows, length)
            seconds += self.layers.skew * max(longer, 0.0)
        seconds *= float(self._relief(slice(-2, -1), work))
        return (
            self._host_s
            + _read(self._dense, tokens)
            + (_read(self._head, sampled) if sampled else 0.0)
            + seconds
            + moved
        )

    def together(self, works: Sequence[StepWork]) -> float:
        """Return the seconds of a step of data-parallel ranks that share experts, each with its own work: all wait for the slowest, twice a layer.

        If the largest has a graph, all are padded to it.
        """
        tokens = [int(work.computed_tokens) for work in works]
        padded = int(self.launching.padded(np.array([max(tokens)]))[0])
        total = padded * len(works) if padded <= max(self.launching.graph_sizes, default=0) else sum(tokens)
        return max(float(self._own(work)) for work in works) + _read(self._shared, total)

    def costs(self, block_size: int) -> Costs:
        """Return the scheduler's costs: a token in a step full of tokens, and a block's copy over the published link."""
        expected = self.roofline.costs(block_size)
        token = (self._dense[MOST_TOKENS] - self._dense[MOST_TOKENS - _SLOPE]) / _SLOPE
        return Costs(
            seconds_per_swapped_block=expected.seconds_per_swapped_block,
            seconds_per_token=token,
            attention_knee=expected.attention_knee,
        )

    @cached_property
    def _host_s(self) -> float:
        return self.launching.host_s / self.roofline.faster.host

    @cached_property
    def _dense(self) -> list[float]:
        """Seconds by a step's tokens, 0 to MOST_TOKENS."""
        tokens = self.launching.padded(np.arange(1, MOST_TOKENS + 1)).astype(np.float64)
        seconds = self.layers.dense_seconds(tokens) * self._relief(slice(-2), StepWork(computed_tokens=tokens))
        return [0.0, *seconds.tolist()]

    def _shared_by_all(self, tokens: Any) -> Any:
        """Return the seconds of what data-parallel ranks do together if each has so many tokens; 0 for models whose ranks share nothing."""
        if not self.is_lockstep:
            return 0.0
        total = self.launching.padded(np.asarray(tokens, np.int64)).astype(np.float64) * self.roofline.data_parallel
        return _read_many(self._shared, total) if isinstance(tokens, np.ndarray) else _read(self._shared, float(total))

    @cached_property
    def _shared(self) -> list[float]:
        """Seconds by the tokens of all data-parallel ranks together, 0 to MOST_TOKENS."""
        tokens = np.arange(1.0, MOST_TOKENS + 1)
        each = StepWork(computed_tokens=tokens / self.roofline.data_parallel)
        seconds = self.layers.shared_seconds(tokens) * self._relief(slice(1, 2), each)
        return [0.0, *seconds.tolist()]

    @cached_property
    def _head(self) -> list[float]:
        rows = np.arange(1.0, MOST_ROWS + 1)
        work = StepWork(computed_tokens=rows, sampled_rows=rows)
        seconds = self.layers.head_seconds(rows) * self._relief(slice(-1, None), work)
        return [0.0, *seconds.tolist()]

    def _relief(self, places: slice, work: StepWork) -> Any:
        """Return the share of their time that these parts of a step take on the faster device, by the rooflines of both. Attention and the output
        projection are the last two of a roofline's parts."""
        if self.roofline.faster.arithmetic == self.roofline.faster.bandwidth == 1:
            return 1.0
        parts: tuple[Part, ...] = self.roofline.parts(work)[places]
        faster, published = (
            sum(roofline.part_seconds(part) for part in parts) for roofline in (self.roofline, self._published)
        )
        return faster / published

    @cached_property
    def _published(self) -> Roofline:
        return self.roofline.as_published()

    def _of_arrays(self, work: StepWork) -> Numbers:
        columns = {name: np.asarray(getattr(work, name), np.float64) for name in work.__struct_fields__}
        shape = np.broadcast_shapes(*(column.shape for column in columns.values()))
        # In many like steps, as when the same sequences decode for a while, most amounts are numbers.
        tokens, rows = columns["computed_tokens"], columns["decode_rows"]
        length = columns["decode_context"] / np.maximum(rows, 1)
        at = self.layers.attention.at
        chunk = np.maximum(tokens - rows, 0)
        if (chunk > 0).any():
            flat = {name: np.broadcast_to(column, shape).ravel() for name, column in columns.items()}
            steps = [
                StepWork(**{name: float(column[i]) for name, column in flat.items()})
                for i in range(int(np.prod(shape)))
            ]
            return np.array([self.seconds(step) for step in steps]).reshape(shape)
        does_run = tokens > 0
        seconds = np.where(does_run, at(0.0, 0.0, rows, length) * self._relief(slice(-2, -1), work), 0.0)
        seconds = seconds + _read_many(self._dense, tokens) + _read_many(self._head, columns["sampled_rows"])
        seconds = seconds + self._host_s * (does_run | (columns["moved_tokens"] > 0))
        seconds = seconds + self._shared_by_all(tokens)
        return np.broadcast_to(seconds + self.roofline.moved_seconds(columns["moved_tokens"]), shape)


def _one_chunk(chunk: float, pairs: float) -> tuple[float, float]:
    """Reduce chunks to one with as many pairs of positions. Return the tokens before it, and the share of the pairs that the chunk alone would have:
    below 1 if several prompts have fewer."""
    alone = chunk * (chunk + 1) / 2
    return max(pairs - alone, 0.0) / chunk, min(pairs / alone, 1.0)


def _read(table: list[float], size: float) -> float:
    """Return the seconds for a whole number of tokens or rows; beyond the table the slope at its end goes on."""
    last = len(table) - 1
    if size <= last:
        return table[int(size)]
    return table[last] + (size - last) * (table[last] - table[last - _SLOPE // 2]) / (_SLOPE // 2)


def _read_many(table: list[float], sizes: Numbers) -> Numbers:
    places, inverse = np.unique(sizes, return_inverse=True)
    found: Numbers = np.array([_read(table, size) for size in places.tolist()])[inverse].reshape(sizes.shape)
    return found
