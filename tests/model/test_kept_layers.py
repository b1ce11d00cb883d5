"""What a configuration's layers keep is what transformers' own cache holds after a forward pass of the model."""

import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from paged.errors import InvalidConfig
from paged.model.kept_layers import kept_layers
from paged.model.shrinking import shrunk

TOKENS = 40
FAMILIES = (
    *(
        "llama",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "gpt_oss",
        "cohere2",
        "olmo3",
        "mistral",
        "deepseek_v3",
    ),
    *("deepseek_v32", "qwen3_next", "qwen3_5_text", "olmo_hybrid", "mamba"),
)
PLAIN = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_s_own_cache_holds_as_many_bytes(family):
    config = shrunk(CONFIG_MAPPING[family]()).config
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config).eval().float()
        said = model(torch.arange(1, TOKENS + 1)[None], use_cache=True)
    cache = said.past_key_values if hasattr(said, "past_key_values") else said.cache_params
    held = sum(_bytes_of(layer) for layer in cache.layers)
    layers = kept_layers({**config.get_text_config().to_dict(), "model_type": family}, size=4, state_size=4)
    assert sum(each.kept_bytes(TOKENS) for each in layers) == held


def _bytes_of(layer) -> int:
    """What a layer of a cache holds. Of a convolution it keeps one token more than the next step reads."""
    total = 0
    for name, value in vars(layer).items():
        for tensor in value.values() if isinstance(value, dict) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1:
                total += tensor[..., 1:].nbytes if name == "conv_states" else tensor.nbytes
    return total


def test_layers_that_reuse_the_kv_of_earlier_ones_keep_nothing():
    first = kept_layers({**PLAIN, "num_kv_shared_layers": 3})
    assert [(each.kind, each.count) for each in first] == [("full", 1)]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model_type": "rwkv"}, "what layers of rwkv keep is not known"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 layers; num_hidden_layers is 4"),
        ({"layer_types": ["linear_attention"] * 4}, "this kind of model is known without"),
        ({"layer_types": ["full"] * 3 + ["other"]}, "other is not known"),
        ({"num_key_value_heads": 3}, "4 heads cannot share so many evenly"),
        ({"num_kv_shared_layers": 4}, "one has to keep K and V"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": None}, "num_hidden_layers or .* is missing"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window is -1"),
        ({"model_type": "minimax", "attn_type_list": [1]}, "attn_type_list has 1 layers"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "has to be 4 letters"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(more, words):
    with pytest.raises(InvalidConfig, match=words):
        kept_layers({**PLAIN, **more})
