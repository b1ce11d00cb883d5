"""How an engine cuts a step into forward passes of one shape."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.errors import InvalidConfig


class Tiling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine cuts a step whose forward passes all have one shape.

    places  tokens of a forward pass; the last one of a step is padded
    piece   positions that attention reads at a time, in every place: up to the longest context in the tile, rounded up to this
    """

    places: int
    piece: int = 1

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} is {getattr(self, name)}; it has to be at least 1")

    def whole_pieces(self, contexts: NDArray[Any]) -> NDArray[Any]:
        """Contexts rounded up to what attention reads."""
        rounded: NDArray[Any] = -(-contexts // self.piece) * self.piece
        return rounded

    def longest_contexts(self, contexts: NDArray[Any]) -> NDArray[Any]:
        """The longest context of each tile, [tiles]; of `contexts` [tokens], what each token attends to, in their order."""
        if not len(contexts):
            return contexts
        longest: NDArray[Any] = np.maximum.reduceat(contexts, np.arange(0, len(contexts), self.places))
        return longest
