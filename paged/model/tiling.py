"""The tiles into which an engine cuts a step."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.errors import InvalidConfig


class Tiling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine cuts a step whose forward passes all have one shape.

    places  tokens of a forward pass; the last pass of a step is padded
    piece   positions that attention reads at a time; every place reads the longest context in its tile, rounded up to pieces
    """

    places: int
    piece: int = 1

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} is {getattr(self, name)}; it has to be at least 1")

    def whole_pieces(self, contexts: NDArray[Any]) -> NDArray[Any]:
        """Return contexts rounded up to whole pieces."""
        rounded: NDArray[Any] = -(-contexts // self.piece) * self.piece
        return rounded

    def longest_contexts(self, contexts: NDArray[Any]) -> NDArray[Any]:
        """Return the longest context of each tile, [tiles], given the context of each token in order, [tokens]."""
        if not len(contexts):
            return contexts
        longest: NDArray[Any] = np.maximum.reduceat(contexts, np.arange(0, len(contexts), self.places))
        return longest
