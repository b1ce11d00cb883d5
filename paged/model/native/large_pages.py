"""Memory on pages of 2 MiB, if the system has them.

A decode reads all weights once. On pages of 4 KiB the processor may spend more of that time on address lookups than on reading.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

_PAGE = 2 * 2**20
# Bytes mapped at a time; a tensor of more than half has a region of its own. Memory is not resident before it is written.
_REGION = 16 * _PAGE
_LINE = 64
_is_there = hasattr(mmap, "MADV_HUGEPAGE")


class _Region:
    """Mapped memory, allocated from its front; it is unmapped with the last tensor on it."""

    def __init__(self, size: int) -> None:
        try:
            self._memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{size:,} bytes cannot be mapped: {error.strerror}") from error
        # A kernel may be built without large pages.
        with suppress(OSError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._at = -torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr() % _PAGE
        self.left = size

    def take(self, size: int) -> Tensor:
        found = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=self._at)
        taken = -(-size // _LINE) * _LINE
        self._at += taken
        self.left -= taken
        return found


_shared: list[_Region] = []
_lock = Lock()


def empty(size: int) -> Tensor:
    """Allocate uint8 [size], `size` at least 1, at the start of a cache line, on large pages of its own if there are any. Raises MemoryError, or the error
    of torch's allocator."""
    return _Region(size + _LINE).take(size) if _is_there else aligned(size)


def aligned(size: int) -> Tensor:
    """Allocate uint8 [size] at the start of a cache line, in torch's memory."""
    room = torch.empty(size + _LINE, dtype=torch.uint8)
    return room[-room.data_ptr() % _LINE :][:size]


def on_large_pages(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of a CPU tensor on large pages, next to earlier ones if it is small."""
    size = tensor.nbytes
    if not size:
        return tensor
    if not _is_there or size > _REGION // 2:
        room = empty(size)
    else:
        with _lock:
            if not _shared or _shared[0].left < size + _LINE:
                _shared[:] = [_Region(_REGION)]
            room = _shared[0].take(size)
    return room.view(tensor.dtype).view(tensor.shape).copy_(tensor)
