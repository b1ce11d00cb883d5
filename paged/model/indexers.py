"""Modules that choose which tokens each one attends to, by index keys of all before it: DeepSeek-V3.2's indexer (arXiv:2512.02556) and those made after it.

Such a module is transformers' own. It asks its cache for the index keys of a sequence, which here the forward pass under way keeps, on the pages of its
layer; and so it is called for one sequence at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paged.model.hook import ForwardPass, now_under_way


def follow_indexers(module: nn.Module) -> None:
    """Make them find index keys in the forward pass under way."""
    for each in module.modules():
        forward: Any = getattr(inspect.unwrap(type(each).forward), "__code__", None)
        if forward is not None and not {"update_indexer", "update_index"}.isdisjoint(forward.co_names):
            each.forward = partial(_chosen, each.forward, inspect.signature(each.forward))


class _IndexCache:
    """transformers' cache, or with `layer` that of one layer, as a module sees it that chooses for one share of a pass."""

    def __init__(self, forward_pass: ForwardPass, first: int, layer: int = -1) -> None:
        self._forward_pass, self._first, self._layer = forward_pass, first, layer

    @property
    def layers(self) -> _IndexCache:
        return self

    def __getitem__(self, layer: int) -> _IndexCache:
        return _IndexCache(self._forward_pass, self._first, layer)

    def update_index(self, keys: Tensor) -> Tensor:
        """[1, 1, tokens, size] → [1, 1, n, size]."""
        return self.update_indexer(keys[0], self._layer)[None]

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """[1, tokens, size] → [1, n, size]."""
        return self._forward_pass.index(layer, self._first, keys[0])[None]


def _chosen(forward: Callable[..., Tensor], signature: inspect.Signature, *args: Any, **kwargs: Any) -> Tensor:
    """int64 [1, T, k], or [1, groups of heads, T, k]: what each token chose, by one call a share; -1 behind it, and for places that are no tokens."""
    forward_pass, given = now_under_way(), signature.bind(*args, **kwargs).arguments
    places, found = given["hidden_states"].shape[1], list[Tensor]()

    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cut, value))
        return value[:, first:stop] if isinstance(value, Tensor) and value.shape[1] == places else value

    for first, stop in forward_pass.index_shares():
        positions = forward_pass.positions[first:stop]
        is_seen = torch.arange(int(positions[-1]) + 1, device=positions.device) <= positions[:, None]
        its = {name: cut(value) for name, value in given.items()} | {
            "past_key_values": _IndexCache(forward_pass, first)
        }
        found.append(forward(**its | ({"attention_mask": is_seen[None]} if "attention_mask" in its else {})))
    groups, most = found[0].shape[1:-2], max(each.shape[-1] for each in found)
    chosen = found[0].new_full((1, *groups, places, most), -1, dtype=torch.int64)
    for (first, stop), each in zip(forward_pass.index_shares(), found, strict=True):
        chosen[..., first:stop, : each.shape[-1]] = each
    return chosen
