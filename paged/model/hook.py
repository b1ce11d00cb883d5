"""The place where a Hugging Face decoder's attention is handed to a backend.

transformers lets an attention function be registered by name and calls it in every layer. Ours hands the layer's queries, keys and
values to whatever forward pass is under way, which a context variable carries: some architectures drop keyword arguments on the
way. A mask is never built: what transformers would write into one, a window, is handed through the layers in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from paged.attention import LayerOptions

# The name under which transformers knows our function.
ATTENTION = "paged"
# What some modules hand to attention beside this, and what changes an answer.
_OTHERS = ("position_bias", "block_indices", "sinks")


class Mask(NamedTuple):
    """What stands in for a mask of causal attention: a token sees so many tokens, itself included; None: all before it."""

    window: int | None


class ForwardPass(Protocol):
    """What takes the attention of one forward pass. `is_long`: bool [1, T], tokens whose rotary embedding is that of a long sequence
    (`rotary.py`); None: no token's is."""

    is_long: Tensor | None

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, options: LayerOptions) -> Tensor:
        """Attention of T tokens: queries [T, heads, head_dim], keys and values [T, kv heads, head_dim] → like the queries."""
        ...

    def refuse(self, what: str) -> None:
        """A layer wants something that no backend does."""
        ...


_UNDER_WAY: ContextVar[ForwardPass] = ContextVar("forward pass")


@contextmanager
def under_way(forward_pass: ForwardPass) -> Iterator[None]:
    """Attention of models called inside goes to this forward pass."""
    token = _UNDER_WAY.set(forward_pass)
    try:
        yield
    finally:
        _UNDER_WAY.reset(token)


def now_under_way() -> ForwardPass:
    """The forward pass that a model which is being called belongs to; for models that are not transformers' own."""
    return _UNDER_WAY.get()


def _paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, head_dim], key and value [1, kv heads, T, head_dim] → [1, T, heads, head_dim]."""
    forward_pass = now_under_way()
    if getattr(module, "is_causal", True) is False:
        forward_pass.refuse("attention to what comes later, as an encoder's do")
    if key.shape[-1] != value.shape[-1]:
        forward_pass.refuse(f"keys of {key.shape[-1]} and values of {value.shape[-1]} a head")
    for name in _OTHERS:
        if others.get(name) is not None:
            forward_pass.refuse(f"{name} in its attention")
    if isinstance(attention_mask, Mask):
        # The mask decides, as it does where transformers itself computes attention: many modules say their window nowhere else.
        sliding_window = attention_mask.window
    elif attention_mask is not None:
        forward_pass.refuse("a mask that they compute themselves")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = LayerOptions(scale, sliding_window, softcap, s_aux)
    packed = [part[0].transpose(0, 1) for part in (query, key, value)]
    out = forward_pass.attend(int(module.layer_idx), packed[0], packed[1], packed[2], options)
    return out.unsqueeze(0), None


def _mask(*, local_size: int | None = None, use_vmap: bool = False, **others: Any) -> Mask:
    """As transformers' own functions that build masks. `use_vmap`: a module adds conditions of its own."""
    if use_vmap:
        now_under_way().refuse("a mask with conditions of their own")
    return Mask(local_size)


def register() -> None:
    """Make both functions known to transformers; once more does no harm."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _paged_attention)
    AttentionMaskInterface.register(ATTENTION, _mask)
