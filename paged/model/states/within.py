"""States within modules that take one sequence at a time, by methods of the cache that no seam has.

    Compressor   tokens without a compressed entry: DeepSeek-V4's attention (DeepSeek-AI, 2026)
    Tails        the last columns of convolutions, and the last token ids: Qwen4-exp's embeddings of n-grams

DeepSeek-V4 keeps an entry of several tokens beside a window of K:

    tokens            0   1   2   3 | 4   5   6   7 | 8   9          4 tokens an entry
    entries           |      e0     |      e1       |               on pages of a full group
    state                                           | 8   9 |       projections of tokens without an entry
                                    | 4   5   6   7 |               with overlap, those of the last entry's tokens

Entries lie on pages by their number, so rows that share a prefix share its entries; the rest is a state. A block is a whole number of entries, so a
row that begins after a block has no token without an entry.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from paged.errors import UnsupportedModel
from paged.model.hook import names_in, now_under_way
from paged.model.states.layer import RowStates
from paged.model.states.seams import Piece, keeps_tails

# The attribute that we set on modules with such a state.
WITHIN = "paged_within"


class Compressor:
    """What one layer keeps of tokens without an entry, as KeepsState. `stride`: tokens of an entry. `gates`: dtype of the bias that is added to the
    overlap of the second projection; None: entries do not overlap."""

    def __init__(self, unit: int, path: str, layer: int, stride: int, gates: torch.dtype | None) -> None:
        self.unit, self.path, self.layer, self.stride = unit, path, layer, stride
        self.pieces: tuple[Piece, ...] = ()
        self._gates = gates
        # By name of the entries, the number of the first piece.
        self._first: dict[str, int] = {}

    def take(self, name: str, given: tuple[Tensor, Tensor], offset: int) -> tuple[Tensor, Tensor]:
        """Take projections of tokens from position `offset` on, [1, tokens, size] each. Return those of the tokens that make whole entries; the others are
        the new state."""
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
        if self._gates is not None and not found[0].shape[1]:
            # `last` is not called then, and the state may be written to other pages than it is read from.
            for piece in (first + 2, first + 3):
                states.write(self.unit, piece, states.read(self.unit, piece))
        return found[0], found[1]

    def last(self, name: str, given: tuple[Tensor, Tensor], offset: int) -> tuple[Tensor | None, Tensor | None]:
        """Take the overlap of the last entry's tokens, [1, stride, size] each. Return that of the entry before these; None: there is none."""
        states, found = _states(), list[Tensor]()
        for piece, new in enumerate(given, self._first[name] + 2):
            found.append(states.read(self.unit, piece)[:, :, 0])
            states.write(self.unit, piece, new[:, :, None])
        return (found[0], found[1]) if offset >= self.stride else (None, None)

    def _note(self, name: str, projected: Tensor) -> None:
        self._first[name] = len(self.pieces)
        size, dtype = projected.shape[-1], projected.dtype
        self.pieces += (Piece(name, (self.stride - 1, 1, size), dtype),) * 2
        if self._gates is not None:
            dtypes = dtype, torch.promote_types(dtype, self._gates)
            self.pieces += tuple(Piece(name, (self.stride, 1, size // 2), each) for each in dtypes)


class Tails:
    """The last columns of a module's convolutions, and its last token ids, as KeepsState; by the number that the module gives each."""

    def __init__(self, unit: int, path: str, layer: int) -> None:
        self.unit, self.path, self.layer = unit, path, layer
        self.pieces: tuple[Piece, ...] = ()
        self._numbers: dict[int, int] = {}

    def held(self, number: int, offset: int) -> Tensor | None:
        """Return the columns before position `offset`, [1, ..., columns]; None at position 0."""
        return _states().read(self.unit, self._numbers[number]) if offset else None

    def take(self, number: int, new: Tensor, columns: int, offset: int) -> Tensor:
        """Take columns of tokens from position `offset` on, [1, ..., tokens], and keep the last `columns`. Return them behind the kept ones; at position 0,
        if they are fewer than `columns`, behind zeros."""
        if number not in self._numbers:
            self._numbers[number] = len(self.pieces)
            name = "conv" if new.ndim > 2 else "ids"
            self.pieces += (Piece(f"{name} {number}", (*new.shape[1:-1], columns), new.dtype),)
        before = self.held(number, offset)
        if before is not None:
            new = torch.cat([before, new], -1)
        elif new.shape[-1] < columns:
            new = torch.nn.functional.pad(new, (columns - new.shape[-1], 0))
        _states().write(self.unit, self._numbers[number], new[..., -columns:])
        return new


def _states() -> RowStates:
    states = now_under_way().states
    assert states is not None, "a pass of a model with such modules has states"
    return states


def states_within(module: nn.Module, first_unit: int) -> tuple[Compressor | Tails, ...]:
    """Set the state of each module that has one within, as its attribute WITHIN, and return them; units count from `first_unit`.

    Raises UnsupportedModel for compressed entries of single tokens, and of several lengths in one module.
    """
    found: list[Compressor | Tails] = []
    for path, each in module.named_modules():
        parts = [part for part in each.modules() if "store_compression_weights" in names_in(part)]
        is_compressing = bool(parts) and "update" in names_in(each)
        if not is_compressing and not keeps_tails(each):
            continue
        unit, layer = first_unit + len(found), int(re.findall(r"\d+", path)[0])
        if is_compressing:
            found.append(_compressor(unit, path, layer, parts))
        else:
            found.append(Tails(unit, path, layer))
        setattr(each, WITHIN, found[-1])
    return tuple(found)


def _compressor(unit: int, path: str, layer: int, parts: list[nn.Module]) -> Compressor:
    """Return the state of an attention module whose `parts` compress."""
    strides = sorted({int(getattr(part, "compress_rate", 0)) for part in parts})
    if len(strides) > 1 or strides[0] < 2:
        raise UnsupportedModel(
            f"{path} keeps an entry of every {' and of every '.join(map(str, strides))} tokens; it has to be one number, of at least 2."
        )
    biases = [getattr(part, "position_bias", None) for part in parts if "update_overlap_state" in names_in(part)]
    gates = next((torch.float32 if each is None else each.dtype for each in biases), None)
    return Compressor(unit, path, layer, strides[0], gates)
