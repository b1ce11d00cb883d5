"""Modules of transformers that take one sequence at a time, with a cache object, in a pass of several sequences.

    indexers               choose which tokens each token attends to, by index keys of all earlier ones: DeepSeek-V3.2 (arXiv:2512.02556) and similar
    attention by itself    ignores transformers' attention interface, or wants of it what no backend does (Falcon, BLOOM, DiffLlama)
    embeddings of n-grams  keep the last token ids, and columns of a convolution over their embeddings (Qwen4-exp)

Such a module is called once for each *share* of a pass, tokens of one sequence. Its cache object reads from our pages and writes to them. A state
within the module is that of the one sequence.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paged.model.hook import BY_ITSELF, ForwardPass, Mask, names_in, now_under_way, under_way
from paged.model.states.within import WITHIN, Compressor, Tails

# Attributes that we set on attention modules: a function that makes the rotary embeddings of all positions, for modules that want them; and whether the
# module takes K and V of its window alone, as from transformers' cache. Others compute with distances, and need a column for each token.
_ROTARY, _WINDOW_ALONE = "paged_rotary", "paged_window_alone"
# Names of a module's argument for the cache.
_CACHES = ("past_key_values", "layer_past")


def follow_indexers(module: nn.Module) -> None:
    """Make indexers take index keys from the forward pass under way."""
    for each in module.modules():
        if not {"update_indexer", "update_index"}.isdisjoint(names_in(each)):
            each.forward = partial(_chosen, each.forward, inspect.signature(each.forward))


def attend_by_itself(module: nn.Module) -> None:
    """Make attention modules that use transformers' cache attend by themselves, to the K and V of the forward pass under way."""
    compresses = any(isinstance(getattr(each, WITHIN, None), Compressor) for each in module.modules())
    rotary: Any = next((each for path, each in module.named_modules() if path.endswith("rotary_emb")), None)
    for each in module.modules():
        if "update" not in names_in(each):
            continue
        signature = inspect.signature(each.forward)
        if "hidden_states" in signature.parameters and not signature.parameters.keys().isdisjoint(_CACHES):
            setattr(each, BY_ITSELF, True)
            setattr(each, _WINDOW_ALONE, compresses)
            for part in each.modules():
                forward: Any = part.forward
                if getattr(forward, "func", None) is _chosen and rotary is not None:
                    # Qwen4-exp: the indexer is within a module that is called for one sequence already, so it gets its own forward function again. It
                    # wants the embeddings of all positions of the sequence.
                    part.forward = forward.args[0]
                    # A partial, since a module would become a submodule of this one.
                    setattr(each, _ROTARY, partial(rotary))
            each.forward = partial(_attended, each, each.forward, signature)


def follow_tails(module: nn.Module) -> None:
    """Make modules that have Tails take one sequence at a time."""
    for each in module.modules():
        if isinstance(getattr(each, WITHIN, None), Tails):
            each.forward = partial(_attended, each, each.forward, inspect.signature(each.forward))


