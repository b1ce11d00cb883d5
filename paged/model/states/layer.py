"""A layer with a state, called for the tokens of many rows in one forward pass.

A pass has the tokens of its rows one after the other, [1, T], as attention takes them; a state layer takes the tokens of one row, or one token of
each of several rows. So the layer's module is called several times in its place:

    tokens     a0 a1 a2 | b0 | c0 c1 |      rounds    (a0 b0 c0) (a1 c1) (a2)
                                            chunks    (a0 a1 a2) (c0 c1) (b0)

A layer with a recurrence in C (`recurrences.py`) is called once, and each row's states go from page to page within the call. With any other, rounds
compute a row token by token, so its bits do not depend on how the row was cut into passes. Chunks are faster, and round otherwise. In
batch-invariant mode a layer is called in chunks only if trials found the bits of rounds for every length that a pass may have, as for LFM2's
convolutions and MiniMax's lightning attention.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from paged.attention import LayeredPool, StepTokens
from paged.model.hook import now_under_way
from paged.model.native.recurrences import RowPages
from paged.model.states.calls import Call, Cut
from paged.model.states.projections import Projections
from paged.model.states.recurrences import Recurrence
from paged.model.states.seams import Piece, Seam, keeps_tails, seam_of
from paged.model.states.trial import CLOSE, LONGEST_CHUNK, Trial, Ways


class RowStates(Protocol):
    """The states of the rows of one forward pass.

    starts        n + 1 numbers: row i has places starts[i] to starts[i + 1] - 1 of the pass; places after the last row are padding
    is_new        bool [n]: rows that compute their first token, and have no state
    is_invariant  bits must not depend on other rows, nor on how rows are cut
    """

    @property
    def starts(self) -> Sequence[int]: ...
    @property
    def is_new(self) -> Sequence[bool]: ...
    @property
    def is_invariant(self) -> bool: ...

    def read(self, unit: int, piece: int) -> Tensor:
        """Return a copy of a piece of the rows' states before their tokens, [n, ...]; new rows have any values."""
        ...

    def write(self, unit: int, piece: int, states: Tensor) -> None:
        """Store a piece of the rows' states after their tokens, [n, ...]."""
        ...

    def pages_of(self, unit: int) -> Sequence[RowPages] | None:
        """Return the pages of each piece of the rows' states; None: they are not on pages."""
        ...

    def of_row(self, row: int, count: int, *, has_begun: bool) -> RowStates:
        """Return the states of one row for `count` of its tokens. `has_begun`: earlier tokens of this pass have written its state."""
        ...


class KeepsState(Protocol):
    """A module that keeps a state. `unit`: its number among these modules; `layer`: the number of its layer; `pieces` are known once it was called."""

    path: str
    unit: int
    layer: int

    @property
    def pieces(self) -> tuple[Piece, ...]: ...


class StateLayer:
    """One module with a state, as KeepsState. Replaces the module's forward function, and calls it with the states of the forward pass under way.
    `is_in_c` is known once it was called.
    """

    def __init__(self, unit: int, path: str, module: nn.Module, seam: Seam, ways: dict[Any, Ways]) -> None:
        self.unit, self.path = unit, path
        number = getattr(module, "layer_idx", getattr(module, "layer_id", None))
        self.layer = int(re.findall(r"\d+", path)[0] if number is None else number)
        self._module = module
        self._seam = seam
        self._all_ways = ways
        self._ways: Ways | None = None
        self._projections: Projections | None = None
        self._recurrence: Recurrence | None = None
        forward: Any = self
        module.forward = forward

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return self._seam.pieces

    @property
    def is_in_c(self) -> bool:
        """Whether it has a recurrence in C: then it is called once for all tokens of a pass."""
        return self._recurrence is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self._seam.arguments(args, kwargs)
        if not self.pieces:
            trial = Trial(self._seam, arguments)
            self._recurrence = trial.recurrence(self._module)
            if self._recurrence is None:
                self._ways = self._learned(trial)
        states = now_under_way().states
        assert states is not None, "a pass of a model with state layers has states"
        places = states.pages_of(self.unit)
        if self._recurrence is not None and places is not None:
            return self._seam.returned(self._recurrence.run(arguments, np.asarray(states.starts, np.int64), places))
        held = [states.read(self.unit, k) for k in range(len(self.pieces))]
        new = [row for row, is_new in enumerate(states.is_new) if is_new]
        for piece, state in zip(self.pieces, held, strict=True):
            if new:
                state[new] = piece.start
        outputs = Call(self._seam, arguments, held).run(self._cuts(states, arguments), self._projections)
        for k, state in enumerate(held):
            states.write(self.unit, k, state)
        return self._seam.returned(outputs)

    def _cuts(self, states: RowStates, arguments: dict[str, Any]) -> list[Cut]:
        """The chunks and rounds of a pass."""
        starts, rows = states.starts, range(len(states.is_new))
        if starts[-1] == 1:
            return [Cut([0], [[0]], False)]
        if self._ways is None:
            self._ways = self._learned(Trial(self._seam, arguments))
        ways = self._ways
        counts = [starts[row + 1] - starts[row] for row in rows]
        whole = [row for row in rows if counts[row] > 1 and _goes_whole(ways, states, row, counts[row])]
        cuts = [
            Cut([row], [[*range(starts[row], starts[row + 1])]], states.is_new[row] and not states.is_invariant)
            for row in whole
        ]
        single = sorted(set(rows).difference(whole), key=lambda row: -counts[row])
        together = ways.keeps_bits if states.is_invariant else ways.takes_rows
        for nth in range(max((counts[row] for row in single), default=0)):
            going = [row for row in single if counts[row] > nth]
            for some in [going] if together else [[row] for row in going]:
                cuts.append(Cut(some, [[starts[row] + nth] for row in some], False))
        return cuts

    def _learned(self, trial: Trial) -> Ways:
        """Try how the layer may be called, unless a layer of its kind was tried. Sets its projections."""
        self._projections = trial.projections(self._module)
        key = (type(self._module), self.pieces)
        if key not in self._all_ways:
            apart = trial.rows_apart()
            self._all_ways[key] = Ways(apart < CLOSE, apart == 0, trial.goes_on(), trial.is_in_order())
        return self._all_ways[key]


