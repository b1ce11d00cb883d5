"""Kinds of quantisation, bytes of codes, and lists of layers in configurations; without torch, for settings and planning."""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from paged.errors import InvalidConfig

BITS = {"int8": 8, "int4": 4}
"""Bits of a code."""
GROUPS: dict[str, int | None] = {"int8": None, "int4": 32}
"""Inputs that share a scale; None: all inputs of a result."""
QUANTIZATIONS = tuple(BITS)
HEAD = "int8"
"""The kind of a quantised output projection, whatever that of the layers is."""


class StoredCodes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the linear layers of a model's decoder layers are stored as codes.

    title        name of the format
    bits         bits of a code; None: the size of these layers is not known
    group_size   inputs that share a scale; None: all inputs of a result
    scale_bytes  bytes of a scale
    zero_bits    bits of the code that means 0, one a scale; 0: it is the same everywhere
    input_bytes  bytes stored for each input of a layer, as for GPTQ's groups
    """

    title: str
    bits: int | None = None
    group_size: int | None = None
    scale_bytes: int = 2
    zero_bits: int = 0
    input_bytes: int = 0

    def __post_init__(self) -> None:
        for name, least in (("bits", 1), ("group_size", 1), ("scale_bytes", 0), ("zero_bits", 0), ("input_bytes", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or value < least):
                raise InvalidConfig(f"codes: {name} is {value!r}; it has to be a whole number of at least {least}")

    def num_bytes(self, numbers: int, results: int, inputs: int) -> int:
        """Return the bytes of linear layers with `numbers` weights, `results` outputs and `inputs` inputs in all. `bits` has to be known."""
        assert self.bits is not None, "what is not known is not counted"
        scales = results if self.group_size is None else numbers // self.group_size
        return (
            numbers * self.bits // 8
            + self.scale_bytes * scales
            + scales * self.zero_bits // 8
            + self.input_bytes * inputs
        )


AT_LOAD = {name: StoredCodes(title=name, bits=BITS[name], group_size=GROUPS[name], scale_bytes=4) for name in BITS}
"""The codes that `load_model` makes of linear layers, by `quantization`."""


def names_of(stored: object) -> list[str]:
    """Return a configuration's list of layers: names, and patterns after "re:"; empty for None. Raises ValueError."""
    if isinstance(stored, str):
        raise ValueError(f"{stored!r} is no list of layers")
    found = list(stored or ())  # type: ignore[call-overload]
    for each in found:
        if not isinstance(each, str):
            raise ValueError(f"{each!r} is no name of a layer")
        try:
            re.compile(each.removeprefix("re:") if each.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"{each!r} is no pattern: {error}") from None
    return found


def listed_names(stored: object) -> list[str]:
    """Return the names as `names_of` does, from a list whose items may be lists of names, like GPTQ's modules of a block."""
    groups = stored if isinstance(stored, list | tuple) else names_of(stored)
    return names_of([name for each in groups for name in (each if isinstance(each, list | tuple) else (each,))])


def check_asked(quantization: str | None, *, with_head: bool = False) -> None:
    """Raise InvalidConfig for a quantization that is not known, and for `with_head` without one."""
    if quantization is None and with_head:
        raise InvalidConfig("quantize_head goes with a quantization; got quantize_head=True and quantization=None.")
    if quantization is not None and quantization not in QUANTIZATIONS:
        known = " or ".join(f'"{name}"' for name in QUANTIZATIONS)
        raise InvalidConfig(f'quantization has to be {known}; got "{quantization}".')


def check_stored(
    name: object, title: str, bits: Collection[int], quantization: str | None, *, with_head: bool = False
) -> None:
    """Raise InvalidConfig if `quantization` has other bits than the codes of the checkpoint `name`, and for `with_head`. `title`: its format."""
    if quantization is not None and set(bits) != {BITS[quantization]}:
        raise InvalidConfig(
            f'quantization="{quantization}" is asked for, and {name} is stored as {title}; leave it out.'
        )
    if with_head:
        raise InvalidConfig(
            f"quantize_head is asked for, and {name} is stored as {title}, its head as it is; leave it out."
        )
