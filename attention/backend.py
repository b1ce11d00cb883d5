"""The protocol of an attention backend, and the list of backends.

A backend's module is imported when its name is asked for, so that none of them needs what another one needs.
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
    """What layers have in common: query heads, heads of K and V (a divisor), the size of a head of K, tokens a block, dtype and device;
    whether any layer caps its scores, has sinks, or attends within chunks; the size of a head of V where it is another one;
    whether a page is a whole number of blocks of one layer's K, as it is where all layers are alike; and how K and V are stored, as of kv_dtypes.py."""

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
    window    a token attends to so many tokens, itself included; None: to all before it
    soft_cap  scores become soft_cap * tanh(score / soft_cap); None: they stay
    sinks     [num_heads], a score that every token of a head sees and that has no value (gpt-oss); None: there are none
    chunk     a token attends to those since the last multiple of so many, itself included (Llama 4); None: to all before it
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = field(default=None, compare=False)
    chunk: int | None = None

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """Window and chunk: layers that have both alike see the same tokens."""
        return self.window, self.chunk

    def first_seen(self, positions: Ints) -> Ints:
        """Return the first position that each of these tokens attends to, int64 of any shape."""
        first = np.zeros_like(positions)
        if self.window is not None:
            first = np.maximum(first, positions - self.window + 1)
        if self.chunk is not None:
            first = np.maximum(first, positions // self.chunk * self.chunk)
        return first

    def capped(self, scores: Tensor) -> Tensor:
        """The scores, of any shape, as the soft cap leaves them."""
        return scores if self.soft_cap is None else torch.tanh(scores / self.soft_cap) * self.soft_cap


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """What scores and weights are computed in: float64 for float64, float32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class AttentionBackend(Protocol):
    """One way to compute attention. `is_invariant`: a token's result does not depend, to the last bit, on what else is in the
    step, on how its prompt was cut into steps, or on where its blocks lie. `piece`: positions of a context that it then reads at a
    time, for all places of the step; 1 where each token costs what it sees."""

    name: str
    is_invariant: bool
    piece: int

    def check(self, shape: LayerShape) -> None:
        """Raise UnsupportedByBackend if layers of this shape cannot be done."""
        ...

    def prepare(self, step: StepTokens, pool: LayeredPool) -> Any:
        """What all layers of one forward pass need: index tensors, masks. Only `attend` of this backend reads it."""
        ...

    def attend(self, queries: Tensor, pool: LayeredPool, layer: int, plan: Any, options: LayerOptions) -> Tensor:
        """Attention of this step's tokens, whose K and V are in the pool already.

        queries [T + num_padded, num_heads, size of K] → [T + num_padded, num_heads, size of V], in the same dtype; places behind T
        hold something finite.
        """
        ...


@runtime_checkable
class RenewsPlans(AttentionBackend, Protocol):
    """A backend whose kernels can be captured in a graph: they find all that differs from decode to decode in a plan's tensors."""

    def renew(self, plan: Any, step: StepTokens, pool: LayeredPool) -> None:
        """Put another step into the tensors of a plan. Both steps have one token a sequence, as many sequences, and a longest one whose number of
        blocks, rounded up to a power of two, is the same."""
        ...


# In the order in which they are proposed; the module of each has a class Backend(is_invariant).
_MODULES = {
    "reference": "paged.attention.reference",
    "native": "paged.attention.native.backend",
    "torch_gather": "paged.attention.torch_gather",
    "triton": "paged.attention.triton_blocks",
    "xformers_splitk": "paged.attention.xformers_splitk",
}

# Those that are faster on a type of device than what runs everywhere, the fastest first.
_FASTER = {"cuda": ("triton",), "cpu": ("native",)}


def known_backends() -> tuple[str, ...]:
    """The names that `get_backend` takes."""
    return tuple(_MODULES)


def get_backend(name: str, *, invariant: bool = False) -> AttentionBackend:
    """The backend of this name; with `invariant` in the mode in which a token's result depends on nothing but its sequence.

    Raises UnknownBackend, or UnsupportedByBackend when what the backend needs is not installed or it has no such mode.
    """
    if name not in _MODULES:
        raise UnknownBackend(name, _MODULES)
    backend: AttentionBackend = import_module(_MODULES[name]).Backend(invariant)
    return backend


def best_backend(shapes: Sequence[LayerShape], *, invariant: bool = False) -> AttentionBackend:
    """The fastest backend that can do layers of these shapes here: on CUDA `triton` and on a CPU `native` where they can,
    everywhere else, and where nothing attends, `torch_gather`. Where nothing can be compiled it warns, once."""
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
