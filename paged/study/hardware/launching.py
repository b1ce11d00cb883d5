"""The time that an engine adds to the kernels of a step."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.errors import InvalidConfig


class Launching(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine puts a step on a device.

    host_s       seconds of each step in which the device waits for the host
    graph_sizes  numbers of tokens for which a CUDA graph was captured, ascending: a step of fewer is padded to the next; () and above the
                 last none is
    """

    host_s: float = 0.0
    graph_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.host_s) and self.host_s >= 0):
            raise InvalidConfig(f"host_s is {self.host_s}; it has to be a finite number, 0 or more")
        if any(size < 1 for size in self.graph_sizes) or list(self.graph_sizes) != sorted(set(self.graph_sizes)):
            raise InvalidConfig(f"graph_sizes is {self.graph_sizes}; sizes are above 0 and rise")

    def padded(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens that kernels see, int64; 0 stays 0."""
        if not self.graph_sizes:
            return tokens
        sizes = np.array(self.graph_sizes, np.int64)
        place = np.searchsorted(sizes, tokens)
        return np.where((tokens > 0) & (place < len(sizes)), sizes[np.minimum(place, len(sizes) - 1)], tokens)
