"""The backend `native`: attention in C over K and V where they lie, for a CPU. See attention.c for the order of sums.

It is always invariant: a token's result depends on its own context alone. It reads float32, bfloat16 and codes with
scales, and computes in float32.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged.errors import BuildFailed, UnsupportedByBackend

from ..backend import LayerOptions, LayerShape
from ..kv_pool import LayeredPool
from ..layouts.quantised import AnyEntries, QuantisedEntries
from ..step_tokens import StepTokens
from .build import library

_HERE = Path(__file__).parent
HEADERS = tuple(_HERE / f"{name}.h" for name in ("amx", "attention", "matrix", "quantised", "vector"))
# The arguments of `library`: name, sources and headers.
ATTENTION_LIBRARY = ("attention", (_HERE / "attention.c",), HEADERS)
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}  # enum element of vector.h
_STORED = {"int8": 2, "int4": 3}  # as in quantised.h
MOST_HEAD_SIZE = 256  # as in attention.h

_NAME = "native"
_OTHERS = 'the backends "torch_gather" and "reference" can.'
_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


class Call(ctypes.Structure):
    """As attention.h's paged_attention_call."""

    _fields_ = (
        *(
            (name, _pointer)
            for name in (
                "queries",
                "out",
                "keys",
                "values",
                "key_scales",
                "value_scales",
                "tables",
                "query_start",
                "seq_lens",
                "sinks",
            )
        ),
        *((name, _int64) for name in ("query_stride", "out_stride", "table_stride", "column_stride")),
        *((name, _int64) for name in ("block_size", "page_bytes", "key_part", "value_part")),
        *((name, _int64) for name in ("n", "heads", "kv_heads", "key_size", "value_size", "window", "chunk")),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("stored", "query_element", "out_element")),
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """Sequences as the C code reads them, with their memory: block tables int32 [n, columns] or [n, columns, k],
    query_start int64 [n + 1], seq_lens int64 [n]."""

    tables: NDArray[np.int32]
    query_start: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    block_size: int

    def write(self, call: Call) -> None:
        """Write the arrays' addresses and sizes into a call."""
        call.tables = self.tables.ctypes.data
        call.column_stride = self.tables.shape[2] if self.tables.ndim == 3 else 1
        call.table_stride = self.tables.shape[1] * call.column_stride
        call.query_start, call.seq_lens = self.query_start.ctypes.data, self.seq_lens.ctypes.data
        call.block_size, call.n = self.block_size, len(self.seq_lens)


class Backend:
    """See the module. Raises UnsupportedByBackend where it cannot be compiled."""

    name = _NAME
    is_invariant = True
    piece = 1

    def __init__(self, is_invariant: bool) -> None:
        del is_invariant  # It always is.
        self._attention = attention_function()

    def check(self, shape: LayerShape) -> None:
        """Raise UnsupportedByBackend unless layers are on a CPU, in float32 or bfloat16, with heads of up to 256."""
        refusal = _refusal(shape)
        if refusal is not None:
            raise UnsupportedByBackend(_NAME, *refusal)

    def prepare(self, step: StepTokens, pool: LayeredPool) -> Plan:
        """Return the sequences' arrays as the C code reads them."""
        return plan_of(step)

    def attend(self, queries: Tensor, pool: LayeredPool, layer: int, plan: Plan, options: LayerOptions) -> Tensor:
        """See AttentionBackend."""
        own = pool.layer(layer)
        keys, values = own.keys, own.values
        out = queries.new_empty(*queries.shape[:2], values.size)
        # Places behind the tokens hold something finite.
        out[int(plan.query_start[-1]) :] = 0
        if queries.stride()[1:] != (queries.shape[2], 1):
            queries = queries.contiguous()
        call = Call(
            queries=queries.data_ptr(),
            out=out.data_ptr(),
            page_bytes=pool.pages.page_bytes,
            key_part=keys.part,
            value_part=values.part,
            query_stride=queries.stride(0),
            out_stride=out.stride(0),
            heads=queries.shape[1],
            kv_heads=keys.heads,
            key_size=keys.size,
            value_size=values.size,
            window=options.window or 0,
            chunk=options.chunk or 0,
            scale=options.scale,
            soft_cap=options.soft_cap or 0,
            query_element=ELEMENTS[queries.dtype],
            out_element=ELEMENTS[out.dtype],
        )
        if options.sinks is not None:
            sinks = options.sinks.float().contiguous()
            call.sinks = sinks.data_ptr()
        _write_pool(call, pool, keys, values)
        plan.write(call)
        self._attention(ctypes.byref(call))
        return out


def stored_as(pool: LayeredPool, entries: AnyEntries) -> int:
    """Return quantised.h's number for what these entries are stored in."""
    return _STORED[entries.kv_dtype] if isinstance(entries, QuantisedEntries) else ELEMENTS[pool.dtype]


def _write_pool(call: Call, pool: LayeredPool, keys: AnyEntries, values: AnyEntries) -> None:
    """Write where K and V lie into a call."""
    *key_scales, key_codes = keys.stored
    *value_scales, value_codes = values.stored
    call.keys, call.values = key_codes.blocks.data_ptr(), value_codes.blocks.data_ptr()
    call.stored = stored_as(pool, keys)
    if key_scales:
        call.key_scales, call.value_scales = key_scales[0].blocks.data_ptr(), value_scales[0].blocks.data_ptr()


def plan_of(step: StepTokens) -> Plan:
    """Return a step's plan."""
    return Plan(
        np.ascontiguousarray(step.block_tables, np.int32),
        np.ascontiguousarray(step.query_start_loc, np.int64),
        np.ascontiguousarray(step.seq_lens, np.int64),
        step.block_size,
    )


def _refusal(shape: LayerShape) -> tuple[str, str] | None:
    """Return what the backend cannot do of a shape, and what can; None if it can do all."""
    if shape.device.type != "cpu":
        return f"device {str(shape.device)!r}", f"it runs on a CPU; {_OTHERS}"
    if shape.dtype not in ELEMENTS:
        return f"{shape.dtype}", f"it reads float32 and bfloat16; {_OTHERS}"
    largest = max(shape.head_dim, shape.value_dim or 0)
    if largest > MOST_HEAD_SIZE:
        return f"heads of {largest}", f"it does heads of up to {MOST_HEAD_SIZE}; {_OTHERS}"
    return None


@cache
def attention_function() -> Any:
    """Return attention.c's paged_attention. Raises UnsupportedByBackend where it cannot be compiled."""
    try:
        function = library(*ATTENTION_LIBRARY).paged_attention
    except BuildFailed as error:
        raise UnsupportedByBackend(_NAME, "anything here", str(error)) from error
    function.argtypes, function.restype = [ctypes.POINTER(Call)], None
    return function
