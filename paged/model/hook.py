"""The hook in transformers by which a Hugging Face decoder's attention comes to a backend.

transformers registers attention functions by name, and calls the chosen one in every layer. Ours hands the layer's queries, keys and values to the
forward pass under way. A context variable carries that pass, since some architectures drop keyword arguments. No mask is built: a small `Mask`
with the window goes through the layers in its place.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from paged.attention import Expand, LayerOptions

if TYPE_CHECKING:
    from paged.model.states.layer import RowStates

# The name under which our function is registered.
ATTENTION = "paged"
# Arguments of some modules that change an answer, and that no backend takes.
_OTHERS = ("position_bias", "sinks")
# An attribute that we set on modules that expand latents: the function that does.
_EXPAND = "paged_expand"
# An attribute that we set on modules that attend by themselves.
BY_ITSELF = "paged_by_itself"


@dataclass(frozen=True, slots=True)
class Mask:
    """Stands in for a mask of causal attention: a token sees `window` tokens, itself included, or those since the last multiple of `chunk`; both
    None: all before it. Any part that a module cuts out of it, for a head, is the whole."""

    window: int | None
    chunk: int | None = None

    def __getitem__(self, part: Any) -> Mask:
        return self

    @property
    def dtype(self) -> Any:
        """Refuse the model: a module reads it in order to compute with the mask."""
        return now_under_way().refuse("to compute with a mask", can_itself=True)


class ForwardPass(Protocol):
    """A forward pass under way, as the layers of a model see it.

    is_long    bool [1, T]: tokens whose rotary embedding is that of a long sequence (`rotary.py`); None: no token's is
    states     the states of its rows, for layers that keep one; None: no layer does
    positions  int64 [T]
    """

    is_long: Tensor | None
    states: RowStates | None
    positions: Tensor

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        options: LayerOptions,
        expand: Expand | None = None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Attend for T tokens: queries [T, heads, size of K], keys and values [T, kv heads, size] → [T, heads, size of V]. With `expand` keys and values
        are latents, which it expands to K and V. `chosen`: as for `Latents.attend`."""
        ...

    def shares(self) -> list[tuple[int, int]]:
        """Return the tokens of each call of a module that takes one sequence at a time, as (first, stop)."""
        ...

    def of_share(self, first: int, stop: int) -> ForwardPass:
        """Return the pass as parts of that module see it: its states are those of the share's row alone."""
        ...

    def index(self, layer: int, first: int, keys: Tensor) -> Tensor:
        """Keep the index keys of one share, [tokens, size], which begins at token `first`. Return those of its sequence up to the share's end, [n, size]."""
        ...

    def keep(self, layer: int, first: int, keys: Tensor, values: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """Keep K and V of one share, [tokens, heads, size] each, for a module that attends by itself. Return those of its sequence up to the share's end,
        [n, heads, size]; with a window they begin at the first token that the share sees."""
        ...

    def keep_compressed(self, layer: int, first: int, name: str, begin: int, new: Tensor) -> Tensor:
        """Keep compressed entries of one share, [m, size], from entry `begin` of its sequence on. Return those of its sequence up to their end, [n, size]."""
        ...

    def refuse(self, what: str, *, can_itself: bool = False) -> None:
        """Raise, since a layer wants something that no backend does. `can_itself`: its module can, if it is given K and V."""
        ...


_UNDER_WAY: ContextVar[ForwardPass] = ContextVar("forward pass")


@contextmanager
def under_way(forward_pass: ForwardPass) -> Iterator[None]:
    """Make this the forward pass of models that are called inside."""
    token = _UNDER_WAY.set(forward_pass)
    try:
        yield
    finally:
        _UNDER_WAY.reset(token)


def now_under_way() -> ForwardPass:
    """Return the forward pass under way, whose model is being called."""
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
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend: query [1, heads, T, size], key and value [1, kv heads, T, size] → [1, T, heads, size of V]. `indices`, [1, T, k]: the tokens that each
    token attends to; `block_indices`, [1, groups of heads, T, k]: blocks of them, of the size that the module's indexer has."""
    forward_pass = now_under_way()
    if hasattr(module, BY_ITSELF):
        attend: Any = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        others |= {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        given = {name: value for name, value in others.items() if value is not None}
        found: tuple[Tensor, None] = attend(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **given
        )
        return found
    if getattr(module, "is_causal", True) is False:
        forward_pass.refuse("attention to what comes later, as an encoder's do")
    if query.shape[0] != 1:
        # The rows of a state layer are a batch; attention takes rows one after the other.
        forward_pass.refuse("to attend within a layer that keeps a state")
    for name in _OTHERS:
        if others.get(name) is not None:
            forward_pass.refuse(f"{name} in its attention", can_itself=True)
    chunk = None
    if isinstance(attention_mask, Mask):
        # The mask decides, as in transformers' own attention: many modules have their window nowhere else.
        sliding_window, chunk = attention_mask.window, attention_mask.chunk
    elif attention_mask is not None:
        forward_pass.refuse("a mask that they compute themselves", can_itself=True)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = LayerOptions(scale, sliding_window, softcap, s_aux, chunk)
    packed = [part[0].transpose(0, 1) for part in (query, key, value)]
    more: dict[str, Any] = {"expand": getattr(module, _EXPAND)} if hasattr(module, _EXPAND) else {}
    if indices is not None:
        more["chosen"] = indices
    if block_indices is not None:
        blocks, size = block_indices[0, ..., None], module.indexer.block_size
        positions = blocks * size + torch.arange(size, device=blocks.device)
        more["chosen"] = positions.where(blocks >= 0, -1).flatten(2)
    out = forward_pass.attend(int(module.layer_idx), packed[0], packed[1], packed[2], options, **more)
    return out.unsqueeze(0), None


def _mask(*, config: Any, local_size: int | None = None, use_vmap: bool = False, **others: Any) -> Mask:
    """Take the place of transformers' functions that build masks. `use_vmap`: a module adds conditions of its own."""
    if use_vmap:
        now_under_way().refuse("a mask with conditions of their own", can_itself=True)
    if local_size is None or local_size != getattr(config, "attention_chunk_size", None):
        return Mask(local_size)
    if local_size == getattr(config, "sliding_window", None):
        now_under_way().refuse("a window and chunks of one size, which look alike")
    return Mask(None, local_size)


def follow_latents(module: nn.Module) -> None:
    """Make attention modules that expand latents to K and V hand the latents to attention, with the function that expands them."""
    for each in module.modules():
        if hasattr(type(each), "expand_kv"):
            setattr(each, _EXPAND, each.expand_kv)
            as_it_is: Any = _both
            each.expand_kv = as_it_is


def _both(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    return first, second


def names_in(module: nn.Module) -> tuple[str, ...]:
    """Return the names that the code of a module's forward function uses."""
    code: Any = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def follow_layers(module: nn.Module) -> None:
    """Make attention modules that serve several layers set `layer_idx` at each call, as all others have it. Such a call has the layer's number, or an
    offset to the module's own."""
    for each in module.modules():
        if "ALL_ATTENTION_FUNCTIONS" not in names_in(each):
            continue
        signature = inspect.signature(each.forward)
        if "layer_idx" in signature.parameters:
            each.forward = partial(_of_layer, each, each.forward, signature, "layer_idx", 0)
        elif "cycle_offset" in signature.parameters:
            own: Any = each.layer_idx
            each.forward = partial(_of_layer, each, each.forward, signature, "cycle_offset", own)


def _of_layer(
    module: Any,
    forward: Callable[..., Any],
    signature: inspect.Signature,
    name: str,
    own: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    module.layer_idx = own + signature.bind(*args, **kwargs).arguments.get(name, 0)
    return forward(*args, **kwargs)


def register() -> None:
    """Register both functions with transformers. A second call changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _paged_attention)
    AttentionMaskInterface.register(ATTENTION, _mask)
