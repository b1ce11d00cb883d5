"""Dtypes in which a processor computes slowly, and the dtypes that are faster there.

native code      float32 and bfloat16 are fast: without units for bfloat16 it is widened as it is read, half as many bytes as float32
torch on a CPU   float32 is fast, and bfloat16 if there are units for it; all other dtypes are converted by way of float32 in every operator
"""

from __future__ import annotations

import warnings
from functools import cache

import torch

from paged.attention.native.build import has_instructions
from paged.errors import PagedWarning
from paged.model.loading import LoadedModel
from paged.model.native.packed import NativeLinear, is_compiled

# Flags of such units, as Linux names them.
_BFLOAT16_UNITS = ("avx512_bf16", "amx_bf16", "bf16")


def warn_if_slow(model: LoadedModel) -> None:
    """Warn if the model would be faster in another dtype here, once a process and dtype."""
    if model.device.type == "cpu":
        is_native = any(isinstance(each, NativeLinear) for each in model.module.modules())
        faster = faster_dtypes(model.dtype, is_native)
        if faster:
            _say_once(str(model.dtype).removeprefix("torch."), faster)


def faster_dtypes(dtype: torch.dtype, is_native: bool) -> tuple[str, ...]:
    """Return the dtypes that are faster than this one on this processor; () if none is. `is_native`: the model's products are C, not torch's."""
    has_units = any(map(has_instructions, _BFLOAT16_UNITS))
    if dtype == torch.float16:
        # Native code has no float16, so the products are torch's.
        return ("float32", "bfloat16") if has_units or is_compiled() else ("float32",)
    if dtype == torch.bfloat16 and not (is_native or has_units):
        return ("float32",)
    return ()


@cache
def _say_once(dtype: str, faster: tuple[str, ...]) -> None:
    which = f"{' and '.join(faster)} {'is' if len(faster) == 1 else 'are'}"
    warnings.warn(f"dtype {dtype} is slow on this processor; {which} faster.", PagedWarning, stacklevel=4)
