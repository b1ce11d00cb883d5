"""Folders of timed kernels in the format of NVIDIA's aiconfigurator, a table for each kind, a row for each kernel; and the least seconds of each.

    least seconds = max(operations ÷ peak, bytes ÷ bandwidth) by a device's published rates

A fit divides measured seconds by these. The quotient varies little over sizes that differ by powers of ten, so it needs few points.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from paged.base.extras import import_with_extra
from paged.base.fields import Finite
from paged.errors import BadHardwareFile
from paged.study.files import Line, bad_table, csv_lines
from paged.study.hardware.catalogue import device_names
from paged.study.hardware.device import DTYPES, Device
from paged.study.limits import NotNegative

Columns = Mapping[str, NDArray[Any]]
Numbers = NDArray[np.float64]
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "fp8": "fp8"}
"""Our names of dtypes by the tables' names; rows of other dtypes are left out."""
_TOO_FAST = 5
"""Caches make a kernel up to three times faster than memory allows. A time that is faster by this factor is in another unit."""
_TOO_SLOW = 2e-3
"""Seconds. If a table's shortest row is longer, the table is in another unit: a launch takes 2 to 20 microseconds."""


class Timed(msgspec.Struct, frozen=True, eq=False):
    """One table: `columns` by name, [rows] each, and the `seconds` of each row."""

    columns: Columns
    seconds: Numbers

    def without(self, is_left_out: NDArray[np.bool_]) -> "Timed":
        """Return the table without some rows."""
        return Timed({name: column[~is_left_out] for name, column in self.columns.items()}, self.seconds[~is_left_out])


