"""Raw memory of both tiers in pages of one size. Pages are copied and poisoned here, whatever the layouts put on them.

    device   uint8 [num_pages + 1, page_bytes]
    host     uint8 [num_host_pages, page_bytes]

Page `num_pages` is scratch: it is never given out and stays zero, and padding points to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from paged.base.arguments import is_integer
from paged.base.words import shown
from paged.errors import InvalidPool

# torch's indexed writes go element by element, so pages are viewed as the widest of these that divides them.
_WORDS = (torch.int64, torch.int32, torch.int16)


class Pages:
    """Device and host memory of so many pages, all zero at first.

    Raises InvalidPool for sizes that are no integers of at least 1 (host: of at least 0), for a device that torch does
    not know, and whatever torch raises if it cannot allocate them.
    """

    def __init__(
        self, *, num_pages: int, page_bytes: int, device: torch.device | str = "cpu", num_host_pages: int = 0
    ) -> None:
        check_sizes(1, num_blocks=num_pages, page_bytes=page_bytes)
        check_sizes(0, num_host_blocks=num_host_pages)
        self.num_pages = num_pages
        self.num_host_pages = num_host_pages
        self.page_bytes = page_bytes
        try:
            self.device = torch.device(device)
        except (TypeError, ValueError, RuntimeError):
            raise InvalidPool(f"device has to be one that torch knows; got {shown(device)}.") from None
        is_cuda = self.device.type == "cuda"
        self.on_device = torch.zeros(num_pages + 1, page_bytes, dtype=torch.uint8, device=self.device)
        self.on_host = torch.zeros(num_host_pages, page_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        word = next((each for each in _WORDS if page_bytes % each.itemsize == 0), torch.uint8)
        self._device_words, self._host_words = self.on_device.view(word), self.on_host.view(word)

    def view(self, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
        """Return the device's memory as a tensor of this size and these strides, in elements, from byte `offset` of the
        first page on. Raises InvalidPool if a page or the offset is not a whole number of elements."""
        for name, value in (("pages", self.page_bytes), ("an offset", offset)):
            if value % dtype.itemsize:
                raise InvalidPool(f"{name} of {value} bytes: {dtype} takes multiples of {dtype.itemsize}.")
        whole = self.on_device.view(-1).view(dtype)
        return whole.as_strided(tuple(size), tuple(stride), offset // dtype.itemsize)

    def poison(self, pages: Tensor) -> None:
        """Fill device pages, int64 [n], with bytes that are NaN in every float, so that a read of freed pages shows."""
        self._device_words.index_fill_(0, pages.to(self.device), 255 if self._device_words.dtype == torch.uint8 else -1)

    def device_to_host(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy device pages to host pages, both int64 [n]. A GPU with Triton does it later, in the current stream."""
        _copy(self._device_words, self._host_words, sources, destinations)

    def host_to_device(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy host pages to device pages, both int64 [n], as `device_to_host`."""
        _copy(self._host_words, self._device_words, sources, destinations)

    def device_to_device(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy device pages to other device pages, both int64 [n]."""
        staged = self._device_words.index_select(0, sources.to(self.device))
        self._device_words.index_copy_(0, destinations.to(self.device), staged)

    def read(self, pages: Tensor) -> Tensor:
        """Return a copy of device pages, int64 [n], in the processor's memory: uint8 [n, page_bytes]."""
        return self._device_words.index_select(0, pages.to(self.device)).to("cpu").view(torch.uint8)

    def write(self, pages: Tensor, data: Tensor) -> None:
        """Put `data`, uint8 [n, page_bytes] and contiguous, into device pages, int64 [n]."""
        words = data.view(self._device_words.dtype).to(self.device)
        self._device_words.index_copy_(0, pages.to(self.device), words)


def check_sizes(least: int, **sizes: object) -> None:
    """Raise InvalidPool, with the name, unless each size is an integer from `least` to 2^31 - 1."""
    for name, value in sizes.items():
        if not is_integer(value) or not least <= value < 2**31:
            raise InvalidPool(f"{name} has to be an integer from {least} to 2^31 - 1; got {shown(value)}.")


def _copy(source: Tensor, target: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copy rows `sources` of `source` to rows `destinations` of `target`."""
    gpu = source if source.is_cuda else target
    copy_rows = _kernel(gpu.device) if gpu.is_cuda else None
    if copy_rows is not None:
        copy_rows(source, target, sources, destinations)
    else:
        staged = source.index_select(0, sources.to(source.device)).to(target.device)
        target.index_copy_(0, destinations.to(target.device), staged)


@cache
def _kernel(device: torch.device) -> Any:
    """Return the copy as one kernel; None if it does not run here: it needs Triton, a C compiler, a folder to write."""
    try:
        copy_rows = import_module("paged.attention.copy_kernel").copy_rows
        word = torch.zeros(1, 1, dtype=torch.int64, device=device)
        copy_rows(word, word, word[0], word[0])
    except Exception:
        return None
    return copy_rows
