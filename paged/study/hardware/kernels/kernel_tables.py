"""The seconds of a device's kernels by their sizes: tables fitted to measured kernels, and their look-up.

    seconds = e^L(sizes) · (launch + least seconds by the published rates)

L is a `Grid` for each kernel: it says how far the kernel stays behind the device's data sheet. Between measured sizes it is interpolated,
beyond them it stays what it is at the edge. Along what a kernel repeats (rows of a product, sequences, elements of a message) what
exceeds the launch grows as the least seconds do instead: once a device is full, a straight line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged.base.whole_file import whole_file
from paged.errors import BadHardwareFile, UnknownKernel
from paged.study.hardware.device import Device
from paged.study.hardware.files import read_described
from paged.study.hardware.kernels import guide
from paged.study.hardware.kernels.grid import Grid
from paged.study.hardware.kernels.kernel_file import FORMAT, KernelError, KernelFile, PackedGrids
from paged.study.hardware.kernels.measurements import Columns, Measurements, Timed

KINDS = ("product", "prefill", "decode", "all_reduce")
Seconds = NDArray[np.float64]
_OWN = "own"
"""The family of attention in which every head has its own K and V."""


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """How far an answer stands on measurements.

    beyond   by axis, how many times the size lies outside of what was measured; {}: nowhere
    measured the share of the answer that is interpolated from measured kernels and not from their neighbours, of the least of the sizes
    instead  the family of kernels that answers for one that was not measured; "" where it was
    """

    beyond: dict[str, float]
    measured: float
    instead: str = ""

    @property
    def is_inside(self) -> bool:
        """Whether it is an interpolation between measured kernels."""
        return not self.beyond and not self.instead and self.measured > 0.999


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
        for kind in KINDS:
            timed: Timed | None = getattr(measured, kind)
            if timed is None:
                continue
            launch[kind] = float(timed.seconds.min())
            for key, rows in _by_kernel(kind, timed.columns).items():
                ratio = timed.seconds[rows] / (launch[kind] + _least(device, key, timed.columns, rows))
                axes = {axis: timed.columns[axis][rows] for axis in _AXES[kind]}
                grids[key] = _grid(axes, np.log(ratio))
        fitted = cls(
            name=name,
            device=device,
            launch=launch,
            grids=grids,
            versions=measured.versions,
            source=source,
            license=license,
        )
        errors = {kind: fitted.error(kind, getattr(measured, kind)) for kind in launch}
        return msgspec.structs.replace(fitted, errors=errors)

    @classmethod
    def load(cls, path: str | Path) -> KernelTables:
        """Saved tables. Raises BadHardwareFile with the field that is wrong, and OSError for a file that cannot be read."""
        found = read_described(Path(path), _Head).format
        if found != FORMAT:
            other = "no kernel tables" if found is None else f"kernel tables of format {found}"
            raise BadHardwareFile(Path(path), "format", f"{other}; this paged reads {FORMAT}")
        file = read_described(Path(path), KernelFile)
        missing = {key.partition("/")[0] for key in file.grids.axes} - set(file.launch)
        if missing:
            raise BadHardwareFile(Path(path), "launch", f"it has no seconds of {', '.join(sorted(missing))}")
        fields = {name: getattr(file, name) for name in KernelFile.__struct_fields__ if name not in ("grids", "format")}
        return cls(grids=file.grids.grids(), **fields)

    def save(self, path: str | Path) -> None:
        """Write them as JSON. Raises UnwritablePath."""
        fields = {name: getattr(self, name) for name in KernelFile.__struct_fields__ if name not in ("grids", "format")}
        packed = KernelFile(grids=PackedGrids.of(self.grids), format=FORMAT, **fields)
        with whole_file(path) as file:
            file.write(msgspec.json.encode(packed).decode() + "\n")

    def product(self, dtype: str, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> Seconds:
        """Of m rows of k numbers times a k × n matrix, all of `dtype`; sizes broadcast. Raises UnknownKernel."""
        key = self._known(f"product/{dtype}")
        return self._seconds(key, (m, n, k), lambda m, n, k: guide.product_seconds(self.device, dtype, m, n, k))

    def prefill_attention(
        self,
        dtype: str,
        batch: ArrayLike,
        tokens: ArrayLike,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        window: int = 0,
    ) -> Seconds:
        """Of `batch` prompts of `tokens` each, in one layer, with K and V of `dtype`. A window of 0 is none. Raises UnknownKernel."""
        return self._attention("prefill", dtype, batch, tokens, heads, kv_heads, head_dim, window)

    def decode_attention(
        self,
        dtype: str,
        batch: ArrayLike,
        tokens: ArrayLike,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        window: int = 0,
    ) -> Seconds:
        """Of one new token in each of `batch` sequences of `tokens`, it included, in one layer. Raises UnknownKernel."""
        return self._attention("decode", dtype, batch, tokens, heads, kv_heads, head_dim, window)

    def all_reduce(self, num_gpus: ArrayLike, elements: ArrayLike, *, launch: str = "graph") -> Seconds:
        """Of a message of so many elements of two bytes, launched from a CUDA graph or `eager`. One device takes none. Raises UnknownKernel."""
        key = self._known(f"all_reduce/{launch}")
        seconds = self._seconds(
            key,
            (np.maximum(num_gpus, 2), elements),
            lambda num_gpus, elements: guide.all_reduce_seconds(self.device, num_gpus, elements),
        )
        return np.where(np.asarray(num_gpus) > 1, seconds, 0.0)

    def product_coverage(self, dtype: str, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> Coverage:
        """Of `product` at these sizes."""
        return self._coverage(self._known(f"product/{dtype}"), (m, n, k))

    def attention_coverage(
        self,
        kind: str,
        dtype: str,
        batch: ArrayLike,
        tokens: ArrayLike,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        window: int = 0,
    ) -> Coverage:
        """Of `prefill_attention` or `decode_attention` at these sizes; `kind` is "prefill" or "decode"."""
        family = self._family(kind, dtype, head_dim, window, heads, kv_heads)
        found = self._coverage(family.key, (np.asarray(batch) * family.fold, family.heads, tokens))
        return found if family.is_asked_for else msgspec.structs.replace(found, instead=family.key)

    def all_reduce_coverage(self, num_gpus: ArrayLike, elements: ArrayLike, *, launch: str = "graph") -> Coverage:
        """Of `all_reduce` at these sizes."""
        return self._coverage(self._known(f"all_reduce/{launch}"), (num_gpus, elements))

    def error(self, kind: str, timed: Timed) -> KernelError:
        """How far answers are from kernels that were timed, at least one."""
        return KernelError.of(self.answers(kind, timed.columns), timed.seconds)

    def answers(self, kind: str, columns: Columns) -> Seconds:
        """Of each row of a table. Raises UnknownKernel."""
        found = np.zeros(len(columns[_AXES[kind][0]]))
        for key, rows in _by_kernel(kind, columns).items():
            sizes = {name: column[rows] for name, column in columns.items()}
            words = key.split("/")
            if kind == "product":
                found[rows] = self.product(words[1], sizes["m"], sizes["n"], sizes["k"])
            elif kind == "all_reduce":
                found[rows] = self.all_reduce(sizes["num_gpus"], sizes["elements"], launch=words[1])
            else:
                known = self._known(key)
                axes = tuple(sizes[axis] for axis in _AXES[kind])
                found[rows] = self._seconds(known, axes, _attention_least(self.device, known))
        return found

    def _attention(
        self,
        kind: str,
        dtype: str,
        batch: ArrayLike,
        tokens: ArrayLike,
        heads: int,
        kv_heads: int,
        head_dim: int,
        window: int,
    ) -> Seconds:
        family = self._family(kind, dtype, head_dim, window, heads, kv_heads)
        sizes = (np.asarray(batch) * family.fold, family.heads, tokens)
        return self._seconds(family.key, sizes, _attention_least(self.device, family.key))

    def _family(self, kind: str, dtype: str, head_dim: int, window: int, heads: int, kv_heads: int) -> _Family:
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

    def _seconds(self, key: str, sizes: tuple[ArrayLike, ...], least: Callable[..., Any]) -> Seconds:
        """At each of the sizes; beyond the repeated axis what exceeds the launch grows as the least seconds do."""
        kind = key.partition("/")[0]
        grid, launch, axis = self.grids[key], self.launch[kind], _AXES[kind].index(_REPEATED[kind])
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


class _Head(msgspec.Struct):
    """What of a file says how to read the rest."""

    format: int | None = None


class _Family(msgspec.Struct, frozen=True):
    """The grid that answers for attention with so many heads, with so many times the sequences."""

    key: str
    heads: float
    fold: float
    is_asked_for: bool


_AXES = {
    "product": ("m", "n", "k"),
    "prefill": ("batch", "heads", "tokens"),
    "decode": ("batch", "heads", "tokens"),
    "all_reduce": ("num_gpus", "elements"),
}
_REPEATED = {"product": "m", "prefill": "batch", "decode": "batch", "all_reduce": "elements"}


def _by_kernel(kind: str, columns: Columns) -> dict[str, NDArray[np.intp]]:
    """The rows of a table of each grid, by its key."""
    if kind == "product":
        names = columns["dtype"]
    elif kind == "all_reduce":
        names = columns["launch"]
    else:
        kv_heads = columns["kv_heads"]
        family = np.where(kv_heads == columns["heads"], _OWN, kv_heads.astype(np.int64).astype(str))
        parts = [
            columns["dtype"],
            *(columns[name].astype(np.int64).astype(str) for name in ("head_dim", "window")),
            family,
        ]
        names = np.asarray(["/".join(row) for row in zip(*parts)])
    known, which = np.unique(names, return_inverse=True)
    return {f"{kind}/{name}": np.flatnonzero(which == place) for place, name in enumerate(known)}


def _least(device: Device, key: str, columns: Columns, rows: NDArray[np.intp]) -> Seconds:
    """Least seconds of each of the rows, which are of one grid."""
    kind, *words = key.split("/")
    sizes = [columns[axis][rows] for axis in _AXES[kind]]
    if kind == "product":
        return np.asarray(guide.product_seconds(device, words[0], *sizes))
    if kind == "all_reduce":
        return np.asarray(guide.all_reduce_seconds(device, *sizes))
    return np.asarray(_attention_least(device, key)(*sizes))


def _attention_least(device: Device, key: str) -> Callable[[Any, Any, Any], Any]:
    """Least seconds by sequences, heads and tokens, for the kernels of one grid."""
    kind, dtype, head_dim, window, family = key.split("/")
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
