"""Checkpoints in the formats that users have: made by the libraries that write them (tools/make_quantised_checkpoints.py), read, run and refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from paged import LLM, SamplingParams
from paged.errors import BrokenCheckpoint, InvalidConfig, UnsupportedModel
from paged.model.loading import load_model
from paged.model.native.coded import QuantisedLinear, coded_library
from paged.model.quantised.checkpoints import QuantisedCheckpoint, reader_of
from paged.model.quantised.files import TensorFiles
from paged.model.quantised.weights import QuantisedWeight, quantise
from paged.model.quantised.writing import write_quantised
from paged.study.hardware import Roofline, device_named, model_named

MADE = Path(__file__).parent / "quantised"
NAMES = sorted(each.name for each in MADE.iterdir() if each.is_dir())
TITLES = {
    "awq": "AWQ, 4 bits, groups of 32",
    "compressed-w4a16": "compressed-tensors, 4 bits, groups of 32",
    "compressed-w4a16-zeros": "compressed-tensors, 4 bits, groups of 32",
    "compressed-w8a8": "compressed-tensors, 8 bits, a scale a result",
    "gptq": "GPTQ, 4 bits, groups of 32",
    "gptq-8-bits": "GPTQ, 8 bits, groups of 32",
    "gptq-act-order": "GPTQ, 4 bits, groups of 32",
}
WEIGHTS = "model.safetensors"
LAYER = "model.layers.1.mlp.down_proj"
DEPTH, OUTS = 192, 64
IDS = [5, 17, 99, 300, 4, 71, 512, 8]


def reader(folder: Path) -> QuantisedCheckpoint:
    found = reader_of(AutoConfig.from_pretrained(folder), folder)
    assert found is not None
    return found


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """copied(name): a copy of a folder, to be harmed."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(MADE / name, tmp_path / name))

    return copy


def floats_like(folder: Path) -> Any:
    """A model of a folder's configuration in float32, with weights at random."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def change_settings(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def change_weights(folder: Path, **changes: Tensor | None) -> None:
    """Of LAYER: parts by name, None to leave one out."""
    held = load_file(folder / WEIGHTS)
    for part, tensor in changes.items():
        held.pop(f"{LAYER}.{part}", None)
        if tensor is not None:
            held[f"{LAYER}.{part}"] = tensor.contiguous()
    save_file(held, folder / WEIGHTS, metadata={"format": "pt"})


def held_part(folder: Path, part: str) -> Tensor:
    return load_file(folder / WEIGHTS)[f"{LAYER}.{part}"]


def test_each_format_was_made_by_its_library() -> None:
    assert set(NAMES) == set(TITLES)
    for name in NAMES:
        assert json.loads((MADE / name / "made_by.json").read_text())["torch"]


@pytest.mark.parametrize("name", NAMES)
def test_codes_are_the_floats_that_the_library_makes_of_them(name: str) -> None:
    found, expected = reader(MADE / name), load_file(MADE / f"{name}.expected.safetensors")
    assert found.title == TITLES[name]
    assert set(found.layers) == {f"model.{path}" for path in expected}
    assert len(found.layers) == 7 * AutoConfig.from_pretrained(MADE / name).num_hidden_layers
    for path, products in expected.items():
        weight = found.weight_of(f"model.{path}")
        assert weight is not None and (weight.outs, weight.depth) == found.layers[f"model.{path}"]
        ours = weight.dequantised() @ torch.cos(torch.arange(weight.depth))
        # Libraries multiply in float16.
        torch.testing.assert_close(ours, products, rtol=2e-3, atol=2e-3 * float(products.abs().max()))
    assert found.weight_of("model.embed_tokens") is None


@pytest.mark.parametrize("name", NAMES)
def test_a_model_answers_as_its_floats_do(name: str) -> None:
    found = reader(MADE / name)
    theirs = floats_like(MADE / name)
    theirs.load_state_dict(
        {
            path: each.float() if each.is_floating_point() else each
            for path, each in load_file(MADE / name / WEIGHTS).items()
            if path in theirs.state_dict() and each.is_floating_point()
        },
        strict=False,
    )
    with torch.no_grad():
        for path in found.layers:
            weight = found.weight_of(path)
            assert weight is not None
            theirs.get_submodule(path).weight.copy_(weight.dequantised())
        expected = theirs(torch.tensor([IDS])).logits[0].log_softmax(-1)
    model = load_model(MADE / name)
    for path in found.layers:
        weight = found.weight_of(path)
        assert weight is not None
        assert torch.equal(model.module.get_submodule(path).weight, weight.dequantised())
    llm = LLM(model, num_blocks=16)
    [answer] = llm.generate([IDS], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1))
    assert answer.prompt_logprobs is not None
    errors = []
    for place, token in enumerate(IDS[1:]):
        alternatives = answer.prompt_logprobs[place + 1]
        assert alternatives is not None
        errors.append(abs(alternatives[token].logprob - float(expected[place, token])))
    # Products round their inputs to 8 bits; with other weights they are off by 1 and more.
    assert sum(errors) / len(errors) < 0.2


def test_loading_makes_no_layer_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    def dequantised(weight: QuantisedWeight) -> Tensor:
        raise AssertionError("floats of a layer were made")

    # It tries the products of its library once a process.
    coded_library()
    seen = []
    read = QuantisedCheckpoint.weight_of
    monkeypatch.setattr(QuantisedWeight, "dequantised", dequantised)
    monkeypatch.setattr(QuantisedCheckpoint, "weight_of", lambda each, name: seen.append(name) or read(each, name))
    model = load_model(MADE / "gptq-act-order")
    assert sorted(seen) == sorted(reader(MADE / "gptq-act-order").layers)
    # The head, and of each layer scales alone: fewer than an eighth of its weights.
    weights = sum(outs * depth for outs, depth in reader(MADE / "gptq-act-order").layers.values())
    assert sum(each.numel() for each in model.module.parameters() if each.is_floating_point()) < 1024 * 64 + weights / 8


def settings(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change_settings(folder, **changes)


def scheme(**changes: Any) -> Callable[[Path], None]:
    """Changes to how weights are stored in compressed-tensors' only group."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"]["config_groups"]["group_0"]["weights"].update(changes)
        (folder / "config.json").write_text(json.dumps(config))

    return change


