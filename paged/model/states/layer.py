"""A layer with a state, called for the tokens of many rows in one forward pass.

A pass has the tokens of its rows one after the other, [1, T], as attention wants them; a state layer takes the tokens of one row, or one token of
each of several rows. So the layer's module is called a few times in its place:

    tokens     a0 a1 a2 | b0 | c0 c1 |      rounds    (a0 b0 c0) (a1 c1) (a2)
                                            chunks    (a0 a1 a2) (c0 c1) (b0)

In rounds each row's recurrence is computed token by token, by what the module does for a single token, so that its bits do not depend on how
the row was cut into passes. A chunk is faster, and rounds otherwise. In batch-invariant mode a layer is called in chunks only if trials gave the bits of
rounds for every length that a pass may have; LFM2's convolutions and MiniMax's lightning attention are such.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from paged.model.hook import now_under_way
from paged.model.states.projections import Now, Projections
from paged.model.states.seams import Piece, Seam, seam_of

# What rounding may make of a number, of the largest.
CLOSE = 1e-3
# Rows of a round in its trials, and tokens of a chunk: up to those of a tile.
TRIED = (2, 3, 5, 8, 16, 32)
LONGEST_CHUNK = 32


class RowStates(Protocol):
    """The states of the rows of one forward pass.

    starts        n + 1 numbers: row i has places starts[i] to starts[i + 1] - 1 of the pass; those behind the last are padding
    is_new        bool [n]: rows that compute their first token, and have no state
    is_invariant  whether bits must not depend on the other rows, nor on how rows are cut
    """

    @property
    def starts(self) -> Sequence[int]: ...
    @property
    def is_new(self) -> Sequence[bool]: ...
    @property
    def is_invariant(self) -> bool: ...

    def read(self, unit: int, piece: int) -> Tensor:
        """[n, ...]: a copy of a piece of the rows' states before their tokens; anything for rows that are new."""
        ...

    def write(self, unit: int, piece: int, states: Tensor) -> None:
        """Take a piece of the rows' states behind their tokens, [n, ...]."""
        ...


class _Ways(NamedTuple):
    """How a layer may be called; what trials found.

    takes_rows    a round may have many rows
    keeps_bits    a round of many rows gives each the bits that it has alone
    goes_on       a chunk may begin with a state
    is_in_order   a chunk gives the bits of rounds
    """

    takes_rows: bool
    keeps_bits: bool
    goes_on: bool
    is_in_order: bool


class StateLayer:
    """One module with a state. It takes the place of the module's forward function, which it calls with states that the forward pass under way has.

    `unit` counts a model's state layers; `layer` is the layer of the model that it is in; `pieces` are known once it was called.
    """

    def __init__(self, unit: int, path: str, module: nn.Module, seam: Seam, ways: dict[Any, _Ways]) -> None:
        self.unit, self.path = unit, path
        number = getattr(module, "layer_idx", getattr(module, "layer_id", None))
        self.layer = int(re.findall(r"\d+", path)[0] if number is None else number)
        self._module = module
        self._seam = seam
        self._all_ways = ways
        self._ways: _Ways | None = None
        self._projections: Projections | None = None
        forward: Any = self
        module.forward = forward

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return self._seam.pieces

    @property
    def ways(self) -> _Ways:
        assert self._ways is not None, "it was called"
        return self._ways

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self._seam.arguments(args, kwargs)
        if self._ways is None:
            self._ways = self._learned(arguments)
        states = now_under_way().states
        assert states is not None, "a pass of a model with state layers has states"
        rows = range(len(states.is_new))
        held = [states.read(self.unit, k) for k in range(len(self.pieces))]
        new = [row for row in rows if states.is_new[row]]
        for piece, state in zip(self.pieces, held, strict=True):
            state[new] = piece.start
        counts = [states.starts[row + 1] - states.starts[row] for row in rows]
        whole = [row for row in rows if counts[row] > 1 and self._goes_whole(states, row, counts[row])]
        cuts = [
            _Cut([row], [[*range(states.starts[row], states.starts[row + 1])]], states.is_new[row]) for row in whole
        ]
        single = sorted(set(rows).difference(whole), key=lambda row: -counts[row])
        together = self._ways.keeps_bits if states.is_invariant else self._ways.takes_rows
        for turn in range(max((counts[row] for row in single), default=0)):
            going = [row for row in single if counts[row] > turn]
            for some in [going] if together else [[row] for row in going]:
                cuts.append(_Cut(some, [[states.starts[row] + turn] for row in some], False))
        if states.is_invariant:
            cuts = [cut._replace(is_first=False) for cut in cuts]
        outputs = _Call(self._seam, arguments, held).run(cuts, self._projections)
        for k, state in enumerate(held):
            states.write(self.unit, k, state)
        return self._seam.returned(outputs)

    def _goes_whole(self, states: RowStates, row: int, count: int) -> bool:
        if states.is_invariant:
            return self.ways.is_in_order and count <= LONGEST_CHUNK
        return self.ways.goes_on or bool(states.is_new[row])

    def _learned(self, arguments: dict[str, Any]) -> _Ways:
        """Call the layer for two tokens that have no state before them, so that its pieces are known, and try its ways unless another layer of
        its kind did."""
        trial = _Trial(self._seam, arguments)
        self._projections = trial.projections(self._module)
        key = (type(self._module), self.pieces)
        if key not in self._all_ways:
            apart = trial.rows_apart()
            self._all_ways[key] = _Ways(apart < CLOSE, apart == 0, trial.goes_on(), trial.is_in_order())
        return self._all_ways[key]


