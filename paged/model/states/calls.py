"""One call of a state layer for all places of a pass, made of calls of its module for some of them."""

from __future__ import annotations

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
