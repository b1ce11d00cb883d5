"""Seams: how a layer of transformers takes the state before its tokens, and returns the state after them.

Most layers take it from the model's cache object, and give it back to it: `get_conv_state`, `update_recurrent_state` and so on. For the others there
is a class each. A layer's state is a few tensors, its *pieces*, whose first dimension is the row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paged.errors import UnsupportedModel
from paged.model.hook import names_in

Forward = Callable[..., Any]


class Piece(NamedTuple):
    """One tensor of a layer's state.

    name   name in messages, and in the cache
    shape  shape for one row
    dtype  dtype in which the layer computes it
    start  value of every element before a row's first token
    tail   the layer wants one more column, which nothing reads: for a convolution over k tokens k - 1 columns are kept, and it gets k
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: float = 0.0
    tail: bool = False

    @staticmethod
    def of(name: str, states: Tensor, start: float = 0.0) -> Piece:
        """Return the piece that has these states, one a row."""
        return Piece(name, tuple(states.shape[1:]), states.dtype, start)


class Seam:
    """A layer with a state. `pieces` are known once it was called."""

    cache_names = ("cache_params", "past_key_values")

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        self._module = module
        self._forward = forward
        self._signature = inspect.signature(forward)
        self.pieces: tuple[Piece, ...] = ()

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return a call's arguments by name; the first is the hidden states."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        named = dict(bound.arguments)
        variable = next((p.name for p in self._signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
        return named | (named.pop(variable) if variable else {})

    def run(self, arguments: dict[str, Any], states: list[Tensor] | None) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Call the layer. Return its outputs, each [rows, tokens, ...], and the states after the tokens.

        `states`, one [rows, ...] a piece, may be overwritten; None: no row has a state yet.
        """
        raise NotImplementedError

    def returned(self, outputs: tuple[Tensor, ...]) -> Any:
        """Return these outputs in the form of the layer's result; here, a pair with None."""
        return outputs[0], None


class CacheSeam(Seam):
    """A layer that keeps its state in the cache object."""

    def run(self, arguments: dict[str, Any], states: list[Tensor] | None) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        name = next(each for each in self.cache_names if each in arguments)
        cache = _OneLayer({} if states is None else self._handed(states))
        result = self._forward(**arguments | {name: cache})
        if not self.pieces:
            self.pieces = tuple(cache.piece(key) for key in cache.held)
        self._is_tuple = isinstance(result, tuple)
        return result if self._is_tuple else (result,), self._taken(cache)

    def returned(self, outputs: tuple[Tensor, ...]) -> Any:
        return outputs if self._is_tuple else outputs[0]

    def _handed(self, states: list[Tensor]) -> dict[str, Tensor]:
        return {
            piece.name: torch.nn.functional.pad(state, (1, 0)) if piece.tail else state
            for piece, state in zip(self.pieces, states, strict=True)
        }

    def _taken(self, cache: _OneLayer) -> list[Tensor]:
        return [cache.held[piece.name][..., 1:] if piece.tail else cache.held[piece.name] for piece in self.pieces]


class _OneLayer:
    """Stands in for the model's cache in a call of one layer, with its states by name. The layer may write into them."""

    def __init__(self, held: dict[str, Tensor]) -> None:
        self.held = held
        self._tails: set[str] = set()

    @property
    def layers(self) -> Any:
        raise UnsupportedModel(
            "its state layers look for states in `layers` of a cache, as those of transformers before 5.21; 5.21 and newer ones are served."
        )

    def piece(self, key: str) -> Piece:
        state = self.held[key]
        tail = key in self._tails
        shape = (*state.shape[1:-1], state.shape[-1] - 1) if tail else state.shape[1:]
        return Piece(key, tuple(shape), state.dtype, tail=tail)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.held.get(f"conv {state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.held.get(f"recurrent {state_idx}")

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **others: Any,
    ) -> Tensor:
        """Keep the last columns of [rows, channels, tokens]. Return these tokens behind the columns kept before."""
        key = f"conv {state_idx}"
        if conv_kernel_size is not None:
            self._tails.add(key)
        kept = conv_kernel_size or conv_states.shape[-1]
        before = self.held.get(key)
        if before is not None:
            conv_states = torch.cat([before, conv_states], -1)
        elif conv_states.shape[-1] < kept:
            conv_states = torch.nn.functional.pad(conv_states, (kept - conv_states.shape[-1], 0))
        self.held[key] = conv_states[..., -kept:]
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **others: Any
    ) -> Tensor:
        self.held[f"recurrent {state_idx}"] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.held)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


