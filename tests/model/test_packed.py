"""Packed linear layers give what torch's give, in one order of additions whatever else is computed beside."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from paged.model.native.coded import QuantisedLinear
from paged.model.native.packed import PackedEmbedding, PackedLinear, model_library, multiply, pack, pack_linears, padded
from paged.model.quantised.weights import quantise

DTYPES = [torch.float32, torch.bfloat16]
# Around a tile of 6 or 16 rows, a piece of 96, a panel of 16 or 64 results, and the depth of 512 that stays in a cache.
ROWS = st.integers(1, 14) | st.sampled_from([15, 16, 17, 31, 32, 33, 48, 64, 95, 96, 97, 200])
OUTS = st.integers(1, 20) | st.sampled_from([63, 64, 65, 128, 200])
DEPTHS = st.integers(1, 20).map(lambda half: 2 * half) | st.sampled_from([510, 512, 514, 1030])


def drawn(rows, depth, outs, dtype, seed=0):
    random = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, depth, generator=random), torch.randn(outs, depth, generator=random)
    return x.to(dtype), weight.to(dtype), torch.randn(outs, generator=random)


def packed(weight):
    return pack(weight, model_library().paged_columns())


@settings(max_examples=100, derandomize=True)
@given(ROWS, DEPTHS, OUTS, st.sampled_from(DTYPES), st.booleans(), st.data())
def test_a_product_is_a_product_and_a_row_does_not_depend_on_the_others(rows, depth, outs, dtype, has_bias, data):
    x, weight, bias = drawn(rows, depth, outs, dtype)
    weights, own_bias = packed(weight), bias if has_bias else None
    found = multiply(x, weights, own_bias, outs)
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    assert found.shape == (rows, outs) and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6 * depth)
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    assert torch.equal(multiply(x[first:last], weights, own_bias, outs), found[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_the_number_of_threads_nor_nan_in_another_row_changes_a_row(dtype, on_any_threads):
    x, weight, bias = drawn(200, 1030, 300, dtype)
    weights = packed(weight)
    assert on_any_threads(lambda: [multiply(x, weights, bias, 300)])
    x[3, 7] = torch.nan
    assert multiply(x, weights, bias, 300).isnan().all(1).nonzero().flatten().tolist() == [3]


LAYERS = {
    "float32": lambda: PackedLinear(nn.Linear(34, 97)),
    "bfloat16": lambda: PackedLinear(nn.Linear(34, 97, dtype=torch.bfloat16)),
    "codes": lambda: QuantisedLinear(quantise(torch.randn(97, 34), bits=4, group_size=17), torch.randn(97)),
}


@pytest.mark.parametrize("name", LAYERS)
@torch.inference_mode()
def test_padding_is_not_computed_and_changes_nothing(name):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    x = torch.randn(1, 32, 34).to(torch.bfloat16 if name == "bfloat16" else torch.float32)
    whole = layer(x)
    for num_tokens in (1, 7, 32):
        with padded(32, num_tokens):
            found = layer(x)
            other = layer(x[:, :31])
        assert torch.equal(found[:, :num_tokens], whole[:, :num_tokens])
        assert (found[:, num_tokens:] == 0).all()
        assert torch.equal(other, whole[:, :31]), "these are no places of the pass"
    assert torch.equal(layer(x), whole)


class Tied(nn.Module):
    """An embedding, a layer, and a head that shares the embedding's weights."""

    def __init__(self, dtype):
        super().__init__()
        self.embedding = nn.Embedding(97, 34, dtype=dtype)
        self.layers = nn.ModuleList([nn.Linear(34, 34, dtype=dtype)])
        self.head = nn.Linear(34, 97, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.layers[0](self.embedding(ids)))


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_modules_weights_are_held_once(dtype):
    torch.manual_seed(0)
    module, ids = Tied(dtype), torch.tensor([[0, 5, 96], [64, 63, 1]])
    expected, rows, weights = module(ids), module.embedding(ids), module.head.weight.clone()
    assert pack_linears(module)
    assert isinstance(module.embedding, PackedEmbedding) and isinstance(module.head, PackedLinear)
    assert module.embedding.packed is module.head.packed
    assert torch.equal(module.head.weight, weights)
    assert torch.equal(module.embedding(ids), rows)
    torch.testing.assert_close(module(ids), expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    columns = model_library().paged_columns()
    panels = -(-97 // columns) + -(-34 // columns)
    assert sum(each.numel() for each in module.parameters()) == panels * columns * 34 + 34


@pytest.mark.parametrize("linear", [nn.Linear(4, 5, dtype=torch.float16), nn.Linear(3, 5, dtype=torch.bfloat16)])
def test_what_the_library_does_not_read_stays_as_it_is(linear):
    module = nn.Sequential(linear)
    assert pack_linears(module)
    assert module[0] is linear
