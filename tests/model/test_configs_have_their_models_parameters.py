"""The kinds of config.json that are read: their parameters are those of transformers' own modules."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paged.study.hardware import model_named
from paged.study.hardware.hf_kinds import KINDS

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
