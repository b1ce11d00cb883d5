"""The tensors of a linear layer that is stored as codes, with checks of each; and codes that share an integer."""

from __future__ import annotations

import torch
from torch import Tensor

from paged.errors import BrokenCheckpoint
from paged.model.quantised.files import Header, TensorFiles

FLOATS = ("F16", "BF16", "F32")
"""Dtypes of floats, and so of scales, as headers name them."""


class Stored:
    """The tensors of one linear layer: those whose names begin with its name."""

    def __init__(self, files: TensorFiles, name: str) -> None:
        self.name = name
        self._files = files

    def __contains__(self, part: str) -> bool:
        return f"{self.name}.{part}" in self._files

    def header(self, part: str, dtypes: tuple[str, ...], dims: int) -> Header:
        """Return the header of a tensor. Raises BrokenCheckpoint unless it exists, has one of these dtypes and `dims` dimensions, and is not empty."""
        if part not in self:
            raise self.broken(f"{part} is missing")
        found = self._files.headers[f"{self.name}.{part}"]
        if found.dtype not in dtypes:
            raise self.broken(f"{part} is {found.dtype}; {' or '.join(dtypes)} is wanted")
        if len(found.shape) != dims:
            raise self.broken(f"{part} has the shape {list(found.shape)}; {dims} dimensions are wanted")
        if 0 in found.shape:
            raise self.broken(f"{part} has the shape {list(found.shape)}, which is empty")
        return found

    def expect(self, part: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        """Raise BrokenCheckpoint unless a tensor exists, of this shape and one of these dtypes."""
        found = self.header(part, dtypes, len(shape))
        if found.shape != shape:
            raise self.broken(f"{part} has the shape {list(found.shape)}; {list(shape)} is wanted")

    def read(self, part: str) -> Tensor:
        return self._files.read(f"{self.name}.{part}")

    def scales(self, part: str) -> Tensor:
        """Read scales as float32. Raises BrokenCheckpoint unless all are finite and not 0."""
        found = self.read(part).float()
        for is_wrong, what in ((~torch.isfinite(found), "NaN or infinite"), (found == 0, "0")):
            if is_wrong.any():
                raise self.broken(f"{int(is_wrong.sum()):,} of its {found.numel():,} scales are {what}")
        return found

    def group_size(self, depth: int, stored: int | None) -> int:
        """Return the inputs that share a scale; `stored` None: all. Raises BrokenCheckpoint if groups do not divide the inputs."""
        size = stored or depth
        if depth % size:
            raise self.broken(f"groups of {size} do not divide its {depth:,} inputs")
        return size

    def order(self, part: str, group_size: int) -> Tensor | None:
        """Return the inputs in the order of their groups, int64 [depth], from a tensor with the group of each input; None if it does not exist, or inputs are
        in that order. Raises BrokenCheckpoint unless all groups have `group_size` inputs."""
        if part not in self:
            return None
        groups = self.read(part).long()
        expected = torch.arange(len(groups)) // group_size
        if torch.equal(groups, expected):
            return None
        order = torch.argsort(groups, stable=True)
        if not torch.equal(groups[order], expected):
            num_groups = len(groups) // group_size
            raise self.broken(f"{part} does not give each of {num_groups:,} groups {group_size:,} inputs")
        return order

    def broken(self, what: str) -> BrokenCheckpoint:
        """Return the error that says what is wrong with this layer."""
        return BrokenCheckpoint(f"{self._files.folder}: {self.name}: {what}.")


def group_size_of(stored: object) -> int | None:
    """Return a configuration's group size; None for -1, all inputs of a result. Raises ValueError."""
    found = int(stored)  # type: ignore[call-overload]
    if found != -1 and found < 1:
        raise ValueError(f"group_size is {found}")
    return None if found == -1 else found


def groups_in_words(group_size: int | None) -> str:
    return "a scale a result" if group_size is None else f"groups of {group_size}"


def unpacked(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return the codes in words, int32 [rows, columns], as uint8 [rows, columns × 32 / bits], those in the lowest bits first; with `order`, code i of each word
    is at place order[i]."""
    places = torch.tensor(order or range(32 // bits), dtype=torch.int32) * bits
    codes = words.unsqueeze(-1) >> places & 2**bits - 1
    return codes.to(torch.uint8).reshape(len(words), -1)