class _Cut(NamedTuple):
    """Places of a pass for which a layer's module is called at once: of each of these rows as many. `is_first`: by what it does without a state."""

    rows: list[int]
    places: list[list[int]]
    is_first: bool


class _Call:
    """A call of a state layer for the T places of a pass; the rows' states, `held`, become those behind their tokens."""

    def __init__(self, seam: Seam, arguments: dict[str, Any], held: list[Tensor]) -> None:
        self._seam = seam
        self._arguments = arguments
        self._hidden: Tensor = next(iter(arguments.values()))
        self._held = held
        self._found: list[Tensor] = []

    def run(self, cuts: list[_Cut], projections: Projections | None) -> tuple[Tensor, ...]:
        """What the layer returns of all places."""
        # Without a state a module may take another way through its projections.
        if projections is None or len(cuts) == 1 or any(cut.is_first for cut in cuts):
            for cut in cuts:
                self._run(cut, None)
            return tuple(self._found)
        with projections.shared(self._hidden) as now:
            for cut in cuts:
                self._run(cut, now)
        return projections.finished(tuple(self._found))

    def _run(self, cut: _Cut, now: Now | None) -> None:
        places = torch.tensor(cut.places, device=self._hidden.device)
        held, count = self._held, self._hidden.shape[1]
        # All of them in their order: nothing is copied.
        at = None if cut.rows == list(range(len(held[0]))) else torch.tensor(cut.rows, device=places.device)
        before = held if at is None else [each[at] for each in held]
        arguments = of_places(self._arguments, places, count)
        if now is not None:
            now.places, now.hidden = places, next(iter(arguments.values()))
        outputs, states = self._seam.run(arguments, None if cut.is_first else before)
        if not self._found:
            self._found = [each.new_zeros(1, count, *each.shape[2:]) for each in outputs]
        for found, output in zip(self._found, outputs, strict=True):
            found[0, places.flatten()] = output.flatten(0, 1)
        for k, state in enumerate(states):
            if at is None:
                held[k] = state.to(held[k].dtype)
            else:
                held[k][at] = state.to(held[k].dtype)


def of_places(value: Any, places: Tensor, count: int) -> Any:
    """A call's arguments for these places, int64 [rows, tokens], of its `count`: whatever has a place a token, [1, count, ...], is cut."""
    if isinstance(value, Tensor):
        return value[0][places] if value.shape[:2] == (1, count) else value
    if isinstance(value, tuple | list):
        return type(value)(of_places(each, places, count) for each in value)
    if isinstance(value, dict):
        return {name: of_places(each, places, count) for name, each in value.items()}
    return value


