"""The least time of a step on this machine: to read weights, K and V at memory's rate, or to compute its operations at the rate of matrix products,
whichever takes longer.

Weights are read once a step. Of K and V no more is read than the blocks in use hold, since rows may share blocks. A model
that fits in a cache may be faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from paged.attention.kv_dtypes import AUTO
from paged.model.limits import Limits
from paged.study.hardware import Device, ModelShape, Roofline, StepWork

# As paged.study.hardware calls what torch calls so.
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class Floor:
    """A model on this machine, with an engine's `kv_cache_dtype` (`kv_dtype`), `quantization` and `quantize_head`. Operations are counted at the rate of
    products in the dtype; products of codes may be faster."""

    def __init__(
        self,
        shape: ModelShape,
        limits: Limits,
        *,
        kv_dtype: str = AUTO,
        quantization: str | None = None,
        quantize_head: bool = False,
    ) -> None:
        dtype = _DTYPES[limits.dtype]
        here = Device(
            name="this machine",
            memory_bytes=1,
            bandwidth=limits.read_bytes_per_s,
            peak_flops={dtype: limits.flops_per_s},
            host_link=limits.read_bytes_per_s,
        )
        self._limits = limits
        self._roofline = Roofline(
            model=shape,
            device=here,
            dtype=dtype,
            kv_dtype=None if kv_dtype == AUTO else kv_dtype,
            quantization=quantization,
            quantize_head=quantize_head,
        )

    def seconds(self, steps: Sequence[StepWork], used_slots: Sequence[int]) -> float:
        """Return the least seconds of all steps together. `used_slots`: slots of the blocks in use at each step, with or without those of its own
        tokens."""
        work = StepWork.of_steps(steps)
        most = np.asarray(used_slots) + work.computed_tokens
        read = msgspec.structs.replace(work, context_tokens=np.minimum(work.context_tokens, most))
        carried = self._roofline.kept_bytes(read) / self._limits.read_bytes_per_s
        computed = self._roofline.flops(work) / self._limits.flops_per_s
        return float(np.maximum(carried, computed).sum())
