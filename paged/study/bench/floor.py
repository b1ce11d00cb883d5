"""The least time in which this machine could take a step: its weights, K and V read at the rate of memory, or its operations made at the rate of
products, whichever takes longer.

Weights are read once a step, and no more of K and V than the blocks in use hold, as rows may share them. A model that
a cache holds may be faster.
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
    """A model on this machine; `kv_dtype` as an engine's `kv_cache_dtype`, and its `quantization` and `quantize_head`. Operations go at the rate of products in
    the dtype, which those of codes may be above."""

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
        """Of all steps together. `used_slots`: of the blocks in use at each, those of the step's own tokens perhaps not among them."""
        work = StepWork.of_steps(steps)
        most = np.asarray(used_slots) + work.computed_tokens
        read = msgspec.structs.replace(work, context_tokens=np.minimum(work.context_tokens, most))
        carried = self._roofline.kept_bytes(read) / self._limits.read_bytes_per_s
        computed = self._roofline.flops(work) / self._limits.flops_per_s
        return float(np.maximum(carried, computed).sum())
