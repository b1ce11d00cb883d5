"""Weights of a linear layer as codes of 8 or 4 bits, with a scale for each result and group of inputs.

    weight[result, input] ≈ scales[result, group] * (codes[result, input] - zeros[result, group]),   group = input // group_size

All formats that are read become this form (GPTQ, AWQ, compressed-tensors), and so do weights that are quantised at load; kernels pack it further. With
`order`, GPTQ's "act order", inputs are in that order, and groups are counted in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paged.errors import InvalidConfig

# Weights that are quantised at a time.
_AT_ONCE = 2**20


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight [outs, depth] in codes. In symmetric formats each zero is half the range, 128 or 8."""

    codes: Tensor
    """uint8 [outs, depth], each below 2 ** bits; one code a byte."""
    scales: Tensor
    """float32 [outs, groups], finite; a scale of 0 has only codes that mean 0."""
    zeros: Tensor
    """uint8 [outs, groups]: the code that means 0, below 2 ** bits."""
    bits: int
    group_size: int
    """Inputs that share a scale; divides depth."""
    order: Tensor | None = None
    """int64 [depth]: the input that each column of `codes` multiplies; None: column i multiplies input i."""

    @property
    def outs(self) -> int:
        return self.codes.shape[0]

    @property
    def depth(self) -> int:
        return self.codes.shape[1]

    def dequantised(self) -> Tensor:
        """Return the weight as float32 [outs, depth], with inputs in their own order."""
        grouped = self.codes.view(self.outs, -1, self.group_size).float()
        numbers = (grouped - self.zeros.float().unsqueeze(-1)) * self.scales.unsqueeze(-1)
        numbers = numbers.view(self.outs, self.depth)
        return numbers if self.order is None else numbers[:, torch.argsort(self.order)]


def quantise(
    weight: Tensor, *, bits: int, group_size: int | None = None, scale_dtype: torch.dtype = torch.float32
) -> QuantisedWeight:
    """Quantise a weight [outs, depth] of floats to the nearest codes, symmetrically. Without `group_size` each result has one scale. Scales are rounded to
    `scale_dtype`.

    The weight of largest magnitude in a group gets the lowest code, as in llama.cpp's Q4_0, so all codes are used. Raises InvalidConfig if groups
    do not divide the depth, or a weight is not finite.
    """
    outs, depth = weight.shape
    group_size = group_size or depth
    if depth % group_size:
        raise InvalidConfig(f"groups of {group_size} do not divide the {depth} inputs of a linear layer.")
    if not torch.isfinite(weight).all():
        raise InvalidConfig("a weight to quantise is NaN or infinite.")
    half, groups = 2 ** (bits - 1), depth // group_size
    codes, scales = torch.empty(outs, depth, dtype=torch.uint8), torch.empty(outs, groups)
    # A few rows at a time, so that few of a layer's floats are in memory twice.
    for rows in torch.arange(outs).split(max(1, _AT_ONCE // depth)):
        its = slice(int(rows[0]), int(rows[-1]) + 1)
        grouped = weight[its].detach().float().view(len(rows), groups, group_size)
        least, most = grouped.amin(-1), grouped.amax(-1)
        steps = (torch.where(most > -least, most, least) / -half).to(scale_dtype).float()
        found = (grouped / torch.where(steps == 0, 1, steps).unsqueeze(-1)).round_().add_(half).clamp_(0, 2 * half - 1)
        codes[its], scales[its] = found.to(torch.uint8).view(len(rows), depth), steps
    return QuantisedWeight(
        codes=codes,
        scales=scales,
        zeros=torch.full_like(scales, half, dtype=torch.uint8),
        bits=bits,
        group_size=group_size,
    )
