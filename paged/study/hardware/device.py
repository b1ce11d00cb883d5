"""A device by its published figures."""

from __future__ import annotations

import math

import msgspec

from paged.attention.kv_dtypes import CODE_BITS, head_bytes
from paged.errors import InvalidConfig

DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
"""The dtypes of weights, activations and KV, and the bytes of an element."""
KV_DTYPES = tuple(dict.fromkeys((*DTYPES, *CODE_BITS)))
"""Those of K and V; int8 and int4 have a scale a token and head beside."""


def kv_bytes(dtype: str, elements: int, head_size: int) -> int:
    """Return the bytes of so many elements of K and V, in heads of this size, with the scales that the dtype has."""
    if dtype in CODE_BITS:
        return elements // head_size * head_bytes(dtype, head_size, 0)
    return elements * DTYPES[dtype]


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device; several of them are the cost model's business.

    memory_bytes   what holds weights and KV
    bandwidth      bytes/s between that memory and the arithmetic
    peak_flops     operations/s by dtype, dense; a dtype that is not listed has no rate of its own
    host_link      bytes/s to or from the host, one direction
    interconnect   bytes/s to other devices of its kind, one direction; None: they do not work together
    source         where the figures come from
    """

    name: str
    memory_bytes: int
    bandwidth: float
    peak_flops: dict[str, float]
    host_link: float
    interconnect: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        rates = {"memory_bytes": self.memory_bytes, "bandwidth": self.bandwidth, "host_link": self.host_link}
        if self.interconnect is not None:
            rates["interconnect"] = self.interconnect
        for dtype, rate in self.peak_flops.items():
            if dtype not in DTYPES:
                raise InvalidConfig(f"peak_flops has {dtype}; known dtypes are {', '.join(DTYPES)}")
            rates[f"peak_flops of {dtype}"] = rate
        for field, value in rates.items():
            if not (math.isfinite(value) and value > 0):
                raise InvalidConfig(f"{field} is {value}; it has to be a finite number above 0")
        if not self.peak_flops:
            raise InvalidConfig("peak_flops is empty; at least one dtype has to have a rate")

    def peak(self, dtype: str) -> float:
        """Operations/s in a dtype. Raises InvalidConfig where none is known."""
        if dtype not in self.peak_flops:
            raise InvalidConfig(f'{self.name} has no rate for dtype "{dtype}"; it has {", ".join(self.peak_flops)}')
        return self.peak_flops[dtype]

    @property
    def usual_dtype(self) -> str:
        """What stands in for a dtype that is not given: bf16, or where it has no rate for that the first that it has."""
        return "bf16" if "bf16" in self.peak_flops else next(iter(self.peak_flops))

    def ridge(self, dtype: str) -> float:
        """Operations a byte at which arithmetic and memory take equally long: the corner of the roofline."""
        return self.peak(dtype) / self.bandwidth