class Measurements(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The timings of a device, by kind, and the versions by table."""

    product: Timed
    prefill: Timed
    decode: Timed
    all_reduce: Timed | None
    versions: dict[str, str]


class _Row(msgspec.Struct, kw_only=True):
    """A timed kernel, in milliseconds."""

    latency: Finite
    device: str = ""
    framework: str = ""
    version: str = ""


class _Product(_Row, kw_only=True):
    dtype: str = msgspec.field(name="gemm_dtype")
    m: Finite
    n: Finite
    k: Finite


class _Attention(_Row, kw_only=True):
    dtype: str = msgspec.field(name="kv_cache_dtype")
    head_dim: Finite
    window: NotNegative = msgspec.field(name="window_size", default=0.0)
    batch: Finite = msgspec.field(name="batch_size")
    heads: Finite = msgspec.field(name="num_heads")
    kv_heads: Finite = msgspec.field(name="num_key_value_heads")


class _Prefill(_Attention, kw_only=True):
    tokens: Finite = msgspec.field(name="isl")


class _Decode(_Attention, kw_only=True):
    step: NotNegative


class _AllReduce(_Row, kw_only=True):
    backend: str
    num_gpus: Annotated[float, Meta(ge=2)]
    elements: Finite = msgspec.field(name="message_size")


def read_folder(folder: str | Path, device: Device) -> Measurements:
    """Read the tables of a folder, each a .parquet or .csv file with milliseconds; the all-reduce may be missing.

    Products in blocks of fp8 are left out. Raises BadHardwareFile for a missing table, column or cell, and for an impossible number, such as a time
    in another unit, and MissingExtra for Parquet files without pyarrow.
    """
    folder = Path(folder)
    reduces = any((folder / f"custom_allreduce_perf{ending}").exists() for ending in (".parquet", ".csv"))
    versions: dict[str, str] = {}

    def timed(name: str, kind: type[_Row], least: Callable[..., Any]) -> Timed:
        lines = list(_lines(folder, name))
        if not lines:
            raise BadHardwareFile(folder, name, "it has no rows")
        rows = [line.read(kind) for line in lines]
        _must_be_of(device, lines, rows)
        versions[name] = f"{rows[0].framework} {rows[0].version}".strip()
        places = [place for place, row in enumerate(rows) if getattr(row, "dtype", "fp8") in _DTYPES]
        if not places:
            raise lines[0].refuse(lines[0].path, None, None, f"no row has one of the dtypes {', '.join(_DTYPES)}")
        rows, lines = [rows[place] for place in places], [lines[place] for place in places]
        columns, seconds = _columns(kind, rows), np.array([row.latency for row in rows]) * 1e-3
        _must_be_plausible(lines, seconds, _least_of_rows(device, columns, least))
        return Timed(columns, seconds)

    return Measurements(
        product=timed("gemm_perf", _Product, product_seconds),
        prefill=timed("context_attention_perf", _Prefill, prefill_seconds),
        decode=timed("generation_attention_perf", _Decode, decode_seconds),
        all_reduce=timed("custom_allreduce_perf", _AllReduce, all_reduce_seconds) if reduces else None,
        versions=versions,
    )


def _lines(folder: Path, name: str) -> Iterator[Line]:
    parquet, text = folder / f"{name}.parquet", folder / f"{name}.csv"
    if parquet.exists():
        import_with_extra("pyarrow", "study.hardware.kernels")
        table = import_with_extra("pyarrow.parquet", "study.hardware.kernels").ParquetFile(parquet).read()
        yield from (Line(parquet, number, row, bad_table) for number, row in enumerate(table.to_pylist(), 1))
    elif text.exists():
        yield from csv_lines(text, bad_table)
    else:
        raise BadHardwareFile(folder, name, "there is neither a .parquet nor a .csv file of this name")


def _must_be_of(device: Device, lines: Sequence[Line], rows: Sequence[_Row]) -> None:
    """Raise BadHardwareFile for a table of two devices or versions, and for one that names another device of the catalogue, and not this one."""
    for name in ("device", "version"):
        first = getattr(rows[0], name)
        for line, row in zip(lines, rows):
            if getattr(row, name) != first:
                raise line.error(name, f"{getattr(row, name)}, but {first} in the rows before: a table is of one")
    said = rows[0].device.lower()
    # A name in the catalogue is a family, followed by the member.
    own, *families = (name.partition("-")[0] for name in (device.name, *device_names()))
    if own not in said and any(family in said for family in families):
        raise lines[0].error("device", f"it is {rows[0].device}; kernels of {device.name} were asked for")


def _must_be_plausible(lines: Sequence[Line], seconds: Numbers, least: Numbers) -> None:
    """Raise BadHardwareFile if a time is far below the device's rates, or all are far above a launch."""
    if (seconds * _TOO_FAST < least).any():
        row = int((least / seconds).argmax())
        rates = f"at its published rates the device takes {least[row] * 1e3:.3g} ms"
        unit = "is it in another unit, or of another device?"
        raise lines[row].error("latency", f"{seconds[row] * 1e3:.6g} ms; {rates}: {unit}")
    if seconds.min() > _TOO_SLOW:
        row = int(seconds.argmin())
        shorter = f"no row is shorter, and the shortest has to be below {_TOO_SLOW * 1e3:g} ms"
        raise lines[row].error("latency", f"{seconds[row] * 1e3:.6g} ms; {shorter}: is it in another unit?")


def _columns(kind: type[_Row], rows: Sequence[_Row]) -> Columns:
    names = [name for name in kind.__struct_fields__ if name not in _Row.__struct_fields__]
    columns = {name: np.array([getattr(row, name) for row in rows]) for name in names}
    if "dtype" in columns:
        columns["dtype"] = np.array([_DTYPES[name] for name in columns["dtype"]])
    if "step" in columns:
        columns["tokens"] = columns.pop("step") + 1
    if "backend" in columns:
        columns["launch"] = np.where(np.char.find(columns.pop("backend"), "graph") >= 0, "graph", "eager")
    return columns


def _least_of_rows(device: Device, columns: Columns, least: Callable[..., Any]) -> Numbers:
    """Return the least seconds of each row, by its dtype if the kernels have one."""
    sizes = {name: column for name, column in columns.items() if name not in ("dtype", "launch")}
    if "dtype" not in columns:
        return np.asarray(least(device, **sizes))
    found = np.zeros(len(columns["dtype"]))
    for dtype in np.unique(columns["dtype"]):
        rows = columns["dtype"] == dtype
        found[rows] = least(device, str(dtype), **{name: column[rows] for name, column in sizes.items()})
    return found


_ACTIVATION_BYTES = 2


def product_seconds(device: Device, dtype: str, m: Any, n: Any, k: Any) -> Any:
    """Return the least seconds of an m × k matrix times a k × n one, both of `dtype`; the result has two bytes an element."""
    size = DTYPES[dtype]
    carried = size * (m * k + n * k) + _ACTIVATION_BYTES * m * n
    return np.maximum(2 * m * n * k / device.peak(dtype), carried / device.bandwidth)


def prefill_seconds(
    device: Device, dtype: str, head_dim: Any, window: Any, batch: Any, heads: Any, kv_heads: Any, tokens: Any
) -> Any:
    """Return those of causal attention of `batch` prompts of `tokens` each, with K and V of `dtype`; window 0: none."""
    reach = _reach(tokens, window)
    pairs = reach * (tokens - (reach - 1) / 2)
    carried = batch * tokens * head_dim * 2 * (_ACTIVATION_BYTES * heads + DTYPES[dtype] * kv_heads)
    operations = 4 * batch * heads * head_dim * pairs
    return np.maximum(operations / device.peak(dtype), carried / device.bandwidth)


def decode_seconds(
    device: Device, dtype: str, head_dim: Any, window: Any, batch: Any, heads: Any, kv_heads: Any, tokens: Any
) -> Any:
    """Return those of attention of one new token in each of `batch` sequences of `tokens`, the new one included."""
    reach = _reach(tokens, window)
    carried = batch * head_dim * 2 * (DTYPES[dtype] * kv_heads * reach + _ACTIVATION_BYTES * heads)
    operations = 4 * batch * heads * head_dim * reach
    return np.maximum(operations / device.peak(dtype), carried / device.bandwidth)


def all_reduce_seconds(device: Device, num_gpus: Any, elements: Any) -> Any:
    """Return those of a ring over the published link, with elements of two bytes."""
    link = device.interconnect or device.host_link
    return 2 * (num_gpus - 1) / num_gpus * _ACTIVATION_BYTES * elements / link


def _reach(tokens: Any, window: Any) -> Any:
    """Return how many of `tokens` the last one attends to."""
    return np.where(np.asarray(window) > 0, np.minimum(tokens, window), tokens)
