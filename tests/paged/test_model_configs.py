"""Models and devices as data, and a Hugging Face config.json in place of a name: right figures, what is not modelled by name, or a typed refusal."""

import json

import pytest

from paged import PagedError
from paged.study.hardware import (
    Device,
    ModelShape,
    device_named,
    device_names,
    layers_named,
    model_named,
    model_names,
)

from .files_of_others import (  # noqa: TID252
    BOX,
    CONFIGS,
    TINY,
)

LLAMA, PHI_3, GPT_OSS, DEEPSEEK_V3 = (CONFIGS[name] for name in ("LLAMA", "PHI_3", "GPT_OSS", "DEEPSEEK_V3"))
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}


def quantised(how=None, **more):
    """What a configuration says of its weights, of AWQ for want of another method."""
    return {"quantization_config": (how or {"quant_method": "awq", "bits": 4}) | more}


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


@pytest.mark.parametrize(
    ("name", "parameters", "kv_elements"),
    [
        ("LLAMA", 8_030_261_248, 32 * 2 * 8 * 128),
        ("QWEN3_MOE", 30_532_122_624, 48 * 2 * 4 * 128),
        ("MIXTRAL", 46_702_792_704, 32 * 2 * 8 * 128),
        ("GEMMA_3_27B", 27_009_346_304, 62 * 2 * 16 * 128),
        ("PHI_3", 3_821_079_552, 32 * 2 * 32 * 96),
        ("DEEPSEEK_V3", 671_026_419_200, 61 * (512 + 64)),
        ("GPT_OSS", 116_829_156_672, 36 * 2 * 8 * 64),
        ("GPT_2", 124_439_808, 12 * 2 * 12 * 64),
        ("FALCON_7B", 6_921_720_704, 32 * 2 * 64),
        ("OPT_125M", 125_239_296, 12 * 2 * 12 * 64),
        ("LLAMA_4_SCOUT", 107_769_861_120, 48 * 2 * 8 * 128),
    ],
)
def test_a_configuration_has_the_parameters_and_the_kv_of_its_model(written, name, parameters, kv_elements):
    model = model_named(str(written(CONFIGS[name])))
    assert model.name == "tiny-model"
    assert model.parameters == pytest.approx(parameters, rel=0.001)
    assert model.kv_elements == kv_elements


def test_a_folder_and_its_config_json_are_the_same_model_as_the_one_that_ships(written):
    folder, ships = written(LLAMA), model_named("llama-3.1-8b")
    model = model_named(str(folder))
    assert model == model_named(str(folder / "config.json"))
    assert (model.parameters, model.max_length) == (ships.parameters, ships.max_length)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (CONFIGS["GEMMA_3_27B"], ["what reads vision"]),
        (CONFIGS["LLAMA_4_SCOUT"], ["what reads vision"]),
        (DEEPSEEK_V3, ["layers that guess tokens ahead, 1 beside the 61"]),
        ({**LLAMA, **BITSANDBYTES}, ["weights in bitsandbytes, as published: they are counted in the dtype"]),
        ({**CONFIGS["QWEN3_MOE"], **AWQ}, ["weights in AWQ, 4 bits, groups of 128, as published"]),
        (
            {**LLAMA, **quantised(modules_to_not_convert=["v_proj"])},
            ["layers that stay floats, as v_proj: they are counted in AWQ, 4 bits"],
        ),
        *(
            (
                {**LLAMA, **quantised(GPTQ, modules_to_not_convert=["lm_head"], modules_in_block_to_quantize=only)},
                ["linear layers other than self_attn.q_proj, mlp.up_proj stay floats: they are counted in GPTQ, 4"],
            )
            for only in (["self_attn.q_proj", "mlp.up_proj"], [["self_attn.q_proj"], ["mlp.up_proj"]])
        ),
        (
            {**LLAMA, **quantised(GPTQ, dynamic={"-:.*up_proj": {}, "-:.*lm_head$": {}})},
            ["layers that stay floats, as .*up_proj: "],
        ),
        ({**LLAMA, **quantised(modules_to_not_convert=["re:.*lm_head"])}, []),
        ({**LLAMA, **quantised(modules_to_not_convert="v_proj")}, ["weights in awq with 4 bits, as published"]),
        ({**LLAMA, **AWQ}, []),
        ({**LLAMA, "num_kv_shared_layers": 8}, ["K and V that 8 of 32 layers take from others"]),
        (LLAMA, []),
    ],
)
def test_what_no_figure_counts_is_said(written, config, said):
    pytest.importorskip("torch")
    found = model_named(str(written(config))).not_modelled
    assert [sentence.startswith(words) for sentence, words in zip(found, said, strict=True)] == [True] * len(said)


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (GPT_OSS, [("full", 18, 0), ("window", 18, 128)]),
        (CONFIGS["GEMMA_3_27B"], [("full", 10, 0), ("window", 52, 1024)]),
        (CONFIGS["LLAMA_4_SCOUT"], [("full", 12, 0), ("chunk", 36, 8192)]),
        (PHI_3, [("window", 32, 2047)]),
        ({**PHI_3, "sliding_window": 262144}, []),
        ({**CONFIGS["QWEN3_MOE"], "sliding_window": 4096}, []),
        (DEEPSEEK_V3, []),
    ],
)
def test_layers_that_keep_a_part_of_the_context_are_read_as_transformers_reads_them(written, config, kept):
    path = str(written(config))
    model = model_named(path)
    assert [(each.kind, each.count, each.reach) for each in model.kept] == kept
    if kept:
        pytest.importorskip("transformers.models.auto.configuration_auto")
        assert sorted(map(str, model.kept)) == sorted(map(str, layers_named(path).layers))


