"""Checkpoints in the formats that users have: made by the libraries that write them (tools/make_quantised_checkpoints.py), read, run and refused."""

import json
import shutil
from functools import partial, reduce
from operator import getitem
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from paged import LLM, SamplingParams
from paged.errors import InvalidConfig, UnsupportedModel
from paged.model.loading import load_model
from paged.model.native.coded import QuantisedLinear, coded_library
from paged.model.quantised.checkpoints import QuantisedCheckpoint, reader_of
from paged.model.quantised.files import TensorFiles
from paged.model.quantised.weights import QuantisedWeight, quantise
from paged.model.quantised.writing import write_quantised
from paged.study.hardware import Roofline, device_named, model_named

from ..shown import assert_refused, shown_in  # noqa: TID252

MADE = Path(__file__).parent / "quantised"
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


def reader(folder):
    found = reader_of(AutoConfig.from_pretrained(folder), folder)
    assert found is not None
    return found


@pytest.fixture
def copied(tmp_path):
    """copied(name): a copy of a folder, to be harmed."""

    def copy(name):
        return Path(shutil.copytree(MADE / name, tmp_path / name))

    return copy


def floats_like(folder):
    """A model of a folder's configuration in float32, with weights at random."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def change_weights(folder, **changes):
    """Of LAYER: parts by name, None to leave one out."""
    held = load_file(folder / WEIGHTS)
    for part, tensor in changes.items():
        held.pop(f"{LAYER}.{part}", None)
        if tensor is not None:
            held[f"{LAYER}.{part}"] = tensor.contiguous()
    save_file(held, folder / WEIGHTS, metadata={"format": "pt"})


def held_part(folder, part):
    return load_file(folder / WEIGHTS)[f"{LAYER}.{part}"]


@pytest.mark.parametrize("name", TITLES)
def test_codes_are_the_floats_that_the_library_makes_of_them(name):
    found, expected = reader(MADE / name), load_file(MADE / f"{name}.expected.safetensors")
    assert found.format.codes.title == TITLES[name]
    assert set(found.layers) == {f"model.{path}" for path in expected}
    assert len(found.layers) == 7 * AutoConfig.from_pretrained(MADE / name).num_hidden_layers
    for path, products in expected.items():
        weight = found.weight_of(f"model.{path}")
        assert (weight.outs, weight.depth) == found.layers[f"model.{path}"]
        ours = weight.dequantised() @ torch.cos(torch.arange(weight.depth))
        # Libraries multiply in float16.
        torch.testing.assert_close(ours, products, rtol=2e-3, atol=2e-3 * float(products.abs().max()))
    assert found.weight_of("model.embed_tokens") is None


@pytest.mark.parametrize("name", TITLES)
def test_a_model_answers_as_its_floats_do(name):
    found = reader(MADE / name)
    theirs = floats_like(MADE / name)
    stored, known = load_file(MADE / name / WEIGHTS), theirs.state_dict()
    floats = {path: each.float() for path, each in stored.items() if path in known and each.is_floating_point()}
    theirs.load_state_dict(floats, strict=False)
    model = load_model(MADE / name)
    with torch.no_grad():
        for path in found.layers:
            weight = found.weight_of(path).dequantised()
            assert torch.equal(model.module.get_submodule(path).weight, weight)
            theirs.get_submodule(path).weight.copy_(weight)
        expected = theirs(torch.tensor([IDS])).logits[0].log_softmax(-1)
    llm = LLM(model, num_blocks=16)
    [answer] = llm.generate([IDS], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1))
    errors = [
        abs(answer.prompt_logprobs[place + 1][token].logprob - float(expected[place, token]))
        for place, token in enumerate(IDS[1:])
    ]
    # Products round their inputs to 8 bits; with other weights they are off by 1 and more.
    assert sum(errors) / len(errors) < 0.2


def test_loading_makes_no_layer_floats(monkeypatch):
    def dequantised(weight):
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


def config(*place, **changes):
    """A harm: this is changed there in the configuration."""

    def change(folder):
        whole = json.loads((folder / "config.json").read_text())
        reduce(getitem, place, whole).update(changes)
        (folder / "config.json").write_text(json.dumps(whole))

    return change


# Of how weights are stored; of compressed-tensors' only group of layers, and of their inputs.
stored = partial(config, "quantization_config")
scheme = partial(stored, "config_groups", "group_0", "weights")
inputs = partial(stored, "config_groups", "group_0", "input_activations")


def scales(part, value):
    """One scale of LAYER is this."""

    def change(folder):
        held = held_part(folder, part)
        held[3, 0] = value
        change_weights(folder, **{part: held})

    return change


def parts(**changes):
    """A harm: these parts of LAYER are others, None: they are missing."""
    return lambda folder: change_weights(folder, **changes)


def of_floats(folder):
    """LAYER is stored as floats."""
    stored = dict.fromkeys(("qweight", "qzeros", "scales", "g_idx"))
    change_weights(folder, **stored, weight=torch.zeros(OUTS, DEPTH, dtype=torch.float16))


def uneven(folder):
    """One group of LAYER has an input more, and another one less."""
    groups = held_part(folder, "g_idx")
    groups[groups == 1] = 0
    change_weights(folder, g_idx=groups)


def index_without_names(folder):
    """The weights' index has a number where a file's name is to be."""
    (folder / WEIGHTS).unlink()
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"a": 5}}))


@pytest.mark.parametrize(("call", "shown"), shown_in("model/refused_checkpoints.txt", ">>>"))
def test_a_checkpoint_that_is_broken_or_in_a_format_that_is_not_read_is_told(copied, call, shown):
    def harmed(name, harm, read=load_model):
        folder = copied(name)
        harm(folder)
        read(folder)

    assert_refused(call, shown, globals() | {"harmed": harmed})


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_status": "frozen"},
        {"quantization_status": None},
        {"sparsity_config": {"format": "dense", "global_sparsity": 0.1, "sparsity_structure": "unstructured"}},
    ],
)
def test_settings_that_change_nothing_of_how_weights_are_stored_are_read(copied, changes):
    folder = copied("compressed-w4a16")
    stored(**changes)(folder)
    assert reader(folder).layers == reader(MADE / "compressed-w4a16").layers


def test_layers_that_the_configuration_leaves_out_stay_floats(copied):
    folder = copied("gptq")
    of_floats(folder)
    stored(dynamic={rf"-:{LAYER}": {}})(folder)
    model = load_model(folder)
    assert float(model.module.get_submodule(LAYER).weight.abs().max()) == 0


def test_shards_are_read_as_one_file_is(copied):
    folder = copied("gptq")
    held = load_file(folder / WEIGHTS)
    names, placed = sorted(held), {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({each: held[each] for each in part}, folder / f"part{number}.safetensors", metadata={"format": "pt"})
        placed.update(dict.fromkeys(part, f"part{number}.safetensors"))
    (folder / WEIGHTS).unlink()
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    found, whole = reader(folder).weight_of(LAYER), reader(MADE / "gptq").weight_of(LAYER)
    assert torch.equal(found.dequantised(), whole.dequantised())
    assert load_model(folder).num_layers == 3


@pytest.mark.parametrize(
    "architecture",
    ["falcon_h1", "gemma3n_text", "jamba", "llama4_text", "mamba2", "phi", "qwen3_next", "recurrent_gemma"],
)
def test_codes_go_to_the_layers_that_transformers_puts_their_floats_in(checkpoint, tmp_path, architecture):
    folder, out = checkpoint(architecture), tmp_path / "out"
    write_quantised(folder, out, weights="int8")
    theirs, ours = AutoModelForCausalLM.from_pretrained(folder), load_model(out).module
    linears = {path: each for path, each in ours.named_modules() if isinstance(each, QuantisedLinear)}
    assert len(linears) == len(reader(out).layers) > 0
    for path, linear in linears.items():
        expected = quantise(theirs.get_submodule(path).weight, bits=8).dequantised()
        assert torch.equal(linear.weight, expected), path
    assert not [path for path, each in ours.named_parameters() if each.is_meta]


def test_codes_of_experts_that_transformers_joins_are_refused(checkpoint, tmp_path):
    out = tmp_path / "out"
    made = write_quantised(checkpoint("qwen3_next"), out, weights="int8")
    held = load_file(out / WEIGHTS)
    assert made.bytes_not_linear > sum(each.nbytes for name, each in held.items() if ".experts." in name) > 0
    (name, *_) = (
        each.removesuffix(".weight") for each in sorted(held) if ".experts.0." in each and held[each].dim() == 2
    )
    other = "model.layers.1.self_attn.k_proj"
    for part in ("weight_packed", "weight_scale", "weight_shape"):
        held[f"{name}.{part}"] = held[f"{other}.{part}"].clone()
    del held[f"{name}.weight"]
    save_file(held, out / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=f"{name} is a layer of its own in the files, and part of .*experts"):
        load_model(out)


@pytest.mark.parametrize("name", TITLES)
def test_planning_counts_the_bytes_of_the_files(name):
    folder = MADE / name
    found = Roofline(model=model_named(str(folder)), device=device_named("h100"), dtype="bf16")
    files = TensorFiles(folder)
    # compressed-tensors writes each layer's shape, too.
    shapes = sum(header.num_bytes for tensor, header in files.headers.items() if tensor.endswith("weight_shape"))
    assert found.weight_bytes == sum(header.num_bytes for header in files.headers.values()) - shapes
    assert found.codes.title == reader(folder).format.codes.title


@pytest.mark.parametrize("asked", [{"quantization": "int8"}, {"quantization": "int4", "quantize_head": True}])
def test_planning_refuses_what_contradicts_the_folder_as_loading_does(asked):
    folder = MADE / "gptq"
    with pytest.raises(InvalidConfig, match="stored as GPTQ, 4 bits, groups of 32.*leave it out") as loading:
        load_model(folder, **asked)
    with pytest.raises(InvalidConfig) as planning:
        Roofline(model=model_named(str(folder)), device=device_named("h100"), **asked)
    assert str(planning.value) == str(loading.value).replace(str(folder), "gptq")


def test_the_quantization_that_a_folder_has_is_taken_by_planning_and_loading():
    plan = partial(Roofline, model=model_named(str(MADE / "gptq")), device=device_named("h100"))
    assert plan(quantization="int4").weight_bytes == plan().weight_bytes
    assert load_model(MADE / "gptq", quantization="int4").num_layers == 3
