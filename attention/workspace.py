"""Memory for what is gathered from a pool, allocated once: fresh memory of this size costs page faults in every layer.

Knows shapes. Does not know what is gathered, or why.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Grows to what was asked of it, a buffer for each name, dtype and device. What it gave for a name is gone with the next call."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def gathered(self, name: str, source: Tensor, rows: Tensor) -> Tensor:
        """Rows, int64 [n], of source [m, ...]: [n, ...]."""
        shape = (len(rows), *source.shape[1:])
        return torch.index_select(source, 0, rows, out=self._room(name, shape, source.dtype, source.device))

    def _room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        count = 1
        for size in shape:
            count *= size
        buffer = self._buffers.get((name, dtype, device))
        if buffer is None or len(buffer) < count:
            buffer = self._buffers[name, dtype, device] = torch.empty(2 * count, dtype=dtype, device=device)
        return buffer[:count].view(shape)
