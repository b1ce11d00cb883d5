"""Weights in codes, and products with them: near the floats' within what rounding a row allows, and the same bits whatever else is computed beside."""

import hashlib
import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from paged.model.native.coded import PackedCodes, QuantisedEmbedding, QuantisedLinear, coded_library, replace_linears
from paged.model.quantised.weights import QuantisedWeight, quantise

BITS = st.sampled_from([8, 4])
ROWS = st.integers(1, 36) | st.sampled_from([95, 96, 97, 200])
OUTS = st.integers(1, 20) | st.sampled_from([63, 64, 65, 128, 200])
# Around a filling of 8, a tile of 64 inputs and a piece of 128.
GROUPS = st.integers(1, 20) | st.sampled_from([31, 32, 33, 45, 64, 127, 128, 136, 192, 320, 640])
PIECE = 128


def random_weight(outs, groups, size, bits, seed=0, *, zeros=True, order=True):
    """Codes, scales, zeros and an order that are as odd as they may be."""
    drawn = torch.Generator().manual_seed(seed)
    depth = groups * size
    zero = (
        torch.randint(0, 2**bits, (outs, groups), generator=drawn)
        if zeros
        else torch.full((outs, groups), 2 ** (bits - 1))
    )
    return QuantisedWeight(
        codes=torch.randint(0, 2**bits, (outs, depth), generator=drawn).to(torch.uint8),
        scales=torch.randn(outs, groups, generator=drawn),
        zeros=zero.to(torch.uint8),
        bits=bits,
        group_size=size,
        order=torch.randperm(depth, generator=drawn) if order else None,
    )


def numbers(rows, depth, seed=1):
    return torch.randn(rows, depth, generator=torch.Generator().manual_seed(seed))


def packed(weight):
    return PackedCodes(weight, coded_library().paged_columns())


def rounded(x, weight):
    """Rows as the product takes them: to 8 bits, in pieces of 128 inputs of a group, in the order of the codes."""
    ordered = x if weight.order is None else x[:, weight.order]
    pieces = []
    for group in ordered.split(weight.group_size, 1):
        for piece in group.split(PIECE, 1):
            largest = piece.abs().amax(1, keepdim=True)
            # torch takes 127 / largest as 127 times a reciprocal, which may be rounded to another code.
            pieces.append((piece * (torch.full_like(largest, 127) / largest)).round() * (largest / 127))
    back = torch.cat(pieces, 1)
    return back if weight.order is None else back[:, torch.argsort(weight.order)]


@settings(max_examples=100, derandomize=True)
@given(ROWS, OUTS, st.integers(1, 4), GROUPS, BITS, st.booleans(), st.booleans(), st.booleans(), st.data())
def test_a_product_is_that_of_the_rounded_rows_and_what_codes_stand_for_and_a_row_does_not_depend_on_the_others(
    rows, outs, groups, size, bits, zeros, order, has_bias, data
):
    weight = random_weight(outs, groups, size, bits, zeros=zeros, order=order)
    x, bias, ours = numbers(rows, groups * size), torch.randn(outs) if has_bias else None, packed(weight)
    found = ours.multiply(x, bias)
    dense = weight.dequantised().double()
    expected = rounded(x, weight).double() @ dense.T + (0 if bias is None else bias.double())
    assert found.shape == (rows, outs) and found.dtype == torch.float32
    bound = 1e-5 * (x.double().abs() @ dense.abs().T) + 1e-5
    assert ((found - expected).abs() <= bound).all()
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    for its, together in ((x, found), (x.bfloat16(), ours.multiply(x.bfloat16(), bias))):
        assert torch.equal(ours.multiply(its[first:last], bias), together[first:last])


@pytest.mark.parametrize("bits", [8, 4])
def test_neither_the_number_of_threads_nor_what_is_no_number_in_another_row_changes_a_row(bits, on_any_threads):
    weight, x = packed(random_weight(300, 8, 64, bits)), numbers(200, 512)
    assert on_any_threads(lambda: [weight.multiply(x, None)])
    x[3, 7], x[5, 8], x[9, 0] = torch.nan, torch.inf, -torch.inf
    assert weight.multiply(x, None).isnan().all(1).nonzero().flatten().tolist() == [3, 5, 9]


