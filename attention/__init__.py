"""Attention over paged KV memory: pools of tensors, slot mappings, and the backends that read them through block tables.

Names load at their first use, so that importing this package does not import torch.

    KVPool                     pages of both tiers, with K and V of all layers; run_moves copies between the tiers
    LayeredPool                the same for layers of several kinds; a plan says where each layer lies
    StepTokens                 what one forward pass attends to, as arrays
    get_backend(name)          a way to compute attention: "reference", "native", "torch_gather", "triton" and others
    best_backend(shapes)       the fastest backend for layers of these shapes on this machine
    LayerShape, LayerOptions   a layer's sizes and dtypes, and how it attends
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backend import (
        AttentionBackend,
        LayerOptions,
        LayerShape,
        best_backend,
        get_backend,
        known_backends,
    )
    from .kv_pool import EntryPlace, KVPlace, KVPool, LayeredPool
    from .latents import Expand, Latents
    from .layouts.state import StatePlace
    from .movement import run_moves
    from .step_tokens import StepTokens

_HOMES = {
    "AttentionBackend": "paged.attention.backend",
    "EntryPlace": "paged.attention.kv_pool",
    "Expand": "paged.attention.latents",
    "KVPlace": "paged.attention.kv_pool",
    "KVPool": "paged.attention.kv_pool",
    "Latents": "paged.attention.latents",
    "LayeredPool": "paged.attention.kv_pool",
    "LayerOptions": "paged.attention.backend",
    "LayerShape": "paged.attention.backend",
    "StatePlace": "paged.attention.layouts.state",
    "StepTokens": "paged.attention.step_tokens",
    "best_backend": "paged.attention.backend",
    "get_backend": "paged.attention.backend",
    "known_backends": "paged.attention.backend",
    "run_moves": "paged.attention.movement",
}

__all__ = [
    "AttentionBackend",
    "EntryPlace",
    "Expand",
    "KVPlace",
    "KVPool",
    "Latents",
    "LayerOptions",
    "LayerShape",
    "LayeredPool",
    "StatePlace",
    "StepTokens",
    "best_backend",
    "get_backend",
    "known_backends",
    "run_moves",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            value = getattr(import_module(_HOMES[name]), name)
            globals()[name] = value
            return value
        raise AttributeError(f"module 'paged.attention' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