def _goes_whole(ways: Ways, states: RowStates, row: int, count: int) -> bool:
    if states.is_invariant:
        return ways.is_in_order and count <= LONGEST_CHUNK
    return ways.goes_on or bool(states.is_new[row])


class FirstToken:
    """The states of one row that computes its first token; the state after it is dropped."""

    def __init__(self, layers: Sequence[KeepsState], device: torch.device) -> None:
        self.starts, self.is_new, self.is_invariant = (0, 1), (True,), False
        self._layers, self._device = layers, device

    def read(self, unit: int, piece: int) -> Tensor:
        """Return zeros, [1, ...]."""
        its = self._layers[unit].pieces[piece]
        return torch.zeros(1, *its.shape, dtype=its.dtype, device=self._device)

    def write(self, unit: int, piece: int, states: Tensor) -> None:
        """Drop them."""

    def pages_of(self, unit: int) -> None:
        """Return None: they are not on pages."""

    def of_row(self, row: int, count: int, *, has_begun: bool) -> FirstToken:
        """Return itself: it has one row."""
        return self


class PassStates:
    """The states of a forward pass's rows, as RowStates. The step, or part of one, has the pages that each row's state is read from, and written to;
    `on_device`: the same ids, two int64 [n, k], if they are on the device already."""

    def __init__(
        self,
        pool: LayeredPool,
        step: StepTokens,
        *,
        is_invariant: bool,
        on_device: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        assert step.states is not None, "a step of a model with state layers says where they are"
        self._read, self._write = step.states
        self.starts: Sequence[int] = step.query_start_loc.tolist()
        self.is_new: Sequence[bool] = (self._read[:, 0] < 0).tolist()
        self.is_invariant = is_invariant
        self._states = pool.states
        self._is_whole = bool((self._write[:, 0] >= 0).all())
        # Copied to the device once for all pieces of all layers.
        self._sources, self._targets = on_device or (
            torch.from_numpy(each).to(pool.device, torch.int64) for each in step.states
        )

    def read(self, unit: int, piece: int) -> Tensor:
        """As in RowStates; zeros for new rows."""
        return self._states[unit][piece].read(self._sources)

    def write(self, unit: int, piece: int, states: Tensor) -> None:
        self._states[unit][piece].write(self._targets, states, is_whole=self._is_whole)

    def pages_of(self, unit: int) -> list[RowPages]:
        return [RowPages(each, self._read, self._write) for each in self._states[unit]]

    def of_row(self, row: int, count: int, *, has_begun: bool) -> PassStates:
        its, only = copy(self), slice(row, row + 1)
        its.starts, its.is_new = [0, count], [self.is_new[row] and not has_begun]
        its._read, its._sources = (self._write, self._targets) if has_begun else (self._read, self._sources)
        its._read, its._write = its._read[only], self._write[only]
        its._sources, its._targets = its._sources[only], self._targets[only]
        return its


def follow_states(module: nn.Module) -> tuple[StateLayer, ...]:
    """Make a decoder's state layers use the states of the forward pass under way. Return them in the order of its modules."""
    _rescale(module)
    ways: dict[Any, Ways] = {}
    found: list[StateLayer] = []
    within = {part for each in module.modules() if keeps_tails(each) for part in each.modules()}
    for path, each in module.named_modules():
        seam = None if each in within else seam_of(each)
        if seam is not None:
            found.append(StateLayer(len(found), path, each, seam, ways))
    return tuple(found)


def _rescale(module: nn.Module) -> None:
    """Divide RWKV's weights of late layers now, which it does at its first call otherwise."""
    for each in module.modules():
        rescale: Any = getattr(each, "_rescale_layers", None)
        if rescale is not None and not each.training and not each.layers_are_rescaled:
            rescale()
