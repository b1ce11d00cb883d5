"""A device by its published figures, and the link between devices with the seconds of collectives over it.

    all-reduce, all-gather, reduce-scatter of d devices: messages · latency + bytes that one device sends ÷ rate

Over a switch (NVLink) a device sends to all others at once: an all-reduce is two messages, whatever the number of devices. Over PCIe it is a
ring of 2 · (d − 1).
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from paged.attention.kv_dtypes import CODE_BITS, head_bytes
from paged.base.fields import AtLeast1, Finite
from paged.errors import InvalidConfig
from paged.study.limits import NotNegative, check

DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
"""The dtypes of weights, activations and KV, and the bytes of an element."""
KV_DTYPES = tuple(dict.fromkeys((*DTYPES, *CODE_BITS)))
"""The dtypes of K and V; int8 and int4 have a scale for each token and head as well."""
_PCIE = 128e9
"""Bytes/s up to which a published interconnect is PCIe: Gen6 x16. NVLink of the slowest device in the catalogue has more than twice that."""
PCIE_SHARE, PCIE_LATENCY_S = 0.25, 12e-6
"""Of PCIe: the share of its published rate that collectives reach, and the seconds of a message beside its bytes. NCCL assumes 16 GB/s for a path
through the processor. On RTX PRO 6000 cards over Gen5 x16 (64 GB/s), owners measured 22 GB/s with NCCL's defaults, 41 with more channels, 24 µs
for an all-reduce of up to 64 KB and 14 µs a message without peer access (voipmonitor/rtx6kpro, hardware/pcie-bandwidth.md). Two such cards under
vLLM 0.19 were recorded 23 to 34 % slower than 51 GB/s and 5 µs predict, which 16 GB/s explains."""


def kv_bytes(dtype: str, elements: int, head_size: int) -> int:
    """Return the bytes of so many elements of K and V in heads of this size, with the dtype's scales."""
    if dtype in CODE_BITS:
        return elements // head_size * head_bytes(dtype, head_size, 0)
    return elements * DTYPES[dtype]


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device.

    memory_bytes   of the memory that holds weights and KV
    bandwidth      bytes/s between that memory and the arithmetic
    peak_flops     operations/s by dtype, dense; a dtype that is not listed has no rate
    host_link      bytes/s to or from the host, one direction
    interconnect   bytes/s to other devices of its kind, one direction; None: there is none
    source         where the figures come from
    """

    name: str
    memory_bytes: AtLeast1
    bandwidth: Finite
    peak_flops: Annotated[dict[str, Finite], Meta(min_length=1)]
    host_link: Finite
    interconnect: Finite | None = None
    source: str = ""

    def __post_init__(self) -> None:
        check(self)
        for dtype in self.peak_flops:
            if dtype not in DTYPES:
                raise InvalidConfig(f"peak_flops has {dtype}; known dtypes are {', '.join(DTYPES)}")

    def peak(self, dtype: str) -> float:
        """Return the operations/s in a dtype. Raises InvalidConfig if the device has no rate for it."""
        if dtype not in self.peak_flops:
            raise InvalidConfig(f'{self.name} has no rate for dtype "{dtype}"; it has {", ".join(self.peak_flops)}')
        return self.peak_flops[dtype]

    @property
    def usual_dtype(self) -> str:
        """The default dtype: bf16, or the first dtype with a rate if bf16 has none."""
        return "bf16" if "bf16" in self.peak_flops else next(iter(self.peak_flops))

    def ridge(self, dtype: str) -> float:
        """Return the operations a byte at which arithmetic and memory take equally long: the corner of the roofline."""
        return self.peak(dtype) / self.bandwidth


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A link between devices. Raises InvalidConfig for a rate that is not above 0, and a negative latency.

    bytes_per_s  that a device reaches when it sends, one direction
    latency_s    of one message beside its bytes
    is_switched  each device sends to all others at once; else they form a ring
    source       where the two figures come from, in words
    """

    bytes_per_s: Finite
    latency_s: NotNegative
    is_switched: bool = False
    source: str = "as it was given"

    def __post_init__(self) -> None:
        check(self)

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e9:.3g} GB/s and {self.latency_s * 1e6:.3g} µs a message ({self.source})"

    def all_reduce(self, devices: int, num_bytes: Any) -> Any:
        """Return the seconds to sum so many bytes, which every device has."""
        return 2 * self.all_gather(devices, num_bytes)

    def all_gather(self, devices: int, num_bytes: Any) -> Any:
        """Return the seconds until every device has all of so many bytes, of which each had a part; a reduce-scatter takes as long."""
        if devices == 1:
            return 0.0 * num_bytes
        messages = 1 if self.is_switched else devices - 1
        return messages * self.latency_s + (devices - 1) / devices * num_bytes / self.bytes_per_s


def usual_link(device: Device, *, share: float = 0.8, latency_s: float = 5e-6) -> Link | None:
    """Return the assumed link of a device by its published interconnect; None if it has none.

    `share` of the published rate and `latency_s` of a message are those of NVLink; PCIe has its own.
    """
    rate = device.interconnect
    if rate is None:
        return None
    if rate <= _PCIE:
        source = f"assumed: {PCIE_SHARE:.0%} of PCIe's {rate / 1e9:.3g}, as NCCL reaches"
        return Link(bytes_per_s=rate * PCIE_SHARE, latency_s=PCIE_LATENCY_S, source=source)
    source = f"assumed: {share:.0%} of NVLink's {rate / 1e9:.3g}"
    return Link(bytes_per_s=rate * share, latency_s=latency_s, is_switched=True, source=source)


def link_of(device: Device, gb_per_s: float | None, latency_us: float | None) -> Link | None:
    """Return the link with a caller's figures; the rest as in `usual_link`, or as PCIe's if the device has none. None if no figure is given."""
    if gb_per_s is None and latency_us is None:
        return None
    usual = usual_link(device) or Link(bytes_per_s=device.host_link * PCIE_SHARE, latency_s=PCIE_LATENCY_S)
    return Link(
        bytes_per_s=usual.bytes_per_s if gb_per_s is None else gb_per_s * 1e9,
        latency_s=usual.latency_s if latency_us is None else latency_us * 1e-6,
        is_switched=usual.is_switched,
    )
