"""States of rows on pages: where each piece of each state layer lies, and what one forward pass reads and writes there.

A batch says from which pages a row's state is read and onto which it is written. A pass that begins within a row's share goes on from the pages that the
pass before wrote.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged.attention.layouts.state import State
from paged.attention.pages import Pages
from paged.model.layer_plan import Layers
from paged.model.places import Pieces
from paged.model.states.layer import StateLayer

Table = NDArray[np.int32]


class StateMemory:
    """The pieces of all state layers of a model on a pool's pages. `places` of each layer, and `layers`, what it keeps, by which they were planned."""

    def __init__(
        self, pages: Pages, units: Sequence[StateLayer], places: Sequence[Pieces], layers: Sequence[Layers]
    ) -> None:
        self.states = [
            [
                State(pages, of_piece, unit_bytes=part.unit_bytes, shape=piece.shape, dtype=piece.dtype)
                for piece, of_piece, part in zip(unit.pieces, of_unit, kept.parts, strict=True)
            ]
            for unit, of_unit, kept in zip(units, places, layers, strict=True)
        ]
        self._device = pages.device

    def of_step(
        self, query_start_loc: NDArray[np.int64], read: Table, write: Table, *, is_invariant: bool
    ) -> StepStates:
        """The states of a step's n rows: `read` and `write` [n, k], the pages of each; a row that reads -1 has no state yet."""
        return StepStates(self.states, self._device, query_start_loc, read, write, is_invariant)


class StepStates:
    """The states of one step's rows, of which each forward pass takes its part."""

    def __init__(
        self,
        states: list[list[State]],
        device: torch.device,
        query_start_loc: NDArray[np.int64],
        read: Table,
        write: Table,
        is_invariant: bool,
    ) -> None:
        self._states = states
        self._device = device
        self._starts = query_start_loc
        self._read, self._write = read, write
        self._is_invariant = is_invariant

    def part(self, first: int, stop: int) -> PassStates:
        """Those of the pass that computes tokens `first` to `stop` - 1 of the step."""
        begin = int(np.searchsorted(self._starts, first, "right")) - 1
        end = int(np.searchsorted(self._starts, stop, "left"))
        starts = np.clip(self._starts[begin : end + 1], first, stop) - first
        read, write = self._read[begin:end], self._write[begin:end]
        if self._starts[begin] < first:
            read = np.concatenate([write[:1], read[1:]])
        return PassStates(self._states, self._device, starts, read, write, self._is_invariant)


class PassStates:
    """The states of one forward pass's rows, as `layer.RowStates` wants them."""

    def __init__(
        self,
        states: list[list[State]],
        device: torch.device,
        starts: NDArray[np.int64],
        read: Table,
        write: Table,
        is_invariant: bool,
    ) -> None:
        self.starts: Sequence[int] = starts.tolist()
        self.is_new: Sequence[bool] = (read[:, 0] < 0).tolist()
        self.is_invariant = is_invariant
        self._states = states
        self._read, self._write = (torch.from_numpy(each.astype(np.int64)).to(device) for each in (read, write))

    def read(self, unit: int, piece: int) -> Tensor:
        """[n, ...]: a copy of a piece of the rows' states before their tokens; zeros for rows that are new."""
        return self._states[unit][piece].read(self._read)

    def write(self, unit: int, piece: int, states: Tensor) -> None:
        """Take a piece of the rows' states behind their tokens, [n, ...]."""
        self._states[unit][piece].write(self._write, states)
