"""Values that depend on a token's position beyond its rotary embedding: each token's by its own sequence.

LongRoPE has two sets of frequencies, and transformers takes one for all tokens of a call: the long one if any position lies beyond a limit.
Llama 4 scales queries by the position, which it counts from the tokens that a cache has. Here a batch has tokens of many sequences, and of a long
prompt perhaps only its first chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paged.model.hook import now_under_way


def follow_rows(module: nn.Module) -> int | None:
    """Make a decoder's LongRoPE go by the forward pass's `is_long`. Return the longest sequence that has the short frequencies; None where
    the model has no LongRoPE."""
    limits = set()
    for each in module.modules():
        limit = _limit(each)
        if limit is not None:
            limits.add(limit)
            each.forward = partial(_by_token, each.forward, limit)
    return min(limits, default=None)


def _limit(module: Any) -> int | None:
    """The limit of a rotary embedding whose frequencies depend on the length."""
    if getattr(module, "rope_type", None) != "longrope":
        return None
    limit: int = module.config.rope_parameters["original_max_position_embeddings"]
    return limit


def _by_token(forward: Callable[..., Any], limit: int, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
    """Cosines and sines, each [1, T, size], by transformers' own function, which is called once for each set of frequencies."""
    is_long = now_under_way().is_long
    # A draft that is too long for its sequence must not change the others' frequencies.
    within = position_ids.clamp(max=limit - 1)
    if is_long is None:
        return tuple(forward(x, within))
    short = forward(x, within)
    # One place beyond the limit decides for all.
    beyond = torch.cat([position_ids, torch.full_like(position_ids[:, :1], limit)], 1)
    long = [part[:, :-1] for part in forward(x, beyond)]
    return tuple(torch.where(is_long[..., None], b, a) for a, b in zip(short, long, strict=True))


def follow_positions(module: nn.Module) -> None:
    """Make layers that scale queries by the position go by the forward pass's `positions`."""
    for each in module.modules():
        if getattr(each, "attn_temperature_tuning", False) and hasattr(each, "layer_idx"):
            each.forward = partial(_by_position, each.forward)


def _by_position(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs | {"past_key_values": _Positions()})


class _Positions:
    """In the place of a cache: tokens before a call, for each of its places, so that a module that counts on gets the places' positions."""

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        positions = now_under_way().positions
        return positions - torch.arange(len(positions), device=positions.device)

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return keys, values
