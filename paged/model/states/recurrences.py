"""Recurrences in C within a state layer of transformers: one call of its module for all tokens of a pass (`native/recurrences.py`).

A module calls its recurrence by name, as a function of its file. Here its forward function runs with our functions under these names, and with a
cache object that has no states, so that the module does what it does for a prompt:

    causal_conv1d_fn                a short convolution: LFM2's layers, and before the recurrence of all others
    torch_chunk_gated_delta_rule    Qwen3-Next, Qwen3.5, OLMo Hybrid
    chunk_kimi_delta_attention      Kimi Linear, GLM 5 Next, Bailing Hybrid
    mamba2_chunk_scan               Mamba 2, Bamba, Granite 4, Nemotron-H, Falcon-H1, Zamba 2
    mamba_selective_scan            Mamba, Falcon-Mamba, Jamba

Our functions read each row's state from its pages and write it there, token after token, and add in one order: bits depend neither on how rows are
cut nor on other rows. A trial compares a layer with its module, token by token. A layer is called as `layer.py` describes if it differs, if its
recurrence has another name, if its state is not float32 (for a convolution: float32 or bfloat16), or if it is not on a CPU. Tried with
transformers 5.23.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paged.errors import UnsupportedModel
from paged.model.native.packed import model_library
from paged.model.native.recurrences import (
    RowPages,
    advance_delta_rule,
    advance_scan,
    advance_selective_scan,
    convolve,
)
from paged.model.states.seams import CacheSeam, Seam


class _Call:
    """A call under way, which stands in for the model's cache. It has no states.

    starts  int64 [n + 1]: the first place of each row's tokens, and the end of the last
    rows    the pages of the pieces of their states, by name
    """

    def __init__(self, starts: NDArray[np.int64], rows: dict[str, RowPages]) -> None:
        self.starts, self.rows = starts, rows
        # Name of the tail of the next convolution.
        self.tail = ""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None: ...

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None: ...

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **others: Any) -> Tensor:
        self.tail = f"conv {state_idx}"
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, **others: Any) -> None: ...

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


# Returned in place of a state, which is on pages.
_ELSEWHERE = torch.empty(0)
_UNDER_WAY: ContextVar[_Call] = ContextVar("call of a layer")


class Recurrence:
    """One state layer, called for all tokens of a pass. Raises UnsupportedModel if its module has no known recurrence, and BuildFailed."""

    def __init__(self, module: nn.Module, seam: Seam) -> None:
        functions = {
            "causal_conv1d_fn": self._convolve,
            "torch_chunk_gated_delta_rule": _advance_delta_rule,
            "chunk_kimi_delta_attention": _advance_delta_rule,
            "mamba2_chunk_scan": _advance_scan,
            "mamba_selective_scan": _advance_selective_scan,
        }
        forward: Any = inspect.unwrap(type(module).forward)
        known = functions.keys() & set(forward.__code__.co_names)
        # A function for the convolution, and one for each other piece.
        wanted = 1 + sum(not piece.tail for piece in seam.pieces)
        if not isinstance(seam, CacheSeam) or len(known) != wanted or "causal_conv1d_fn" not in known:
            raise UnsupportedModel(f"{type(module).__name__} has no recurrence that is known by name.")
        model_library()
        self._names = [piece.name for piece in seam.pieces]
        self._cache_names = seam.cache_names
        self._weights: dict[int, tuple[Tensor, Tensor | None]] = {}
        its = forward.__globals__ | functions
        own = FunctionType(forward.__code__, its, forward.__name__, forward.__defaults__, forward.__closure__)
        own.__kwdefaults__ = forward.__kwdefaults__
        self._forward = own.__get__(module)

    def run(self, arguments: dict[str, Any], starts: NDArray[np.int64], rows: Sequence[RowPages]) -> tuple[Tensor, ...]:
        """Call the layer. Return its outputs for all places. Advances the rows' states, one RowPages a piece, to those after their tokens."""
        name = next(each for each in self._cache_names if each in arguments)
        call = _Call(starts, dict(zip(self._names, rows, strict=True)))
        token = _UNDER_WAY.set(call)
        try:
            result = self._forward(**arguments | {name: call})
        finally:
            _UNDER_WAY.reset(token)
        return result if isinstance(result, tuple) else (result,)

    def _convolve(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **others: Any,
    ) -> Tensor:
        """Replace causal_conv1d_fn; hidden states are [1, channels, T]."""
        _refuse(others, "seq_idx", "initial_states")
        if activation not in (None, "silu", "swish"):
            raise UnsupportedModel(f"{activation} behind a convolution; in C it has silu or nothing.")
        if weight.data_ptr() not in self._weights:
            its = weight.detach().float().t().contiguous()
            self._weights[weight.data_ptr()] = its, None if bias is None else bias.detach().float()
        weights, biases = self._weights[weight.data_ptr()]
        call, x = _UNDER_WAY.get(), hidden_states[0].t()
        out = convolve(x, weights, biases, call.starts, call.rows[call.tail], has_silu=activation is not None)
        return out.t()[None]


def _advance_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Replace torch_chunk_gated_delta_rule and chunk_kimi_delta_attention; queries, keys and values are [1, T, heads, size]."""
    _refuse(others, "cu_seqlens", "initial_state")
    call = _UNDER_WAY.get()
    out = advance_delta_rule(
        queries=query[0],
        keys=key[0],
        values=value[0],
        decay=g[0],
        beta=beta[0],
        starts=call.starts,
        rows=call.rows["recurrent 0"],
        is_normed=use_qk_l2norm_in_kernel,
    )
    return out[None].to(query.dtype), _ELSEWHERE


def _advance_scan(
    hidden_states: Tensor,
    dt: Tensor,
    decay: Tensor,
    into: Tensor,
    reading: Tensor,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Replace mamba2_chunk_scan; hidden states are [1, T, heads, size]. A, B and C are positional arguments."""
    _refuse(others, "z", "seq_idx", "initial_states")
    call = _UNDER_WAY.get()
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = nn.functional.softplus(dt)
    out = advance_scan(
        x=hidden_states[0],
        step=dt[0].clamp(*dt_limit),
        decay=decay,
        given=(into[0], reading[0]),
        skip=others.get("D"),
        starts=call.starts,
        rows=call.rows["recurrent 0"],
    )
    return out[None], _ELSEWHERE


def _advance_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    decay: Tensor,
    into: Tensor,
    reading: Tensor,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Replace mamba_selective_scan; hidden states are [1, channels, T]. A, B and C are positional arguments."""
    call = _UNDER_WAY.get()
    step = dt[0].t()
    if delta_bias is not None:
        step = step + delta_bias.to(dt.dtype)
    if delta_softplus:
        step = nn.functional.softplus(step)
    out = advance_selective_scan(
        x=hidden_states[0].t(),
        step=step,
        decay=decay,
        given=(into[0].t(), reading[0].t()),
        skip=others.get("D"),
        starts=call.starts,
        rows=call.rows["recurrent 0"],
    ).t()[None]
    return out if z is None else out * nn.functional.silu(z), _ELSEWHERE


def _refuse(others: dict[str, Any], *names: str) -> None:
    """Raise UnsupportedModel if any of these arguments is given."""
    for name in names:
        if others.get(name) is not None:
            raise UnsupportedModel(f"{name} for a recurrence in C.")
