"""States of rows on pages, as one forward pass reads and writes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paged.attention import LayeredPool, StepTokens
from paged.model.native.recurrences import RowPages


class PassStates:
    """The states of one forward pass's rows, as `layer.RowStates` wants them: a step, or a part of one, says from which of the pool's pages each row's is
    read, and onto which it is written."""

    def __init__(self, pool: LayeredPool, step: StepTokens, *, is_invariant: bool) -> None:
        assert step.states is not None, "a step of a model with state layers says where they are"
        read, write = step.states
        self.starts: Sequence[int] = step.query_start_loc.tolist()
        self.is_new: Sequence[bool] = (read[:, 0] < 0).tolist()
        self.is_invariant = is_invariant
        self._states = pool.states
        self._read, self._write = read, write
        # Once for all pieces of all layers, each of which would take them to the device.
        self._sources, self._targets = (torch.from_numpy(each).to(pool.device, torch.int64) for each in (read, write))

    def read(self, unit: int, piece: int) -> Tensor:
        """[n, ...]: a copy of a piece of the rows' states before their tokens; zeros for rows that are new."""
        return self._states[unit][piece].read(self._sources)

    def write(self, unit: int, piece: int, states: Tensor) -> None:
        """Take a piece of the rows' states behind their tokens, [n, ...]."""
        self._states[unit][piece].write(self._targets, states)

    def pages_of(self, unit: int) -> list[RowPages]:
        """Where each piece of the rows' states lies."""
        return [RowPages(each, self._read, self._write) for each in self._states[unit]]
