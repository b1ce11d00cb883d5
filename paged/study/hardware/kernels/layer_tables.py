"""The seconds of one model's layers on one device, from tables of timings.

Dense layers go by the tokens of a step, LM head and sampler by its sequences, attention of a mixed step by four sizes: a prompt's chunk, the
tokens before it, the sequences that decode beside it, and their length. Seconds are linear between timed sizes, as reads and products are, and
beyond them as between the last two.
"""

from functools import cached_property
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.model.model_shape import ModelShape
from paged.study.files import Saved
from paged.study.hardware.kernels.completion import completed
from paged.study.hardware.kernels.grid import Multilinear, in_steps, packed, unpacked
from paged.study.hardware.kernels.layer_measurements import ONCE, REPEATED, SIZES, LayerMeasurements
from paged.study.hardware.profile import ProfiledModel, non_negative_least_squares

STEP = 0.004
"""Attention's logarithms are multiples of it, which puts a value off by at most 0.2 %."""
Numbers = NDArray[np.float64]


class Timed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A layer's nanoseconds at sizes, ascending."""

    sizes: list[int]
    ns: list[int]

    def seconds(self, sizes: Numbers) -> Numbers:
        """Return the seconds at these sizes, float64: beyond the last size with the slope of the last eight, below the first those of the first."""
        known, ns = np.array(self.sizes, np.float64), np.array(self.ns, np.float64)
        found = np.interp(sizes, known, ns)
        back = min(8, len(known) - 1)
        slope = max(0.0, (ns[-1] - ns[-1 - back]) / (known[-1] - known[-1 - back]))
        return (found + slope * np.maximum(sizes - known[-1], 0)) * 1e-9


