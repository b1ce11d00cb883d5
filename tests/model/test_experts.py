"""Experts in C give what transformers' modules give, and a row's numbers do not depend on who else chose its experts."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn import functional
from transformers.integrations.moe import use_experts_implementation

from paged.errors import UnsupportedModel
from paged.model.native.experts import Activation, PackedExperts, can_be_coded, code_experts, pack_experts
from paged.model.native.packed import padded
from paged.model.quantised.weights import quantise

DTYPES = [torch.float32, torch.bfloat16]
# Around a vector, a panel of 16 or 64 results, and what one piece of work has.
SIZES = st.integers(1, 20).map(lambda half: 2 * half) | st.sampled_from([64, 66, 128, 258, 514])
LIMIT, SLOPE = 1.5, 1.3


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Experts(nn.Module):
    """Experts as transformers has them, each row's computed one by one: `forward` is the specification."""

    def __init__(self, config, count, hidden, width, dtype=torch.float32):
        super().__init__()
        self.num_experts = count
        ups = width * (2 if self.gated else 1)
        shapes = [(hidden, ups), (width, hidden)] if self.transposed else [(ups, hidden), (hidden, width)]
        name = "gate_up_proj" if self.gated else "up_proj"
        for number, (each, shape) in enumerate(zip((name, "down_proj"), shapes, strict=True)):
            self.register_parameter(each, nn.Parameter(drawn(count, *shape, seed=number).to(dtype) / math.sqrt(width)))
            if self.biased:
                bias = drawn(count, ups if number == 0 else hidden, seed=2 + number).to(dtype)
                self.register_parameter(f"{each}_bias", nn.Parameter(bias))

    gated, transposed, biased = True, False, False

    def act_fn(self, x):
        return functional.silu(x)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for row, (x, chosen, shares) in enumerate(zip(hidden_states, top_k_index, top_k_weights, strict=True)):
            for expert, share in zip(chosen.tolist(), shares, strict=True):
                if expert < self.num_experts:
                    out[row] += share * self.one(expert, x)
        return out

    def one(self, expert, x):
        first = self._parameters["gate_up_proj" if self.gated else "up_proj"]
        ups = self.product(x, first, "gate_up_proj_bias", expert)
        between = self._apply_gate(ups) if self.gated else self.act_fn(ups)
        return self.product(between, self.down_proj, "down_proj_bias", expert)

    def product(self, x, weight, bias, expert):
        found = x @ (weight[expert] if self.transposed else weight[expert].t())
        return found + self._parameters[bias][expert] if self.biased else found


@use_experts_implementation
class Silu(Experts): ...


@use_experts_implementation
class Gelu(Experts):
    def act_fn(self, x):
        return functional.gelu(x, approximate="tanh")


@use_experts_implementation(is_transposed=True)
class Transposed(Experts):
    transposed = True


@use_experts_implementation(is_concatenated=False, is_transposed=True, has_bias=True)
class LikeGptOss(Experts):
    transposed, biased, limit, alpha = True, True, LIMIT, SLOPE

    def _apply_gate(self, gate_up):
        gate, up = gate_up[..., ::2].clamp(max=LIMIT), gate_up[..., 1::2].clamp(-LIMIT, LIMIT)
        return (up + 1) * gate * torch.sigmoid(gate * SLOPE)


@use_experts_implementation
class Limited(Experts):
    swiglu_limit = LIMIT

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)


@use_experts_implementation(has_gate=False)
class Squared(Experts):
    gated = False

    def act_fn(self, x):
        return functional.relu(x).square()


@use_experts_implementation
class Unknown(Experts):
    def act_fn(self, x):
        return x.sin()


@use_experts_implementation(has_post_expert_norm=True)
class Normed(Experts): ...


@use_experts_implementation
class Says(Experts):
    """Does more than it says."""

    def one(self, expert, x):
        return 2 * super().one(expert, x)


KINDS = [Silu, Gelu, Transposed, LikeGptOss, Limited, Squared]


def made(kind, *sizes, dtype=torch.float32):
    return kind(SimpleNamespace(_experts_implementation="eager"), *sizes, dtype)


def packed(experts):
    holder = nn.ModuleDict({"experts": experts})
    pack_experts(holder)
    return holder["experts"]


def choices(rows, count, k, seed=0):
    random = torch.Generator().manual_seed(seed)
    # A last number that is no expert: it adds nothing.
    chosen = torch.stack([torch.randperm(count + 1, generator=random)[:k] for _ in range(rows)])
    return chosen, torch.rand(rows, k, generator=random)


@settings(max_examples=60, derandomize=True)
@given(
    st.sampled_from(KINDS), st.integers(1, 40) | st.just(70), st.integers(1, 5), SIZES, SIZES, st.sampled_from(DTYPES),
    st.data(),
)  # fmt: skip
@torch.inference_mode()
def test_experts_in_c_are_the_modules_and_rows_do_not_depend_on_others(kind, rows, count, hidden, width, dtype, data):
    k = data.draw(st.integers(1, count))
    exact, experts = (
        made(kind, count, hidden, width, dtype=dtype).double(),
        made(kind, count, hidden, width, dtype=dtype),
    )
    x, (chosen, shares) = drawn(rows, hidden, seed=9).to(dtype), choices(rows, count, k)
    expected = exact(x.double(), chosen, shares.double())
    ours = packed(experts)
    assert isinstance(ours, PackedExperts)
    found = ours(x, chosen, shares)
    assert found.dtype == dtype and found.shape == x.shape
    bound = (1e-5 if dtype == torch.float32 else 2e-2) * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=bound)
    assert_rows_are_alone(ours, x, chosen, shares, data)


