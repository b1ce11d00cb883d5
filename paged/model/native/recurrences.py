"""Recurrences in C over states that lie on pages, on a CPU (recurrences.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged.attention.layouts.state import State
from paged.attention.native.backend import ELEMENTS
from paged.attention.pages import Pages
from paged.errors import UnsupportedModel
from paged.model.native.packed import model_library

# Limits of recurrences.h.
MOST_KEY_SIZE, MOST_TAPS = 512, 16
_pointer, _int64, _int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class RowPages(NamedTuple):
    """The pages of one piece of the states of n rows.

    state  the piece, on a pool's pages
    read   int32 [n, k]: pages of each row's state before its tokens; -1: the row has no state yet
    write  int32 [n, k]: pages for the state after its tokens; -1: it is not written
    """

    state: State
    read: NDArray[np.int32]
    write: NDArray[np.int32]


class Rows(ctypes.Structure):
    """paged_rows of recurrences.h. `held`: arrays that it refers to by address."""

    held: tuple[NDArray[Any], ...]
    _fields_ = (
        *((name, _pointer) for name in ("pages", "read", "write", "parts", "offsets", "starts")),
        *((name, _int64) for name in ("page_bytes", "stride", "units", "n")),
        ("lacks_memory", _pointer),
    )


class _Convolution(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("x", "out", "weight", "bias")),
        *((name, _int64) for name in ("channels", "taps", "x_stride")),
        ("element", _int32),
        ("has_silu", _int32),
    )


class _DeltaRule(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("queries", "keys", "values", "decay", "beta", "out")),
        *((name, _int64) for name in ("heads", "key_heads", "key_size", "value_size", "decay_size")),
        ("scale", ctypes.c_float),
        ("is_normed", _int32),
    )


class _Scan(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("x", "step", "decay", "input", "reading", "skip", "out")),
        *((name, _int64) for name in ("heads", "groups", "head_size", "state_size")),
    )


class _SelectiveScan(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("x", "step", "decay", "input", "reading", "skip", "out")),
        *((name, _int64) for name in ("channels", "state_size")),
    )


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, starts: NDArray[np.int64], rows: RowPages, *, has_silu: bool
) -> Tensor:
    """Convolve over time, with SiLU after it if `has_silu`. Return [T, channels], of x's dtype. The rows' states become the last tokens of x.

    x       [T, channels], float32 or bfloat16
    states  [channels, taps - 1], of x's dtype
    weight  float32 [taps, channels]
    bias    float32 [channels]
    starts  int64 [n + 1]: row i has places starts[i] to starts[i + 1] - 1; places after the last row are padding, and give zeros

    This and the other recurrences raise UnsupportedModel for shapes and dtypes that C does not take. Those of states that are float32
    also raise MemoryError where there is no memory for a state that is not written.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    _check(rows, (x.shape[1], len(weight) - 1), x.dtype)
    if len(weight) > MOST_TAPS:
        raise UnsupportedModel(f"a convolution over {len(weight)} tokens; in C it has up to {MOST_TAPS}.")
    channels = x.shape[1]
    _check_shapes(weight=(weight, (len(weight), channels)))
    if bias is not None:
        _check_shapes(bias=(bias, (channels,)))
    out = _results(x.shape, x.dtype, starts)
    call = _Convolution(
        x=x.data_ptr(),
        out=out.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        channels=x.shape[1],
        taps=len(weight),
        x_stride=x.stride(0),
        element=ELEMENTS[x.dtype],
        has_silu=has_silu,
    )
    _run(model_library().paged_convolve, call, starts, rows)
    return out


