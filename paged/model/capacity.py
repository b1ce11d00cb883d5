"""Memory for what a model's layers keep: the bytes of a block, and pools.

Layers that are alike share blocks of all layers (`pool_for`). Layers of several kinds have a plan of groups on pages (`plan_of`, `layered_pool_for`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.attention import EntryPlace, KVPlace, KVPool, LayeredPool, StepTokens
from paged.attention.kv_dtypes import AUTO, CODE_BITS, KV_DTYPES, SKIPPED
from paged.errors import InvalidConfig, UnsupportedModel
from paged.model.layer_plan import LayerPlan, Layers, plan_layers
from paged.model.loading import LoadedModel
from paged.model.places import Pieces, located, places_of
from paged.model.states.plan import layers_of, state_places

_TRIAL_BLOCK = 4


def check_kv_dtype(model: LoadedModel, kv_dtype: str) -> None:
    """Raise InvalidConfig if `kv_dtype` is one of codes, and no layer of the model can keep K and V in codes."""
    if kv_dtype == AUTO or any(each.stored_as(kv_dtype) != AUTO for each in model.layers):
        return
    kept = "latents" if model.layers else "states"
    raise InvalidConfig(
        f'kv_cache_dtype="{kv_dtype}": {model.path} keeps {kept}, which stay in the model\'s dtype; its kv_cache_dtype can be "{AUTO}".'
    )


def with_kv_dtype(
    model: LoadedModel, kv_dtype: str, kv_dtype_skip_layers: Sequence[str] = ()
) -> tuple[LoadedModel, str]:
    """Return the model with the layers in `kv_dtype_skip_layers` marked to keep K and V in the model's dtype, and `kv_dtype` as pools take it.

    A name in `kv_dtype_skip_layers` is the number of a layer, or one of SKIPPED for all layers of a kind. Raises InvalidConfig for a float dtype other
    than the model's, for a name without layers that have K and V of their own, and if no layer is left in codes.
    """
    own = str(model.dtype).removeprefix("torch.")
    if kv_dtype not in KV_DTYPES and kv_dtype != own:
        raise InvalidConfig(
            f'kv_cache_dtype="{kv_dtype}": {model.path} is computed in {own}, and so are its K and V; it can be "{own}", '
            f'"{AUTO}", which is the same, "int8" or "int4".'
        )
    if kv_dtype not in CODE_BITS:
        return model, AUTO
    # Layers that share the K and V of an earlier one follow that one; latents are never codes.
    keeping = [each for each in model.layers if each.source is None and not each.expands]
    names = {str(each.layer): {each.layer} for each in keeping}
    names |= {name: {each.layer for each in keeping if each.kind == kind} for name, kind in SKIPPED.items()}
    for name in kv_dtype_skip_layers:
        if not names.get(name):
            known = ", ".join(each for each, of_name in names.items() if of_name) or "none"
            raise InvalidConfig(
                f'kv_cache_dtype_skip_layers has "{name}"; {model.path} has no such layers with K and V of their own; it has {known}.'
            )
    floats = {number for name in kv_dtype_skip_layers for number in names[name]}
    layers = tuple(each._replace(in_floats=each.layer in floats) for each in model.layers)
    marked = replace(model, layers=layers) if floats else model
    if floats and all(each.stored_as(kv_dtype) == AUTO for each in layers if each.source is None):
        raise InvalidConfig(
            f"kv_cache_dtype_skip_layers={','.join(kv_dtype_skip_layers)} leaves no layer of {model.path} whose K and V could be in {kv_dtype}."
        )
    return marked, kv_dtype


def bytes_per_block(models: Sequence[LoadedModel], block_size: int, kv_dtype: str = AUTO) -> int:
    """Return the bytes of one block over all layers of the models that share it. Raises UnsupportedModel for layers that are not alike."""
    return sum(KVPool.bytes_per_block(**_kv_shape(model), block_size=block_size, kv_dtype=kv_dtype) for model in models)


def pool_for(
    model: LoadedModel,
    *,
    num_blocks: int,
    block_size: int,
    num_host_blocks: int = 0,
    kv_dtype: str = AUTO,
    kind: type[KVPool] = KVPool,
) -> KVPool:
    """Return a pool for this model's K and V, on its device, in its dtype or in `kv_dtype`; every layer keeps all tokens.

    Raises InvalidPool, and UnsupportedModel for layers that are not alike.
    """
    return kind(
        **_kv_shape(model),
        num_blocks=num_blocks,
        block_size=block_size,
        kv_dtype=kv_dtype,
        device=model.device,
        num_host_blocks=num_host_blocks,
    )


def _kv_shape(model: LoadedModel) -> dict[str, Any]:
    """Return the shape of K and V in all layers. Raises UnsupportedModel for layers that are not alike."""
    if not model.is_uniform:
        raise UnsupportedModel(
            f"{model.path}: its layers keep states, K and V of several shapes, or attend through an earlier layer's; blocks of all layers "
            "hold K and V of one shape."
        )
    names = ("num_layers", "num_kv_heads", "head_dim", "value_dim", "dtype")
    return {name: getattr(model, name) for name in names}


def kept_by(model: LoadedModel, kv_dtype: str = AUTO) -> list[Layers]:
    """Return what each layer with K and V of its own keeps, in the order of the model; then all compressed entries; then each state layer."""
    attention = [each.kept(model.dtype, kv_dtype) for each in model.layers if each.source is None]
    compressed = [each.kept_compressed(model.dtype) for each in model.layers if each.compressed]
    return [*attention, *compressed, *map(layers_of, model.state_layers)]


def plan_of(
    model: LoadedModel, *, block_size: int | None = None, page_bytes: int | None = None, kv_dtype: str = AUTO
) -> LayerPlan:
    """Plan groups and pages for this model's layers. Raises as `plan_layers` does."""
    return plan_layers(kept_by(model, kv_dtype), block_size=block_size, page_bytes=page_bytes)


