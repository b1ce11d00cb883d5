"""LongRoPE and scaled queries, for each token by its own sequence.

LongRoPE has two sets of frequencies, and transformers uses one for all tokens of a call: the long set if any position lies beyond a limit. Llama 4
scales queries by the position, which it counts on from the tokens in its cache. A pass of ours has tokens of many sequences, and perhaps only the
first chunk of a long prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paged.model.hook import now_under_way


def follow_rows(module: nn.Module) -> int | None:
    """Make a decoder's LongRoPE follow `is_long` of the forward pass. Return the length of the longest sequence with short frequencies; None if the
    model has no LongRoPE."""
    limits = set()
    for each in module.modules():
        limit = _limit(each)
        if limit is not None:
            limits.add(limit)
            each.forward = partial(_by_token, each.forward, limit)
    return min(limits, default=None)


def _limit(module: Any) -> int | None:
    """Return the limit of a module's LongRoPE; None for any other module."""
    if getattr(module, "rope_type", None) != "longrope":
        return None
    limit: int = module.config.rope_parameters["original_max_position_embeddings"]
    return limit


def _by_token(forward: Callable[..., Any], limit: int, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
    """Return cosines and sines, each [1, T, size], by transformers' function, called once for each set of frequencies."""
    is_long = now_under_way().is_long
    # The position of a draft may lie beyond the limit, and must not change the frequencies of all tokens.
    within = position_ids.clamp(max=limit - 1)
    if is_long is None:
        return tuple(forward(x, within))
    short = forward(x, within)
    # An added position beyond the limit makes the function use the long set for all.
    beyond = torch.cat([position_ids, torch.full_like(position_ids[:, :1], limit)], 1)
    long = [part[:, :-1] for part in forward(x, beyond)]
    return tuple(torch.where(is_long[..., None], b, a) for a, b in zip(short, long, strict=True))


def follow_positions(module: nn.Module) -> None:
    """Make layers that scale queries by the position use `positions` of the forward pass."""
    for each in module.modules():
        if getattr(each, "attn_temperature_tuning", False) and hasattr(each, "layer_idx"):
            each.forward = partial(_by_position, each.forward)


def _by_position(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs | {"past_key_values": _Positions()})


class _Positions:
    """Stands in for a cache, with the tokens before each place of a pass, so that a module that counts on from it gets the place's position."""

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        positions = now_under_way().positions
        return positions - torch.arange(len(positions), device=positions.device)

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return keys, values
