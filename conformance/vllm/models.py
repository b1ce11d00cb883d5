"""Tiny checkpoints with random weights whose layers are of several kinds, which vLLM's CPU build runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2_048,
    "tie_word_embeddings": False,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0}


class Family(NamedTuple):
    """A model_type, and what its configuration has besides. `num_blocks`: of vLLM's, too few for eight sequences."""

    model_type: str
    num_blocks: int
    given: dict[str, Any]
    keeps_states: bool = False
    dtype: str = "float32"
    policy: str = "vllm"


FAMILIES = {
    "windows beside full layers, as in Gemma 3": Family(
        "gemma3_text",
        40,
        {
            "num_hidden_layers": 6,
            "sliding_window": 48,
            "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
            "query_pre_attn_scalar": 32,
        },
    ),
    "windows with sinks, as in gpt-oss": Family(
        "gpt_oss",
        28,
        {
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 48,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": _YARN | {"truncate": False, "original_max_position_embeddings": 1_024},
        },
    ),
    "chunks, as in Llama 4": Family(
        "llama4_text",
        44,
        {
            "intermediate_size": 64,
            "intermediate_size_mlp": 128,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 64,
        },
    ),
    "windows alone, as in Mistral": Family("mistral", 20, {"sliding_window": 48}, policy="paged"),
    "states of short convolutions, as in LFM2": Family(
        "lfm2",
        24,
        {
            "hidden_size": 128,
            "conv_dim": 128,
            "block_dim": 128,
            # So long that a wrong state is seen by all tokens of a block.
            "conv_L_cache": 32,
            "block_ff_dim": 128,
            "block_multiple_of": 32,
            "block_auto_adjust_ff_dim": False,
            "block_ffn_dim_multiplier": 1.0,
            "layer_types": ["conv", "full_attention"] * 2,
            # vLLM ties them whatever is said.
            "tie_word_embeddings": True,
        },
        keeps_states=True,
    ),
    # vLLM's CPU kernels take bfloat16 and heads of 128 alone.
    "states of gated delta rules, as in Qwen3-Next": Family(
        "qwen3_next",
        40,
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            # All of them: after rounding others would be chosen.
            "num_experts": 2,
            "num_experts_per_tok": 2,
        },
        keeps_states=True,
        dtype="bfloat16",
    ),
}


def write(family: Family, folder: Path) -> Path:
    """Write the family's checkpoint, without a tokenizer. Small embeddings and large weights, so that answers depend on all of a prompt."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(family.model_type, dtype=family.dtype, **tokens, **_SIZES | family.given)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() > 1:
                weights.normal_(0, 0.05 if "embed" in name else 0.3)
    model.to(getattr(torch, family.dtype)).save_pretrained(folder)
    return folder
