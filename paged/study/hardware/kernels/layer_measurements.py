"""Published timings of one model's layers on one device: folders in LLMServingSim's form, read and checked.

dense.csv         layer, tokens, time_us          layers over each token but attention, one of each
per_sequence.csv  layer, sequences, time_us       LM head and sampler, once a step
attention.csv     prefill_chunk, kv_prefill, n_decode, kv_decode, time_us
                  one layer: a prompt's chunk after `kv_prefill` tokens, beside `n_decode` sequences that decode at length `kv_decode`
"""

import re
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from paged.errors import BadHardwareFile
from paged.study.files import bad_table, csv_lines

Numbers = NDArray[np.float64]
SIZES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
REPEATED = {"layernorm": 2}
"""How many of a layer a decoder's layer has, if several."""
ONCE = ("embedding", "final_layernorm")
"""Layers that a step runs once, not once for each decoder layer."""
_Size = Annotated[float, Meta(ge=0, lt=1e9)]
_Micros = Annotated[float, Meta(ge=0.2, le=10e6)]
"""Of a layer's kernel: a time outside of them is in another unit."""


class _Dense(msgspec.Struct):
    layer: str
    tokens: _Size
    time_us: _Micros


class _Head(msgspec.Struct):
    layer: str
    sequences: _Size
    time_us: _Micros


class _Attention(msgspec.Struct):
    prefill_chunk: _Size
    kv_prefill: _Size
    n_decode: _Size
    kv_decode: _Size
    time_us: _Micros


_Kind = TypeVar("_Kind", bound=msgspec.Struct)


class LayerMeasurements(msgspec.Struct, frozen=True, eq=False):
    """`dense` and `head`: by layer sizes, ascending, and seconds; `attention`: sizes, float64 [rows, 4] as in `SIZES`, and seconds."""

    dense: dict[str, tuple[Numbers, Numbers]]
    head: dict[str, tuple[Numbers, Numbers]]
    attention: tuple[Numbers, Numbers]


def is_layer_folder(folder: Path) -> bool:
    """Whether a folder has this form."""
    return (folder / "dense.csv").exists() or (folder / "attention.csv").exists()


def read_layers(folder: str | Path) -> LayerMeasurements:
    """Read a folder. Raises BadHardwareFile for a missing file or column, and for an impossible value."""
    folder = Path(folder)
    dense = _by_layer(folder / "dense.csv", _Dense)
    head = _by_layer(folder / "per_sequence.csv", _Head)
    path = folder / "attention.csv"
    values = np.array([msgspec.structs.astuple(row) for row in _rows(path, _Attention)])
    is_empty = (values[:, 0] == 0) & (values[:, 2] == 0)
    if is_empty.any():
        row = int(is_empty.argmax())
        raise bad_table(path, row + 2, "n_decode", "neither a prompt nor a decoding sequence is in it")
    _, first, place = np.unique(values[:, :4], axis=0, return_index=True, return_inverse=True)
    first = first[place.ravel()]
    differs = values[first, 4] != values[:, 4]
    if differs.any():
        row = int(differs.argmax())
        other = f"row {int(first[row]) + 2} has {values[first[row], 4]:g} for the same sizes"
        raise bad_table(path, row + 2, "time_us", f"it is {values[row, 4]:g}; {other}")
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


def _by_layer(path: Path, kind: type[_Dense] | type[_Head]) -> dict[str, tuple[Numbers, Numbers]]:
    found, rows = {}, [msgspec.structs.astuple(row) for row in _rows(path, kind)]
    for name in dict.fromkeys(layer for layer, *_ in rows):
        sizes, times = np.array(sorted(numbers for layer, *numbers in rows if layer == name)).T
        found[name] = (sizes, times * 1e-6)
        if len(sizes) < 2 or (np.diff(sizes) <= 0).any():
            size = kind.__struct_fields__[1]
            raise BadHardwareFile(path, size, f"layer {name} needs two {size} at least, each once")
    return found


def _rows(path: Path, kind: type[_Kind]) -> list[_Kind]:
    """Return a table's rows."""
    if not path.exists():
        raise BadHardwareFile(path, None, "there is no such file")
    rows = [line.read(kind) for line in csv_lines(path, bad_table, kind.__struct_fields__)]
    if not rows:
        raise BadHardwareFile(path, None, "it has no rows")
    return rows
