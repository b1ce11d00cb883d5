"""Models and devices as data: their figures add up to what was published, and a wrong name or file is told apart."""

import json
import re

import pytest

from paged import PagedError
from paged.errors import BadHardwareFile, InvalidConfig, UnknownDevice, UnknownModel
from paged.study.hardware import Device, Experts, ModelShape, device_named, device_names, model_named, model_names

TINY = {
    "name": "tiny",
    "hidden": 8,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 2,
    "intermediate": 16,
    "vocab": 10,
    "max_length": 64,
}
BOX = {"name": "box", "memory_bytes": 1000, "bandwidth": 100.0, "peak_flops": {"bf16": 1e3}, "host_link": 10.0}


def shape(**changes):
    return ModelShape(**{**TINY, **changes})


def test_the_models_and_devices_that_ship_are_these():
    assert {"llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b", "llama-3-70b", "mistral-7b"} < set(model_names())
    assert {"llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b"} < set(model_names())
    assert {"mixtral-8x7b", "gpt-oss-120b"} < set(model_names())
    assert {"qwen2.5-7b", "opt-13b", "opt-30b", "deepseek-v2", "smollm-135m"} < set(model_names())
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


def test_deepseek_activates_21_of_236_billion_and_keeps_576_numbers_a_token_and_layer():
    model = model_named("deepseek-v2")
    assert model.parameters == pytest.approx(236e9, rel=0.01)
    assert model.active_parameters == pytest.approx(21e9, rel=0.02)
    assert model.kv_elements == 60 * (512 + 64)
    assert model.kv_elements_of_all_heads == 60 * 128 * (192 + 128)


def test_groups_of_heads_share_k_and_v():
    model = model_named("llama-2-70b")
    assert model.kv_elements == 2 * 80 * 8 * 128
    assert model.kv_elements_of_all_heads == 2 * 8192 * 80 == 8 * model.kv_elements


@pytest.mark.parametrize(
    ("call", "error", "name", "nearest"),
    [
        (model_named, UnknownModel, "llama2-70b", "llama-2-70b"),
        (model_named, UnknownModel, "Llama-3-8B", "llama-3-8b"),
        (model_named, UnknownModel, "zzz", None),
        (model_named, UnknownModel, "gemma-3-27b", None),
        (model_named, UnknownModel, "lama-3-8b", "llama-3-8b"),
        (device_named, UnknownDevice, "b200", None),
        (model_named, UnknownModel, "", None),
        (device_named, UnknownDevice, "a100", "a100-40g"),
        (device_named, UnknownDevice, "groq", "groq-lpu"),
        (device_named, UnknownDevice, "../devices/h100", None),
    ],
)
def test_an_unknown_name_lists_the_known_and_suggests_the_nearest(call, error, name, nearest):
    with pytest.raises(error, match=re.escape(f'"{name}"')) as raised:
        call(name)
    assert isinstance(raised.value, PagedError)
    assert raised.value.nearest == nearest
    assert all(known in str(raised.value) for known in raised.value.known)
    assert (f"Did you mean {nearest}?" in str(raised.value)) == (nearest is not None)


def test_a_file_of_ones_own_is_a_model_or_a_device(tmp_path):
    model, device = tmp_path / "tiny.json", tmp_path / "box.json"
    model.write_text(json.dumps(TINY))
    device.write_text(json.dumps(BOX))
    assert model_named(str(model)) == ModelShape(**TINY)
    assert device_named(str(device)) == Device(**BOX)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden": "8"}, "hidden"),
        ({"hidden": 0}, "hidden"),
        ({"layers": 2.5}, "layers"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"hiden": 8}, "hiden"),
        ({"bias": "some"}, "bias"),
        ({"experts": {"count": 4, "per_token": 8, "intermediate": 4}}, "experts.per_token"),
        ({"experts": {"count": 4, "per_token": 2}}, "experts.intermediate"),
        ({"latent": {"kv_rank": -1, "rope_dim": 1, "query_rank": 1, "nope_dim": 1, "value_dim": 1}}, "latent.kv_rank"),
    ],
)
def test_a_model_file_with_a_wrong_field_is_named_with_that_field(tmp_path, changes, field):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({**TINY, **changes}))
    with pytest.raises(BadHardwareFile, match=re.escape(f"{path}, field {field}: ")) as raised:
        model_named(str(path))
    assert (raised.value.path, raised.value.field) == (path, field)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"memory_bytes": -1}, "memory_bytes"),
        ({"bandwidth": None}, "bandwidth"),
        ({"interconnect": 0}, "interconnect"),
        ({"peak_flops": {}}, "peak_flops"),
        ({"peak_flops": {"bf17": 1.0}}, "peak_flops"),
        ({"peak_flops": {"bf16": -1.0}}, "peak_flops"),
    ],
)
def test_a_device_file_with_a_wrong_field_is_named_with_that_field(tmp_path, changes, field):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({**BOX, **changes}))
    with pytest.raises(BadHardwareFile, match=re.escape(f"{path}, field {field}")):
        device_named(str(path))


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b'{"name": "\xff"}'])
def test_a_file_that_is_no_json_is_named(tmp_path, text):
    path = tmp_path / "torn.json"
    path.write_bytes(text)
    with pytest.raises(BadHardwareFile, match=re.escape(f"{path}: no JSON: ")) as raised:
        model_named(str(path))
    assert raised.value.field is None


def test_a_file_without_a_field_names_it_and_one_that_is_not_there_is_an_os_error(tmp_path):
    path = tmp_path / "short.json"
    path.write_text(json.dumps({name: value for name, value in TINY.items() if name != "vocab"}))
    with pytest.raises(BadHardwareFile, match="field vocab"):
        model_named(str(path))
    with pytest.raises(FileNotFoundError):
        model_named(str(tmp_path / "none.json"))


def test_a_shape_that_cannot_be_is_refused_when_it_is_made():
    with pytest.raises(InvalidConfig, match="hidden is -1"):
        shape(hidden=-1)
    with pytest.raises(InvalidConfig, match="hidden is True"):
        shape(hidden=True)
    with pytest.raises(InvalidConfig, match="memory_bytes is 0"):
        Device(**{**BOX, "memory_bytes": 0})


def test_a_rate_that_a_device_does_not_have_is_refused_with_those_that_it_has():
    with pytest.raises(InvalidConfig, match='groq-lpu has no rate for dtype "bf16"; it has fp16, int8'):
        device_named("groq-lpu").peak("bf16")
