"""Memory for a model's K and V: how many blocks a number of bytes holds, and a pool of so many.

Knows the shape of a model's K and V. Does not know who uses a block.
"""

from __future__ import annotations

from attention import KVPool
from paged.model.errors import BudgetTooSmall
from paged.model.loading import LoadedModel


def bytes_per_block(model: LoadedModel, block_size: int) -> int:
    """Bytes that one block takes over all layers of the model."""
    return KVPool.bytes_per_block(
        num_layers=model.num_layers,
        block_size=block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=model.dtype,
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


def blocks_within(model: LoadedModel, num_bytes: int, block_size: int, longest: int = 1) -> int:
    """Blocks that fit in `num_bytes`. Raises BudgetTooSmall when they do not hold one sequence of `longest` tokens."""
    each = bytes_per_block(model, block_size)
    num_blocks, needed = num_bytes // each, -(-longest // block_size)
    if num_blocks >= needed:
        return num_blocks
    wanted = needed * each
    if needed == 1:
        message = f"{num_bytes:,} bytes do not hold one block of {block_size} tokens; that takes {wanted:,}."
    else:
        held = num_blocks * block_size
        message = f"{num_bytes:,} bytes hold {held:,} tokens; one sequence of {longest:,} takes {wanted:,}."
    raise BudgetTooSmall(message, wanted=wanted, given=num_bytes)