@dataclass(frozen=True, slots=True)
class _Cache:
    """Stands in for transformers' cache in a call of a module for one share of a pass.

    first            place of the share's first token in the pass
    length           tokens of the sequence up to the share's end
    offset           position of the share's first token
    window           tokens that a token sees, itself included; None: all
    within           the state of the module: a Compressor, Tails or None
    is_window_alone  the module wants no columns for tokens before its window
    layer            number of the layer of `cache.layers[layer]`
    """

    forward_pass: ForwardPass
    first: int
    length: int
    offset: int
    window: int | None
    within: Any
    is_window_alone: bool
    layer: int = -1

    @property
    def layers(self) -> _Cache:
        return self

    def __getitem__(self, layer: int) -> _Cache:
        return replace(self, layer=layer)

    def update(self, keys: Tensor, values: Tensor, layer: int, *others: Any) -> tuple[Tensor, Tensor]:
        """Keep K and V, [1, heads, tokens, size] each. Return those up to the share's end, [1, heads, n, size]."""
        packed = [each[0].transpose(0, 1) for each in (keys, values)]
        kept = self.forward_pass.keep(layer, self.first, packed[0], packed[1], self.window)
        found = [each.transpose(0, 1)[None] for each in kept]
        if not self.is_window_alone:
            found = [torch.nn.functional.pad(each, (0, 0, self.length - each.shape[2], 0)) for each in found]
        return found[0], found[1]

    def update_index(self, keys: Tensor) -> Tensor:
        """Keep index keys, [1, 1, tokens, size]. Return those up to the share's end, [1, 1, n, size]."""
        return self.update_indexer(keys[0], self.layer)[None]

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """Keep index keys, [1, tokens, size]. Return those up to the share's end, [1, n, size]."""
        return self.forward_pass.index(layer, self.first, keys[0])[None]

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        """Take projections of tokens, [1, tokens, size] each. Return those of tokens that make whole entries, and the position of the first."""
        kv, gate = self.within.take(name, (kv, gate), self.offset)
        return kv, gate, self.offset - self.offset % self.within.stride

    def update_overlap_state(
        self, name: str, kv: Tensor, gate: Tensor, size: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Take projections, [1, entries, tokens, sizes] each, of which the first `size` columns overlap. Return those of the entry before, [1, tokens, size]."""
        found: tuple[Tensor | None, Tensor | None] = self.within.last(
            name, (kv[:, -1, :, :size], gate[:, -1, :, :size]), self.offset
        )
        return found

    def update_compressor_states(self, name: str, entries: Tensor) -> Tensor:
        """Keep compressed entries, [1, entries, size]. Return those up to the share's end, [1, n, size]."""
        begin = self.offset // self.within.stride
        return self.forward_pass.keep_compressed(self.layer, self.first, name, begin, entries[0])[None]

    def get_conv_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        """Return the last columns, [1, ..., columns]; None before the first token."""
        found: Tensor | None = self.within.held(state_idx, self.offset)
        return found

    def update_conv_state(self, new: Tensor, layer: int, state_idx: int = 0, conv_kernel_size: int = 0) -> Tensor:
        """Keep the last columns of tokens, [1, ..., tokens]. Return these behind the columns before them."""
        found: Tensor = self.within.take(state_idx, new, conv_kernel_size, self.offset)
        return found

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the tokens of the sequence up to the share's end."""
        return self.length

    def get_mask_sizes(self, length: int, layer: int) -> tuple[int, int]:
        """Return the length and the offset of the keys of a mask: all tokens up to the share's end, from position 0 on."""
        return self.length, 0

    def get_query_offset(self, layer: int) -> int:
        """Return the position of the share's first token."""
        return self.offset


def _shares(given: dict[str, Any], module: Any = None) -> Iterator[tuple[slice, Tensor, dict[str, Any]]]:
    """Yield for each share of the pass its places, which tokens each of its tokens sees, bool [tokens, n], and the module's arguments."""
    forward_pass, places, mask = now_under_way(), given["hidden_states"].shape[1], given.get("attention_mask")
    window, chunk = (mask.window, mask.chunk) if isinstance(mask, Mask) else (None, None)
    if chunk is not None:
        forward_pass.refuse("chunks for a module that takes one sequence")

    def cut(value: Any, its: slice) -> Any:
        if isinstance(value, tuple):
            return tuple(cut(each, its) for each in value)
        if isinstance(value, dict):
            return {name: cut(each, its) for name, each in value.items()}
        return value[:, its] if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == places else value

    for first, stop in forward_pass.shares():
        positions, its = forward_pass.positions[first:stop, None], slice(first, stop)
        length = int(positions[-1]) + 1
        others = torch.arange(length, device=positions.device)
        is_seen, is_alone = others <= positions, getattr(module, _WINDOW_ALONE, False)
        if window is not None:
            is_seen &= others > positions - window
            if is_alone:
                is_seen = is_seen[:, max(0, int(positions[0]) - window + 1) :]
        within = getattr(module, WITHIN, None)
        cache = _Cache(
            forward_pass,
            first,
            length,
            offset=int(positions[0]),
            window=window,
            within=within,
            is_window_alone=is_alone,
        )
        its_own: dict[str, Any] = {name: cache for name in _CACHES if name in given}
        if (rotary := getattr(module, _ROTARY, None)) is not None:
            its_own["position_embeddings"] = rotary(given["hidden_states"], others[None])
        yield its, is_seen, {name: cut(value, its) for name, value in given.items()} | its_own


def _chosen(forward: Callable[..., Tensor], signature: inspect.Signature, *args: Any, **kwargs: Any) -> Tensor:
    """Call an indexer for each share. Return the tokens that each token chose, int64 [1, T, k] or [1, groups of heads, T, k]; -1 fills up, also at
    padding."""
    given, found = signature.bind(*args, **kwargs).arguments, list[tuple[slice, Tensor]]()
    for its, is_seen, of_share in _shares(given):
        if "attention_mask" in given:
            of_share["attention_mask"] = is_seen[None]
        found.append((its, forward(**of_share)))
    groups, most = found[0][1].shape[1:-2], max(each.shape[-1] for _, each in found)
    chosen = torch.full((1, *groups, given["hidden_states"].shape[1], most), -1, device=found[0][1].device)
    for its, each in found:
        chosen[..., its, : each.shape[-1]] = each
    return chosen


def _attended(
    module: nn.Module, forward: Callable[..., Any], signature: inspect.Signature, *args: Any, **kwargs: Any
) -> Any:
    """Call a module for each share. Return its outputs, [1, T, size], zeros at padding; other results are those of the first share."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    given, mask, others = bound.arguments, bound.arguments.get("attention_mask"), list[Any]()
    out = torch.zeros_like(given["hidden_states"])
    for its, is_seen, of_share in _shares(given, module):
        if "attention_mask" in given:
            of_share["attention_mask"] = _as_given(mask, is_seen, out.dtype)
        if of_share.get("alibi") is not None:
            # They were made for the tokens of the pass; the share needs those of its sequence.
            build: Any = vars(sys.modules[type(module).__module__])["build_alibi_tensor"]
            of_share["alibi"] = build(is_seen.new_ones(1, is_seen.shape[1]).long(), module.num_heads, dtype=out.dtype)
        more = of_share.pop("kwargs", {})
        with under_way(now_under_way().of_share(its.start, its.stop)):
            found = forward(**of_share, **more)
        is_alone = isinstance(found, Tensor)
        attended, *rest = [found] if is_alone else found
        out[:, its] = attended
        others = others or rest
    return out if is_alone else (out, *others)


def _as_given(mask: Any, is_seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask, [1, 1, tokens, n], in the form of the given one. True may mean seen or hidden: the given mask's first entry tells, since the first
    token sees itself."""
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return (is_seen == bool(mask[0, 0, 0, 0]))[None, None]
    return torch.zeros_like(is_seen, dtype=dtype).masked_fill(~is_seen, torch.finfo(dtype).min)[None, None]