def inputs(**changes: Any) -> Callable[[Path], None]:
    """Changes to how inputs are to be quantised there."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"]["config_groups"]["group_0"]["input_activations"].update(changes)
        (folder / "config.json").write_text(json.dumps(config))

    return change


def scales(part: str, value: float) -> Callable[[Path], None]:
    """One scale of LAYER is this."""

    def change(folder: Path) -> None:
        held = held_part(folder, part)
        held[3, 0] = value
        change_weights(folder, **{part: held})

    return change


def without(part: str) -> Callable[[Path], None]:
    return lambda folder: change_weights(folder, **{part: None})


def of_floats(folder: Path) -> None:
    """LAYER is stored as floats."""
    change_weights(
        folder, qweight=None, qzeros=None, scales=None, g_idx=None, weight=torch.zeros(OUTS, DEPTH, dtype=torch.float16)
    )


def empty(folder: Path) -> None:
    """LAYER has no inputs."""
    change_weights(folder, qweight=torch.zeros(0, OUTS, dtype=torch.int32))


def uneven(folder: Path) -> None:
    """One group of LAYER has an input more, and another one less."""
    groups = held_part(folder, "g_idx")
    groups[groups == 1] = 0
    change_weights(folder, g_idx=groups)


def with_zeros(folder: Path) -> None:
    """LAYER has zero points."""
    change_weights(folder, weight_zero_point=torch.zeros(OUTS, DEPTH // 32, dtype=torch.int8))


def with_floats(folder: Path) -> None:
    """LAYER has its floats, too."""
    change_weights(folder, weight=torch.zeros(OUTS, DEPTH, dtype=torch.float16))


READ = "GPTQ and AWQ with 4 bits"


@pytest.mark.parametrize(
    ("name", "harm", "message"),
    [
        ("gptq", settings(quant_method="bitsandbytes"), rf"quantised \(bitsandbytes\), which is not read. {READ}"),
        ("gptq", settings(quant_method="hqq"), rf"quantised \(hqq\), which is not read. {READ}"),
        ("gptq", settings(quant_method="torchao"), rf"quantised \(torchao\), which is not read. {READ}"),
        ("gptq", settings(quant_method="exl2"), rf"quantised \(exl2\), which is not read. {READ}"),
        ("gptq", settings(bits=3), rf"quantised \(gptq\) in 3 bits, which is not read. {READ}"),
        ("gptq", settings(checkpoint_format="marlin"), rf"in the format 'marlin', which is not read. {READ}"),
        ("gptq", settings(dynamic={r"+:.*\.down_proj.*": {"bits": 8}}), r"otherwise where '\+:.*' matches"),
        ("awq", settings(version="gemv"), "in the version 'gemv', which is not read"),
        ("awq", settings(bits=8), r"quantised \(awq\) in 8 bits"),
        (
            "compressed-w8a8",
            settings(format="naive-quantized", config_groups={"g": {"weights": {}}}),
            "naive-quantized",
        ),
        ("compressed-w4a16", settings(kv_cache_scheme={"num_bits": 8}), "it has a kv_cache_scheme, which is not read"),
        ("compressed-w4a16", settings(sparsity_config={"format": "sparse-24-bitmask"}), "it has a sparsity_config"),
        (
            "compressed-w4a16",
            settings(quantization_status="initialized"),
            "its weights are initialized, not compressed",
        ),
        ("compressed-w4a16", scheme(type="float"), "as float of 4 bits with a scale a group, which is not read"),
        ("compressed-w4a16", scheme(strategy="block"), "with a scale a block, which is not read"),
        ("compressed-w8a8", inputs(dynamic=False), "a fixed scale a token, which is not done"),
    ],
)
def test_formats_that_are_not_read_are_refused_by_name(
    copied: Callable[[str], Path], name: str, harm: Callable[[Path], None], message: str
) -> None:
    folder = copied(name)
    harm(folder)
    with pytest.raises(UnsupportedModel, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "harm", "message"),
    [
        ("gptq", settings(group_size=80), "groups of 80 do not divide its 192 inputs"),
        ("gptq", settings(group_size=64), r"scales has the shape \[6, 64\]; \[3, 64\] is wanted"),
        ("gptq", scales("scales", 0.0), f"{LAYER}: 1 of its 384 scales are 0"),
        ("gptq", scales("scales", float("nan")), f"{LAYER}: 1 of its 384 scales are NaN or infinite"),
        ("gptq", without("scales"), f"{LAYER}: scales is missing"),
        ("gptq", without("qweight"), f"{LAYER}: qweight is missing"),
        ("gptq", of_floats, f"{LAYER} is stored as floats, .* quantised in part is not read"),
        ("gptq-act-order", uneven, "g_idx does not give each of 6 groups 32 inputs"),
        ("compressed-w4a16", settings(config_groups={}), "no group of the configuration names it"),
        ("compressed-w4a16", without("weight_shape"), f"{LAYER}: weight_shape is missing"),
        ("compressed-w4a16-zeros", without("weight_zero_point"), f"{LAYER}: weight_zero_point is missing"),
        ("compressed-w8a8", scales("weight_scale", float("inf")), f"{LAYER}: 1 of its 64 scales are NaN or infinite"),
        ("compressed-w4a16", with_zeros, f"{LAYER}: it has a weight_zero_point, and its configuration says symmetric"),
        ("compressed-w4a16", with_floats, f"{LAYER}: it has both weight and weight_packed"),
        ("gptq", settings(group_size=0), "quantisation cannot be read: .*group_size is 0"),
        ("awq", settings(group_size="many"), "quantisation cannot be read: .*'many'"),
        ("gptq", settings(dynamic={"-:(": {}}), "quantisation cannot be read: .* is no pattern"),
        ("compressed-w4a16", scheme(group_size=None), "quantisation cannot be read: .*NoneType"),
        ("compressed-w4a16", settings(ignore=["re:("]), "quantisation cannot be read: .* is no pattern"),
        ("compressed-w4a16", settings(ignore=[7]), "quantisation cannot be read: .*7 is no name of a layer"),
        ("gptq", empty, f"{LAYER}: qweight has the shape .*, which is empty"),
        ("compressed-w8a8", settings(config_groups=7), "what its configuration says of quantisation cannot be read"),
    ],
)
def test_a_checkpoint_that_is_broken_is_told_by_layer_and_fault(
    copied: Callable[[str], Path], name: str, harm: Callable[[Path], None], message: str
) -> None:
    folder = copied(name)
    harm(folder)
    with pytest.raises(BrokenCheckpoint, match=f"{folder.name}.*{message}"):
        load_model(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_status": "frozen"},
        {"quantization_status": None},
        {"sparsity_config": {"format": "dense", "global_sparsity": 0.1, "sparsity_structure": "unstructured"}},
    ],
)
def test_settings_that_change_nothing_of_how_weights_are_stored_are_read(
    copied: Callable[[str], Path], changes: dict[str, Any]
) -> None:
    folder = copied("compressed-w4a16")
    change_settings(folder, **changes)
    assert reader(folder).layers == reader(MADE / "compressed-w4a16").layers


def test_an_index_without_names_of_files_is_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("gptq")
    (folder / WEIGHTS).unlink()
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"a": 5}}))
    with pytest.raises(BrokenCheckpoint, match=f"{folder}: .*json cannot be read: it has 5 .* name of a's file"):
        reader(folder)


def test_layers_that_the_configuration_leaves_out_stay_floats(copied: Callable[[str], Path]) -> None:
    folder = copied("gptq")
    of_floats(folder)
    change_settings(folder, dynamic={rf"-:{LAYER}": {}})
    model = load_model(folder)
    assert float(model.module.get_submodule(LAYER).weight.abs().max()) == 0


def test_a_flag_that_contradicts_the_checkpoint_is_refused() -> None:
    assert load_model(MADE / "gptq", quantization="int4").num_layers == 3
    with pytest.raises(InvalidConfig, match='quantization="int8" is asked for, and .* stored as GPTQ, 4 bits'):
        load_model(MADE / "gptq", quantization="int8")
    with pytest.raises(InvalidConfig, match="quantize_head is asked for, and .* its head as it is"):
        load_model(MADE / "gptq", quantization="int4", quantize_head=True)


def test_a_layer_of_another_shape_than_the_module_has_is_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("gptq")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 256}))
    with pytest.raises(
        BrokenCheckpoint, match=r"layers.0.mlp.down_proj has the shape \[64, 192\]; \[64, 256\] is wanted"
    ):
        load_model(folder)


def test_shards_are_read_as_one_file_is(copied: Callable[[str], Path]) -> None:
    folder = copied("gptq")
    held = load_file(folder / WEIGHTS)
    names, placed = sorted(held), {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({each: held[each] for each in part}, folder / f"part{number}.safetensors", metadata={"format": "pt"})
        placed.update(dict.fromkeys(part, f"part{number}.safetensors"))
    (folder / WEIGHTS).unlink()
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    found, whole = reader(folder).weight_of(LAYER), reader(MADE / "gptq").weight_of(LAYER)
    assert found is not None and whole is not None
    assert torch.equal(found.dequantised(), whole.dequantised())
    assert load_model(folder).num_layers == 3


@pytest.mark.parametrize(
    "architecture",
    ["falcon_h1", "gemma3n_text", "jamba", "llama4_text", "mamba2", "phi", "qwen3_next", "recurrent_gemma"],
)
def test_codes_go_to_the_layers_that_transformers_puts_their_floats_in(
    checkpoint: Callable[..., Path], tmp_path: Path, architecture: str
) -> None:
    folder, out = checkpoint(architecture), tmp_path / "out"
    write_quantised(folder, out, weights="int8")
    theirs, ours = AutoModelForCausalLM.from_pretrained(folder), load_model(out).module
    linears = {path: each for path, each in ours.named_modules() if isinstance(each, QuantisedLinear)}
    assert len(linears) == len(reader(out).layers) > 0
    for path, linear in linears.items():
        expected = quantise(theirs.get_submodule(path).weight, bits=8).dequantised()
        assert torch.equal(linear.weight, expected), path
    assert not [path for path, each in ours.named_parameters() if each.is_meta]


def test_codes_of_experts_that_transformers_joins_are_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = write_quantised(checkpoint("qwen3_next"), out, weights="int8")
    held = load_file(out / WEIGHTS)
    assert made.bytes_not_linear > sum(each.nbytes for name, each in held.items() if ".experts." in name) > 0
    name = next(each for each in sorted(held) if ".experts.0." in each and held[each].dim() == 2).removesuffix(
        ".weight"
    )
    other = "model.layers.1.self_attn.k_proj"
    for part in ("weight_packed", "weight_scale", "weight_shape"):
        held[f"{name}.{part}"] = held[f"{other}.{part}"].clone()
    del held[f"{name}.weight"]
    save_file(held, out / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=f"{name} is a layer of its own in the files, and part of .*experts"):
        load_model(out)


@pytest.mark.parametrize("name", NAMES)
def test_planning_counts_the_bytes_of_the_files(name: str) -> None:
    folder = MADE / name
    found = Roofline(model=model_named(str(folder)), device=device_named("h100"), dtype="bf16")
    files = TensorFiles(folder)
    # compressed-tensors writes each layer's shape, too.
    shapes = sum(header.num_bytes for tensor, header in files.headers.items() if tensor.endswith("weight_shape"))
    assert found.weight_bytes == sum(header.num_bytes for header in files.headers.values()) - shapes
    assert found.codes is not None
    assert found.codes.title == reader(folder).title


@pytest.mark.parametrize("asked", [{"quantization": "int8"}, {"quantization": "int4", "quantize_head": True}])
def test_planning_refuses_what_contradicts_the_folder_as_loading_does(asked: dict[str, Any]) -> None:
    folder = MADE / "gptq"
    with pytest.raises(InvalidConfig, match="stored as GPTQ, 4 bits, groups of 32.*leave it out") as loading:
        load_model(folder, **asked)
    with pytest.raises(InvalidConfig) as planning:
        Roofline(model=model_named(str(folder)), device=device_named("h100"), **asked)
    assert str(planning.value) == str(loading.value).replace(str(folder), "gptq")


def test_planning_takes_the_quantization_that_a_folder_has() -> None:
    shape, device = model_named(str(MADE / "gptq")), device_named("h100")
    assert (
        Roofline(model=shape, device=device, quantization="int4").weight_bytes
        == Roofline(model=shape, device=device).weight_bytes
    )
