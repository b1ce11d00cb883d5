"""Published timings of one model's layers on one device: folders in LLMServingSim's form, read and checked.

dense.csv         layer, tokens, time_us          layers over each token but attention, one of each
per_sequence.csv  layer, sequences, time_us       LM head and sampler, once a step
attention.csv     prefill_chunk, kv_prefill, n_decode, kv_decode, time_us
                  one layer: a prompt's chunk after `kv_prefill` tokens, beside `n_decode` sequences that decode at length `kv_decode`
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.errors import BadHardwareFile, BadKernelRow
from paged.study.hardware.files import bad_table, csv_rows

Numbers = NDArray[np.float64]
SIZES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
REPEATED = {"layernorm": 2}
"""How many of a layer a decoder's layer has, if several."""
ONCE = ("embedding", "final_layernorm")
"""Layers that a step runs once, not once for each decoder layer."""
_LEAST_US, _MOST_US = 0.2, 10e6
"""The bounds of a layer's kernel: a time outside of them is in another unit."""


class LayerMeasurements(msgspec.Struct, frozen=True, eq=False):
    """`dense` and `head`: by layer sizes, ascending, and seconds; `attention`: sizes, float64 [rows, 4] as in `SIZES`, and seconds."""

    dense: dict[str, tuple[Numbers, Numbers]]
    head: dict[str, tuple[Numbers, Numbers]]
    attention: tuple[Numbers, Numbers]


def is_layer_folder(folder: Path) -> bool:
    """Whether a folder has this form."""
    return (folder / "dense.csv").exists() or (folder / "attention.csv").exists()


def read_layers(folder: str | Path) -> LayerMeasurements:
    """Read a folder. Raises BadHardwareFile for a missing file or column, and BadKernelRow for an impossible value."""
    folder = Path(folder)
    dense = _by_layer(folder / "dense.csv", "tokens")
    head = _by_layer(folder / "per_sequence.csv", "sequences")
    path = folder / "attention.csv"
    _, values = _columns(path, (*SIZES, "time_us"), ())
    is_empty = (values[:, 0] == 0) & (values[:, 2] == 0)
    if is_empty.any():
        row = int(is_empty.argmax())
        raise BadKernelRow(path, "n_decode", row + 2, 0, "neither a prompt nor a decoding sequence is in it")
    _, first, place = np.unique(values[:, :4], axis=0, return_index=True, return_inverse=True)
    first = first[place.ravel()]
    differs = values[first, 4] != values[:, 4]
    if differs.any():
        row = int(differs.argmax())
        other = f"row {int(first[row]) + 2} has {values[first[row], 4]:g} for the same sizes"
        raise BadKernelRow(path, "time_us", row + 2, values[row, 4], other)
    return LayerMeasurements(dense, head, (values[:, :4], values[:, 4] * 1e-6))


def described(folder: str | Path) -> dict[str, str]:
    """Return the plain lines of a folder's meta.yaml: names and values of its outermost level, and `skew`, how much longer sequences of different
    lengths take on one device. Empty without the file."""
    path = Path(folder) / "meta.yaml"
    if not path.exists():
        return {}
    text = path.read_text(errors="replace")
    found = {name: value.strip("'\" ") for name, value in re.findall(r"^(\w+): *(\S.*)$", text, re.MULTILINE)}
    skew = re.search(r"^ +1:(?:\n +\w+:.*)*?\n +alpha_default: ([0-9.]+)", text, re.MULTILINE)
    return found | ({"skew": skew.group(1)} if skew else {})


def _by_layer(path: Path, size: str) -> dict[str, tuple[Numbers, Numbers]]:
    names, values = _columns(path, (size, "time_us"), ("layer",))
    found = {}
    for name in dict.fromkeys(names):
        rows = np.array([name == each for each in names])
        order = values[rows, 0].argsort(kind="stable")
        found[name] = (values[rows, 0][order], values[rows, 1][order] * 1e-6)
        if len(found[name][0]) < 2 or (np.diff(found[name][0]) <= 0).any():
            raise BadHardwareFile(path, size, f"layer {name} needs two {size} at least, each once")
    return found


def _columns(path: Path, numeric: tuple[str, ...], words: tuple[str, ...]) -> tuple[list[str], Numbers]:
    """Return a table's column of words, and its numbers, float64 [rows, numeric]."""
    if not path.exists():
        raise BadHardwareFile(path, None, "there is no such file")
    names: list[str] = []
    values: list[list[float]] = []
    for number, row in csv_rows(path, (*words, *numeric), bad_table):
        names.extend(row[name] for name in words)
        values.append([_number(path, name, number, row[name]) for name in numeric])
    if not values:
        raise BadHardwareFile(path, None, "it has no rows")
    return names, np.array(values)


def _number(path: Path, name: str, row: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise BadKernelRow(path, name, row, text, "it has to be a number") from None
    if name == "time_us":
        if not _LEAST_US <= value <= _MOST_US:
            raise BadKernelRow(
                path, name, row, value, f"a kernel takes {_LEAST_US:g} to {_MOST_US:,.0f} µs; is it in another unit?"
            )
    elif not 0 <= value < 1e9:
        raise BadKernelRow(path, name, row, value, "a size is 0 or more")
    return value
