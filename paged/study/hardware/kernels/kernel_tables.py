"""The seconds of a device's kernels by their sizes, from tables fitted to measured kernels.

    seconds = e^L(sizes) · (launch + least seconds by the published rates)

L, a `Grid` for each kernel, is how far the kernel stays behind the device's data sheet. It is interpolated between measured sizes, and beyond
them it stays that of the edge. Beyond the axis that a kernel repeats (rows of a product, sequences, elements of a message), the time above the
launch grows as the least seconds do: once a device is full, in a straight line.
"""

from collections.abc import Callable
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NotRequired, TypedDict, Unpack

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged.errors import UnknownDevice, UnknownKernel
from paged.study.files import Saved, named_in, names_in
from paged.study.hardware.catalogue import device_named
from paged.study.hardware.device import Device
from paged.study.hardware.kernels.grid import Grid, PackedGrids
from paged.study.hardware.kernels.measurements import (
    Columns,
    Measurements,
    Timed,
    all_reduce_seconds,
    decode_seconds,
    prefill_seconds,
    product_seconds,
    read_folder,
)

Seconds = NDArray[np.float64]
_OWN = "own"
"""The family of attention kernels in which every head has its own K and V."""
_AXES = {
    "product": ("m", "n", "k"),
    "prefill": ("batch", "heads", "tokens"),
    "decode": ("batch", "heads", "tokens"),
    "all_reduce": ("num_gpus", "elements"),
}
_REPEATED = {"product": "m", "prefill": "batch", "decode": "batch", "all_reduce": "elements"}
_FOLDER = Path(__file__).parent / "data"
_SOURCE = "ai-dynamo/aiconfigurator, copyright NVIDIA CORPORATION & AFFILIATES; fitted by paged"
_LICENSE = "Apache-2.0"


class Heads(TypedDict):
    """Heads of one layer's attention; window 0: none."""

    heads: int
    kv_heads: int
    head_dim: int
    window: NotRequired[int]


