"""The tensors of both tiers: what a write touches, what stays zero, what a block costs, and which sizes are none."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from paged.attention import EntryPlace, KVPlace, KVPool, LayeredPool
from paged.errors import InvalidPool

from ..strange import STRANGE  # noqa: TID252

SIZES = {"num_layers": 2, "num_blocks": 3, "block_size": 2, "num_kv_heads": 2, "head_dim": 3}
NUM_SLOTS = SIZES["num_blocks"] * SIZES["block_size"]


def make_pool(**changes):
    return KVPool(**{**SIZES, **changes})


def every_block(pool):
    """K and V of all layers by block, a copy: [layers, 2, num_blocks + 1, block_size, num_kv_heads, head_dim]."""
    layers = range(pool.num_layers)
    return torch.stack([torch.stack([pool.keys(layer), pool.values(layer)]) for layer in layers])


def rising(first, num_tokens):
    """K or V of so many tokens, all numbers different."""
    shape = (num_tokens, SIZES["num_kv_heads"], SIZES["head_dim"])
    return first + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def test_a_new_pool_is_zero_and_scratch_behind_its_blocks_stays_so_whatever_is_done_to_them():
    pool = make_pool(num_host_blocks=3)
    assert (pool.scratch_block, len(pool.keys(0)), bool(every_block(pool).any())) == (3, 4, False)
    blocks = torch.arange(3)
    for layer in range(2):
        pool.write_kv(layer, torch.arange(NUM_SLOTS), rising(1, NUM_SLOTS), rising(1, NUM_SLOTS))
    pool.device_to_host(blocks, blocks)
    pool.host_to_device(blocks, blocks.flip(0))
    pool.device_to_device(blocks[:1], blocks[1:2])
    pool.poison(blocks)
    found = every_block(pool)
    assert not found[:, :, pool.scratch_block].any()
    assert found[:, :, :3].isnan().all()


@pytest.mark.parametrize(
    ("changes", "cost"),
    [
        ({"dtype": torch.float32}, 2 * 2 * 2 * 2 * 3 * 4),
        ({"dtype": torch.bfloat16}, 2 * 2 * 2 * 2 * 3 * 2),
        ({"dtype": torch.float32, "value_dim": 5}, 2 * 2 * 2 * (3 + 5) * 4),
        # Scales of two bytes; two codes a byte.
        ({"dtype": torch.float32, "kv_dtype": "int8"}, 2 * 2 * 2 * 2 * (3 + 2)),
        ({"dtype": torch.float32, "kv_dtype": "int4"}, 2 * 2 * 2 * 2 * (2 + 2)),
    ],
    ids=str,
)
def test_a_block_costs_what_its_tensors_take(changes, cost):
    pool = make_pool(num_host_blocks=5, **changes)
    sizes = {name: SIZES[name] for name in SIZES if name != "num_blocks"}
    assert KVPool.bytes_per_block(**sizes, **changes) == pool.pages.page_bytes == cost
    on_device = sum(pool.keys(layer).nbytes + pool.values(layer).nbytes for layer in range(2))
    assert pool.pages.on_device.nbytes == 4 * cost and ("kv_dtype" in changes or on_device == 4 * cost)
    assert pool.pages.on_host.nbytes == 5 * cost


def test_layers_lie_side_by_side_where_nothing_else_is_on_a_page():
    pool = make_pool()
    assert pool.is_side_by_side
    places = {0: KVPlace(0, EntryPlace(0, 0, 1, 1), EntryPlace(0, 8, 1, 1))}
    sizes = {"num_blocks": 1, "block_size": 2}
    assert LayeredPool(places, page_bytes=16, **sizes).is_side_by_side
    shared = {**places, 1: replace(places[0], is_shared=True)}
    assert not LayeredPool(shared, page_bytes=16, **sizes).is_side_by_side
    swapped = {0: KVPlace(0, places[0].values, places[0].keys)}
    assert not LayeredPool(swapped, page_bytes=16, **sizes).is_side_by_side
    assert not LayeredPool({}, page_bytes=16, **sizes).is_side_by_side


@pytest.mark.parametrize(
    ("name", "least", "value"),
    [*((name, 1, value) for name in SIZES for value in (0, -3, 2.5, True, None)), ("num_host_blocks", 0, -1)],
)
def test_a_size_that_is_no_integer_or_below_its_least_is_refused(name, least, value):
    with pytest.raises(InvalidPool, match=f"^{name} has to be an integer from {least} to 2\\^31 - 1; got {value}.$"):
        make_pool(**{name: value})


@pytest.mark.parametrize("name", [*SIZES, "dtype", "device", "kv_dtype"])
def test_a_strange_value_is_taken_or_refused_by_a_typed_error(name):
    for value in STRANGE:
        with suppress(InvalidPool):
            make_pool(**{name: value})
