"""The limits of this machine, measured in short runs: bytes/s of its memory, operations/s of a matrix product.

Each figure is the best of several runs and implementations: other processes can only make it lower, and torch's products are not
the fastest on every processor.
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
# A larger product that would take longer is left out: the smaller one's rate counts.
_PATIENCE_S = 1.0


class Limits(msgspec.Struct, frozen=True):
    """Limits to compare a step with: bytes/s read, and operations/s of products in `dtype`, with this number of threads."""

    threads: int
    dtype: str
    read_bytes_per_s: float
    flops_per_s: float


def measured_limits(dtype: torch.dtype) -> Limits:
    """Measure the limits with torch's number of threads."""
    return Limits(
        threads=torch.get_num_threads(),
        dtype=str(dtype).removeprefix("torch."),
        read_bytes_per_s=read_rate(),
        flops_per_s=product_rate(dtype),
    )


def copy_rate() -> float:
    """Return the bytes/s of a copy of 256 MiB; each byte counts twice, as it is read and written."""
    source, target = torch.zeros(_BYTES, dtype=torch.uint8), torch.zeros(_BYTES, dtype=torch.uint8)
    return 2 * _BYTES / _best(lambda: target.copy_(source))


def read_rate() -> float:
    """Return the bytes/s at which 256 MiB of numbers are added up."""
    numbers = torch.zeros(_BYTES // 4)
    return _BYTES / _best(numbers.sum)


def product_rate(dtype: torch.dtype) -> float:
    """Return the operations/s of a product of two matrices of 2048 × 2048, or of 256 × 256 on a slow machine: torch's or that of packed weights,
    whichever is faster. A multiplication and an addition are two operations."""
    return max(_rate_of(product, dtype) for product in _products(dtype))


def _products(dtype: torch.dtype) -> list[Product]:
    """Return functions that take two square matrices, and return what multiplies them."""
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
    """Return the seconds of the fastest run, after one that does not count."""
    work()
    seconds = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