@pytest.mark.skipif(
    bool({"-mno-fma", "-mno-avx"} & {*os.environ.get("PAGED_CFLAGS", "").split()}), reason="additions are not fused"
)
def test_processors_that_fuse_additions_agree_to_the_bit():
    """AVX-512 with and without its dot product, AVX2 and AVX-VNNI: taken once on one of them."""
    digest = hashlib.sha256()
    for bits in (8, 4):
        for size in (24, 32, 45, 64, 128, 192, 640):
            weight = random_weight(70, 3, size, bits)
            drawn = torch.Generator().manual_seed(3)
            x = torch.randint(-1000, 1000, (7, 3 * size), generator=drawn) / 256
            scales = torch.randint(1, 100, weight.scales.shape, generator=drawn) / 64
            found = packed(replace(weight, scales=scales)).multiply(x, None)
            digest.update(found.numpy().tobytes())
    assert digest.hexdigest()[:16] == "023d11c3a7a7dc5d"


def test_rows_of_zeros_and_of_numbers_too_small_to_divide_by_give_zeros():
    x = torch.zeros(3, 64)
    x[1] = 1e-38
    x[2, :32] = 1
    found = packed(random_weight(20, 2, 32, 8, zeros=False, order=False)).multiply(x, None)
    assert (found[:2] == 0).all() and (found[2] != 0).any()


@settings(max_examples=40, derandomize=True)
@given(OUTS, st.integers(1, 3), GROUPS, BITS, st.booleans(), st.booleans())
def test_what_was_packed_comes_out_again_and_so_do_the_numbers_of_a_result(outs, groups, size, bits, zeros, order):
    weight = random_weight(outs, groups, size, bits, zeros=zeros, order=order)
    found = packed(weight)
    for name in ("codes", "scales", "zeros"):
        assert torch.equal(getattr(found.weight, name), getattr(weight, name))
    rows = QuantisedEmbedding(found, torch.float32)(torch.arange(outs)[None])
    assert torch.equal(rows[0], weight.dequantised())


@torch.inference_mode()
def test_layers_are_replaced_by_name_and_an_embedding_that_shares_one_reads_its_codes():
    module = nn.ModuleDict(
        {
            "embed": nn.Embedding(40, 32),
            "up": nn.Linear(32, 48),
            "left": nn.Linear(48, 32),
            "head": nn.Linear(32, 40, bias=False),
        }
    )
    module["head"].weight = module["embed"].weight
    bias, kept, asked = module["up"].bias.clone(), module["left"], []

    def make(name, linear):
        asked.append(name)
        return None if name == "left" else quantise(linear.weight, bits=8, group_size=32)

    replace_linears(module, make)
    assert asked == ["up", "left", "head"] and module["left"] is kept
    assert isinstance(module["up"], QuantisedLinear) and torch.equal(module["up"].bias, bias)
    assert module["embed"].packed is module["head"].packed
    assert torch.equal(module["embed"](torch.arange(40)), module["head"].weight)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group_size", [None, 32])
def test_codes_are_within_a_step_of_their_numbers(bits, group_size):
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    quantised = quantise(weight, bits=bits, group_size=group_size)
    error = (quantised.dequantised() - weight).abs().view(24, -1, group_size or 96)
    assert (error <= quantised.scales.abs().unsqueeze(-1) * 1.0001).all()
    assert error.mean() < quantised.scales.abs().mean() * 0.26
    assert (quantised.dequantised()[3] == 0).all()


def test_inputs_in_another_order_are_put_back():
    order = torch.tensor([2, 0, 3, 1])
    weight = torch.tensor([[1.0, -2.0, 3.0, -4.0]])
    taken = quantise(weight[:, order], bits=8, group_size=2)
    quantised = QuantisedWeight(taken.codes, taken.scales, taken.zeros, 8, 2, order)
    torch.testing.assert_close(quantised.dequantised(), weight, atol=0.05, rtol=0)
