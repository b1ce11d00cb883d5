"""Models and devices as data: their figures add up to what was published, and a wrong name or file is told apart."""

import json

import pytest

from paged import PagedError
from paged.study.hardware import Device, Experts, ModelShape, device_named, device_names, model_named, model_names

from .files_of_others import BOX, TINY  # noqa: TID252


def shape(**changes):
    return ModelShape(**{**TINY, **changes})


MODELS = """
llama-2-7b llama-2-13b llama-2-70b llama-3-8b llama-3-70b llama-3.1-8b llama-3.1-70b mistral-7b mixtral-8x7b gpt-oss-120b
qwen2.5-7b qwen3-8b qwen3-32b qwen3-30b-a3b opt-13b opt-30b deepseek-v2 smollm-135m
"""


def test_the_models_and_devices_that_ship_are_these():
    assert set(MODELS.split()) <= set(model_names())
    assert device_names() == ["a100-40g", "a100-80g", "cpu", "groq-lpu", "h100", "h200", "rtx4090", "rtxpro6000"]


@pytest.mark.parametrize("name", model_names())
def test_a_models_parameters_are_those_that_were_published(name):
    model = model_named(name)
    assert model.name == name
    assert model.published_parameters > 0
    assert model.parameters == pytest.approx(model.published_parameters, rel=0.01)
    assert len(model.source) > 40


@pytest.mark.parametrize("name", device_names())
def test_a_device_says_where_its_figures_come_from(name):
    device = device_named(name)
    assert device.name == name
    assert len(device.source) > 40
    assert all(device.ridge(dtype) == rate / device.bandwidth for dtype, rate in device.peak_flops.items())


def test_parameters_are_counted_by_hand():
    # Attention: 8 × (8 + 4 + 4 + 8) = 192; MLP: 3 × 8 × 16 = 384; two norms of 8. Embedding and output: 80 each; one norm.
    assert shape().parameters == 2 * (192 + 384 + 16) + 2 * 80 + 8
    assert shape(tied_embeddings=True).parameters == shape().parameters - 80
    assert shape(gated_mlp=False).parameters == shape().parameters - 2 * 128
    # Biases: 8 + 4 + 4 of queries, keys and values.
    assert shape(bias="qkv").parameters == shape().parameters + 2 * 16
    # And 8 of the output, 16 + 16 + 8 of the MLP, 8 of each norm.
    assert shape(bias="all").parameters == shape().parameters + 2 * (24 + 40 + 16) + 8
    assert shape(learned_positions=5).parameters == shape().parameters + 40


def test_experts_are_counted_by_hand():
    model = shape(experts=Experts(count=6, per_token=2, shared=1, intermediate=4, dense_layers=1))
    expert = 3 * 8 * 4
    one_layer = 7 * expert + 8 * 6 - 384
    assert model.parameters == shape().parameters + one_layer
    assert model.active_parameters == model.parameters - 4 * expert


def test_an_unknown_name_comes_with_the_nearest_and_all_that_are_known():
    for call, name, nearest, known in (
        (model_named, "lama-3-8b", "llama-3-8b", model_names()),
        (device_named, "b200", None, device_names()),
    ):
        with pytest.raises(PagedError) as raised:
            call(name)
        assert (raised.value.nearest, list(raised.value.known)) == (nearest, known)
        assert all(each in str(raised.value) for each in known)


def test_a_file_of_ones_own_is_a_model_or_a_device(tmp_path):
    model, device = tmp_path / "tiny.json", tmp_path / "box.json"
    model.write_text(json.dumps(TINY))
    device.write_text(json.dumps(BOX))
    assert (model_named(str(model)), device_named(str(device))) == (ModelShape(**TINY), Device(**BOX))