def assert_rows_are_alone(ours, x, chosen, shares, data):
    """Some of the rows, in another order and more than once, get the bits that they get together."""
    order = torch.tensor(data.draw(st.lists(st.integers(0, len(x) - 1), min_size=1, max_size=len(x))))
    assert torch.equal(ours(x[order], chosen[order], shares[order]), ours(x, chosen, shares)[order])


@settings(max_examples=30, derandomize=True)
@given(st.sampled_from(KINDS), st.integers(1, 40), st.sampled_from([32, 64, 160]), st.sampled_from(DTYPES), st.data())
@torch.inference_mode()
def test_experts_in_codes_are_the_products_of_their_codes_and_rows_do_not_depend_on_others(
    kind, rows, size, dtype, data
):
    bits, group = data.draw(st.sampled_from([(8, None), (4, 32)]))
    width, count = data.draw(st.sampled_from([32, 96])), data.draw(st.integers(1, 4))
    ours = coded(made(kind, count, size, width), bits, group)
    x, (chosen, shares) = drawn(rows, size, seed=9).to(dtype), choices(rows, count, data.draw(st.integers(1, count)))
    together = ours(x, chosen, shares)
    expected = torch.zeros(rows, size)
    for row, each in enumerate(chosen.tolist()):
        for expert, share in zip(each, shares[row], strict=True):
            if expert < count:
                expected[row] += share * one_coded(ours, expert, x[row : row + 1])[0]
    # What lies between both products differs in its last bits, and may be rounded to another code.
    torch.testing.assert_close(together.float(), expected, rtol=0, atol=2e-2 * max(1.0, float(expected.abs().max())))
    assert_rows_are_alone(ours, x, chosen, shares, data)


def coded(experts, bits, group):
    assert can_be_coded(experts)
    return code_experts(experts, "mlp", lambda weight: quantise(weight, bits=bits, group_size=group))


def one_coded(ours, expert, x):
    up_bias, down_bias = (None if each is None else each[expert] for each in (ours.up_bias, ours.down_bias))
    both = ours.up.each[expert].multiply(x, up_bias)
    gate, up = both.chunk(2, -1) if ours._has_gates else (both, None)
    return ours.down.each[expert].multiply(ours._activation.of(gate, up).to(x.dtype), down_bias)


@torch.inference_mode()
def test_experts_whose_trial_differs_are_not_made_codes():
    experts = made(Says, 2, 32, 32)
    with pytest.raises(UnsupportedModel, match="mlp: Says computes otherwise than C does, so that its experts cannot"):
        coded(experts, 8, None)
    assert not can_be_coded(made(Unknown, 2, 32, 32)) and not can_be_coded(made(Normed, 2, 32, 32))


@pytest.mark.parametrize("pack", [lambda experts: packed(experts), lambda experts: coded(experts, 8, None)])
@torch.inference_mode()
def test_neither_threads_nor_padding_nor_nan_of_another_row_change_a_row(pack, on_any_threads):
    ours, x, chosen = pack(made(LikeGptOss, 4, 130, 514)), drawn(200, 130), choices(200, 4, 2)
    assert on_any_threads(lambda: [ours(x, *chosen)])
    x[3, 7] = torch.nan
    whole = ours(x, *chosen)
    assert whole.isnan().any(1).nonzero().flatten().tolist() == [3]
    with padded(200, 3):
        found = ours(x, *chosen)
        assert torch.equal(found[:3], whole[:3]) and not found[3:].any()
        # Rows that are no places of the pass.
        assert torch.equal(ours(x[4:11], *(each[4:11] for each in chosen)), whole[4:11])


@torch.inference_mode()
def test_the_weights_are_held_once_and_limits_are_kept():
    experts = made(Limited, 4, 64, 128)
    weights = sum(each.numel() for each in experts.parameters())
    ours = packed(experts)
    assert sum(each.numel() for each in ours.parameters()) == weights
    assert [each for each in experts.parameters() if each.dim() == 3] == []
    # A limit beyond all that is tried holds.
    assert ours._activation == Activation(most_gate=LIMIT, most_up=LIMIT)


@pytest.mark.parametrize(
    "experts",
    [
        made(Unknown, 2, 8, 8), made(Normed, 2, 8, 8), made(Says, 2, 8, 8), made(Silu, 2, 8, 8, dtype=torch.float16),
        made(Silu, 2, 8, 7, dtype=torch.bfloat16), Experts(None, 2, 8, 8),
    ],
    ids=["another activation", "a norm behind", "something more", "float16", "an odd width", "no mark"],
)  # fmt: skip
@torch.inference_mode()
def test_what_is_not_known_stays(experts):
    before = {name: each.clone() for name, each in experts.named_parameters()}
    assert packed(experts) is experts
    assert all(torch.equal(each, before[name]) for name, each in experts.named_parameters())


@torch.inference_mode()
def test_shares_have_the_shape_of_the_choices():
    ours = packed(made(Silu, 3, 8, 8))
    with pytest.raises(UnsupportedModel, match=r"experts \(4, 2\) with shares \(4, 3\) for 4 rows"):
        ours(drawn(4, 8), choices(4, 3, 2)[0], torch.ones(4, 3))


@torch.inference_mode()
def test_a_width_that_transformers_grouped_products_refuse_is_packed():
    experts = Silu(SimpleNamespace(_experts_implementation="grouped_mm"), 3, 45, 77)
    x, (chosen, shares) = drawn(4, 45), choices(4, 3, 2)
    with pytest.raises(RuntimeError, match="multiple of 16"):
        experts(x, chosen, shares)
    assert isinstance(packed(experts), PackedExperts)