class KernelError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The error of answers as a share of measured seconds: median and 90th percentile over so many rows."""

    rows: int
    median: float
    p90: float

    @classmethod
    def of(cls, answered: Seconds, measured: Seconds) -> "KernelError":
        """Return the error over at least one row."""
        shares = np.abs(answered / measured - 1)
        return cls(rows=len(shares), median=float(np.median(shares)), p90=float(np.quantile(shares, 0.9)))


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """How far an answer lies from measured kernels.

    beyond   by axis, how many times the size lies outside of the measured sizes; {}: nowhere
    instead  the family of kernels that answers for one that was not measured; "" if it was
    """

    beyond: dict[str, float]
    instead: str = ""


class KernelTables(Saved, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True, dict=True):
    """Seconds of one device's kernels.

    name      of the tables
    device    the fit is relative to its published rates
    launch    by kind, the shortest measured seconds
    packed    grids by kernel, such as `product/bf16` or `decode/bf16/128/0/8` (head size, window, KV heads)
    errors    by kind, against the rows of the fit
    versions  by table, of the measured software
    """

    what: ClassVar[str] = "kernel tables"

    name: str
    device: Device
    launch: dict[str, float]
    packed: PackedGrids = msgspec.field(name="grids")
    errors: dict[str, KernelError] = msgspec.field(default_factory=dict)
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    source: str = ""
    license: str = ""

    def __post_init__(self) -> None:
        if missing := {key.partition("/")[0] for key in self.packed.axes} - set(self.launch):
            raise ValueError(f"launch has no seconds of {', '.join(sorted(missing))}")

    @cached_property
    def grids(self) -> dict[str, Grid]:
        """The grids by kernel."""
        return self.packed.grids()

    @classmethod
    def fit(
        cls,
        measured: Measurements,
        device: Device,
        name: str,
        *,
        source: str = "",
        license: str = "",  # noqa: A002
    ) -> "KernelTables":
        """Fit tables to measurements. Of several timings of a kernel, as of several libraries, the fastest counts."""
        launch: dict[str, float] = {}
        grids: dict[str, Grid] = {}
        for kind, axes in _AXES.items():
            timed: Timed | None = getattr(measured, kind)
            if timed is None:
                continue
            launch[kind] = float(timed.seconds.min())
            for key, rows in _by_kernel(kind, timed.columns).items():
                sizes = {axis: timed.columns[axis][rows] for axis in axes}
                ratio = timed.seconds[rows] / (launch[kind] + _least(device, key)(*sizes.values()))
                grids[key] = _grid(sizes, np.log(ratio))
        packed = PackedGrids.of(grids)
        fitted = cls(name=name, device=device, launch=launch, packed=packed, source=source, license=license)
        errors = {kind: fitted.error(kind, getattr(measured, kind)) for kind in launch}
        return msgspec.structs.replace(fitted, errors=errors, versions=measured.versions)

    def product(self, dtype: str, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> Seconds:
        """Return the seconds of an m × k matrix times a k × n one, both of `dtype`; sizes broadcast. Raises UnknownKernel."""
        return self._seconds(self._known(f"product/{dtype}"), (m, n, k))

    def attention(self, kind: str, dtype: str, batch: ArrayLike, tokens: ArrayLike, **heads: Unpack[Heads]) -> Seconds:
        """Return the seconds of one layer's attention with K and V of `dtype`. Raises UnknownKernel.

        `kind` is "prefill", of `batch` prompts of `tokens` each, or "decode", of one new token in each of `batch` sequences of `tokens`.
        """
        family = self._family(kind, dtype, **heads)
        return self._seconds(family.key, (np.asarray(batch) * family.fold, family.heads, tokens))

    def all_reduce(self, num_gpus: ArrayLike, elements: ArrayLike) -> Seconds:
        """Return the seconds of a message of so many elements of two bytes, launched from a CUDA graph; 0 for one device. Raises UnknownKernel."""
        seconds = self._seconds(self._known("all_reduce/graph"), (np.maximum(num_gpus, 2), elements))
        return np.where(np.asarray(num_gpus) > 1, seconds, 0.0)

    def product_coverage(self, dtype: str, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> Coverage:
        """Return the coverage of `product` at these sizes."""
        return Coverage(beyond=self.grids[self._known(f"product/{dtype}")].beyond(m, n, k))

    def attention_coverage(
        self, kind: str, dtype: str, batch: ArrayLike, tokens: ArrayLike, **heads: Unpack[Heads]
    ) -> Coverage:
        """Return the coverage of `attention` at these sizes."""
        family = self._family(kind, dtype, **heads)
        beyond = self.grids[family.key].beyond(np.asarray(batch) * family.fold, family.heads, tokens)
        return Coverage(beyond=beyond, instead="" if family.is_asked_for else family.key)

    def error(self, kind: str, timed: Timed) -> KernelError:
        """Return the error against timed kernels, at least one."""
        return KernelError.of(self.answers(kind, timed.columns), timed.seconds)

    def answers(self, kind: str, columns: Columns) -> Seconds:
        """Return the seconds of each row of a table. Raises UnknownKernel."""
        found = np.zeros(len(columns[_AXES[kind][0]]))
        for key, rows in _by_kernel(kind, columns).items():
            found[rows] = self._seconds(self._known(key), tuple(columns[axis][rows] for axis in _AXES[kind]))
        return found

    def _family(self, kind: str, dtype: str, *, heads: int, kv_heads: int, head_dim: int, window: int = 0) -> "_Family":
        """Return the grid that answers for so many heads and KV heads.

        A kernel computes each KV head of each sequence by itself: 8 sequences of 2 KV heads cost about as much as 4 of 4. So for a number of KV
        heads that was not measured, the next smaller one answers, with as many query heads each and more sequences.
        """
        head = f"{kind}/{dtype}/{head_dim}/{window}"
        measured = {key.rpartition("/")[2]: key for key in self.grids if key.startswith(f"{head}/")}
        if not measured:
            raise UnknownKernel(
                self.name, head, sorted({key.rpartition("/")[0] for key in self.grids if key.startswith(kind)})
            )
        if heads == kv_heads and _OWN in measured:
            most = self.grids[measured[_OWN]].axes["heads"][-1]
            fewer = min(heads, most)
            return _Family(measured[_OWN], fewer, heads / fewer, heads <= most)
        if str(kv_heads) in measured:
            return _Family(measured[str(kv_heads)], heads, 1.0, True)
        counts = sorted(int(count) for count in measured if count != _OWN)
        if not counts:
            raise UnknownKernel(self.name, f"{head}/{kv_heads}", [measured[_OWN]])
        fewer = max((count for count in counts if count < kv_heads), default=counts[0])
        return _Family(measured[str(fewer)], heads * fewer / kv_heads, kv_heads / fewer, False)

    def _seconds(self, key: str, sizes: tuple[ArrayLike, ...]) -> Seconds:
        """Return the seconds at each of the sizes; beyond the repeated axis the time above the launch grows as the least seconds do."""
        kind = key.partition("/")[0]
        grid, launch, axis = self.grids[key], self.launch[kind], _AXES[kind].index(_REPEATED[kind])
        least = _least(self.device, key)
        asked = [np.asarray(size, np.float64) for size in sizes]
        cut = asked.copy()
        cut[axis] = np.minimum(asked[axis], grid.axes[_REPEATED[kind]][-1])
        least_cut = np.asarray(least(*cut), np.float64)
        seconds = np.exp(grid.at(*cut)) * (launch + least_cut)
        growth = np.asarray(least(*asked), np.float64) / least_cut
        return np.where(growth > 1, launch + np.maximum(seconds - launch, 0) * growth, seconds)

    def _known(self, key: str) -> str:
        """Return the key. Raises UnknownKernel if there is no such grid."""
        if key not in self.grids:
            kind = key.partition("/")[0]
            raise UnknownKernel(self.name, key, [known for known in self.grids if known.startswith(kind)])
        return key


class _Family(msgspec.Struct, frozen=True):
    """The grid that answers for attention, with how many heads, and with how many times the sequences (`fold`)."""

    key: str
    heads: float
    fold: float
    is_asked_for: bool


def _by_kernel(kind: str, columns: Columns) -> dict[str, NDArray[np.intp]]:
    """Return the rows of a table that belong to each grid, by its key."""
    if kind in ("product", "all_reduce"):
        names = columns["dtype" if kind == "product" else "launch"]
    else:
        kv_heads = columns["kv_heads"]
        whole = (columns[name].astype(np.int64).astype(str) for name in ("head_dim", "window"))
        family = np.where(kv_heads == columns["heads"], _OWN, kv_heads.astype(np.int64).astype(str))
        names = np.asarray(["/".join(row) for row in zip(columns["dtype"], *whole, family)])
    known, which = np.unique(names, return_inverse=True)
    return {f"{kind}/{name}": np.flatnonzero(which == place) for place, name in enumerate(known)}


def _least(device: Device, key: str) -> Callable[..., Any]:
    """Return the function from the sizes of `_AXES` to the least seconds of one grid's kernels."""
    kind, *words = key.split("/")
    if kind == "product":
        return partial(product_seconds, device, words[0])
    if kind == "all_reduce":
        return partial(all_reduce_seconds, device)
    dtype, head_dim, window, family = words
    least = prefill_seconds if kind == "prefill" else decode_seconds

    def seconds(batch: Any, heads: Any, tokens: Any) -> Any:
        kv_heads = heads if family == _OWN else int(family)
        return least(device, dtype, int(head_dim), int(window), batch, heads, kv_heads, tokens)

    return seconds


