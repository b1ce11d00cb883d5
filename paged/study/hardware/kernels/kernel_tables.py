"""The seconds of a device's kernels by their sizes: tables fitted to measured kernels, and their look-up.

    seconds = e^L(sizes) · (launch + least seconds by the published rates)

L is a `Grid` for each kernel: it says how far the kernel stays behind the device's data sheet. Between measured sizes it is interpolated,
beyond them it stays what it is at the edge. Along what a kernel repeats (rows of a product, sequences, elements of a message) what
exceeds the launch grows as the least seconds do instead: once a device is full, a straight line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict, Unpack

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged.base.whole_file import whole_file
from paged.errors import BadHardwareFile, UnknownDevice, UnknownKernel
from paged.study.hardware.catalogue import device_named
from paged.study.hardware.device import Device
from paged.study.hardware.files import check_format, read_described
from paged.study.hardware.kernels import guide
from paged.study.hardware.kernels.grid import Grid
from paged.study.hardware.kernels.measurements import Columns, Measurements, Timed, read_folder
from paged.study.hardware.kernels.packing import PackedGrids

FORMAT = 1
"""Of the file; raised when a field changes its meaning."""
Seconds = NDArray[np.float64]
_OWN = "own"
"""The family of attention in which every head has its own K and V."""
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
    """Of one layer's attention; a window of 0 is none."""

    heads: int
    kv_heads: int
    head_dim: int
    window: NotRequired[int]


