"""Trials of a state layer with random hidden states: what it keeps, and how it may be called."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from paged.attention import LayeredPool, StatePlace
from paged.model.native.recurrences import RowPages
from paged.model.states.calls import Call, Cut, of_places
from paged.model.states.projections import Projections
from paged.model.states.recurrences import Recurrence
from paged.model.states.seams import Seam

# Largest difference by rounding, as a share of the largest number; in bfloat16, too.
CLOSE = 0.05
# The same for a recurrence in C, and the tokens that it is tried with.
_NEAR = {torch.float32: 1e-3, torch.bfloat16: CLOSE}
_TOKENS = 5
# Most rows of a round and tokens of a chunk that are tried: those of a tile.
MOST_ROWS = LONGEST_CHUNK = 32


class Ways(NamedTuple):
    """How a layer may be called, as trials found it.

    takes_rows    a round may have many rows
    keeps_bits    a round of many rows gives each row the bits that it has alone
    goes_on       a chunk may begin with a state
    is_in_order   a chunk gives the bits of rounds
    """

    takes_rows: bool
    keeps_bits: bool
    goes_on: bool
    is_in_order: bool


class Trial:
    """Calls of one layer. The first, for two tokens without a state, finds its pieces. `arguments`: those of any call of the layer."""

    def __init__(self, seam: Seam, arguments: dict[str, Any]) -> None:
        self._seam = seam
        self._arguments = arguments
        self._hidden: Tensor = next(iter(arguments.values()))
        self._drawn = torch.Generator().manual_seed(0)
        self._call(self._tokens(1, 2), None)

    def recurrence(self, module: nn.Module) -> Recurrence | None:
        """Return the layer's recurrence in C; None if it has none, or if its results differ from the module's, token by token."""
        dtype = self._hidden.dtype
        if self._hidden.device.type != "cpu" or dtype not in _NEAR:
            return None
        tokens, states = self._tokens(1, _TOKENS), self._states(1)
        try:
            found = Recurrence(module, self._seam)
            rows = self._on_pages(states)
            outputs = found.run(self._arguments_of(tokens), np.array([0, _TOKENS]), rows)
        except MemoryError:
            raise
        except Exception:
            # It is refused or not compiled here, or another version of transformers calls these functions in another way.
            return None
        singles = []
        for token in range(_TOKENS):
            single, states = self._call(tokens[:, token : token + 1], states)
            singles.append(single)
        expected = [*(torch.cat(each, 1) for each in zip(*singles, strict=True)), *states]
        after = [its.state.read(torch.from_numpy(its.write)) for its in rows]
        pairs = zip((*outputs, *after), expected, strict=True)
        is_near = all((its - theirs).abs().max() <= _NEAR[dtype] * theirs.abs().max() for its, theirs in pairs)
        return found if is_near else None

    def _on_pages(self, states: list[Tensor]) -> list[RowPages]:
        """Write these states of one row to page 0 of a pool. Return the pages of each piece: read from page 0, written to page 1, with a unit for each head."""
        places, end = [], 0
        for piece in self._seam.pieces:
            units = 1 if piece.tail else piece.shape[0]
            size = -(-math.prod(piece.shape) * piece.dtype.itemsize // units)
            places.append(StatePlace([(0, end + size * unit) for unit in range(units)], size, piece.shape, piece.dtype))
            end += -(-size * units // 16) * 16
        pool = LayeredPool({}, num_blocks=2, page_bytes=end, block_size=1, states=[places], state_group=0)
        found = [RowPages(its, *(np.array([[page]], np.int32) for page in (0, 1))) for its in pool.states[0]]
        for its, state in zip(found, states, strict=True):
            its.state.write(torch.from_numpy(its.read), state)
        return found

    def projections(self, module: nn.Module) -> Projections | None:
        """Return the layer's shared projections; None if there are none, or if they give other bits."""
        tokens, states = self._tokens(1, 3), self._states(1)
        first = tokens[:, :1]
        found = Projections(module, first, lambda: self._call(first, states)[0])
        if not found:
            return None
        arguments = self._arguments_of(tokens)
        cuts = [Cut([0], [[place]], False) for place in range(3)]
        alone, shared = (
            Call(self._seam, arguments, [each.clone() for each in states]).run(cuts, each) for each in (None, found)
        )
        return found if all(map(torch.equal, alone, shared)) else None

    def rows_apart(self) -> float:
        """Return the largest difference between rows of one call and the same rows alone, as a share of the largest number; infinity for another shape."""
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
        """Whether every piece of the state before a chunk changes its outputs."""
        tokens, states = self._tokens(1, 2), self._states(1)
        outputs, _ = self._call(tokens, states)
        for k in range(len(states)):
            others = [torch.zeros_like(each) if i == k else each for i, each in enumerate(states)]
            if all(map(torch.equal, self._call(tokens, others)[0], outputs)):
                return False
        return True

    def is_in_order(self) -> bool:
        """Whether chunks of every length have the bits of single tokens."""
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
        """Return the outputs, and the states after these tokens."""
        handed = None if states is None else [each.clone() for each in states]
        return self._seam.run(self._arguments_of(tokens), handed)

    def _arguments_of(self, tokens: Tensor) -> dict[str, Any]:
        """Return a call's arguments with these hidden states."""
        places = torch.zeros(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
        arguments = of_places(self._arguments, places, self._hidden.shape[1])
        return arguments | {next(iter(arguments)): tokens}

    def _tokens(self, rows: int, count: int) -> Tensor:
        drawn = torch.randn(rows, count, self._hidden.shape[-1], generator=self._drawn)
        return drawn.to(self._hidden)

    def _states(self, rows: int) -> list[Tensor]:
        return [
            torch.randn(rows, *piece.shape, generator=self._drawn).to(self._hidden.device, piece.dtype)
            for piece in self._seam.pieces
        ]
