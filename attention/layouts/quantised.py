"""K or V of each token in 8 or 4 bits: for each head a scale and codes; their products are its numbers, transformed.

    a block   | scales, bfloat16 [block_size, heads] | codes, int8 [block_size, heads, bytes of a head] |

The Hadamard transform (orthogonal, its own inverse) spreads a large number over its head: others lose no precision
(QuaRot, arXiv:2404.00456). Reads do not undo it: queries are transformed likewise, and results are transformed back.

A code is an integer from -128 to 127, or -8 to 7. A scale is the transformed number of largest magnitude over -128
(-8), its magnitude rounded up to bfloat16: no code overflows, and zeros stay zero. It is written once, with its token,
so codes depend neither on other tokens nor on how a prompt was cut. With a NaN or infinite number the scale is NaN, and
the whole head reads as NaN, as in a poisoned block. Code times scale is exact in float32. Two 4-bit codes share a byte,
the first in its low half.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kv_dtypes import CODE_BITS, SCALE_BYTES, code_bytes
from ..pages import Pages
from .entries import Entries


class QuantisedEntries:
    """One piece of a layer's entries as scales and codes, an Entries each; arguments as of Entries."""

    def __init__(
        self, pages: Pages, *, part: int, offset: int, block_size: int, heads: int, size: int, kv_dtype: str
    ) -> None:
        self.part, self.heads, self.size, self.block_size = part, heads, size, block_size
        self.kv_dtype = kv_dtype
        self.scales = Entries(
            pages, part=part, offset=offset, block_size=block_size, heads=heads, size=1, dtype=torch.bfloat16
        )
        self.codes = Entries(
            pages,
            part=part,
            offset=offset + block_size * heads * SCALE_BYTES,
            block_size=block_size,
            heads=heads,
            size=code_bytes(kv_dtype, size),
            dtype=torch.int8,
        )
        self.stored = (self.scales, self.codes)

    def encoded(self, new: Tensor) -> tuple[Tensor, Tensor]:
        """Return scales, bfloat16 [..., 1], and codes, int8 [..., bytes of a head], for numbers [..., size]."""
        bits = CODE_BITS[self.kv_dtype]
        most = 2 ** (bits - 1)
        numbers = self.transformed(new.float())
        scales = _scales(numbers.amax(-1, keepdim=True), numbers.amin(-1, keepdim=True), most)
        codes = (numbers / scales.float()).round_()
        # 0 / 0, and whatever has NaN for a scale.
        codes = codes.masked_fill_(codes.isnan(), 0).clamp_(-most, most - 1).to(torch.int8)
        return scales, codes if bits == 8 else _packed(codes)

    def decoded(self, scales: Tensor, codes: Tensor) -> Tensor:
        """Return the numbers after the transform, float32 [..., size], of what `encoded` gave."""
        if self.kv_dtype == "int4":
            codes = _unpacked(codes)[..., : self.size]
        return codes.float().mul_(scales)

    def transformed(self, numbers: Tensor) -> Tensor:
        """Transform queries, or results of attention, [..., size], in float32 or float64. A second call undoes the
        first."""
        whole = numbers if numbers.dtype == torch.float64 else numbers.float()
        # The transform is of the largest power of two that divides a head.
        size = self.size & -self.size
        half = 1
        while half < size:
            first, second = whole.reshape(*whole.shape[:-1], self.size // (2 * half), 2, half).unbind(-2)
            whole = torch.stack([first + second, first - second], -2).flatten(-3)
            half *= 2
        return whole * (1 / math.sqrt(size))

    def is_even(self, block_size: int) -> bool:
        """Whether a page is a whole number of blocks of this piece alone: no, scales lie between."""
        return False


AnyEntries = Entries | QuantisedEntries


def _scales(most: Tensor, least: Tensor, codes: int) -> Tensor:
    """Return the bfloat16 scales of heads with these largest and least numbers, float32, for so many codes below 0."""
    size = torch.maximum(most, -least)
    bits = ((size / codes).view(torch.int32) + 0xFFFF) >> 16
    # The number of largest magnitude has the lowest code, so its scale has the other sign.
    bits = bits | (most == size).to(torch.int32) << 15
    return torch.where(size.isfinite(), bits, 0x7FC0).to(torch.int16).view(torch.bfloat16)


def _packed(codes: Tensor) -> Tensor:
    """Pack two codes into each byte."""
    codes = pad(codes, (0, codes.shape[-1] % 2))
    return codes[..., 0::2] & 15 | codes[..., 1::2] << 4


def _unpacked(packed: Tensor) -> Tensor:
    """Return codes from -8 to 7, two for each byte."""
    # Shifted to the left and back, the low half has its sign.
    return torch.stack([packed << 4 >> 4, packed >> 4], -1).flatten(-2)