def test_weights_are_counted_as_they_are_published(written, document):
    def figures(config):
        return document("capacity", written(config), "--device", "h100")

    assert figures(GPT_OSS)["weight_bytes"] == pytest.approx(65.2e9, rel=0.01)
    assert figures(DEEPSEEK_V3)["dtype"] == "fp8"
    fp8 = {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": {"num_bits": 8, "type": "float"}}}}
    assert figures({**LLAMA, **quantised(fp8)})["weight_bytes"] == 8_030_261_248
    bitsandbytes = figures({**LLAMA, **BITSANDBYTES})
    assert (bitsandbytes["weight_bytes"], len(bitsandbytes["not_modelled"])) == (2 * 8_030_261_248, 1)


def test_weights_that_are_published_as_codes_are_counted_with_scales_and_zero_points(written, document):
    pytest.importorskip("torch")
    linear = 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
    found = document("capacity", written({**LLAMA, **AWQ}), "--device", "h100")
    codes, scales, zeros = linear // 2, linear // 128 * 2, linear // 128 // 2
    assert found["weight_bytes"] == codes + scales + zeros + (8_030_261_248 - linear) * 2
    assert found["quantization"] == "AWQ, 4 bits, groups of 128"
    assert found["notes"][0].startswith(
        "linear layers are codes in AWQ, 4 bits, groups of 128 with scales, all else bf16"
    )


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
    pytest.importorskip("torch")
    on = (written({**LLAMA, "quantization_config": GPTQ}), "--device", "h100")
    load = ("synthetic:poisson,rate=2,requests=4,prompt=100,output=5", "--model", *on)
    (simulated,) = document("simulate", *load)
    (plan,) = document("plan", *load, "--find", "rate", "--ttft", 10, "--no-explain", "--jobs", 1)
    found = [each["quantization"] for each in (document("capacity", *on), simulated, plan)]
    assert found == ["GPTQ, 4 bits, groups of 32"] * 3


@pytest.mark.parametrize(
    ("name", "model", "max_length", "dtype"),
    [
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b", 262_144, None),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "qwen3-30b-a3b", 262_144, "fp8"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b", 131_072, None),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "llama-3.1-8b", 131_072, "fp8"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b", 4_096, None),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b", 32_768, None),
        ("Qwen/Qwen3-8B-FP8", "qwen3-8b", 40_960, "fp8"),
        ("meta-llama/llama-3.1-8b-INSTRUCT", "llama-3.1-8b", 131_072, None),
    ],
)
def test_a_publisher_s_name_may_end_in_what_leaves_the_shape_as_it_is(name, model, max_length, dtype):
    found = model_named(name)
    assert (found.name, found.max_length, found.dtype) == (model, max_length, dtype)


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