def layered_pool_for(
    model: LoadedModel, plan: LayerPlan, *, num_blocks: int, num_host_blocks: int = 0, kv_dtype: str = AUTO
) -> LayeredPool:
    """Return a pool of `num_blocks` pages for this model by a plan of its layers, on its device and in its dtype; `kv_dtype` is that of the plan.

    Raises InvalidPool, and InvalidConfig for units that cannot be aligned (`places_of`).
    """
    of_groups: list[list[Pieces]] = [places_of(group, plan.page_bytes) for group in plan.groups]
    found = [(group, of_groups[group][number]) for group, number in located(kept_by(model, kv_dtype), plan)]
    num_states = len(model.state_layers)
    of_layers, of_states = found[: len(found) - num_states], found[len(found) - num_states :]
    return LayeredPool(
        _kv_places(model, of_layers, kv_dtype),
        states=[state_places(layer, pieces) for layer, (_, pieces) in zip(model.state_layers, of_states, strict=True)],
        state_group=of_states[0][0] if of_states else None,
        num_blocks=num_blocks,
        page_bytes=plan.page_bytes,
        block_size=plan.block_size,
        dtype=model.dtype,
        device=model.device,
        num_host_blocks=num_host_blocks,
    )


def _kv_places(model: LoadedModel, found: Sequence[tuple[int, Pieces]], kv_dtype: str) -> dict[int, KVPlace]:
    """Return the places of K and V of each attention layer. `found`: group and places of each layer with K and V of its own, in the order of the
    model, then of all compressed entries."""
    places: dict[int, KVPlace] = {}
    at = iter(found)
    of_compressed = iter(found[sum(each.source is None for each in model.layers) :])
    for each in model.layers:
        if each.source is not None:
            owner = places[each.source]
            places[each.layer] = KVPlace(owner.group, owner.keys, owner.values, is_shared=True)
            continue
        group, ((keys,), *others) = next(at)
        values, *index = [keys] * each.is_one + [place for (place,) in others]
        stored, compressed = each.stored_as(kv_dtype), None
        if each.compressed:
            its_group, pieces = next(of_compressed)
            named = zip(each.compressed, pieces, strict=True)
            compressed = its_group, {k: EntryPlace(*its, 1, size, stride=each.stride) for (k, size), (its,) in named}
        places[each.layer] = KVPlace(
            group,
            EntryPlace(*keys, each.heads, each.key_size, stored),
            EntryPlace(*values, each.heads, each.value_size, stored),
            index=EntryPlace(*index[0], 1, each.index_size) if index else None,
            compressed=compressed,
        )
    return places


def trial_memory(model: LoadedModel, num_rows: int, length: int) -> tuple[LayeredPool, tuple[NDArray[np.int32], ...]]:
    """Return a pool for `num_rows` rows of `length` tokens, and the table of each group, int32 [rows, columns, k], with one column for states. Blocks
    of a row do not lie side by side."""
    if model.is_plain:
        columns = -(-length // _TRIAL_BLOCK)
        pool: LayeredPool = pool_for(model, num_blocks=num_rows * columns, block_size=_TRIAL_BLOCK)
        return pool, (_spread(0, num_rows, columns, 1),)
    plan = plan_of(model, block_size=math.lcm(_TRIAL_BLOCK, *(each.stride for each in model.layers)))
    num_pages, tables = trial_tables(plan, num_rows, length)
    return layered_pool_for(model, plan, num_blocks=num_pages), tables


def trial_tables(plan: LayerPlan, num_rows: int, length: int) -> tuple[int, tuple[NDArray[np.int32], ...]]:
    """Return the pages of `num_rows` rows of `length` tokens, all of which are kept, and their tables, as `trial_memory` has them."""
    num_pages, tables = 0, []
    for group in plan.groups:
        columns = -(-length // group.block_tokens) if group.block_tokens else 1
        tables.append(_spread(num_pages, num_rows, columns, group.pages))
        num_pages += num_rows * columns * group.pages
    return num_pages, tuple(tables)


def trial_step(
    pool: LayeredPool,
    positions: NDArray[np.int64],
    query_start_loc: NDArray[np.int64],
    seq_lens: NDArray[np.int64],
    tables: tuple[NDArray[np.int32], ...],
) -> StepTokens:
    """Return a step of rows of `trial_memory` with these tables; each row's state is read and written in one place."""
    states = None
    if pool.state_group is not None:
        write = tables[pool.state_group][:, 0]
        has_state = seq_lens > np.diff(query_start_loc)
        states = np.where(has_state[:, None], write, np.int32(-1)), write
    return StepTokens.of_groups(positions, query_start_loc, seq_lens, tables, pool.block_size, states)


def _spread(first: int, num_rows: int, columns: int, pages: int) -> NDArray[np.int32]:
    """Return page ids from `first` on, int32 [rows, columns, pages]; those of a row are `num_rows` apart."""
    found: NDArray[np.int32] = np.arange(first, first + num_rows * columns * pages, dtype=np.int32)
    return np.ascontiguousarray(found.reshape(columns, pages, num_rows).transpose(2, 0, 1))
