"""What a layer keeps of each token, such as its K: [block_size, heads, size] without gaps, on one page of each block.

Three views of the same memory:

    blocks   [num_pages + 1, block_size, heads, size]   by page and token
    tokens   [m, heads, size]                           by slot: `token_steps.of(slot)`
    rows     [m', size]                                 by slot and head: `row_steps.of(slot)` + head * row_steps.head

If a page is a whole number of tokens, `tokens` has each token once and is contiguous. If not, neighbours in it overlap:
rows are as far apart as the largest step that reaches every token.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kv_dtypes import AUTO
from ..pages import Pages

# int64 of any shape.
Slots = TypeVar("Slots", NDArray[np.int64], Tensor)


class Steps(NamedTuple):
    """Distances in a view, in rows: from a page to the next, a token of a block to the next, a head to the next."""

    page: int
    token: int
    head: int

    def of(self, slots: Slots, block_size: int) -> Slots:
        """Return the rows of slots; a slot is page * block_size + token."""
        return slots // block_size * self.page + slots % block_size * self.token


class Entries:
    """One piece of a layer's entries, on page `part` of each block, from byte `offset` on."""

    kv_dtype = AUTO

    def __init__(
        self, pages: Pages, *, part: int, offset: int, block_size: int, heads: int, size: int, dtype: torch.dtype
    ) -> None:
        self.part = part
        self.heads = heads
        self.size = size
        self.block_size = block_size
        page, token = pages.page_bytes // dtype.itemsize, heads * size
        self.blocks = pages.view(dtype, offset, (pages.num_pages + 1, block_size, heads, size), (page, token, size, 1))
        length = (pages.num_pages + 1) * page - offset // dtype.itemsize
        of_tokens, of_rows = math.gcd(page, token), math.gcd(page, size)
        self.tokens = pages.view(dtype, offset, ((length - token) // of_tokens + 1, heads, size), (of_tokens, size, 1))
        self.token_steps = Steps(page // of_tokens, token // of_tokens, 0)
        self.rows = pages.view(dtype, offset, ((length - size) // of_rows + 1, size), (of_rows, 1))
        self.row_steps = Steps(page // of_rows, token // of_rows, size // of_rows)

    @property
    def stored(self) -> tuple[Entries, ...]:
        """The entries that lie on the pages: itself."""
        return (self,)

    def encoded(self, new: Tensor) -> tuple[Tensor, ...]:
        """Return what each of `stored` keeps of numbers [..., size]."""
        return (new,)

    def decoded(self, *parts: Tensor) -> Tensor:
        """Return the numbers, floating [..., size], from what each of `stored` keeps."""
        return parts[0]

    def transformed(self, numbers: Tensor) -> Tensor:
        """Return queries, or results of attention, [..., size], as they go with `decoded` numbers: unchanged."""
        return numbers

    def is_even(self, block_size: int) -> bool:
        """Whether a page is a whole number of blocks of this piece alone."""
        return self.token_steps.token == 1 and self.token_steps.page % block_size == 0
