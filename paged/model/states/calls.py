"""One call of a state layer for all places of a pass, made of calls of its module for some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged.model.states.projections import Now, Projections
from paged.model.states.seams import Seam


class Cut(NamedTuple):
    """Places of a pass for which a layer's module is called at once: of each of these rows as many. `is_first`: by what it does without a state."""

    rows: list[int]
    places: list[list[int]]
    is_first: bool

    def view(self, count: int) -> Callable[[Tensor], Tensor] | None:
        """What takes these places, [rows, tokens, ...], of all, [1, count, ...], where they are views: of one row one after the other, or of all rows the
        only one. None: their numbers have to be taken to the device."""
        first, stop = self.places[0][0], self.places[-1][-1] + 1
        if self.places == [[place] for place in range(count)]:
            return lambda values: values.transpose(0, 1)
        if self.places == [[*range(first, stop)]]:
            return lambda values: values[:, first:stop]
        return None


class Call:
    """A call of a state layer for the T places of a pass; the rows' states, `held`, become those behind their tokens."""

    def __init__(self, seam: Seam, arguments: dict[str, Any], held: list[Tensor]) -> None:
        self._seam = seam
        self._arguments = arguments
        self._hidden: Tensor = next(iter(arguments.values()))
        self._held = held
        self._found: list[Tensor] = []

    def run(self, cuts: list[Cut], projections: Projections | None) -> tuple[Tensor, ...]:
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

    def _run(self, cut: Cut, now: Now | None) -> None:
        count, device = self._hidden.shape[1], self._hidden.device
        view, places = cut.view(count), torch.empty(0)
        if view is None or now is not None:
            places = torch.tensor(cut.places, device=device)
        # A module may write over what it gets.
        arguments = of_places(self._arguments, places if view is None else lambda its: view(its).clone(), count)
        if now is not None:
            now.places, now.hidden = places, next(iter(arguments.values()))
        # None: all of them in their order, and nothing is copied.
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
    """A call's arguments for these places, int64 [rows, tokens], or what takes them, of its `count`: whatever has a place a token, [1, count, ...], is cut."""
    if isinstance(value, Tensor):
        if value.shape[:2] != (1, count):
            return value
        return value[0][places] if isinstance(places, Tensor) else places(value)
    if isinstance(value, tuple | list):
        return type(value)(of_places(each, places, count) for each in value)
    if isinstance(value, dict):
        return {name: of_places(each, places, count) for name, each in value.items()}
    return value
