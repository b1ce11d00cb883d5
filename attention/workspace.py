"""Reusable memory for what is gathered from a pool: fresh memory of this size costs page faults in every layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MOST_SPARE = 64 * 2**20  # bytes that a new buffer is larger than needed, at most


class Workspace:
    """A buffer for each name, dtype and device. One that is too small is replaced by one of twice the needed size, or
    of 64 MiB more if that is less; none shrinks. A result is valid until the next call with its name."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def gathered(self, name: str, source: Tensor, rows: Tensor) -> Tensor:
        """Return rows, int64 [n], of `source` [m, ...]: [n, ...]."""
        shape = (len(rows), *source.shape[1:])
        return torch.index_select(source, 0, rows, out=self._room(name, shape, source.dtype, source.device))

    def _room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        count = math.prod(shape)
        buffer = self._buffers.get((name, dtype, device))
        if buffer is None or len(buffer) < count:
            # Free the old buffer before the new one is made.
            self._buffers.pop((name, dtype, device), None)
            buffer = None
            room = count + min(count, _MOST_SPARE // dtype.itemsize)
            # Usable outside inference mode, too.
            with torch.inference_mode(False):
                buffer = self._buffers[name, dtype, device] = torch.empty(room, dtype=dtype, device=device)
        return buffer[:count].view(shape)
