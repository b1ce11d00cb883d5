"""A decoder of two layers and 5,888 random weights, made in memory: most of what a step costs is the engine around it.

A slot of its second layer depends on the whole context, as in any decoder, so that wrong KV shows.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from paged.attention import LayerOptions
from paged.model.attention_layers import AttentionLayer
from paged.model.hook import now_under_way
from paged.model.loading import LoadedModel

MAX_LENGTH = 256
_LAYERS, _HEADS, _HEAD_DIM = 2, 2, 8
_HIDDEN = _HEADS * _HEAD_DIM


class TinyDecoder(nn.Module):
    """Embeddings of tokens and positions, attention with two heads over one of K and V, one matrix for the words. It is
    called as models of transformers are."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, _HIDDEN)
        self.positions = nn.Embedding(MAX_LENGTH, _HIDDEN)
        self.inputs = nn.ModuleList(nn.Linear(_HIDDEN, _HIDDEN + 2 * _HEAD_DIM, bias=False) for _ in range(_LAYERS))
        self.outputs = nn.ModuleList(nn.Linear(_HIDDEN, _HIDDEN, bias=False) for _ in range(_LAYERS))
        self.words = nn.Linear(_HIDDEN, vocabulary, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        use_cache: bool,
        logits_to_keep: int | Tensor,
        output_hidden_states: bool = False,
    ) -> Any:
        """Token ids and positions, [1, T] each; `logits` [1, T or as many as are kept, vocabulary], and the last of
        `hidden_states` [1, T, 16]."""
        del use_cache, output_hidden_states
        attend = now_under_way().attend
        options = LayerOptions(_HEAD_DIM**-0.5)
        hidden = (self.tokens(input_ids) + self.positions(position_ids))[0]
        for layer, (project, mix) in enumerate(zip(self.inputs, self.outputs, strict=True)):
            queries, keys, values = project(hidden).split([_HIDDEN, _HEAD_DIM, _HEAD_DIM], -1)
            heads = queries.unflatten(-1, (_HEADS, _HEAD_DIM))
            context = attend(layer, heads, keys.unsqueeze(1), values.unsqueeze(1), options)
            hidden = torch.tanh(hidden + mix(context.flatten(1)))
        kept = hidden if isinstance(logits_to_keep, int) else hidden[logits_to_keep]
        return SimpleNamespace(logits=self.words(kept).unsqueeze(0), hidden_states=(hidden.unsqueeze(0),))


@cache
def tiny_model(vocabulary: int = 8, noise: float = 0.0) -> LoadedModel:
    """The model in float32 on the CPU, with the same weights every time, large enough that greedy text does not repeat
    one word at once. `noise` is added to the weights: a model that often says the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = TinyDecoder(vocabulary).eval()
        with torch.no_grad():
            for weights in module.parameters():
                weights.normal_(0, 0.8)
            if noise:
                for weights in module.parameters():
                    weights.add_(torch.randn_like(weights) * noise)
    kept = 1, _HEAD_DIM, _HEAD_DIM
    return LoadedModel(
        path=Path("a tiny decoder"),
        module=module,
        tokenizer=None,
        layers=tuple(AttentionLayer(layer, "full", 0, _HEADS, *kept, attended=kept) for layer in range(_LAYERS)),
        has_soft_cap=False,
        has_sinks=False,
        vocabulary_size=vocabulary,
        max_length=MAX_LENGTH,
        eos_token_ids=(),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