class KernelError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far answers are from measured kernels, as shares of the measured: median and 90th percentile over so many rows."""

    rows: int
    median: float
    p90: float

    @classmethod
    def of(cls, answered: Seconds, measured: Seconds) -> KernelError:
        """Of at least one row."""
        shares = np.abs(answered / measured - 1)
        return cls(rows=len(shares), median=float(np.median(shares)), p90=float(np.quantile(shares, 0.9)))


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """How far an answer stands on measurements.

    beyond   by axis, how many times the size lies outside of what was measured; {}: nowhere
    measured the share of the answer that is interpolated from measured kernels and not from their neighbours, of the least of the sizes
    instead  the family of kernels that answers for one that was not measured; "" where it was
    """

    beyond: dict[str, float]
    measured: float
    instead: str = ""


class KernelTables(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Seconds of one device's kernels.

    name      the tables' own
    device    whose published rates the fit is relative to
    launch    by kind, the shortest measured seconds
    grids     by kind and what else tells kernels apart, as `product/bf16` or `decode/bf16/128/0/8` (head size, window, KV heads)
    errors    by kind, against the rows that they were fitted to
    versions  by table, what was measured
    """

    name: str
    device: Device
    launch: dict[str, float]
    grids: dict[str, Grid]
    errors: dict[str, KernelError] = {}
    versions: dict[str, str] = {}
    source: str = ""
    license: str = ""

    @classmethod
    def fit(
        cls,
        measured: Measurements,
        device: Device,
        name: str,
        *,
        source: str = "",
        license: str = "",  # noqa: A002
    ) -> KernelTables:
        """Tables of what was measured. Of a kernel that was timed several times, by several libraries for one, the fastest counts."""
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
        fitted = cls(name=name, device=device, launch=launch, grids=grids, source=source, license=license)
        errors = {kind: fitted.error(kind, getattr(measured, kind)) for kind in launch}
        return msgspec.structs.replace(fitted, errors=errors, versions=measured.versions)

    @classmethod
    def load(cls, path: str | Path) -> KernelTables:
        """Saved tables. Raises BadHardwareFile with the field that is wrong, and OSError for a file that cannot be read."""
        check_format(Path(path), FORMAT, "kernel tables")
        file = read_described(Path(path), _File)
        missing = {key.partition("/")[0] for key in file.grids.axes} - set(file.launch)
        if missing:
            raise BadHardwareFile(Path(path), "launch", f"it has no seconds of {', '.join(sorted(missing))}")
        return cls(grids=file.grids.grids(), **{name: getattr(file, name) for name in _ALIKE})

    def save(self, path: str | Path) -> None:
        """Write them as JSON. Raises UnwritablePath."""
        alike = {name: getattr(self, name) for name in _ALIKE}
        packed = _File(grids=PackedGrids.of(self.grids), format=FORMAT, **alike)
        with whole_file(path) as file:
            file.write(msgspec.json.encode(packed).decode() + "\n")

    def product(self, dtype: str, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> Seconds:
        """Of m rows of k numbers times a k × n matrix, all of `dtype`; sizes broadcast. Raises UnknownKernel."""
        return self._seconds(self._known(f"product/{dtype}"), (m, n, k))

    def attention(self, kind: str, dtype: str, batch: ArrayLike, tokens: ArrayLike, **heads: Unpack[Heads]) -> Seconds:
        """Of one layer with K and V of `dtype`: `kind` "prefill", of `batch` prompts of `tokens` each; "decode", of one new token in each of `batch`
        sequences of `tokens`, it included. Raises UnknownKernel."""
        family = self._family(kind, dtype, **heads)
        return self._seconds(family.key, (np.asarray(batch) * family.fold, family.heads, tokens))

    def all_reduce(self, num_gpus: ArrayLike, elements: ArrayLike) -> Seconds:
        """Of a message of so many elements of two bytes, launched from a CUDA graph. One device takes none. Raises UnknownKernel."""
        seconds = self._seconds(self._known("all_reduce/graph"), (np.maximum(num_gpus, 2), elements))
        return np.where(np.asarray(num_gpus) > 1, seconds, 0.0)

    def product_coverage(self, dtype: str, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> Coverage:
        """Of `product` at these sizes."""
        return self._coverage(self._known(f"product/{dtype}"), (m, n, k))

    def attention_coverage(
        self, kind: str, dtype: str, batch: ArrayLike, tokens: ArrayLike, **heads: Unpack[Heads]
    ) -> Coverage:
        """Of `attention` at these sizes."""
        family = self._family(kind, dtype, **heads)
        found = self._coverage(family.key, (np.asarray(batch) * family.fold, family.heads, tokens))
        return found if family.is_asked_for else msgspec.structs.replace(found, instead=family.key)

    def error(self, kind: str, timed: Timed) -> KernelError:
        """How far answers are from kernels that were timed, at least one."""
        return KernelError.of(self.answers(kind, timed.columns), timed.seconds)

    def answers(self, kind: str, columns: Columns) -> Seconds:
        """Of each row of a table. Raises UnknownKernel."""
        found = np.zeros(len(columns[_AXES[kind][0]]))
        for key, rows in _by_kernel(kind, columns).items():
            found[rows] = self._seconds(self._known(key), tuple(columns[axis][rows] for axis in _AXES[kind]))
        return found

    def _family(self, kind: str, dtype: str, *, heads: int, kv_heads: int, head_dim: int, window: int = 0) -> _Family:
        """Who answers for so many heads and KV heads.

        Sequences and KV heads are alike to a kernel, which computes each by itself: 8 sequences of 2 KV heads cost about what 4 of 4 do.
        So for KV heads that were not measured the nearest fewer answer, with as many query heads each, and more sequences.
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
        """At each of the sizes; beyond the repeated axis what exceeds the launch grows as the least seconds do."""
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
        """The key. Raises UnknownKernel."""
        if key not in self.grids:
            kind = key.partition("/")[0]
            raise UnknownKernel(self.name, key, [known for known in self.grids if known.startswith(kind)])
        return key

    def _coverage(self, key: str, sizes: tuple[ArrayLike, ...]) -> Coverage:
        grid = self.grids[key]
        return Coverage(beyond=grid.beyond(*sizes), measured=float(grid.measured_share(*sizes).min()))


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tables as they stand in a file, with the numbers of all grids packed together."""

    name: str
    source: str
    license: str
    versions: dict[str, str]
    device: Device
    launch: dict[str, float]
    errors: dict[str, KernelError]
    grids: PackedGrids
    format: int


_ALIKE = tuple(name for name in _File.__struct_fields__ if name not in ("grids", "format"))


class _Family(msgspec.Struct, frozen=True):
    """The grid that answers for attention with so many heads, with so many times the sequences."""

    key: str
    heads: float
    fold: float
    is_asked_for: bool


def _by_kernel(kind: str, columns: Columns) -> dict[str, NDArray[np.intp]]:
    """The rows of a table of each grid, by its key."""
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
    """Least seconds by the sizes of `_AXES`, for the kernels of one grid."""
    kind, *words = key.split("/")
    if kind == "product":
        return partial(guide.product_seconds, device, words[0])
    if kind == "all_reduce":
        return partial(guide.all_reduce_seconds, device)
    dtype, head_dim, window, family = words
    least = guide.prefill_seconds if kind == "prefill" else guide.decode_seconds

    def seconds(batch: Any, heads: Any, tokens: Any) -> Any:
        kv_heads = heads if family == _OWN else int(family)
        return least(device, dtype, int(head_dim), int(window), batch, heads, kv_heads, tokens)

    return seconds


def _grid(columns: dict[str, NDArray[np.float64]], logarithms: NDArray[np.float64]) -> Grid:
    """The rows as a grid of the fastest of each size."""
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
    """The devices whose tables ship, sorted; a further one is a further file in `data/`."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


@cache
def kernels_named(name: str) -> KernelTables:
    """The tables of that device, or those in a file when the name ends in .json.

    Raises UnknownDevice, BadHardwareFile for a file that holds no tables, and OSError for one that cannot be read.
    """
    if name.endswith(".json"):
        return KernelTables.load(name)
    if name not in (known := kernel_names()):
        raise UnknownDevice(name, known)
    return KernelTables.load(_FOLDER / f"{name}.json")


def fit_folder(folder: str | Path, name: str, *, source: str = _SOURCE, license: str = _LICENSE) -> KernelTables:  # noqa: A002
    """Tables of a device that paged knows by name, from a folder of measured kernels in aiconfigurator's format.

    Raises UnknownDevice, BadHardwareFile and BadKernelRow for what the folder lacks or has wrong, and MissingExtra without pyarrow.
    """
    device = device_named(name)
    return KernelTables.fit(read_folder(folder, device), device, Path(name).stem, source=source, license=license)
