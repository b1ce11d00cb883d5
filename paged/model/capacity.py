"""Memory for a model's K and V: how many blocks a number of bytes holds, and a pool of so many."""

from __future__ import annotations

from collections.abc import Sequence

from paged.attention import KVPool
from paged.base import budget
from paged.model.loading import LoadedModel


def bytes_per_block(models: Sequence[LoadedModel], block_size: int) -> int:
    """Bytes that one block takes over all layers of the models that share it."""
    return sum(
        KVPool.bytes_per_block(
            num_layers=model.num_layers,
            block_size=block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=model.dtype,
        )
        for model in models
    )


def pool_for(
    model: LoadedModel, *, num_blocks: int, block_size: int, num_host_blocks: int = 0, kind: type[KVPool] = KVPool
) -> KVPool:
    """A pool for the K and V of this model, on its device and in its dtype. Raises attention's InvalidPool."""
    return kind(
        num_layers=model.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=model.dtype,
        device=model.device,
        num_host_blocks=num_host_blocks,
    )


def blocks_within(models: Sequence[LoadedModel], num_bytes: int, block_size: int, longest: int = 1) -> int:
    """Blocks that fit in `num_bytes`. Raises BudgetTooSmall when they do not hold one sequence of `longest` tokens."""
    return budget.blocks_within(num_bytes, bytes_per_block(models, block_size), block_size, longest)
