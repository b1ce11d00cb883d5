"""At load, a small random model of the configuration is held against transformers: faults in what we do are found, and what passed is remembered."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import get_layer_types_and_kwargs

from paged.errors import UnsupportedModel
from paged.model.hook import ATTENTION, Mask, register
from paged.model.load_check import check_answers
from paged.model.shrinking import Shrunk

QWEN2_MOE = {
    "num_hidden_layers": 12,
    "use_sliding_window": True,
    "sliding_window": 4096,
    "layer_types": ["full_attention", "full_attention", "sliding_attention"] * 4,
}


@pytest.fixture(autouse=True)
def _registered():
    register()


def test_a_window_that_is_ignored_is_found_in_the_layer_that_has_it(request):
    request.addfinalizer(register)
    AttentionMaskInterface.register(ATTENTION, lambda **_: Mask(None))
    config = AutoConfig.for_model("qwen2_moe", **QWEN2_MOE)
    with pytest.raises(UnsupportedModel, match=r"The first to differ is layer 2 \(Qwen2MoeDecoderLayer\)"):
        check_answers(config, Path("a-model"))


def test_every_kind_of_layer_is_there_twice():
    small = Shrunk(AutoConfig.for_model("qwen2_moe", **QWEN2_MOE))
    assert small.layers == [0, 1, 2, 5]
    assert small.config.layer_types == ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]


def test_limits_of_length_become_short_ones_in_their_order():
    for limits, original in (
        ({"original_max_position_embeddings": 4096}, 64),
        ({"max_position_embeddings": 2**17}, 15),
    ):
        small = Shrunk(AutoConfig.for_model("phi3", sliding_window=2048, **limits)).config
        assert (small.sliding_window, small.max_position_embeddings) == (9, 64)
        assert small.original_max_position_embeddings == original


def test_a_configuration_that_cannot_be_made_small_is_refused_by_name():
    config = AutoConfig.for_model("xmod", is_decoder=True)
    with pytest.raises(UnsupportedModel, match=r"^a-model: no small random model .* cannot be checked: Input language"):
        check_answers(config, Path("a-model"))


def test_what_passed_is_remembered_by_its_configuration(tmp_path, monkeypatch):
    config = AutoConfig.for_model("llama", rope_theta=12345.0)
    # So that nothing is compiled into the folder.
    check_answers(AutoConfig.for_model("llama"), Path("a-model"))
    monkeypatch.setenv("PAGED_CACHE", str(tmp_path))
    check_answers(config, Path("a-model"))
    check_answers(config, Path("another-folder"))
    assert len(list(tmp_path.iterdir())) == 1
    config.rms_norm_eps = 0.5
    check_answers(config, Path("a-model"))
    assert len(list(tmp_path.iterdir())) == 2


# By family: fields of its configuration, and the kinds of its layers.
SMALL = json.loads(Path(__file__).with_name("states_made_small.json").read_text())


@pytest.mark.parametrize("family", SMALL)
def test_a_model_with_states_is_made_small_with_every_kind_of_its_layers(family):
    fields, kinds = SMALL[family]
    small = Shrunk(AutoConfig.for_model(family, **fields)).config
    assert set(get_layer_types_and_kwargs(small)[0]) == set(kinds)
    model = AutoModelForCausalLM.from_config(small).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert model(input_ids=torch.arange(4, 20)[None], use_cache=False).logits.isfinite().all()
