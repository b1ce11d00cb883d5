"""Folders of timed kernels in the format of NVIDIA's aiconfigurator: a table for each kind, a row for each kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.base.extras import import_with_extra
from paged.errors import BadHardwareFile, BadKernelRow
from paged.study.files import bad_table, csv_lines
from paged.study.hardware.catalogue import device_names
from paged.study.hardware.device import Device
from paged.study.hardware.kernels import guide

Columns = Mapping[str, NDArray[Any]]
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "fp8": "fp8"}
"""Our names of dtypes by the tables' names; rows of other dtypes are left out."""
_TOO_FAST = 5
"""Caches make a kernel up to three times faster than memory allows. A time that is faster by this factor is in another unit."""
_TOO_SLOW = 2e-3
"""Seconds. If a table's shortest row is longer, the table is in another unit: a launch takes 2 to 20 microseconds."""


class Timed(msgspec.Struct, frozen=True, eq=False):
    """One table: `columns` by name, [rows] each, and the `seconds` of each row."""

    columns: Columns
    seconds: NDArray[np.float64]

    def without(self, is_left_out: NDArray[np.bool_]) -> Timed:
        """Return the table without some rows."""
        return Timed({name: column[~is_left_out] for name, column in self.columns.items()}, self.seconds[~is_left_out])


