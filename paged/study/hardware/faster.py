"""A device that is faster than it is: what a planner asks of a cost model to find out which of its rates binds."""

from __future__ import annotations

import math

import msgspec

from paged.errors import InvalidConfig


class Faster(msgspec.Struct, frozen=True):
    """By how much rates are multiplied, 1 or more each. Raises InvalidConfig for another factor.

    arithmetic  operations/s
    bandwidth   bytes/s between the device's memory and its arithmetic
    host        what the host's share of a step is divided by; infinite: it has none
    """

    arithmetic: float = 1.0
    bandwidth: float = 1.0
    host: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            factor = getattr(self, name)
            if not (factor >= 1 and (math.isfinite(factor) or name == "host")):
                finite = "" if name == "host" else "finite and "
                raise InvalidConfig(f"faster {name} is {factor}; it has to be {finite}at least 1")
