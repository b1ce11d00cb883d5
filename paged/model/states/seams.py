"""How a layer of transformers takes the state before its tokens, and gives the one behind them.

Most layers ask the model's cache object for it and hand it back by the same object: `get_conv_state`, `update_recurrent_state` and so on. A few
have a way of their own, each a class here. A layer's state is a few tensors, its *pieces*; their first dimension is the row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paged.errors import UnsupportedModel

Forward = Callable[..., Any]


class Piece(NamedTuple):
    """One tensor of a layer's state.

    name   what it is called in messages
    shape  of one row's
    dtype  that the layer computes it in
    start  what a row has before its first token, in every element
    tail   whether the layer wants one column more, which nothing reads: of a convolution over k tokens k - 1 are kept, and it is handed k
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: float = 0.0
    tail: bool = False

    @staticmethod
    def of(name: str, states: Tensor, start: float = 0.0) -> Piece:
        """That of which these are states, one a row."""
        return Piece(name, tuple(states.shape[1:]), states.dtype, start)


class Seam:
    """A layer with a state. `run` calls it for tokens of rows that have a state each, or none at all."""

    cache_names = ("cache_params", "past_key_values")

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        self._module = module
        self._forward = forward
        self._signature = inspect.signature(forward)
        self.pieces: tuple[Piece, ...] = ()

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """A call's arguments by name; the first is the hidden states."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        named = dict(bound.arguments)
        variable = next((p.name for p in self._signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
        return named | (named.pop(variable) if variable else {})

    def run(self, arguments: dict[str, Any], states: list[Tensor] | None) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """What the layer returns of its tokens, each [rows, tokens, ...], and the states behind them.

        `states`, one [rows, ...] a piece, may be written over; None: the rows have none yet.
        """
        raise NotImplementedError

    def returned(self, outputs: tuple[Tensor, ...]) -> Any:
        """These outputs in the form in which the layer returns them: most of those with a way of their own beside a second value."""
        return outputs[0], None


class CacheSeam(Seam):
    """A layer that asks the cache object."""

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
    """What a layer sees as its model's cache: its own states, by name. It may write into what it gets."""

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
        """Of [rows, channels, tokens] keep the last; return those before them and all of these."""
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
    """MiniMax's lightning attention, whose cache has names of its own."""

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
    """xLSTM's layer, which is given a state and returns the next one beside its output."""

    def run(self, arguments: dict[str, Any], states: list[Tensor] | None) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        output, found = self._forward(**arguments | {"state": None if states is None else tuple(states)})
        self.pieces = tuple(map(Piece.of, ("matrix", "weight", "scale"), found))
        return (output,), list(found)


class RwkvSeam(Seam):
    """RWKV's two blocks of a layer, each with its part of the list that all layers share: [rows, width, layers] each.

    Time mixing has the token before (1), a sum, its weight and their scale (2 to 4); channel mixing the token before (0).
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
    """The seam of a layer that keeps a state; None for any other module. What it calls in its forward function tells."""
    forward = module.forward
    own = _OWN_WAYS.get(type(module).__name__)
    if own is not None:
        return own(module, forward)
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    names = code.co_names if code is not None else ()
    found = next((_CALLS[name] for name in names if name in _CALLS), None)
    return None if found is None else found(module, forward)


def keeps_tails(module: nn.Module) -> bool:
    """Whether a function of the module beside its forward function keeps columns of a convolution."""
    functions = [each for name, each in vars(type(module)).items() if inspect.isfunction(each) and name != "forward"]
    return any("update_conv_state" in each.__code__.co_names for each in functions)