class Measurements(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The timings of a device, by kind, and the versions by table."""

    product: Timed
    prefill: Timed
    decode: Timed
    all_reduce: Timed | None
    versions: dict[str, str]


def read_folder(folder: str | Path, device: Device) -> Measurements:
    """Read the tables of a folder, each a .parquet or .csv file with milliseconds; the all-reduce may be missing.

    Products in blocks of fp8 are left out. Raises BadHardwareFile for a missing table, column or cell, BadKernelRow for an impossible number, such
    as a time in another unit, and MissingExtra for Parquet files without pyarrow.
    """
    folder = Path(folder)
    versions: dict[str, str] = {}

    def timed(name: str, understood: Callable[[_Table], Columns], least: Callable[..., Any]) -> Timed:
        table = _Table.read(folder, name)
        table.must_be_of(device)
        versions[name] = table.version
        columns = understood(table)
        seconds = table.numbers("latency") * 1e-3
        table.must_be_plausible(seconds, _least_of_rows(device, columns, least))
        return Timed(columns, seconds)

    reduces = any((folder / f"custom_allreduce_perf{ending}").exists() for ending in (".parquet", ".csv"))
    return Measurements(
        product=timed("gemm_perf", _product_columns, guide.product_seconds),
        prefill=timed("context_attention_perf", _prefill_columns, guide.prefill_seconds),
        decode=timed("generation_attention_perf", _decode_columns, guide.decode_seconds),
        all_reduce=timed("custom_allreduce_perf", _all_reduce_columns, guide.all_reduce_seconds) if reduces else None,
        versions=versions,
    )


class _Table:
    """The columns of one file, and the rows that are kept."""

    def __init__(self, path: Path, columns: dict[str, NDArray[Any]]) -> None:
        self.path = path
        self.columns = columns
        self.rows = np.arange(len(next(iter(columns.values()), ())))
        if not len(self.rows):
            raise BadHardwareFile(path, None, "it has no rows")
        for name in ("device", "version"):
            if name in columns and (differs := columns[name] != columns[name][0]).any():
                row = int(differs.argmax())
                raise BadKernelRow(
                    path, name, row, columns[name][row], f"the rows before have {columns[name][0]}: a table is of one"
                )
        framework, version = (str(columns[name][0]) if name in columns else "" for name in ("framework", "version"))
        self.version = f"{framework} {version}".strip()

    @classmethod
    def read(cls, folder: Path, name: str) -> _Table:
        parquet, text = folder / f"{name}.parquet", folder / f"{name}.csv"
        if parquet.exists():
            import_with_extra("pyarrow", "study.hardware.kernels")
            table = import_with_extra("pyarrow.parquet", "study.hardware.kernels").ParquetFile(parquet).read()
            return cls(parquet, {column: np.asarray(table[column].to_pylist()) for column in table.column_names})
        if text.exists():
            rows = [line.values for line in csv_lines(text, bad_table)]
            return cls(
                text, {column: np.asarray([row[column] for row in rows]) for column in (rows[0] if rows else ())}
            )
        raise BadHardwareFile(folder, name, "there is neither a .parquet nor a .csv file of this name")

    def must_be_of(self, device: Device) -> None:
        """Raise BadKernelRow if the table names another device of the catalogue, and not this one."""
        said = "" if "device" not in self.columns else str(self.columns["device"][0])
        # A name in the catalogue is a family, followed by the member.
        own, *families = (name.partition("-")[0] for name in (device.name, *device_names()))
        if own not in said.lower() and any(family in said.lower() for family in families):
            raise BadKernelRow(self.path, "device", 0, said, f"kernels of {device.name} were asked for")

    def keep(self, is_kept: NDArray[np.bool_]) -> None:
        self.rows = self.rows[is_kept]
        if not len(self.rows):
            raise BadHardwareFile(self.path, None, f"no row has one of the dtypes {', '.join(_DTYPES)}")

    def words(self, name: str) -> NDArray[Any]:
        if name not in self.columns:
            raise BadHardwareFile(self.path, name, f"the column is missing; there are {', '.join(self.columns)}")
        return self.columns[name][self.rows].astype(str)

    def dtypes(self, name: str) -> NDArray[Any]:
        """Return our names of a column's dtypes, and drop rows of other dtypes."""
        self.keep(np.isin(self.words(name), list(_DTYPES)))
        return np.asarray([_DTYPES[word] for word in self.words(name)])

    def numbers(self, name: str, least: float | None = None) -> NDArray[np.float64]:
        """Return a column as numbers. Raises BadKernelRow unless they are above 0, or at least `least`."""
        words = self.words(name)
        try:
            numbers = words.astype(np.float64)
        except ValueError:
            row = next(row for row, word in enumerate(words) if not _is_number(word))
            raise self._bad_row(name, row, repr(str(words[row])), "it has to be a number") from None
        is_wrong = ~np.isfinite(numbers) | ((numbers <= 0) if least is None else (numbers < least))
        if is_wrong.any():
            row = int(is_wrong.argmax())
            limit = "above 0" if least is None else f"at least {least:g}"
            raise self._bad_row(name, row, numbers[row], f"it has to be finite and {limit}")
        return numbers

    def must_be_plausible(self, seconds: NDArray[np.float64], least: NDArray[np.float64]) -> None:
        """Raise BadKernelRow if a time is far below the device's rates, or all are far above a launch."""
        if (seconds * _TOO_FAST < least).any():
            row = int((least / seconds).argmax())
            rates = f"at its published rates the device takes {least[row] * 1e3:.3g} ms"
            raise self._bad_row(
                "latency", row, f"{seconds[row] * 1e3:.6g} ms", f"{rates}: is it in another unit, or of another device?"
            )
        if seconds.min() > _TOO_SLOW:
            row = int(seconds.argmin())
            shorter = f"no row is shorter, and the shortest has to be below {_TOO_SLOW * 1e3:g} ms"
            raise self._bad_row("latency", row, f"{seconds[row] * 1e3:.6g} ms", f"{shorter}: is it in another unit?")

    def _bad_row(self, name: str, row: int, found: object, problem: str) -> BadKernelRow:
        """Return the error; `row` counts the rows that are kept."""
        return BadKernelRow(self.path, name, int(self.rows[row]), found, problem)


def _product_columns(table: _Table) -> Columns:
    return {"dtype": table.dtypes("gemm_dtype"), **{name: table.numbers(name) for name in ("m", "n", "k")}}


def _prefill_columns(table: _Table) -> Columns:
    return {**_attention_columns(table), "tokens": table.numbers("isl")}


def _decode_columns(table: _Table) -> Columns:
    return {**_attention_columns(table), "tokens": table.numbers("step", 0) + 1}


def _attention_columns(table: _Table) -> Columns:
    dtypes = table.dtypes("kv_cache_dtype")
    windows = table.numbers("window_size", 0) if "window_size" in table.columns else np.zeros(len(dtypes))
    return {
        "dtype": dtypes,
        "head_dim": table.numbers("head_dim"),
        "window": windows,
        "batch": table.numbers("batch_size"),
        "heads": table.numbers("num_heads"),
        "kv_heads": table.numbers("num_key_value_heads"),
    }


def _all_reduce_columns(table: _Table) -> Columns:
    launches = np.where(np.char.find(table.words("backend"), "graph") >= 0, "graph", "eager")
    return {"launch": launches, "num_gpus": table.numbers("num_gpus", 2), "elements": table.numbers("message_size")}


def _least_of_rows(device: Device, columns: Columns, least: Callable[..., Any]) -> NDArray[np.float64]:
    """Return the least seconds of each row, by its dtype if the kernels have one."""
    sizes = {name: column for name, column in columns.items() if name not in ("dtype", "launch")}
    if "dtype" not in columns:
        return np.asarray(least(device, **sizes))
    found = np.zeros(len(columns["dtype"]))
    for dtype in np.unique(columns["dtype"]):
        rows = columns["dtype"] == dtype
        found[rows] = least(device, str(dtype), **{name: column[rows] for name, column in sizes.items()})
    return found


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
