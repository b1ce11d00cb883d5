"""Recurrences in C in a state layer of transformers, for all tokens of a pass in one call of its module (`native/recurrences.py`).

A module finds its recurrence by name among the functions of its file. Here its forward function runs with other functions under three of these names, and
with a cache object that says of no state that it is there, so that it goes the way of a prompt:

    causal_conv1d_fn                a short convolution: LFM2's layers, and what comes before the others
    torch_chunk_gated_delta_rule    Qwen3-Next, Qwen3.5, OLMo Hybrid
    mamba2_chunk_scan               Mamba 2, Bamba, Granite 4, Nemotron-H, Falcon-H1, Zamba 2

These take each row's state from its pages and leave it there, token after token in one order of additions: bits depend neither on how rows are cut nor on
other rows. A trial holds a layer against its module, token by token. One that differs, or has its recurrence under another name, or a state in another
dtype than float32 (a convolution's: its own, float32 or bfloat16), or is not on a CPU, is called as `layer.py` says. Tried with transformers 5.23.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from paged.errors import UnsupportedModel
from paged.model.native.packed import model_library
from paged.model.native.recurrences import RowPages, advance_delta_rule, advance_scan, convolve
from paged.model.states.seams import CacheSeam, Seam


class _Now(NamedTuple):
    """A call under way: where its rows' tokens are, int64 [n + 1], and where the pieces of their states lie, by name."""

    starts: NDArray[np.int64]
    rows: dict[str, RowPages]


class Recurrence:
    """One state layer, called for all tokens of a pass. Raises UnsupportedModel where its module has no recurrence that is known, and BuildFailed."""

    def __init__(self, module: nn.Module, seam: Seam) -> None:
        functions = {
            "causal_conv1d_fn": self._convolve,
            "torch_chunk_gated_delta_rule": self._advance_delta_rule,
            "mamba2_chunk_scan": self._advance_scan,
        }
        forward: Any = inspect.unwrap(type(module).forward)
        called = set(forward.__code__.co_names)
        steps = [piece for piece in seam.pieces if not piece.tail]
        if not isinstance(seam, CacheSeam) or len(called & set(functions)) != len(
            {"conv"} | {each.name for each in steps}
        ):
            raise UnsupportedModel(f"{type(module).__name__} has no recurrence that is known by name.")
        model_library()
        self._pieces, self._seam = seam.pieces, seam
        self._weights: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._now: _Now | None = None
        self._tail = ""
        own = FunctionType(
            forward.__code__,
            forward.__globals__ | functions,
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        own.__kwdefaults__ = forward.__kwdefaults__
        self._forward = own.__get__(module)

    def run(self, arguments: dict[str, Any], starts: NDArray[np.int64], rows: Sequence[RowPages]) -> tuple[Tensor, ...]:
        """Return what the layer returns of all places; the rows' states, by piece, are those behind their tokens then."""
        name = next(each for each in self._seam.cache_names if each in arguments)
        self._now = _Now(starts, {piece.name: its for piece, its in zip(self._pieces, rows, strict=True)})
        try:
            result = self._forward(**arguments | {name: self})
        finally:
            self._now = None
        return result if isinstance(result, tuple) else (result,)

    # What a layer asks of its model's cache.
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Say that there is none: the functions below have them."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """As get_conv_state."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **others: Any) -> Tensor:
        """Return the tokens as they are, and remember which convolution comes next."""
        self._tail = f"conv {state_idx}"
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor | None, layer_idx: int, **others: Any) -> Tensor | None:
        """Return what a function below gave in place of a state."""
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    # In place of transformers' functions, by their arguments.
    def _convolve(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **others: Any,
    ) -> Tensor:
        """[1, channels, T]: see convolve."""
        _refuse(others, "seq_idx", "initial_states")
        if activation not in (None, "silu", "swish"):
            raise UnsupportedModel(f"{activation} behind a convolution; in C it has silu or nothing.")
        now = self._now
        assert now is not None, "run sets it"
        if weight.data_ptr() not in self._weights:
            its = weight.detach().float().t().contiguous()
            self._weights[weight.data_ptr()] = its, None if bias is None else bias.detach().float()
        weights, biases = self._weights[weight.data_ptr()]
        x = hidden_states[0].t()
        out = convolve(x, weights, biases, now.starts, now.rows[self._tail], has_silu=activation is not None)
        return out.t()[None]

    def _advance_delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """[1, T, heads, size]: see advance_delta_rule."""
        _refuse(others, "cu_seqlens", "initial_state")
        now = self._now
        assert now is not None, "run sets it"
        out = advance_delta_rule(
            queries=query[0],
            keys=key[0],
            values=value[0],
            decay=g[0],
            beta=beta[0],
            starts=now.starts,
            rows=now.rows["recurrent 0"],
            is_normed=use_qk_l2norm_in_kernel,
        )
        return out[None].to(query.dtype), None

    def _advance_scan(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        decay: Tensor,
        into: Tensor,
        reading: Tensor,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **others: Any,
    ) -> tuple[Tensor, None]:
        """[1, T, heads, size]: see advance_scan; A, B and C come by place."""
        _refuse(others, "z", "seq_idx", "initial_states")
        now = self._now
        assert now is not None, "run sets it"
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = nn.functional.softplus(dt)
        dt = dt.clamp(*dt_limit)
        out = advance_scan(
            x=hidden_states[0],
            step=dt[0],
            decay=decay,
            given=(into[0], reading[0]),
            skip=others.get("D"),
            starts=now.starts,
            rows=now.rows["recurrent 0"],
        )
        return out[None], None


def _refuse(others: dict[str, Any], *names: str) -> None:
    """Raise UnsupportedModel if any of these is given."""
    for name in names:
        if others.get(name) is not None:
            raise UnsupportedModel(f"{name} for a recurrence in C.")
