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


def test_what_published_models_activate_and_keep_of_a_token():
    latent = model_named("deepseek-v2")
    assert latent.parameters == pytest.approx(236e9, rel=0.01)
    assert latent.active_parameters == pytest.approx(21e9, rel=0.02)
    assert (latent.kv_elements, latent.kv_elements_of_all_heads) == (60 * (512 + 64), 60 * 128 * (192 + 128))
    grouped = model_named("llama-2-70b")
    assert grouped.kv_elements == 2 * 80 * 8 * 128
    assert grouped.kv_elements_of_all_heads == 2 * 8192 * 80 == 8 * grouped.kv_elements


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


def latent(**changes):
    return {"latent": {"kv_rank": 1, "rope_dim": 1, "query_rank": 1, "nope_dim": 1, "value_dim": 1} | changes}


WRONG = [
    (model_named, {**TINY, "hidden": "8"}, "hidden"),
    (model_named, {**TINY, "hidden": 0}, "hidden"),
    (model_named, {**TINY, "layers": 2.5}, "layers"),
    (model_named, {**TINY, "kv_heads": 3}, "kv_heads"),
    (model_named, {**TINY, "hiden": 8}, "hiden"),
    (model_named, {**TINY, "bias": "some"}, "bias"),
    (model_named, {**TINY, "experts": {"count": 4, "per_token": 8, "intermediate": 4}}, "experts.per_token"),
    (model_named, {**TINY, "experts": {"count": 4, "per_token": 2}}, "experts.intermediate"),
    (model_named, {**TINY, **latent(kv_rank=-1)}, "latent.kv_rank"),
    (device_named, {**BOX, "memory_bytes": -1}, "memory_bytes"),
    (device_named, {**BOX, "bandwidth": None}, "bandwidth"),
    (device_named, {**BOX, "interconnect": 0}, "interconnect"),
    (device_named, {**BOX, "peak_flops": {}}, "peak_flops"),
    (device_named, {**BOX, "peak_flops": {"bf17": 1.0}}, "peak_flops"),
    (device_named, {**BOX, "peak_flops": {"bf16": -1.0}}, "peak_flops"),
]


@pytest.mark.parametrize(("named", "fields", "field"), WRONG)
def test_a_file_with_a_wrong_field_is_named_with_that_field(tmp_path, named, fields, field):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(BadHardwareFile, match=re.escape(f"{path}, field {field}")) as raised:
        named(str(path))
    assert raised.value.path == path
    assert raised.value.field.partition("[")[0] == field


@pytest.mark.parametrize(
    ("text", "problem", "field"),
    [
        (b"", "no JSON: ", None),
        (b"{", "no JSON: ", None),
        (b"\xff\xfe", "no JSON: ", None),
        (b'{"name": "\xff"}', "no JSON: ", None),
        (json.dumps({name: TINY[name] for name in TINY if name != "vocab"}).encode(), "vocab", "vocab"),
    ],
)
def test_a_file_that_is_no_json_or_lacks_a_field_is_named(tmp_path, text, problem, field):
    path = tmp_path / "torn.json"
    path.write_bytes(text)
    with pytest.raises(BadHardwareFile, match=f"{re.escape(str(path))}.*{problem}") as raised:
        model_named(str(path))
    assert raised.value.field == field


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        model_named(str(tmp_path / "none.json"))


def test_a_shape_that_cannot_be_is_refused_when_it_is_made_and_a_rate_that_there_is_not_when_it_is_asked_for():
    for made, words in (
        (lambda: shape(hidden=-1), "hidden is -1"),
        (lambda: shape(hidden=True), "hidden is True"),
        (lambda: Device(**{**BOX, "memory_bytes": 0}), "memory_bytes is 0"),
        (lambda: device_named("groq-lpu").peak("bf16"), 'groq-lpu has no rate for dtype "bf16"; it has fp16, int8'),
    ):
        with pytest.raises(InvalidConfig, match=words):
            made()