def _grid(columns: dict[str, NDArray[np.float64]], logarithms: NDArray[np.float64]) -> Grid:
    """Return a grid of the fastest row of each size."""
    axes = {}
    places = []
    for name, column in columns.items():
        ticks, place = np.unique(column.astype(np.int64), return_inverse=True)
        axes[name] = ticks.tolist()
        places.append(place)
    table = np.full([len(ticks) for ticks in axes.values()], np.inf)
    np.minimum.at(table, tuple(places), logarithms)
    return Grid.of(np.where(np.isinf(table), np.nan, table), axes)


def kernel_names() -> list[str]:
    """Return the devices whose tables ship, sorted. A further one is a further file in `data/`."""
    return names_in(_FOLDER)


@cache
def kernels_named(name: str) -> KernelTables:
    """Return the tables of that device, or those in a file if the name ends in .json.

    Raises UnknownDevice, BadHardwareFile for a file without tables, and OSError for a file that cannot be read.
    """
    return named_in(_FOLDER, name, KernelTables.load, UnknownDevice)


def fit_folder(folder: str | Path, name: str, *, source: str = _SOURCE, license: str = _LICENSE) -> KernelTables:  # noqa: A002
    """Fit tables of a device in the catalogue to a folder of measured kernels in aiconfigurator's format.

    Raises UnknownDevice, BadHardwareFile for a bad folder, and MissingExtra for Parquet files without pyarrow.
    """
    device = device_named(name)
    return KernelTables.fit(read_folder(folder, device), device, Path(name).stem, source=source, license=license)
