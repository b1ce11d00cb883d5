"""What a configuration's layers keep is what transformers' own cache holds after a forward pass of the model."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from paged.errors import InvalidConfig, MissingExtra, UnknownLayers
from paged.model.kept_layers import _KINDS, config_of, kept_layers
from paged.model.shrinking import Shrunk
from paged.study.hardware import model_named
from paged.study.hardware.hf_config import KINDS

from ..shown import assert_shown, shown_in  # noqa: TID252

TOKENS = 40
PLAIN = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}
# Families by their class's defaults with these fields, made small; in full, where what is made small does not run; and what transformers' own
# defaults lack, or have twice.
FIELDS = json.loads(Path(__file__).with_name("kept_layers.json").read_text())
SHRUNK, TINY, GIVEN = FIELDS["shrunk"], FIELDS["in_full"], FIELDS["given"]
WITHOUT_A_CACHE = {"recurrent_gemma", "rwkv", "xlstm"}
"""Their states lie elsewhere; test_groups.py compares those of the first two with a plan of their layers."""
CASES = [
    *(
        pytest.param(Shrunk, family, {}, id=family)
        for family in sorted({*_KINDS} - {*TINY, *dict(SHRUNK)} - WITHOUT_A_CACHE)
    ),
    *(pytest.param(Shrunk, family, fields, id=f"{family} {' '.join(fields)}") for family, fields in SHRUNK),
    *(pytest.param(None, family, fields, id=family) for family, fields in TINY.items()),
]


@pytest.mark.parametrize(("made_small", "family", "fields"), CASES)
def test_a_model_s_own_cache_holds_as_many_elements(made_small, family, fields):
    config = CONFIG_MAPPING[family](**fields)
    config = made_small(config).config if made_small else config
    # As many tokens without a compressed entry as there can be.
    tokens = TOKENS - (family == "deepseek_v4")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        said = AutoModel.from_config(config).eval().float()(torch.arange(1, tokens + 1)[None], use_cache=True)
    cache = said.past_key_values if getattr(said, "past_key_values", None) is not None else said.cache_params
    # MiniMax's has its states beside the layers.
    states = [{"recurrent_states": state} for state in getattr(cache, "linear_cache", []) if len(state)]
    held = sum(_bytes_of(each, family) for each in (*map(vars, cache.layers), *states))
    # transformers keeps the last tokens of a chunk as those of a window.
    layers = [msgspec.structs.replace(e, kind="window") if e.kind == "chunk" else e for e in kept_layers(config)]
    assert sum(each.kept_bytes(tokens) for each in layers) == held


FLOAT32_STATES = ("bailing_hybrid", "jamba", "kimi_linear", "minimax", "nemotron_h", "olmo_hybrid")


def _bytes_of(layer, family) -> int:
    """What a layer of a cache would hold in bf16, recurrent states as serving keeps them. Of a convolution it keeps one token more than is read, but Zaya's and Qwen4-exp's embeddings'."""
    total, seen = 0, list[torch.Tensor]()
    for name, value in layer.items():
        if name == "indexer_position_ids":
            continue  # They are known without it.
        for tensor in value.values() if isinstance(value, dict) else [value]:
            # V may be K.
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1 and not any(tensor is each for each in seen):
                seen.append(tensor)
                is_wide = (name == "recurrent_states" and family in FLOAT32_STATES) or name == "overlap_gate"
                reads_all = name != "conv_states" or family == "zaya" or (len(seen) > 1 and family == "qwen4_exp_text")
                size = 8 if tensor.dtype == torch.int64 else 4 if is_wide else 2
                total += size * (tensor if reads_all else tensor[..., 1:]).numel()
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


def test_heads_that_transformers_repeats_are_kept_once():
    falcon = {"model_type": "falcon", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 8}
    repeated = kept_layers(config_of({**falcon, "new_decoder_architecture": True, "num_kv_heads": 2}))
    assert repeated[0].entry == (2 * 8 * 2,) * 2


def test_layers_that_reuse_the_kv_of_earlier_ones_keep_nothing():
    shared = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    first = kept_layers(config_of({**PLAIN, **shared, "model_type": "gemma4_text"}))
    assert [(each.kind, each.count) for each in first] == [("window", 1), ("full", 1)]


@pytest.mark.parametrize(
    "model_type", ["inkling_text", "inkling_mm_model", None, ["lfm2"]], ids=["text", "mm", "none", "list"]
)
def test_a_kind_that_no_test_holds_is_refused_by_name(model_type):
    with pytest.raises(UnknownLayers, match="keep is not known; known are afmoe, apertus"):
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


IMAGES_TOO = {kind for kind in KINDS if "_vl" in kind}


@pytest.mark.parametrize("kind", sorted(set(KINDS) - IMAGES_TOO))
def test_a_configuration_has_the_parameters_of_its_module(kind, tmp_path):
    config = AutoConfig.for_model(kind, **GIVEN.get(kind, {}))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    counted = sum({id(each): each.numel() for each in module.parameters()}.values())
    assert model_named(str(tmp_path)).parameters == pytest.approx(counted, rel=0.0005)
