"""The limits of this machine, measured in short runs: bytes/s of its memory, operations/s of a matrix product.

Each figure is the best of several runs, and of the ways that there are: others on the machine can only make it lower,
and torch's products are not the fastest on every processor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import msgspec
import torch
from torch import Tensor

from paged.attention.native.backend import ELEMENTS
from paged.model.native.packed import is_compiled, model_library, multiply, pack

Product = Callable[[Tensor, Tensor], Callable[[], object]]
# More than any processor's cache holds.
_BYTES = 256 * 2**20
_SIDE, _TRIAL_SIDE = 2048, 256
_RUNS = 5
# A product that would take longer is not made: the smaller one's rate stands for it.
_PATIENCE_S = 1.0


class Limits(msgspec.Struct, frozen=True):
    """What a step is held against: bytes/s that one reads, operations/s of products in `dtype`, with so many threads."""

    threads: int
    dtype: str
    read_bytes_per_s: float
    flops_per_s: float


def measured_limits(dtype: torch.dtype) -> Limits:
    """Those of torch's threads."""
    return Limits(
        threads=torch.get_num_threads(),
        dtype=str(dtype).removeprefix("torch."),
        read_bytes_per_s=read_rate(),
        flops_per_s=product_rate(dtype),
    )


def copy_rate() -> float:
    """Bytes/s of a copy of 256 MiB; each byte counts twice, as it is read and written."""
    source, target = torch.zeros(_BYTES, dtype=torch.uint8), torch.zeros(_BYTES, dtype=torch.uint8)
    return 2 * _BYTES / _best(lambda: target.copy_(source))


def read_rate() -> float:
    """Bytes/s at which the numbers of 256 MiB are added up."""
    numbers = torch.zeros(_BYTES // 4)
    return _BYTES / _best(numbers.sum)


def product_rate(dtype: torch.dtype) -> float:
    """Operations/s of a product of two matrices of 2048 × 2048, torch's or that of packed weights, whichever is faster; an addition and a
    multiplication are two operations."""
    return max(_rate_of(product, dtype) for product in _products(dtype))


def _products(dtype: torch.dtype) -> list[Product]:
    """Each takes two square matrices and gives what multiplies them."""
    products: list[Product] = [lambda first, second: lambda: first @ second]
    if dtype in ELEMENTS and is_compiled():
        columns = model_library().paged_columns()
        products.append(lambda first, second: partial(multiply, first, pack(second, columns), None, len(second)))
    return products


def _rate_of(product: Product, dtype: torch.dtype) -> float:
    drawn, rate = torch.Generator().manual_seed(0), 0.0
    for side in (_TRIAL_SIDE, _SIDE):
        if rate and 2 * side**3 / rate > _PATIENCE_S:
            break
        first, second = (torch.randn(side, side, generator=drawn).to(dtype) for _ in range(2))
        rate = max(rate, 2 * side**3 / _best(product(first, second)))
    return rate


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest run, after one that is not counted."""
    work()
    seconds = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
