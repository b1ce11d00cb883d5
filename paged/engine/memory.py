"""Memory for the models of an engine: one manager, and a pool for each model.

If layers keep all tokens, they share blocks: as many as fit into the given bytes. Layers of several kinds share pages,
whose size a plan of the model's layers gives; then `num_blocks` counts pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from paged.attention import LayeredPool
from paged.base.budget import as_bytes, blocks_within
from paged.block_manager import BlockManager, LayerGroup, Layout
from paged.engine.config import EngineConfig
from paged.errors import BudgetTooSmall, InvalidConfig
from paged.model.capacity import bytes_per_block, check_kv_dtype, layered_pool_for, plan_of, pool_for
from paged.model.free_memory import check_fits
from paged.model.layer_plan import LayerPlan
from paged.model.loading import LoadedModel
from paged.model.native.fused import fused_decoder
from paged.model.parallel.ranks import Ranks

DEFAULT_BLOCK_SIZE = 16
DEFAULT_KV_BYTES = 256 * 2**20
"""Bytes for what layers keep, if neither blocks nor bytes are named."""


def memory_for(
    config: EngineConfig,
    models: Sequence[LoadedModel],
    longest: int | None,
    kv_dtype: str,
    *,
    ranks: Ranks | None = None,
) -> tuple[BlockManager, list[LayeredPool]]:
    """Make the manager, and a pool for each model; each of the other `ranks` of a split model has as many blocks.
    Raises BudgetTooSmall, and InvalidConfig for more memory than there is, for models that cannot share blocks, and for
    a KV dtype of a model that keeps no K and V."""
    for model in models:
        check_kv_dtype(model, kv_dtype)
    size = block_size_of(config, [each.stride for each in models[0].layers], models[0].path)
    plan = _plan_of(config, models, size, kv_dtype)
    if plan is None:
        groups: tuple[LayerGroup, ...] = (LayerGroup("full"),)
        block_bytes = bytes_per_block(models, size, kv_dtype)
    else:
        groups = tuple(LayerGroup(each.kind, each.reach, each.pages) for each in plan.groups)
        block_bytes = plan.page_bytes
    num_blocks = _num_blocks(config, groups, size, block_bytes, longest)
    host_blocks = config.memory.host_blocks
    check_fits(
        num_blocks,
        host_blocks,
        block_bytes,
        models[0].device,
        ranks=1 if ranks is None else ranks.count,
        free=None if ranks is None else ranks.free,
    )
    manager = BlockManager(
        num_blocks,
        size,
        host_blocks=host_blocks,
        prefix_caching=config.memory.prefix_caching,
        host_caching=config.memory.host_caching,
        groups=groups,
    )
    # If a page is a block with K and V of all layers, the pool is one of equal layers.
    if plan is not None and not (models[0].is_uniform and [each.pages for each in plan.groups] == [1]):
        pools = [
            layered_pool_for(models[0], plan, num_blocks=num_blocks, num_host_blocks=host_blocks, kv_dtype=kv_dtype)
        ]
    else:
        pools = [
            pool_for(each, num_blocks=num_blocks, block_size=size, num_host_blocks=host_blocks, kv_dtype=kv_dtype)
            for each in models
        ]
    for pool in pools:
        manager.must_fit(pool)
    return manager, pools


def block_size_of(config: EngineConfig, strides: Iterable[int], name: object) -> int:
    """Return the tokens of a block for a model with these strides: a layer of stride s keeps an entry of every s
    tokens. Raises InvalidConfig for a block size that is not a whole number of entries."""
    several = sorted(set(strides) - {1})
    size, whole = config.memory.block_size, math.lcm(*several)
    if size is None:
        return math.lcm(DEFAULT_BLOCK_SIZE, whole)
    if size % whole:
        raise InvalidConfig(
            f"block_size is {size}; {name} keeps an entry of every {' and of every '.join(map(str, several))} tokens, and a block has to be "
            f"a whole number of them. Take block_size={-(-size // whole) * whole}."
        )
    return size


def _plan_of(config: EngineConfig, models: Sequence[LoadedModel], block_size: int, kv_dtype: str) -> LayerPlan | None:
    """Return the plan of a model's layers of several kinds; None if all are held as if they kept all tokens. Windows
    are held so with a draft model, and beside full layers if one call computes all layers: it wants them side by
    side."""
    model, *others = models
    kinds = {(each.kind, each.reach) for each in model.layers}
    is_full = not any(kind != "full" for kind, _ in kinds)
    if model.is_uniform and (is_full or others):
        return None
    if model.is_uniform and len(kinds) > 1 and fused_decoder(model.module) is not None:
        return None
    if others:
        raise InvalidConfig(
            f'speculate="draft": layers of several kinds, as {model.path} has, do not share blocks with another model.'
        )
    return plan_of(model, block_size=block_size, kv_dtype=kv_dtype)


def _num_blocks(
    config: EngineConfig,
    groups: Sequence[LayerGroup],
    block_size: int,
    block_bytes: int,
    longest: int | None,
) -> int:
    memory, layout = config.memory, Layout(groups, block_size, keeps=config.memory.prefix_caching)
    if memory.num_blocks is not None:
        return memory.num_blocks
    if layout.is_plain:
        if memory.kv_cache_bytes is not None:
            return blocks_within(memory.kv_cache_bytes, block_bytes, block_size, config.model.max_model_len or 1)
        room = max(1, DEFAULT_KV_BYTES // block_bytes)
        return room if longest is None else min(room, config.scheduling.max_sequences * -(-longest // block_size))
    least = layout.pages_for(config.model.max_model_len or 1) + layout.spare_pages
    given = DEFAULT_KV_BYTES if memory.kv_cache_bytes is None else memory.kv_cache_bytes
    if memory.kv_cache_bytes is not None and given // block_bytes < least:
        raise BudgetTooSmall(
            f"{as_bytes(given)} hold {given // block_bytes:,} pages; one sequence of {config.model.max_model_len or 1:,} tokens takes "
            f"{least:,} of {as_bytes(block_bytes)}.",
            wanted=least * block_bytes,
            given=given,
        )
    room = max(least, given // block_bytes)
    if longest is None or memory.kv_cache_bytes is not None:
        return room
    return min(room, config.scheduling.max_sequences * (layout.pages_for(longest) + layout.spare_pages))