class LinearCacheSeam(Seam):
    """MiniMax's lightning attention, whose cache has other methods."""

    def run(self, arguments: dict[str, Any], states: list[Tensor] | None) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        cache = _LinearCache(None if states is None else states[0])
        output, _ = self._forward(**arguments | {"past_key_values": cache})
        assert cache.state is not None, "the layer sets it"
        self.pieces = (Piece.of("recurrent 0", cache.state),)
        return (output,), [cache.state]


class _LinearCache:
    def __init__(self, state: Tensor | None) -> None:
        self.state = state

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self.state

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.state = linear_cache


class AttributeSeam(Seam):
    """RecurrentGemma's recurrent block, which keeps its states as attributes."""

    def run(self, arguments: dict[str, Any], states: list[Tensor] | None) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        module: Any = self._module
        module.conv1d_state, module.rg_lru.recurrent_states = states or (None, None)
        output, _ = self._forward(**arguments | {"use_cache": True})
        found = [module.conv1d_state, module.rg_lru.recurrent_states]
        module.conv1d_state = module.rg_lru.recurrent_states = None
        self.pieces = tuple(map(Piece.of, ("conv 0", "recurrent 0"), found))
        return (output,), found


class ReturnedSeam(Seam):
    """xLSTM's layer, which takes a state and returns the next one with its output."""

    def run(self, arguments: dict[str, Any], states: list[Tensor] | None) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        output, found = self._forward(**arguments | {"state": None if states is None else tuple(states)})
        self.pieces = tuple(map(Piece.of, ("matrix", "weight", "scale"), found))
        return (output,), list(found)


class RwkvSeam(Seam):
    """A block of an RWKV layer, which keeps its part of a list that all layers share, of tensors [rows, width, layers].

    Time mixing has the previous token (1), a sum, its weight and their scale (2 to 4); channel mixing has the previous token (0).
    """

    _NAMES = ("token before", "token before", "sum", "weight", "scale")
    _NO_SCALE = -1e30

    def run(self, arguments: dict[str, Any], states: list[Tensor] | None) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        module: Any = self._module
        hidden, layer = arguments["hidden"], int(module.layer_id)
        is_time_mixing = hasattr(module, "attention_hidden_size")
        places = (1, 2, 3, 4) if is_time_mixing else (0,)
        listed: list[Any] = [None] * 5
        for k, place in enumerate(places):
            size = hidden.shape[-1] if place < 2 else module.attention_hidden_size
            dtype = hidden.dtype if place < 2 else torch.float32
            listed[place] = torch.zeros(len(hidden), size, layer + 1, dtype=dtype, device=hidden.device)
            listed[place][..., layer] = self._start(place) if states is None else states[k]
        output, _ = self._forward(**arguments | {"state": listed})
        found = [listed[place][..., layer] for place in places]
        self.pieces = tuple(
            Piece.of(self._NAMES[place], state, self._start(place)) for place, state in zip(places, found, strict=True)
        )
        return (output,), found

    def _start(self, place: int) -> float:
        return self._NO_SCALE if place == 4 else 0.0


_OWN_WAYS: dict[str, type[Seam]] = {
    "RecurrentGemmaRecurrentBlock": AttributeSeam,
    "RwkvSelfAttention": RwkvSeam,
    "RwkvFeedForward": RwkvSeam,
    "xLSTMLayer": ReturnedSeam,
}
_CALLS: dict[str, type[Seam]] = {
    "update_conv_state": CacheSeam,
    "update_recurrent_state": CacheSeam,
    "set_linear_cache": LinearCacheSeam,
}


def seam_of(module: nn.Module) -> Seam | None:
    """Return the seam of a layer that keeps a state, by what its forward function calls; None for any other module."""
    forward = module.forward
    own = _OWN_WAYS.get(type(module).__name__)
    if own is not None:
        return own(module, forward)
    found = next((_CALLS[name] for name in names_in(module) if name in _CALLS), None)
    return None if found is None else found(module, forward)


def keeps_tails(module: nn.Module) -> bool:
    """Whether a method of the module other than `forward` keeps columns of a convolution."""
    functions = [each for name, each in vars(type(module)).items() if inspect.isfunction(each) and name != "forward"]
    return any("update_conv_state" in each.__code__.co_names for each in functions)
