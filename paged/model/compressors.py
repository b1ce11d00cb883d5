"""Attention that keeps one compressed entry of several tokens beside a window of K: DeepSeek-V4's (arXiv:2606.19348).

    tokens            0   1   2   3 | 4   5   6   7 | 8   9          4 tokens an entry
    entries           |      e0     |      e1       |               on pages of a full group
    state                                           | 8   9 |       projections of tokens that have no entry yet
                                    | 4   5   6   7 |               where entries overlap, those of the last entry's tokens

transformers' module compresses, and asks its cache for the three. The entries lie on pages by their number, so that a row that shares a prefix shares
them; the rest is a state. A block is a whole number of entries, so a row that begins behind one has no token without an entry.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from paged.errors import UnsupportedModel
from paged.model.hook import names_in, now_under_way
from paged.model.states.layer import RowStates
from paged.model.states.seams import Piece

# An attribute of ours of attention modules that keep such entries.
COMPRESSOR = "paged_compressor"


class Compressor:
    """What one layer keeps of tokens without an entry, a state as any (KeepsState). `stride`: tokens of an entry."""

    def __init__(self, unit: int, path: str, layer: int, stride: int, *, overlaps: bool) -> None:
        self.unit, self.path, self.layer, self.stride = unit, path, layer, stride
        self.pieces: tuple[Piece, ...] = ()
        self._overlaps = overlaps
        # By name of the entries, the number of their first piece.
        self._first: dict[str, int] = {}

    def take(self, name: str, given: tuple[Tensor, Tensor], offset: int) -> tuple[Tensor, Tensor]:
        """Take projections of tokens from number `offset` on, [1, tokens, size] each. Returns those of the tokens that make whole entries; the others, and
        those of the last entry before them, are the state behind them."""
        if name not in self._first:
            self._note(name, given[0])
        states, first, found = _states(), self._first[name], list[Tensor]()
        for piece, new in enumerate(given, first):
            held = states.read(self.unit, piece)
            every = torch.cat([held[:, : offset % self.stride, 0], new], 1)
            whole = every.shape[1] // self.stride * self.stride
            held[:, : every.shape[1] - whole, 0] = every[:, whole:]
            states.write(self.unit, piece, held)
            found.append(every[:, :whole])
        if self._overlaps:
            for piece in (first + 2, first + 3):
                # They may be written elsewhere than they are read.
                states.write(self.unit, piece, states.read(self.unit, piece))
        return found[0], found[1]

    def last(self, name: str, given: tuple[Tensor, Tensor], offset: int) -> tuple[Tensor | None, Tensor | None]:
        """Take what overlaps of the last entry's tokens, [1, stride, size] each. Returns that of the entry before these; None: there is none."""
        states, found = _states(), list[Tensor]()
        for piece, new in enumerate(given, self._first[name] + 2):
            found.append(states.read(self.unit, piece)[:, :, 0])
            states.write(self.unit, piece, new[:, :, None])
        return (found[0], found[1]) if offset >= self.stride else (None, None)

    def _note(self, name: str, projected: Tensor) -> None:
        self._first[name] = len(self.pieces)
        size, dtype = projected.shape[-1], projected.dtype
        lengths = [(self.stride - 1, size)] * 2 + [(self.stride, size // 2)] * (2 * self._overlaps)
        self.pieces += tuple(Piece(name, (tokens, 1, wide), dtype) for tokens, wide in lengths)


def _states() -> RowStates:
    states = now_under_way().states
    assert states is not None, "a pass of a model with compressors has states"
    return states


def follow_compressors(module: nn.Module, first_unit: int) -> tuple[Compressor, ...]:
    """Return a compressor for each attention module that keeps compressed entries, which it is an attribute of; their units count from the first one.

    Raises UnsupportedModel for entries of single tokens."""
    found: list[Compressor] = []
    for path, each in module.named_modules():
        parts = [part for part in each.modules() if "store_compression_weights" in names_in(part)]
        if "update" not in names_in(each) or not parts:
            continue
        strides = {int(part.compress_rate) for part in parts}
        if len(strides) > 1 or min(strides) < 2:
            raise UnsupportedModel(
                f"{path}: its entries stand for {' and '.join(map(str, sorted(strides)))} tokens; they have to for one number, of 2 or more."
            )
        layer, overlaps = (
            int(re.findall(r"\d+", path)[0]),
            any("update_overlap_state" in names_in(part) for part in parts),
        )
        found.append(Compressor(first_unit + len(found), path, layer, strides.pop(), overlaps=overlaps))
        setattr(each, COMPRESSOR, found[-1])
    return tuple(found)
