"""The safetensors files of a checkpoint, read one tensor at a time; their headers have shapes and dtypes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paged.base.words import short_cause
from paged.errors import BrokenCheckpoint

INDEX = "model.safetensors.index.json"
_SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "F16": 2, "BF16": 2, "I32": 4, "F32": 4, "I64": 8, "F64": 8}


@dataclass(frozen=True)
class Header:
    """The file, shape and dtype of a tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * _SIZES.get(self.dtype, 1)


class TensorFiles:
    """The tensors of a folder by name, in the files that transformers would read: with an index, those in the index. Raises BrokenCheckpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.headers: dict[str, Header] = {}
        for file, names in _files(folder):
            with self._reading(file), _opened(file) as opened:
                there = set(opened.keys())
                lost = sorted((names or there) - there)
                if lost:
                    raise BrokenCheckpoint(f"{folder}: {lost[0]} is not in {file.name}, where {INDEX} says it is.")
                for name in sorted(names or there):
                    header = opened.get_slice(name)
                    self.headers[name] = Header(file, tuple(header.get_shape()), header.get_dtype())

    def __contains__(self, name: str) -> bool:
        return name in self.headers

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def read(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        """Read a tensor, or a part of it, as a copy. Raises BrokenCheckpoint."""
        header = self.headers[name]
        with self._reading(header.file), _opened(header.file) as opened:
            found: Tensor = opened.get_slice(name)[part] if part else opened.get_tensor(name)
            return found.clone(memory_format=torch.contiguous_format)

    @contextmanager
    def _reading(self, file: Path) -> Iterator[None]:
        try:
            yield
        except BrokenCheckpoint:
            raise
        except Exception as error:
            raise BrokenCheckpoint(f"{self.folder}: {file.name} cannot be read: {short_cause(error)}") from error


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:  # type: ignore[no-untyped-call]
        yield opened


def _files(folder: Path) -> Iterator[tuple[Path, set[str]]]:
    """Yield each file, and the names of tensors that the index gives it; no names without an index."""
    index, whole = folder / INDEX, folder / "model.safetensors"
    if whole.is_file() or not index.is_file():
        files = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
        yield from ((file, set()) for file in files)
        return
    try:
        placed: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names: dict[str, set[str]] = {}
        for name, file in placed.items():
            if not isinstance(file, str):
                raise ValueError(f"it has {file!r} in place of the name of {name}'s file")
            names.setdefault(file, set()).add(name)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise BrokenCheckpoint(f"{folder}: {INDEX} cannot be read: {short_cause(error)}") from error
    yield from ((folder / file, names[file]) for file in sorted(names))
