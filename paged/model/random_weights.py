"""Decoders of a given shape with random weights, for timing steps: the time does not depend on the values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from paged.base.budget import as_bytes
from paged.errors import BudgetTooSmall, UnsupportedModel
from paged.model.hook import ATTENTION, register
from paged.model.loading import DTYPES, LoadedModel, as_loaded, check_dtype, usable_device
from paged.model.model_shape import ModelShape
from paged.model.quantised.at_load import AtLoad, check_layers, check_quantization


def random_model(
    shape: ModelShape,
    *,
    seed: int = 0,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    quantization: str | None = None,
    quantize_head: bool = False,
) -> LoadedModel:
    """Make a Llama of this shape, without a tokenizer; the same weights for the same seed and device. `dtype` "auto" is float32 on a CPU, else bfloat16.
    `quantization` and `quantize_head` are those of `load_model`.

    Raises UnsupportedModel for a shape that no Llama has, BudgetTooSmall for one that is larger than this machine's memory, and InvalidConfig
    for a quantization that is not known.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    check_dtype(dtype)
    where = usable_device(device)
    check_quantization(quantization, where, with_head=quantize_head)
    _check_is_llama(shape)
    wanted = DTYPES.get(dtype, torch.float32 if where.type == "cpu" else torch.bfloat16)
    _check_memory(shape, wanted.itemsize)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_length,
        tie_word_embeddings=shape.tied_embeddings,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    register()
    build: Any = AutoModelForCausalLM.from_config
    if quantization is not None:
        with torch.device("meta"):
            check_layers(build(config), quantization, Path(shape.name))
    # Drawn on the device: on a processor billions of numbers take minutes.
    with torch.random.fork_rng(devices=[] if where.type == "cpu" else [where]), where:
        torch.manual_seed(seed)
        module = build(config, dtype=wanted, attn_implementation=ATTENTION)
    codes = None if quantization is None else AtLoad(quantization, with_head=quantize_head)
    return as_loaded(module.to(where).eval(), Path(shape.name), None, where, codes)


def _check_is_llama(shape: ModelShape) -> None:
    wanted = {
        "experts": shape.experts is not None,
        "latent attention": shape.latent is not None,
        "an MLP of two matrices": not shape.gated_mlp,
        "biases": shape.bias != "none",
        "learned positions": shape.learned_positions > 0,
    }
    found = [what for what, is_wanted in wanted.items() if is_wanted]
    if found:
        raise UnsupportedModel(
            f"{shape.name} has {' and '.join(found)}; random weights are made for Llama's shape alone."
        )


def _check_memory(shape: ModelShape, size: int) -> None:
    needed = shape.parameters * size
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise BudgetTooSmall(
            f"{shape.name} with {size} bytes a parameter takes {as_bytes(needed)}; this machine has {as_bytes(there)}.",
            wanted=needed,
            given=there,
        )