def advance_delta_rule(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decay: Tensor,
    beta: Tensor,
    starts: NDArray[np.int64],
    rows: RowPages,
    *,
    is_normed: bool,
) -> Tensor:
    """Advance the rows' states by the gated delta rule. Return what queries read of them, float32 [T, heads, value size].

    queries, keys  [T, key heads, key size]; each serves heads / key heads consecutive heads; `is_normed`: scaled to length 1 first
    values         [T, heads, value size]
    decay          logarithms, [T, heads], or [T, heads, key size] with one for each number of a key
    beta           [T, heads]: the share of the correction
    states         float32 [heads, key size, value size], a unit a head
    starts         as of `convolve`
    """
    queries, keys, values, decay, beta = (each.float().contiguous() for each in (queries, keys, values, decay, beta))
    _check(rows, (values.shape[1], keys.shape[2], values.shape[2]), torch.float32)
    if keys.shape[2] > MOST_KEY_SIZE:
        raise UnsupportedModel(
            f"a key of {keys.shape[2]} numbers; the gated delta rule in C has up to {MOST_KEY_SIZE}."
        )
    tokens, heads, _ = values.shape
    decays = (tokens, heads) if decay.dim() == 2 else (tokens, heads, keys.shape[2])
    by_key = (tokens, *keys.shape[1:])
    _check_shapes(decay=(decay, decays), beta=(beta, (tokens, heads)), queries=(queries, by_key), keys=(keys, by_key))
    _check_share("key heads", keys.shape[1], heads)
    out = _results(values.shape, torch.float32, starts)
    call = _DeltaRule(
        queries=queries.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        decay=decay.data_ptr(),
        beta=beta.data_ptr(),
        out=out.data_ptr(),
        heads=values.shape[1],
        key_heads=keys.shape[1],
        key_size=keys.shape[2],
        value_size=values.shape[2],
        decay_size=1 if decay.dim() == 2 else keys.shape[2],
        scale=keys.shape[2] ** -0.5,
        is_normed=is_normed,
    )
    _run(model_library().paged_advance_delta_rule, call, starts, rows)
    return out


class _ScanInputs(NamedTuple):
    """Inputs of both scans, contiguous and float32. It has to live as long as the call."""

    x: Tensor
    step: Tensor
    decay: Tensor
    input: Tensor
    reading: Tensor
    skip: Tensor | None

    @classmethod
    def of(
        cls,
        x: Tensor,
        step: Tensor,
        decay: Tensor,
        given: tuple[Tensor, Tensor],
        skip: Tensor | None,
        *,
        decays: Sequence[int],
    ) -> _ScanInputs:
        """Convert inputs of `advance_scan` or `advance_selective_scan`. `decays`: the shape of `decay`. Raises UnsupportedModel for other shapes."""
        tokens, step, decay, into, reading = (each.float().contiguous() for each in (x, step, decay, *given))
        found = cls(tokens, step, decay, into, reading, None if skip is None else skip.float().contiguous())
        given_each = (x.shape[0], *found.reading.shape[1:])
        _check_shapes(step=(found.step, tuple(x.shape[:2])), decay=(found.decay, tuple(decays)))
        _check_shapes(into=(found.input, given_each), reading=(found.reading, given_each))
        if found.skip is not None:
            _check_shapes(skip=(found.skip, tuple(x.shape[1:2])))
        return found

    def addresses(self) -> dict[str, int | None]:
        return {name: None if each is None else each.data_ptr() for name, each in self._asdict().items()}


def advance_scan(
    x: Tensor,
    step: Tensor,
    decay: Tensor,
    given: tuple[Tensor, Tensor],
    skip: Tensor | None,
    starts: NDArray[np.int64],
    rows: RowPages,
) -> Tensor:
    """Advance the rows' states by Mamba 2's scan. Return its outputs, float32 [T, heads, head size].

    x       [T, heads, head size]
    step    [T, heads]: the time step of a token
    decay   [heads]: A, below 0
    given   B and C, [T, groups, state size]; each group serves heads / groups consecutive heads
    skip    [heads]: D
    states  float32 [heads, head size, state size], a unit a head
    starts  as of `convolve`
    """
    inputs = _ScanInputs.of(x, step, decay, given, skip, decays=x.shape[1:2])
    _, heads, head_size = x.shape
    _, groups, state_size = inputs.reading.shape
    _check(rows, (heads, head_size, state_size), torch.float32)
    _check_share("groups", groups, heads)
    out = _results(x.shape, torch.float32, starts)
    call = _Scan(
        **inputs.addresses(),
        out=out.data_ptr(),
        heads=heads,
        groups=groups,
        head_size=head_size,
        state_size=state_size,
    )
    _run(model_library().paged_advance_scan, call, starts, rows)
    return out


