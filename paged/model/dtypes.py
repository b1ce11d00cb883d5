"""Dtypes that a processor computes in slowly, and what is faster there.

native code      float32, and bfloat16: where there are no units for it, it is widened as it is read, half as many bytes as float32
torch on a CPU   float32, and bfloat16 where there are units for it; all else goes by way of float32, operator by operator
"""

from __future__ import annotations

import warnings
from functools import cache

import torch

from paged.attention.native.build import has_instructions
from paged.errors import PagedWarning
from paged.model.loading import LoadedModel
from paged.model.native.packed import NativeLinear, is_compiled

# Any of these, by the names that Linux gives them.
_BFLOAT16_UNITS = ("avx512_bf16", "amx_bf16", "bf16")


def warn_if_slow(model: LoadedModel) -> None:
    """Warn, once a process and dtype, of a model that would be faster in another dtype here."""
    if model.device.type == "cpu":
        is_native = any(isinstance(each, NativeLinear) for each in model.module.modules())
        faster = faster_dtypes(model.dtype, is_native)
        if faster:
            _say_once(str(model.dtype).removeprefix("torch."), faster)


def faster_dtypes(dtype: torch.dtype, is_native: bool) -> tuple[str, ...]:
    """What is faster than this dtype on this processor, in which the model's products are `is_native` or torch's; () where nothing is."""
    has_units = any(map(has_instructions, _BFLOAT16_UNITS))
    if dtype == torch.float16:
        # Its products are torch's in any case.
        return ("float32", "bfloat16") if has_units or is_compiled() else ("float32",)
    if dtype == torch.bfloat16 and not (is_native or has_units):
        return ("float32",)
    return ()


@cache
def _say_once(dtype: str, faster: tuple[str, ...]) -> None:
    which = f"{' and '.join(faster)} {'is' if len(faster) == 1 else 'are'}"
    warnings.warn(f"dtype {dtype} is slow on this processor; {which} faster.", PagedWarning, stacklevel=4)
