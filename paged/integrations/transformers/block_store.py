"""The keys and values of transformers as blocks for our manager: its tensors, the tables that it reads, the copies of a step.

There are two layouts: up to about 5.18 a pair of tensors for each layer, later one tensor of bytes, which begins with two
sectors of trash.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged.attention import run_moves
from paged.errors import RefusedByPaged


class BlockStore:
    """The blocks of a PagedAttentionCache whose layers all keep every token, and host memory of host_bytes.

    num_blocks, num_host_blocks, block_size
                    by our BlockManager's count
    first_block     transformers' id of our block 0
    longest_decode  tokens up to which its kernel for decoding rows reads tables; 0: it has none
    tables          by request id, transformers' ids of the blocks that it reads
    """

    def __init__(self, cache: Any, host_bytes: float = 0) -> None:
        if hasattr(cache, "cache_allocators"):
            (allocator,) = cache.cache_allocators.values()
            self.block_size: int = allocator.tokens_per_page
            self.num_blocks: int = allocator.num_blocks
            self.first_block: int = cache.pool.num_reserved_sectors * allocator.blocks_per_sector
            self.longest_decode: int = cache.max_decode_fast_path_length
            tensors = [cache.cache_tensor]
            num_stored = cache.cache_tensor.numel() // allocator.bytes_per_block
        else:
            (allocator,) = cache.group_cache_managers
            self.block_size, self.num_blocks, self.first_block = cache.block_size, cache.num_blocks, 0
            self.longest_decode = cache.max_blocks_per_request * cache.block_size
            tensors = [*cache.key_cache, *cache.value_cache]
            num_stored = tensors[0].shape[0] // cache.block_size
        self.tables: dict[str, list[int]] = allocator.block_table
        # Each [blocks, numbers of a block]; a block has a row in each.
        self._device = [tensor.view(num_stored, -1) for tensor in tensors]
        bytes_per_block = sum(plane.shape[1] * plane.element_size() for plane in self._device)
        self.num_host_blocks: int = int(host_bytes // bytes_per_block)
        if host_bytes and not self.num_host_blocks:
            raise RefusedByPaged(
                f"{host_bytes:,.0f} bytes of host memory hold no block: one takes {bytes_per_block:,}."
            )
        is_cuda = self._device[0].is_cuda
        self._host = [
            torch.empty((self.num_host_blocks, plane.shape[1]), dtype=plane.dtype, pin_memory=is_cuda)
            for plane in self._device
            if self.num_host_blocks
        ]

    def run(self, moves: Any) -> None:
        """Make a step's copies, before its forward pass."""
        if len(moves):
            run_moves(self, moves)

    def device_to_host(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy blocks; our ids, int64 [n] each."""
        for device, host in zip(self._device, self._host, strict=True):
            host[destinations] = device[sources + self.first_block].to(host.device)

    def host_to_device(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy blocks; our ids, int64 [n] each."""
        for device, host in zip(self._device, self._host, strict=True):
            device[destinations + self.first_block] = host[sources].to(device.device)

    def device_to_device(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy blocks; our ids, int64 [n] each."""
        for device in self._device:
            device[destinations + self.first_block] = device[sources + self.first_block]