class LayerTables(Saved, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Seconds of one model's layers on one device, as `Layers` of that model.

    name      of the tables
    device    a name in the catalogue
    model     the model of the layers, by its sizes
    dense     by layer, over tokens; one of each
    head      by layer, over sequences
    axes, packed_attention
              places by size in the order of `SIZES`, and the packed logarithms of one layer's seconds
    skew      how much longer decoding sequences of different lengths take: the share of the way from all at the mean length to all as long as the
              longest; 0: not measured
    measured  by size, the least and the most that was timed
    versions  of engine, libraries and card
    """

    what: ClassVar[str] = "tables"

    name: str
    device: str
    model: ProfiledModel
    dtype: str = "bf16"
    dense: dict[str, Timed]
    head: dict[str, Timed]
    axes: list[list[int]]
    packed_attention: str = msgspec.field(name="attention")
    skew: float = 0.0
    measured: dict[str, list[int]] = msgspec.field(default_factory=dict)
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    source: str = ""
    license: str = ""

    def __post_init__(self) -> None:
        if len(self.axes) != len(SIZES):
            raise ValueError(f"axes has {len(self.axes)}; attention has {len(SIZES)} sizes: {', '.join(SIZES)}")
        self._attention()

    @classmethod
    def fit(
        cls,
        measured: LayerMeasurements,
        *,
        name: str,
        device: str,
        model: ModelShape,
        skew: float = 0.0,
        versions: dict[str, str] | None = None,
        source: str = "",
        license: str = "",  # noqa: A002
    ) -> "LayerTables":
        """Fit tables to measurements. Attention's grid has the sizes that were timed with most others, and leaves the rest out."""
        axes, grid = _grid(*measured.attention)
        spans = dict(zip(SIZES, measured.attention[0].T))
        spans["tokens"] = next(iter(measured.dense.values()))[0]
        spans["sequences"] = next(iter(measured.head.values()))[0]
        return cls(
            name=name,
            device=device,
            model=ProfiledModel.of(model),
            dense={layer: _timed(*columns) for layer, columns in measured.dense.items()},
            head={layer: _timed(*columns) for layer, columns in measured.head.items()},
            axes=[[int(place) for place in axis] for axis in axes],
            packed_attention=packed([in_steps(np.log(grid * 1e9), STEP)]),
            skew=skew,
            measured={size: [int(values.min()), int(values.max())] for size, values in spans.items()},
            versions=versions or {},
            source=source,
            license=license,
        )

    @property
    def about(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        who = f": {self.source}" if self.source else ""
        return f"measured layers of {self.name} ({versions or 'no versions stated'}){who}"

    @property
    def notes(self) -> tuple[str, ...]:
        said = (
            f"measured up to {self.measured['tokens'][1]:,} tokens a step, {self.measured['n_decode'][1]:,} sequences and contexts of "
            f"{self.measured['kv_decode'][1]:,} tokens; beyond it goes on in straight lines"
        )
        unskewed = "that contexts of a step differ in length is left out: what it takes here was not measured"
        return (said,) if self.skew else (said, unskewed)

    def dense_seconds(self, tokens: Numbers) -> Numbers:
        found = np.zeros(len(tokens))
        for layer, timed in self.dense.items():
            found += timed.seconds(tokens) * (1 if layer in ONCE else self.model.layers * REPEATED.get(layer, 1))
        return found

    def shared_seconds(self, tokens: Numbers) -> Numbers:
        """Return 0: the tables are of one device."""
        return np.zeros(len(tokens))

    def head_seconds(self, sequences: Numbers) -> Numbers:
        return np.sum([timed.seconds(sequences) for timed in self.head.values()], axis=0)

    @cached_property
    def attention(self) -> Multilinear:
        return Multilinear(self.axes, self.layer_attention.table * self.model.layers)

    @cached_property
    def layer_attention(self) -> Multilinear:
        """Seconds of one layer's attention over the sizes in `SIZES`; 0 without a chunk and sequences."""
        grid = np.exp(self._attention()) * 1e-9
        grid[0, :, 0, :] = 0.0
        return Multilinear(self.axes, grid)

    def _attention(self) -> Numbers:
        """Return the logarithms of nanoseconds. Raises ValueError for packed numbers that do not fill the axes."""
        (steps,) = unpacked(self.packed_attention, [[len(axis) for axis in self.axes]])
        return steps * np.float64(STEP)


def _timed(sizes: Numbers, seconds: Numbers) -> Timed:
    return Timed(sizes=[int(size) for size in sizes], ns=[int(value) for value in np.round(seconds * 1e9)])


def _grid(sizes: Numbers, seconds: Numbers) -> tuple[list[Numbers], Numbers]:
    """Return axes and seconds at each combination; those that were not timed are filled in from neighbours.

    Tokens before no chunk and the length of no sequences have no influence. Decoding sequences have no length 0: its seconds are those of the
    shortest. Holes are filled in seconds divided by a guide, a sum of prices for launches, reads and products, since the quotient is smoother.
    """
    axes = _axes(sizes)
    is_kept = np.all([np.isin(column, axis) for column, axis in zip(sizes.T, axes)], axis=0)
    prices = non_negative_least_squares(_amounts(*sizes[is_kept].T) / seconds[is_kept, None], np.ones(is_kept.sum()))
    grid = np.full([len(axis) for axis in axes], np.nan)
    cells = tuple(np.searchsorted(axis, column[is_kept]) for axis, column in zip(axes, sizes.T))
    grid[cells] = seconds[is_kept]
    grid[0] = grid[0, :1]
    grid[:, :, 0] = grid[:, :, 0, :1]
    grid[0, :, 0, :] = seconds.min()
    for place in range(2, len(axes[2])):
        # More sequences than were timed beside a prompt cost as much as without one.
        more = grid[:, :, place - 1] + np.maximum(grid[:1, :1, place] - grid[:1, :1, place - 1], 0)
        grid[:, :, place] = np.where(np.isnan(grid[:, :, place]).mean() > 0.9, more, grid[:, :, place])
    guide = (_amounts(*np.meshgrid(*axes, indexing="ij")) @ prices).reshape(grid.shape)
    ratio = np.log(grid / guide)
    places = [np.log1p(axis) for axis in axes]
    # Steps that only decode, only compute a prompt, or mix both run other kernels: each kind is filled in from its own.
    ratio[0, :, 1:, 1:] = completed(ratio[0, 0, 1:, 1:], (places[2][1:], places[3][1:]))
    ratio[1:, :, 0, :] = completed(ratio[1:, :, 0, 0], (places[0][1:], places[1]))[:, :, None]
    mixed = (places[0][1:], places[1], places[2][1:], places[3][1:])
    ratio[1:, :, 1:, 1:] = completed(ratio[1:, :, 1:, 1:], mixed)
    filled = guide * np.exp(ratio)
    filled[:, :, 1:, 0] = filled[:, :, 1:, 1]
    return axes, filled


def _axes(sizes: Numbers) -> list[Numbers]:
    """Return the places of each axis: all that were timed, or the powers of two and 0 if a grid of all would be mostly holes, as with a second series
    of places that was timed with few of the first."""
    axes = [np.unique(column) for column in sizes.T]
    powers = [axis[(axis == 0) | (np.exp2(np.round(np.log2(np.maximum(axis, 1)))) == axis)] for axis in axes]
    filled = len(sizes) / np.prod([float(len(axis)) for axis in axes])
    return powers if filled < 0.5 and all(len(axis) > 2 for axis in powers) else axes


def _amounts(chunk: Numbers, before: Numbers, rows: Numbers, length: Numbers) -> Numbers:
    """Return the amounts whose prices make about attention's seconds, float64 [sizes, amounts]."""
    read = rows * length
    pairs = chunk * (before + chunk / 2)
    tiles = np.ceil(chunk / 128) * (before + chunk)
    return np.stack(
        [np.ones(chunk.size), rows.ravel(), read.ravel(), chunk.ravel(), pairs.ravel(), tiles.ravel()], axis=-1
    )
