"""What a configuration's layers keep is what transformers' own cache holds after a forward pass of the model."""

import json
import warnings
from types import SimpleNamespace

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from paged.errors import InvalidConfig, MissingExtra, UnknownLayers
from paged.model.kept_layers import _KINDS, config_of, kept_layers
from paged.model.shrinking import shrunk
from paged.study.hardware import model_named
from paged.study.hardware.hf_kinds import KINDS

from ..shown import assert_shown, shown_in  # noqa: TID252

TOKENS = 40
PLAIN = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}
SMALL = {"vocab_size": 200, "intermediate_size": 64, "hidden_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
FEW = {**SMALL, **HEADS, "num_hidden_layers": 4}
WINDOW = {"sliding_window": 9}
QWEN_WINDOW = {**WINDOW, "use_sliding_window": True, "max_window_layers": 2}
VISION_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
SHRUNK = [
    ("bamba", {"attn_layer_indices": [1], "num_hidden_layers": 4}),
    ("deepseek_v2", {"num_experts_per_tok": 2}),
    ("exaone4", {"sliding_window_pattern": 2}),
    ("falcon", {"multi_query": False}),
    ("falcon", {"multi_query": True, "num_kv_heads": 4}),
    ("gemma4_text", {"num_global_key_value_heads": 1, "attention_k_eq_v": True}),
    ("gemma4_text", {"num_global_key_value_heads": 1, "attention_k_eq_v": False}),
    ("gpt_bigcode", {"multi_query": False}),
    ("gpt_bigcode", {"multi_query": True}),
    ("granitemoehybrid", {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2}),
    ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 4}),
    ("lfm2", {"full_attn_idxs": [1]}),
    ("lfm2_moe", {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4}),
    *((family, WINDOW) for family in ("mixtral", "phi3", "phimoe", "starcoder2")),
    *((family, QWEN_WINDOW) for family in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")),
]
"""By their class's defaults with these fields, made small."""
TINY = {
    "falcon_h1": {**FEW, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2},
    "kimi_linear": {
        **SMALL, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32,
        "qk_rope_head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "linear_head_dim": 16,
        "linear_num_heads": 4, "pad_token_id": 0,
    },
    "mamba2": {**SMALL, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "ministral": {**FEW, **WINDOW, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "nemotron_h": {
        **SMALL,
        **HEADS,
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
    },
    "zamba": {
        **SMALL, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4, "n_mamba_heads": 2,
        "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 16, "mamba_dt_rank": 8,
    },
    "zamba2": {
        **SMALL, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "n_mamba_heads": 8,
        "mamba_headdim": 16, "mamba_d_state": 16, "mamba_ngroups": 2, "num_mem_blocks": 1,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "qwen2_vl_text": {**FEW, "rope_parameters": VISION_ROPE},
    "qwen2_5_vl_text": {**FEW, "rope_parameters": VISION_ROPE},
}  # fmt: skip
"""In full, where what is made small does not run."""
WITHOUT_A_CACHE = {"recurrent_gemma", "rwkv", "xlstm"}
"""Their states lie elsewhere; test_states.py looks there."""
CASES = [
    *(
        pytest.param(shrunk, family, {}, id=family)
        for family in sorted({*_KINDS} - {*TINY, *dict(SHRUNK)} - WITHOUT_A_CACHE)
    ),
    *(pytest.param(shrunk, family, fields, id=f"{family} {' '.join(fields)}") for family, fields in SHRUNK),
    *(pytest.param(None, family, fields, id=family) for family, fields in TINY.items()),
]


@pytest.mark.parametrize(("made_small", "family", "fields"), CASES)
def test_a_model_s_own_cache_holds_as_many_elements(made_small, family, fields):
    config = CONFIG_MAPPING[family](**fields)
    config = made_small(config).config if made_small else config
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        said = AutoModel.from_config(config).eval().float()(torch.arange(1, TOKENS + 1)[None], use_cache=True)
    cache = said.past_key_values if getattr(said, "past_key_values", None) is not None else said.cache_params
    # MiniMax's has its states beside the layers.
    states = [{"recurrent_states": state} for state in getattr(cache, "linear_cache", []) if len(state)]
    held = sum(_bytes_of(each, family) for each in (*map(vars, cache.layers), *states))
    # transformers keeps the last tokens of a chunk as those of a window.
    layers = [msgspec.structs.replace(e, kind="window") if e.kind == "chunk" else e for e in kept_layers(config)]
    assert sum(each.kept_bytes(TOKENS) for each in layers) == held


FLOAT32_STATES = ("bailing_hybrid", "jamba", "kimi_linear", "minimax", "nemotron_h", "olmo_hybrid")


def _bytes_of(layer, family) -> int:
    """What a layer of a cache would hold in bf16, recurrent states as serving keeps them. Of a convolution it keeps one token more than is read, but Zaya's."""
    total = 0
    for name, value in layer.items():
        for tensor in value.values() if isinstance(value, dict) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1:
                is_wide = name == "recurrent_states" and family in FLOAT32_STATES
                total += (4 if is_wide else 2) * (
                    tensor[..., 1:] if name == "conv_states" and family != "zaya" else tensor
                ).numel()
    return total


def test_a_state_has_the_dtype_that_its_configuration_names():
    fields = {"model_type": "mamba", "num_hidden_layers": 1, "hidden_size": 32, "state_size": 16, "conv_kernel": 4}

    def state(**more):
        return kept_layers(config_of({**fields, **more}))[0].kept_bytes(1) - 3 * 64 * 2

    assert state() == 64 * 16 * 2
    assert state(mamba_ssm_dtype="float32") == state(mamba_ssm_cache_dtype="float32") == 64 * 16 * 4
    assert state(mamba_ssm_dtype=None, mamba_ssm_cache_dtype="torch.float32") == 64 * 16 * 4
    with pytest.raises(InvalidConfig, match="mamba_ssm_dtype is float99"):
        state(mamba_ssm_dtype="float99")


def test_a_chunk_keeps_what_came_since_its_start():
    layers = {each.kind: each for each in kept_layers(CONFIG_MAPPING["llama4_text"](num_hidden_layers=4))}
    assert (layers["chunk"].count, layers["chunk"].reach, layers["full"].count) == (3, 8192, 1)


def test_heads_that_transformers_repeats_are_kept_once():
    falcon = {"model_type": "falcon", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 8}
    repeated = kept_layers(config_of({**falcon, "new_decoder_architecture": True, "num_kv_heads": 2}))
    assert repeated[0].entry == (2 * 8 * 2,) * 2


def test_layers_that_reuse_the_kv_of_earlier_ones_keep_nothing():
    shared = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    first = kept_layers(config_of({**PLAIN, **shared, "model_type": "gemma4_text"}))
    assert [(each.kind, each.count) for each in first] == [("window", 1), ("full", 1)]


@pytest.mark.parametrize(
    "model_type",
    ["inkling_text", "inkling_mm_model", "deepseek_v4", None, ["lfm2"]],
    ids=["text", "mm", "v4", "none", "list"],
)
def test_a_kind_that_no_test_holds_is_refused_by_name(model_type):
    with pytest.raises(UnknownLayers, match="keep is not known; known are bailing_hybrid"):
        kept_layers(config_of({**PLAIN, "model_type": model_type}))


def test_a_transformers_without_configurations_of_single_layers_is_too_old():
    old = SimpleNamespace(model_type="llama", get_text_config=lambda: SimpleNamespace(model_type="llama"))
    with pytest.raises(MissingExtra, match=r"transformers 5\.20 or later"):
        kept_layers(old)


G4 = {**PLAIN, "model_type": "gemma4_text", "head_dim": 16}
LFM2 = {**PLAIN, "model_type": "lfm2", "num_key_value_heads": 2, "layer_types": ["conv"] * 3 + ["full_attention"]}
KIMI = {"model_type": "kimi_linear", "num_hidden_layers": 4}
BAMBA = {**PLAIN, "model_type": "bamba"}


@pytest.mark.parametrize(("fields", "shown"), shown_in("model/refused_configurations.txt", ">>>"))
def test_a_configuration_that_contradicts_itself_is_refused(fields, shown):
    with pytest.raises(InvalidConfig) as refused:
        kept_layers(config_of(eval(fields)))
    assert_shown(f"{' '.join(str(refused.value).split())}\n", shown)


# What transformers' own defaults lack, or have twice.
GIVEN = {
    "deepseek_v2": {"q_lora_rank": None, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "glm4_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
}
IMAGES_TOO = {kind for kind in KINDS if "_vl" in kind}


@pytest.mark.parametrize("kind", sorted(set(KINDS) - IMAGES_TOO))
def test_a_configuration_has_the_parameters_of_its_module(kind, tmp_path):
    config = AutoConfig.for_model(kind, **GIVEN.get(kind, {}))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    counted = sum({id(each): each.numel() for each in module.parameters()}.values())
    assert model_named(str(tmp_path)).parameters == pytest.approx(counted, rel=0.0005)
