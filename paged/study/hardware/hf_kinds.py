"""Kinds of models in the Hugging Face layout whose layers are known, and the facts that their configurations leave out.

A kind is listed if its count of parameters is within a hundredth of that of transformers' own module.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Kind(msgspec.Struct, frozen=True):
    """Facts of a `model_type` that its configuration does not have.

    positions   rows of the table of position embeddings beyond the longest sequence; None: there is no such table
    full_every  one layer in so many attends to all of the context if a window is named; 0: none does
    experts     MLPs are mixtures of experts
    defaults    fields that published configurations leave out
    """

    gated: bool = True
    bias: Literal["none", "qkv", "all"] = "none"
    tied: bool = False
    qk_norm: bool = False
    positions: int | None = None
    full_every: int = 0
    experts: bool = False
    defaults: dict[str, Any] = {}


_GEMMA3 = {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}
KINDS = {
    "cohere": Kind(tied=True),
    "cohere2": Kind(tied=True, full_every=4),
    "deepseek_v2": Kind(experts=True),
    "deepseek_v3": Kind(experts=True),
    "ernie4_5": Kind(tied=True),
    "exaone4": Kind(qk_norm=True, full_every=4),
    "falcon": Kind(gated=False, tied=True, defaults={"max_position_embeddings": 2048}),
    "gemma": Kind(tied=True, defaults={"head_dim": 256}),
    "gemma2": Kind(tied=True, full_every=2, defaults={"head_dim": 256}),
    "gemma3_text": Kind(tied=True, qk_norm=True, full_every=6, defaults=_GEMMA3),
    "glm4": Kind(defaults={"head_dim": 128}),
    "glm4_moe": Kind(experts=True),
    "gpt2": Kind(gated=False, bias="all", tied=True, positions=0),
    "gpt_bigcode": Kind(gated=False, bias="all", tied=True, positions=0),
    "gpt_neox": Kind(gated=False, bias="all"),
    "gpt_oss": Kind(bias="all", full_every=2, experts=True),
    "granite": Kind(),
    "llama": Kind(),
    "llama4_text": Kind(experts=True, full_every=4),
    "ministral": Kind(),
    "mistral": Kind(),
    "mixtral": Kind(experts=True),
    "olmo": Kind(),
    "olmo2": Kind(qk_norm=True),
    "olmo3": Kind(qk_norm=True, full_every=4),
    "olmoe": Kind(experts=True),
    "opt": Kind(gated=False, bias="all", tied=True, positions=2),
    "phi": Kind(gated=False, bias="all"),
    "phi3": Kind(),
    "phimoe": Kind(experts=True),
    "qwen2": Kind(bias="qkv"),
    "qwen2_5_vl": Kind(bias="qkv"),
    "qwen2_5_vl_text": Kind(bias="qkv"),
    "qwen2_moe": Kind(bias="qkv", experts=True),
    "qwen3": Kind(qk_norm=True, defaults={"head_dim": 128}),
    "qwen2_vl": Kind(bias="qkv"),
    "qwen2_vl_text": Kind(bias="qkv"),
    "qwen3_moe": Kind(qk_norm=True, experts=True),
    "seed_oss": Kind(bias="qkv"),
    "smollm3": Kind(tied=True),
    "stablelm": Kind(),
    "starcoder2": Kind(gated=False, bias="all", tied=True),
}
