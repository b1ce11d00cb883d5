"""Models and devices as data, or a config.json: right figures, what is not modelled by name, and what fits where."""

import json
import sys

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from paged import PagedError
from paged.errors import MissingExtra
from paged.study.hardware import (
    Device,
    ModelShape,
    Roofline,
    capacity_of,
    device_named,
    device_names,
    layers_named,
    model_named,
    model_names,
)
from paged.study.hardware.device import Link
from paged.study.hardware.hf_config import KINDS

from .files_of_others import BOX, CONFIGS, TINY, assert_by_hand, by_hand_in  # noqa: TID252

LLAMA, PHI_3, GPT_OSS, DEEPSEEK_V3 = (CONFIGS[name] for name in ("LLAMA", "PHI_3", "GPT_OSS", "DEEPSEEK_V3"))
WINDOWS = ("sliding_window", "attention_chunk_size")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}


def quantised(how=None, **more):
    """What a configuration says of its weights, of AWQ for want of another method."""
    return {"quantization_config": (how or {"quant_method": "awq", "bits": 4}) | more}


def gptq(**more):
    return quantised(GPTQ, **more)


AWQ, BITSANDBYTES = quantised(), quantised({"quant_method": "bitsandbytes", "load_in_4bit": True})


@pytest.fixture
def written(tmp_path):
    """Writes a configuration into a checkpoint folder, whose path it returns."""

    def write(config, name="tiny-model"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


@pytest.mark.parametrize("command", ["simulate", "plan --find devices --ttft 10 --no-explain"])
def test_a_checkpoint_folder_is_simulated_and_planned_with_what_is_not_modelled(
    printed, document, written, tmp_path, command
):
    small = {**PHI_3, "num_hidden_layers": 2, "max_position_embeddings": 8192, "num_kv_shared_layers": 1}
    options = [*command.split(), "azure", "--limit", 4, "--model", written(small), "--device", "h100", "--published"]
    page, said = tmp_path / "page.html", "ot modelled: K and V that 1 of 2 layers take from others"
    assert said in printed(*options, "--html", page)
    assert said[13:] in page.read_text()
    assert document(*options)[0]["not_modelled"][0].startswith("K and V that 1 of 2")


def test_simulate_and_plan_say_as_capacity_does_what_a_model_is_stored_as(document, written):
    on = (written({**LLAMA, "quantization_config": GPTQ}), "--device", "h100")
    load = ("synthetic:poisson,rate=2,requests=4,prompt=100,output=5", "--model", *on)
    (simulated,) = document("simulate", *load)
    (plan,) = document("plan", *load, "--find", "rate", "--ttft", 10, "--no-explain", "--jobs", 1)
    found = [each["quantization"] for each in (document("capacity", *on), simulated, plan)]
    assert found == ["GPTQ, 4 bits, groups of 32"] * 3


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


@pytest.mark.parametrize(
    ("call", "name", "nearest", "known"),
    [(model_named, "lama-3-8b", "llama-3-8b", model_names()), (device_named, "b200", None, device_names())],
)
def test_an_unknown_name_comes_with_the_nearest_and_all_that_are_known(call, name, nearest, known):
    with pytest.raises(PagedError) as raised:
        call(name)
    assert (raised.value.nearest, list(raised.value.known)) == (nearest, known)
    assert all(each in str(raised.value) for each in known)


def test_a_file_of_ones_own_is_a_model_or_a_device(tmp_path):
    model, device = tmp_path / "tiny.json", tmp_path / "box.json"
    model.write_text(json.dumps(TINY))
    device.write_text(json.dumps(BOX))
    assert (model_named(str(model)), device_named(str(device))) == (ModelShape(**TINY), Device(**BOX))


FP8 = {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": {"num_bits": 8, "type": "float"}}}}
OTHER_LAYERS = "linear layers other than self_attn.q_proj, mlp.up_proj stay floats: they are counted in GPTQ, 4"
LINEAR = 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
LFM2 = {
    "model_type": "lfm2", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 64, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"],
}  # fmt: skip
FALCON = {"model_type": "falcon", "n_layer": 3, "n_head": 8, "hidden_size": 64, "n_head_kv": 2}


@pytest.mark.parametrize(("call", "by_hand"), by_hand_in("configs.txt"))
def test_a_configuration_is_the_model_that_it_is_by_hand(written, document, refused, call, by_hand):

    def model(config):
        return model_named(str(written(config)))

    def layers(config):
        (its,) = layers_named(str(written(config))).layers
        return its

    def capacity(config, *options):
        return document("capacity", written(config), *options)

    def on_h100(config):
        return capacity(config, "--device", "h100")

    def pages(config, *options):
        return capacity(config, *options)["pages"]["bytes_of_a_sequence"]["8192"]

    def not_counted(config, *words):
        return [each.startswith(its) for each, its in zip(model(config).not_modelled, words, strict=True)]

    def kept(config):
        found = model(config).kept
        assert not found or sorted(map(str, found)) == sorted(map(str, layers_named(str(written(config))).layers))
        return [(each.kind, each.count, each.reach) for each in found]

    assert_by_hand(call, by_hand, globals() | locals())


@pytest.mark.parametrize("model_type", sorted(KINDS))
def test_a_window_that_a_configuration_leaves_out_is_that_of_transformers_and_null_is_none(written, model_type):
    usual = CONFIG_MAPPING[model_type]()
    usual = getattr(usual, "text_config", usual)
    reach = getattr(usual, "sliding_window", None) or getattr(usual, "attention_chunk_size", None)
    config = {**usual.to_dict(), "max_position_embeddings": 65536, "head_dim": 128, "num_experts_per_tok": 2}
    config = {name: value for name, value in config.items() if name not in (*WINDOWS, "layer_types")}
    narrow = [layers.reach for layers in model_named(str(written(config))).kept if layers.kind != "full"]
    assert narrow == ([reach] if reach else [])
    assert not model_named(str(written(config | dict.fromkeys(WINDOWS)))).kept


def test_a_configuration_s_model_is_called_as_its_folder_or_its_file(document, written, tmp_path):
    assert document("capacity", written(LFM2))["model"] == "tiny-model"
    (written(LFM2) / "config.json").rename(tmp_path / "mine.json")
    assert document("capacity", tmp_path / "mine.json")["model"] == "mine"


def test_without_transformers_a_hybrid_is_refused_and_a_llama_is_taken_to_keep_all_tokens(monkeypatch, written):
    monkeypatch.setitem(sys.modules, "transformers.models.auto.configuration_auto", None)
    with pytest.raises(MissingExtra, match="needs transformers, which is not installed"):
        layers_named(str(written(LFM2)))
    kept = layers_named(str(written(LLAMA)))
    assert (kept.layers[0].kind, kept.layers[0].count) == ("full", 32)
    assert "needs transformers" in kept.doubt


def fitting(model, device="a100-80g", *, batch=16, length=1024, **options):
    place = Roofline(model=model_named(model), device=device_named(device), **options)
    return place, capacity_of(place, batch=batch, length=length)


def test_in_a_terminal_of_80_columns_nothing_is_cut(printed, terminal):
    screen = terminal(80, color_system=None)
    assert printed("capacity", "llama-2-70b", "--dtype", "bf16", "--batch", 16, "--length", 1024) == ""
    drawn = screen.getvalue()
    assert "…" not in drawn and max(map(len, drawn.splitlines())) <= 80
    assert "42.9 GB" in " ".join(drawn.split())


def test_the_page_shows_what_the_command_prints(printed, text_of, fences):
    examples = [each for each in fences(text_of("docs/hardware.md"), "") if each.startswith("$ paged capacity ")]
    assert examples
    for example in examples:
        command, _, lines = example.partition("\n")
        assert printed(*command.split()[2:]) == lines


def test_the_page_s_own_model_is_one(document, text_of, fences, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(fences(text_of("docs/hardware.md"), "json")[0])
    assert document("capacity", path, "--device", "h100")["model"] == "mine"


@pytest.mark.parametrize(
    ("model", "device", "options"),
    [("llama-2-70b", "h100", {"tensor_parallel": 4}), ("smollm-135m", "cpu", {"dtype": "fp32"})],
)
def test_so_many_sequences_fit_and_one_more_does_not(model, device, options):
    place, figures = fitting(model, device, **options)
    assert figures.fits
    # More rows take more logits, so room is asked for with as many.
    most = fitting(model, device, batch=figures.max_sequences, **options)[1].max_sequences
    assert fitting(model, device, batch=most, **options)[1].fits
    assert not fitting(model, device, batch=figures.max_sequences + 1, **options)[1].fits
    assert figures.num_blocks == place.num_blocks(16, max_sequences=16)


def test_the_fewest_devices_do_and_half_of_them_do_not_and_one_that_works_alone_has_no_such_number():
    fewest = fitting("llama-3-70b", "a100-40g", batch=64)[1].fewest_devices
    assert fitting("llama-3-70b", "a100-40g", batch=64, tensor_parallel=fewest)[1].fits
    assert not fitting("llama-3-70b", "a100-40g", batch=64, tensor_parallel=fewest // 2)[1].fits
    assert fitting("deepseek-v2", "cpu", batch=4096, length=2048)[1].fewest_devices is None
    # A link that was named joins devices whose sheet has none, and does not count where one device does.
    link = Link(bytes_per_s=1e10, latency_s=1e-5)
    linked, figures = fitting("llama-2-13b", "rtx4090", batch=1, tensor_parallel=4, link=link)
    assert linked.device.interconnect is None and figures.fewest_devices == 2