def advance_selective_scan(
    x: Tensor,
    step: Tensor,
    decay: Tensor,
    given: tuple[Tensor, Tensor],
    skip: Tensor | None,
    starts: NDArray[np.int64],
    rows: RowPages,
) -> Tensor:
    """Advance the rows' states by Mamba 1's scan. Return its outputs, float32 [T, channels].

    x       [T, channels]
    step    [T, channels]: the time step of a token
    decay   [channels, state size]: A, below 0
    given   B and C, [T, state size]
    skip    [channels]: D
    states  float32 [channels, state size]
    starts  as of `convolve`
    """
    channels, state_size = x.shape[1], given[1].shape[1]
    inputs = _ScanInputs.of(x, step, decay, given, skip, decays=(channels, state_size))
    _check(rows, (channels, state_size), torch.float32)
    out = _results(x.shape, torch.float32, starts)
    call = _SelectiveScan(**inputs.addresses(), out=out.data_ptr(), channels=channels, state_size=state_size)
    _run(model_library().paged_advance_selective_scan, call, starts, rows)
    return out


def _check(rows: RowPages, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    its = rows.state
    if (its.shape, its.dtype) != (shape, dtype) or dtype not in ELEMENTS:
        raise UnsupportedModel(
            f"a state of {its.shape} in {its.dtype}; this recurrence in C keeps {shape} in {dtype}, float32 or bfloat16."
        )


def _check_shapes(**each: tuple[Tensor, tuple[int, ...]]) -> None:
    """Raise UnsupportedModel unless each tensor has its shape, which C relies on."""
    for name, (tensor, shape) in each.items():
        if tuple(tensor.shape) != shape:
            raise UnsupportedModel(f"{name} of {tuple(tensor.shape)}; this recurrence in C takes {shape}.")


def _check_share(name: str, count: int, heads: int) -> None:
    """Raise UnsupportedModel unless `count` groups can share `heads` heads evenly."""
    if count < 1 or heads % count:
        raise UnsupportedModel(f"{count} {name} for {heads} heads; each has to serve as many.")


def _results(shape: Sequence[int], dtype: torch.dtype, starts: NDArray[np.int64]) -> Tensor:
    """Allocate memory for results, with zeros at padding. Raises UnsupportedModel if rows end after the last token."""
    if starts[-1] > shape[0]:
        raise UnsupportedModel(f"rows end behind {starts[-1]} tokens; there are {shape[0]}.")
    out = torch.empty(tuple(shape), dtype=dtype)
    out[int(starts[-1]) :] = 0
    return out


def rows_of(pages: Pages, read: NDArray[np.int32], write: NDArray[np.int32], starts: NDArray[np.int64]) -> Rows:
    """Return rows as C reads them, without the units of a piece."""
    read, write = (np.ascontiguousarray(each, np.int32) for each in (read, write))
    found = Rows(
        pages=pages.on_device.data_ptr(),
        read=read.ctypes.data,
        write=write.ctypes.data,
        starts=starts.ctypes.data,
        page_bytes=pages.page_bytes,
        stride=read.shape[1],
        n=len(read),
    )
    found.held = (read, write, starts)
    return found


def _run(function: Any, call: ctypes.Structure, starts: NDArray[np.int64], rows: RowPages) -> None:
    state, lacks_memory = rows.state, np.zeros(1, np.int64)
    its = rows_of(state.pages, rows.read, rows.write, starts)
    its.parts, its.offsets, its.units = state.parts.ctypes.data, state.offsets.ctypes.data, len(state.parts)
    its.lacks_memory = lacks_memory.ctypes.data
    function(ctypes.byref(call), ctypes.byref(its))
    if lacks_memory[0]:
        raise MemoryError("a recurrence needs memory for a state that is not kept.")
