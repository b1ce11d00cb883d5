"""The tensors that hold K and V of every block, on the device and on the host.

    device   [layers, 2, num_blocks + 1, block_size, num_kv_heads, head_dim]    K and V of a layer are contiguous, and so is a block
    host     [num_host_blocks, layers, 2, block_size, num_kv_heads, head_dim]   a block is contiguous over all layers: one copy moves it

Block `num_blocks`, one beyond those that anybody is given, is scratch: it stays zero, and padding points to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged.errors import InvalidPool


class KVPool:
    """Device and host memory for `num_blocks` and `num_host_blocks` blocks of every layer.

    Raises InvalidPool for sizes below 1 (host: below 0), and whatever torch raises when the memory cannot be had.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        num_host_blocks: int = 0,
    ) -> None:
        sizes = {
            "num_layers": num_layers,
            "num_blocks": num_blocks,
            "block_size": block_size,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        }
        for name, value in sizes.items():
            if value < 1:
                raise InvalidPool(f"{name} has to be at least 1; got {value}.")
        if num_host_blocks < 0:
            raise InvalidPool(f"num_host_blocks has to be at least 0; got {num_host_blocks}.")
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.num_host_blocks = num_host_blocks
        self.device = torch.device(device)
        self.dtype = dtype
        block = (block_size, num_kv_heads, head_dim)
        self._device_kv = torch.zeros(num_layers, 2, num_blocks + 1, *block, dtype=dtype, device=self.device)
        is_cuda = self.device.type == "cuda"
        self._host_kv = torch.zeros(num_host_blocks, num_layers, 2, *block, dtype=dtype, pin_memory=is_cuda)
        # Slot views, made once, because every layer of every step asks.
        flat = self._device_kv.flatten(2, 3)
        self._slots = [(flat[layer, 0], flat[layer, 1]) for layer in range(num_layers)]

    @staticmethod
    def bytes_per_block(
        *, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes that one block takes over all layers, K and V."""
        return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize

    @property
    def scratch_block(self) -> int:
        """The block that padding points to; all zero, never written."""
        return self.num_blocks

    @property
    def scratch_slot(self) -> int:
        """The first slot of the scratch block."""
        return self.num_blocks * self.block_size

    def keys(self, layer: int) -> Tensor:
        """[num_blocks + 1, block_size, num_kv_heads, head_dim]: K of a layer."""
        return self._device_kv[layer, 0]

    def values(self, layer: int) -> Tensor:
        """[num_blocks + 1, block_size, num_kv_heads, head_dim]: V of a layer."""
        return self._device_kv[layer, 1]

    def slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer by slot, each [(num_blocks + 1) * block_size, num_kv_heads, head_dim]."""
        return self._slots[layer]

    def write_kv(self, layer: int, slot_mapping: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put K and V, each [T, num_kv_heads, head_dim], into these distinct slots, int64 [T]."""
        key_slots, value_slots = self._slots[layer]
        key_slots.index_copy_(0, slot_mapping, keys)
        value_slots.index_copy_(0, slot_mapping, values)

    def written(self, slot_mapping: Tensor) -> None:
        """K and V of all layers go into these distinct slots, int64 [T], by the hand of somebody who knows where the pool lies. Of use to
        who keeps account of it."""

    def poison(self, blocks: Tensor) -> None:
        """Fill device blocks, int64 [n], with NaN: whoever reads one after it was freed shows it."""
        self._device_kv[:, :, blocks] = torch.nan

    def device_to_host(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy device blocks to host blocks, both int64 [n]: one gather into a staging buffer, one copy."""
        staged = self._device_kv[:, :, sources.to(self.device)].permute(2, 0, 1, 3, 4, 5)
        self._host_kv[destinations] = staged.to("cpu")

    def host_to_device(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy host blocks to device blocks, both int64 [n]."""
        staged = self._host_kv[sources].to(self.device)
        self._device_kv[:, :, destinations.to(self.device)] = staged.permute(1, 2, 0, 3, 4, 5)

    def device_to_device(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy device blocks to other device blocks, both int64 [n]."""
        self._device_kv[:, :, destinations.to(self.device)] = self._device_kv[:, :, sources.to(self.device)]
