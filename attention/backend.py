"""The protocol of an attention backend, and the list of backends.

A backend's module is imported when the backend is asked for by name: what one backend needs, the others do not.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from paged.errors import BuildFailed, PagedWarning, UnknownBackend, UnsupportedByBackend

from .kv_dtypes import AUTO
from .kv_pool import LayeredPool
from .step_tokens import Ints, StepTokens


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What some layers have in common. `head_dim` is the size of a head of K, `value_dim` that of V (None: the same),
    and `num_kv_heads` divides `num_heads`. `has_…`: any of the layers has it. `is_even`: a page is a whole number of
    blocks of one layer's K, as where all layers are alike. `kv_dtype`: see kv_dtypes.py."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    has_soft_cap: bool = False
    has_sinks: bool = False
    has_chunks: bool = False
    value_dim: int | None = None
    is_even: bool = True
    kv_dtype: str = AUTO


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """How one layer attends.

    scale     factor of q·k
    window    a token attends to the last `window` tokens, itself included; None: to all before it, too
    soft_cap  scores become soft_cap * tanh(score / soft_cap); None: they stay
    sinks     [num_heads]; one more score for each head, which takes weight and has no value (gpt-oss); None: no sinks
    chunk     a token attends to tokens from the last multiple of `chunk` on, itself included (Llama 4); None: no chunks
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = field(default=None, compare=False)
    chunk: int | None = None

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """(window, chunk): layers with the same reach see the same tokens."""
        return self.window, self.chunk

    def first_seen(self, positions: Ints) -> Ints:
        """Return the first position that the token at each of these positions attends to, int64 in the same shape."""
        first = np.zeros_like(positions)
        if self.window is not None:
            first = np.maximum(first, positions - self.window + 1)
        if self.chunk is not None:
            first = np.maximum(first, positions // self.chunk * self.chunk)
        return first

    def capped(self, scores: Tensor) -> Tensor:
        """Return scores, of any shape, after the soft cap."""
        return scores if self.soft_cap is None else torch.tanh(scores / self.soft_cap) * self.soft_cap


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores and weights: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class AttentionBackend(Protocol):
    """One way to compute attention. `is_invariant`: a token's result is the same to the last bit, whatever else is in
    the step, however its prompt was cut into steps, and wherever its blocks lie. `piece`: the positions of a context
    that are then read together, for all places of the step; 1 where a token costs only what it sees."""

    name: str
    is_invariant: bool
    piece: int

    def check(self, shape: LayerShape) -> None:
        """Raise UnsupportedByBackend if layers of this shape cannot be done."""
        ...

    def prepare(self, step: StepTokens, pool: LayeredPool) -> Any:
        """Return what all layers of a pass share, such as index tensors. Only this backend's `attend` reads it."""
        ...

    def attend(self, queries: Tensor, pool: LayeredPool, layer: int, plan: Any, options: LayerOptions) -> Tensor:
        """Return the attention of this step's tokens. Their K and V are in the pool already.

        queries [T + num_padded, num_heads, size of K] → [T + num_padded, num_heads, size of V], in the same dtype.
        Results behind the T tokens are finite, and mean nothing.
        """
        ...


@runtime_checkable
class RenewsPlans(AttentionBackend, Protocol):
    """A backend whose kernels a graph can capture: all that differs between two decodes is in a plan's tensors."""

    def renew(self, plan: Any, step: StepTokens, pool: LayeredPool) -> None:
        """Write another step into the tensors of a plan. Both steps have one token a sequence, equally many sequences,
        and, rounded up to a power of two, equally many blocks in the longest sequence."""
        ...


# In the order in which they are listed. Each module has a class Backend(is_invariant).
_MODULES = {
    "reference": "paged.attention.reference",
    "native": "paged.attention.native.backend",
    "torch_gather": "paged.attention.torch_gather",
    "triton": "paged.attention.triton_blocks",
    "xformers_splitk": "paged.attention.xformers_splitk",
}

# By type of device, the backends that are faster there than torch_gather, the fastest first.
_FASTER = {"cuda": ("triton",), "cpu": ("native",)}


def known_backends() -> tuple[str, ...]:
    """Return the names that `get_backend` takes."""
    return tuple(_MODULES)


def get_backend(name: str, *, invariant: bool = False) -> AttentionBackend:
    """Return the backend of this name; `invariant` asks for its mode where a result depends on the token's sequence
    alone.

    Raises UnknownBackend, or UnsupportedByBackend if a library is not installed or there is no such mode.
    """
    if name not in _MODULES:
        raise UnknownBackend(name, _MODULES)
    backend: AttentionBackend = import_module(_MODULES[name]).Backend(invariant)
    return backend


def best_backend(shapes: Sequence[LayerShape], *, invariant: bool = False) -> AttentionBackend:
    """Return the fastest backend for layers of these shapes: `triton` on CUDA or `native` on a CPU if it takes them
    all, else, and without shapes, `torch_gather`. Warns, once for each cause, if nothing can be compiled."""
    for name in _FASTER.get(shapes[0].device.type, ()) if shapes else ():
        try:
            backend = get_backend(name, invariant=invariant)
            for shape in shapes:
                backend.check(shape)
        except UnsupportedByBackend as error:
            if isinstance(error.__cause__, BuildFailed):
                _say_once(str(error.__cause__))
            continue
        return backend
    return get_backend("torch_gather", invariant=invariant)


@cache
def _say_once(cause: str) -> None:
    warnings.warn(
        f'attention runs in torch, which is slower, because "native" cannot be compiled: {cause}',
        PagedWarning,
        stacklevel=2,
    )