class _Trial:
    """Calls of a layer with random hidden states, to find how it may be called."""

    def __init__(self, seam: Seam, arguments: dict[str, Any]) -> None:
        self._seam = seam
        self._arguments = arguments
        self._hidden: Tensor = next(iter(arguments.values()))
        self._drawn = torch.Generator().manual_seed(0)
        self._call(self._tokens(1, 2), None)

    def projections(self, module: nn.Module) -> Projections | None:
        """Those of its linear layers that are computed once for all tokens; None where that gives other bits."""
        tokens, states = self._tokens(1, 3), self._states(1)
        first = tokens[:, :1]
        found = Projections(module, first, lambda: self._call(first, states)[0])
        arguments = of_places(
            self._arguments, torch.zeros_like(tokens[..., 0], dtype=torch.int64), self._hidden.shape[1]
        )
        arguments |= {next(iter(arguments)): tokens}
        cuts = [_Cut([0], [[place]], False) for place in range(3)]
        alone, shared = (
            _Call(self._seam, arguments, [each.clone() for each in states]).run(cuts, each) for each in (None, found)
        )
        return found if all(map(torch.equal, alone, shared)) else None

    def rows_apart(self) -> float:
        """By how much rows of one call differ from what each gives alone, of the largest number; infinity where they have another shape."""
        most, worst = max(TRIED), 0.0
        tokens, states = self._tokens(most, 1), self._states(most)
        alone = [self._call(tokens[row : row + 1], [each[row : row + 1] for each in states]) for row in range(most)]
        for rows in TRIED:
            together = self._call(tokens[:rows], [each[:rows] for each in states])
            for k, found in enumerate((*together[0], *together[1])):
                expected = torch.cat([(*its[0], *its[1])[k] for its in alone[:rows]])
                if found.shape != expected.shape:
                    return math.inf
                if not torch.equal(found, expected):
                    worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
        return worst

    def goes_on(self) -> bool:
        """Whether every piece of the state before a chunk makes a difference to it."""
        tokens, states = self._tokens(1, 2), self._states(1)
        outputs, _ = self._call(tokens, states)
        for k in range(len(states)):
            others = [torch.zeros_like(each) if i == k else each for i, each in enumerate(states)]
            if all(map(torch.equal, self._call(tokens, others)[0], outputs)):
                return False
        return True

    def is_in_order(self) -> bool:
        """Whether chunks have the bits of single tokens, whatever their length."""
        tokens, first = self._tokens(1, LONGEST_CHUNK), self._states(1)
        states, singles = first, []
        for count in range(1, LONGEST_CHUNK + 1):
            outputs, states = self._call(tokens[:, count - 1 : count], states)
            singles.append(outputs)
            whole = self._call(tokens[:, :count], first)
            expected = [torch.cat(each, 1) for each in zip(*singles, strict=True)]
            if not all(map(torch.equal, (*whole[0], *whole[1]), (*expected, *states))):
                return False
        return True

    def _call(self, tokens: Tensor, states: list[Tensor] | None) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Outputs, and the states behind these tokens."""
        places = torch.zeros(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
        arguments = of_places(self._arguments, places, self._hidden.shape[1])
        handed = None if states is None else [each.clone() for each in states]
        return self._seam.run(arguments | {next(iter(arguments)): tokens}, handed)

    def _tokens(self, rows: int, count: int) -> Tensor:
        drawn = torch.randn(rows, count, self._hidden.shape[-1], generator=self._drawn)
        return drawn.to(self._hidden)

    def _states(self, rows: int) -> list[Tensor]:
        return [
            torch.randn(rows, *piece.shape, generator=self._drawn).to(self._hidden.device, piece.dtype)
            for piece in self._seam.pieces
        ]


class FirstToken:
    """The states of one row that computes its first token, and is forgotten then."""

    def __init__(self, layers: Sequence[StateLayer], device: torch.device) -> None:
        self.starts, self.is_new, self.is_invariant = (0, 1), (True,), False
        self._layers, self._device = layers, device

    def read(self, unit: int, piece: int) -> Tensor:
        """[1, ...]: zeros."""
        its = self._layers[unit].pieces[piece]
        return torch.zeros(1, *its.shape, dtype=its.dtype, device=self._device)

    def write(self, unit: int, piece: int, states: Tensor) -> None:
        """Forget them."""


def follow_states(module: nn.Module) -> tuple[StateLayer, ...]:
    """Make a decoder's state layers go by the states of the forward pass under way, and return them in the order of its modules."""
    _rescale(module)
    ways: dict[Any, _Ways] = {}
    found: list[StateLayer] = []
    for path, each in module.named_modules():
        seam = seam_of(each)
        if seam is not None:
            found.append(StateLayer(len(found), path, each, seam, ways))
    return tuple(found)


def _rescale(module: nn.Module) -> None:
    """RWKV divides weights of late layers when it is first called."""
    for each in module.modules():
        rescale: Any = getattr(each, "_rescale_layers", None)
        if rescale is not None and not each.training and not each.layers_are_rescaled:
            rescale()
