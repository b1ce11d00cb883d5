"""A call of a state layer for all places of a pass, as calls of its module for some places each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged.model.states.projections import Now, Projections
from paged.model.states.seams import Seam


class Cut(NamedTuple):
    """The places of one call of a layer's module: for each of these rows, as many places. `is_first`: the module gets no state."""

    rows: list[int]
    places: list[list[int]]
    is_first: bool

    def view(self, count: int) -> Callable[[Tensor], Tensor] | None:
        """Return a function from values of all places, [1, count, ...], to a view of these, [rows, tokens, ...]. None: there is no such view, since the
        places are neither consecutive places of one row nor the only place of every row."""
        first, stop = self.places[0][0], self.places[-1][-1] + 1
        if self.places == [[place] for place in range(count)]:
            return lambda values: values.transpose(0, 1)
        if self.places == [[*range(first, stop)]]:
            return lambda values: values[:, first:stop]
        return None


class Call:
    """A call of a state layer for the T places of a pass. It replaces the rows' states in `held` by those after their tokens."""

    def __init__(self, seam: Seam, arguments: dict[str, Any], held: list[Tensor]) -> None:
        self._seam = seam
        self._arguments = arguments
        self._hidden: Tensor = next(iter(arguments.values()))
        self._held = held
        self._found: list[Tensor] = []

    def run(self, cuts: list[Cut], projections: Projections | None) -> tuple[Tensor, ...]:
        """Call the module for each cut. Return the layer's outputs for all places."""
        # Without a state a module may call its projections in another way.
        if projections is None or len(cuts) == 1 or any(cut.is_first for cut in cuts):
            for cut in cuts:
                self._run(cut, None)
            return tuple(self._found)
        with projections.shared(self._hidden) as now:
            for cut in cuts:
                self._run(cut, now)
        return projections.finished(tuple(self._found))

    def _run(self, cut: Cut, now: Now | None) -> None:
        count, device = self._hidden.shape[1], self._hidden.device
        view, places = cut.view(count), torch.empty(0)
        if view is None or now is not None:
            places = torch.tensor(cut.places, device=device)
        # Cloned, since a module may overwrite its arguments.
        arguments = of_places(self._arguments, places if view is None else lambda its: view(its).clone(), count)
        if now is not None:
            now.places, now.hidden = places, next(iter(arguments.values()))
        # None: all rows in their order, so that nothing is copied.
        rows: Any = None
        if len(cut.rows) == 1 < len(self._held[0]):
            rows = slice(cut.rows[0], cut.rows[0] + 1)
        elif cut.rows != list(range(len(self._held[0]))):
            rows = torch.tensor(cut.rows, device=device)
        before = self._held if rows is None else [each[rows].clone() for each in self._held]
        outputs, states = self._seam.run(arguments, None if cut.is_first else before)
        if not self._found:
            self._found = [each.new_zeros(1, count, *each.shape[2:]) for each in outputs]
        for found, output in zip(self._found, outputs, strict=True):
            if view is None:
                found[0, places.flatten()] = output.flatten(0, 1)
            else:
                view(found).copy_(output)
        for k, state in enumerate(states):
            if rows is None:
                self._held[k] = state.to(self._held[k].dtype)
            else:
                self._held[k][rows] = state.to(self._held[k].dtype)


def of_places(value: Any, places: Tensor | Callable[[Tensor], Tensor], count: int) -> Any:
    """Return a call's arguments for some of its `count` places: tensors [1, count, ...] are cut. `places`: int64 [rows, tokens], or a function that cuts."""
    if isinstance(value, Tensor):
        if value.shape[:2] != (1, count):
            return value
        return value[0][places] if isinstance(places, Tensor) else places(value)
    if isinstance(value, tuple | list):
        return type(value)(of_places(each, places, count) for each in value)
    if isinstance(value, dict):
        return {name: of_places(each, places, count) for name, each in value.items()}
    return value
