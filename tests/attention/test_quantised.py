"""K and V in 8 and 4 bits: what comes back of numbers, when their bytes are the same, and how many bytes they take."""

import pytest
import torch

from paged.attention import KVPool
from paged.errors import InvalidPool

pytestmark = pytest.mark.usefixtures("one_thread")

# Codes below zero.
MOST = {"int8": 128, "int4": 8}
each_kv_dtype = pytest.mark.parametrize("kv_dtype", MOST)


def pool_of(kv_dtype, size=8, num_blocks=8, **more):
    sizes = {"num_layers": 2, "block_size": 4, "num_kv_heads": 2, "head_dim": size, "num_blocks": num_blocks}
    return KVPool(**sizes, kv_dtype=kv_dtype, **more)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(pool, numbers, slots=None):
    """What comes back of K, [tokens, heads, size], that goes into these slots, in the order of tokens."""
    slots = torch.arange(len(numbers)) if slots is None else slots
    pool.write_kv(1, slots, numbers, -numbers)
    return pool.keys(1).flatten(0, 1)[slots]


@each_kv_dtype
@pytest.mark.parametrize("size", [1, 2, 7, 33, 96, 128])
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e36])
def test_no_number_is_off_by_more_than_a_step_after_the_transform_and_most_by_half_a_step(kv_dtype, size, magnitude):
    pool, numbers = pool_of(kv_dtype, size), drawn(30, 2, size) * magnitude
    transformed = pool.layer(1).keys.transformed
    off = (transformed(stored(pool, numbers)) - transformed(numbers)).abs()
    # A step is rounded up to 8 bits. At the end with one code less a number may be off by all of it.
    steps = transformed(numbers).abs().amax(-1, keepdim=True) / MOST[kv_dtype] * (1 + 2**-7)
    assert (off <= steps * 1.001).all()
    assert (off > steps * 0.501).float().mean() < 0.1


@pytest.mark.parametrize("size", [1, 2, 6, 16, 33, 96, 128])
def test_the_transform_is_undone_by_itself_and_keeps_products(size):
    entries, (first, second) = pool_of("int8", size).layer(0).keys, drawn(2, 5, size)
    torch.testing.assert_close(entries.transformed(entries.transformed(first)), first)
    products = (entries.transformed(first) * entries.transformed(second)).sum(-1)
    torch.testing.assert_close(products, (first * second).sum(-1))


@each_kv_dtype
def test_one_large_number_costs_the_others_little(kv_dtype):
    numbers = drawn(30, 2, 64)
    numbers[..., 5] = 40.0
    off = (stored(pool_of(kv_dtype, 64), numbers) - numbers).abs().mean()
    # By codes of the numbers as they are, all but one number would be 0.
    assert off < {"int8": 0.02, "int4": 0.35}[kv_dtype] < numbers[..., 6:].abs().mean()


@each_kv_dtype
@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_a_step_times_a_code_comes_back_as_it_is(kv_dtype, sign):
    # Their number is odd, so that the transform leaves them as they are.
    codes = torch.arange(-MOST[kv_dtype], MOST[kv_dtype] - 1).float()
    numbers = (codes * sign * 2**-5).expand(1, 2, -1)
    assert torch.equal(stored(pool_of(kv_dtype, len(codes)), numbers), numbers)


@each_kv_dtype
def test_zeros_stay_zero_a_head_of_numbers_too_small_for_a_step_becomes_zero_and_no_tokens_are_none(kv_dtype):
    numbers, pool = torch.zeros(2, 2, 8), pool_of(kv_dtype)
    numbers[1, 0] = 1e-44
    assert not stored(pool, numbers).any()
    assert stored(pool, numbers[:0]).shape == pool.layer(1).keys.transformed(numbers[:0]).shape == (0, 2, 8)


@each_kv_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_shows_in_its_head_and_nowhere_else(kv_dtype, bad):
    numbers = drawn(3, 2, 8)
    numbers[1, 1, 5] = bad
    is_nan = stored(pool_of(kv_dtype), numbers).isnan()
    assert is_nan[1, 1].all()
    assert is_nan.sum() == 8


@each_kv_dtype
@pytest.mark.parametrize("size", [3, 8])
def test_bytes_do_not_depend_on_what_is_written_beside(kv_dtype, size):
    numbers, slots = drawn(30, 2, size), torch.randperm(32, generator=torch.Generator().manual_seed(1))[:30]
    whole, parts = pool_of(kv_dtype, size), pool_of(kv_dtype, size)
    stored(whole, numbers, slots)
    for first, last in ((0, 1), (1, 17), (17, 30)):
        stored(parts, numbers[first:last], slots[first:last])
    assert torch.equal(whole.pages.on_device, parts.pages.on_device)


@each_kv_dtype
def test_a_poisoned_block_is_nan_and_scratch_is_zero(kv_dtype):
    pool = pool_of(kv_dtype)
    stored(pool, drawn(32, 2, 8))
    pool.poison(torch.tensor([2]))
    for numbers in (pool.keys(1), pool.values(1)):
        assert numbers[2].isnan().all()
        assert not numbers[pool.scratch_block].any()
        assert numbers[[0, 1, 3, 4, 5, 6, 7]].isfinite().all()


def test_a_kv_dtype_that_is_none_is_refused():
    with pytest.raises(InvalidPool, match='kv_dtype is "fp8"; known are auto, int8, int4'):
        pool_of("fp8")
