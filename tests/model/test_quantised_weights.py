"""Weights in codes: how near they are, and what is refused."""

import pytest
import torch

from paged.errors import InvalidConfig
from paged.model.quantised.weights import QuantisedWeight, quantise


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group_size", [None, 32])
def test_codes_are_within_a_step_of_their_numbers(bits: int, group_size: int | None) -> None:
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    quantised = quantise(weight, bits=bits, group_size=group_size)
    error = (quantised.dequantised() - weight).abs().view(24, -1, group_size or 96)
    assert (error <= quantised.scales.abs().unsqueeze(-1) * 1.0001).all()
    assert error.mean() < quantised.scales.abs().mean() * 0.26
    assert (quantised.dequantised()[3] == 0).all()


def test_inputs_in_another_order_are_put_back() -> None:
    order = torch.tensor([2, 0, 3, 1])
    weight = torch.tensor([[1.0, -2.0, 3.0, -4.0]])
    taken = quantise(weight[:, order], bits=8, group_size=2)
    quantised = QuantisedWeight(taken.codes, taken.scales, taken.zeros, 8, 2, order)
    torch.testing.assert_close(quantised.dequantised(), weight, atol=0.05, rtol=0)


def test_groups_that_do_not_divide_and_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="groups of 32 do not divide the 48 inputs"):
        quantise(torch.zeros(2, 48), bits=4, group_size=32)
    with pytest.raises(InvalidConfig, match="NaN or infinite"):
        quantise(torch.full((2, 32), torch.nan), bits=4, group_size=32)
