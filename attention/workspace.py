"""Memory for what is gathered from a pool, allocated once: fresh memory of this size costs page faults in every layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Bytes that a buffer is larger than it has to be, at most.
_MOST_SPARE = 64 * 2**20


class Workspace:
    """A buffer for each name, dtype and device, twice as large as what was asked for when it last grew, at most 64 MiB more; it never
    shrinks. What it gave for a name is gone with the next call."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def gathered(self, name: str, source: Tensor, rows: Tensor) -> Tensor:
        """Rows, int64 [n], of source [m, ...]: [n, ...]."""
        shape = (len(rows), *source.shape[1:])
        return torch.index_select(source, 0, rows, out=self._room(name, shape, source.dtype, source.device))

    def _room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        count = math.prod(shape)
        buffer = self._buffers.get((name, dtype, device))
        if buffer is None or len(buffer) < count:
            # Not two of them at once.
            self._buffers.pop((name, dtype, device), None)
            buffer = None
            room = count + min(count, _MOST_SPARE // dtype.itemsize)
            # Of use outside inference mode, too.
            with torch.inference_mode(False):
                buffer = self._buffers[name, dtype, device] = torch.empty(room, dtype=dtype, device=device)
        return buffer[:count].view(shape)
