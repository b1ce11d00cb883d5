"""Trials of a state layer with random hidden states: what it keeps, and how it may be called without changing bits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paged.model.states.calls import Call, Cut, of_places
from paged.model.states.projections import Projections
from paged.model.states.seams import Seam

# What rounding may make of a number, of the largest; in bfloat16, too.
CLOSE = 0.05
# Rows of a round and tokens of a chunk that are tried: those of a tile.
MOST_ROWS = LONGEST_CHUNK = 32


class Ways(NamedTuple):
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


class Trial:
    """Calls of one layer, the first of them for two tokens without a state, by which its pieces are known. `arguments`: of a call of it."""

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
        cuts = [Cut([0], [[place]], False) for place in range(3)]
        alone, shared = (
            Call(self._seam, arguments, [each.clone() for each in states]).run(cuts, each) for each in (None, found)
        )
        return found if all(map(torch.equal, alone, shared)) else None

    def rows_apart(self) -> float:
        """By how much rows of one call differ from what each gives alone, of the largest number; infinity where they have another shape."""
        worst = 0.0
        tokens, states = self._tokens(MOST_ROWS, 1), self._states(MOST_ROWS)
        alone = [
            self._call(tokens[row : row + 1], [each[row : row + 1] for each in states]) for row in range(MOST_ROWS)
        ]
        for rows in range(2, MOST_ROWS + 1):
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
