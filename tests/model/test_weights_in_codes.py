"""Engines whose weights are quantised at load: near what their codes stand for, the same bits under pressure, and what is refused."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from paged import Engine
from paged.errors import BuildFailed, UnsupportedModel
from paged.model.loading import load_model
from paged.model.native.coded import QuantisedLinear
from paged.model.native.experts import PackedExperts
from paged.model.native.fused import fused_decoder
from paged.model.native.packed import PackedLinear
from paged.model.quantised import at_load, placing
from paged.model.quantised.weights import quantise
from paged.model.shape import num_parameters
from paged.testing.engine_world import EngineRequest
from paged.testing.pressure import answers_of, differences

from ..shown import assert_refused, shown_in  # noqa: TID252

WIDE = {"hidden_size": 64, "intermediate_size": 96}
# In one call; with short convolutions; with windows beside full layers; with states beside attention; with experts.
MODELS = {
    "llama": ("llama", WIDE),
    "lfm2": ("lfm2", {**WIDE, "block_auto_adjust_ff_dim": False}),
    "gemma3_text": ("gemma3_text", WIDE),
    "falcon_h1": ("falcon_h1", {**WIDE, "mamba_d_ssm": 96}),
    "mixtral": ("mixtral", WIDE),
}
FUSED = ("llama", "lfm2")


@pytest.fixture(scope="module")
def quantised(checkpoint):
    """quantised(name, quantization, **options): that model, loaded once."""
    found = {}

    def load(name, quantization, **options):
        key = (name, quantization, *options.items())
        if key not in found:
            architecture, changes = MODELS[name]
            found[key] = load_model(checkpoint(architecture, **changes), quantization=quantization, **options)
        return found[key]

    return load


@pytest.fixture
def memory(short_memory):
    return short_memory(max_tokens=24)


@pytest.mark.parametrize(("name", "quantization"), [*((name, "int8") for name in MODELS), ("llama", "int4")])
def test_answers_under_pressure_are_those_of_the_request_alone(name, quantization, quantised, memory):
    model = quantised(name, quantization)
    assert (fused_decoder(model.module) is not None) == (name in FUSED)
    # Its linear layers are codes, and its head stays.
    kinds = {
        type(each) for each in model.module.modules() if isinstance(each, nn.Linear | PackedLinear | QuantisedLinear)
    }
    assert kinds == {PackedLinear, QuantisedLinear} and model.quantization == quantization
    packed = [each for each in model.module.modules() if isinstance(each, PackedLinear)]
    assert packed == [model.module.get_output_embeddings()] and model.dtype == torch.float32
    memory.check(model)


def test_weights_and_k_and_v_may_both_be_codes(quantised, memory):
    model = quantised("llama", "int4")
    assert differences(memory.check(model, kv_cache_dtype="int8"), memory.alone(model)) != []


@pytest.mark.parametrize(
    ("architecture", "quantization"), [("llama", "int8"), ("mixtral", "int4"), ("gpt_oss", "int8")]
)
def test_each_layer_has_the_codes_of_its_own_floats(checkpoint, architecture, quantization):
    """Names in files differ from those of modules, and experts are joined at load; gates and ups of gpt-oss come in turns."""
    folder = checkpoint(architecture, **WIDE)
    module = load_model(folder, quantization=quantization).module
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    seen = 0
    for path, each in module.named_modules():
        if isinstance(each, QuantisedLinear):
            seen += same_codes(each.packed, plain.get_submodule(path).weight)
        if isinstance(each, PackedExperts):
            theirs = plain.get_submodule(path)
            for coded, weights in ((each.up, theirs.gate_up_proj), (each.down, theirs.down_proj)):
                for packed, weight in zip(coded.each, weights, strict=True):
                    matrix = weight.t() if theirs.is_transposed else weight
                    is_mixed = coded is each.up and not theirs.is_concatenated
                    seen += same_codes(packed, torch.cat([matrix[::2], matrix[1::2]]) if is_mixed else matrix)
    assert seen > 8 and not any(each.is_meta for each in module.parameters())


def same_codes(packed, weight):
    found, expected = packed.weight, quantise(weight, bits=packed.bits, group_size=packed.group_size)
    assert torch.equal(found.codes, expected.codes) and torch.equal(found.scales, expected.scales)
    return 1


@pytest.mark.parametrize(
    ("name", "quantization"), [*((name, "int8") for name in MODELS if name != "mixtral"), ("llama", "int4")]
)
@torch.inference_mode()
def test_logits_are_near_those_of_the_numbers_that_codes_stand_for(checkpoint, quantised, name, quantization):
    architecture, changes = MODELS[name]
    model, plain = quantised(name, quantization), load_model(checkpoint(architecture, **changes))
    for path, each in plain.module.named_modules():
        if isinstance(each, PackedLinear) and path != "lm_head":
            each.packed.copy_(repacked(model.module.get_submodule(path).weight, each))
    (found,), (expected,) = (logits_of(each) for each in (model, plain))
    # Rows are rounded to 8 bits, which random weights as large as these make more of from layer to layer. Wrong weights differ by 1.4 times.
    assert (found - expected).square().mean().sqrt() < 0.25 * expected.std()


def repacked(weight, layer):
    columns = layer.packed.shape[2]
    filled = nn.functional.pad(weight, (0, 0, 0, -len(weight) % columns))
    return filled.view(-1, columns, layer.in_features).transpose(1, 2)


def logits_of(model):
    """Those after the first sequence's prompt."""
    engine = Engine(model, num_blocks=100, block_size=8)
    answers = answers_of(engine, [EngineRequest(id="a", prompt=list(range(3, 40)), max_tokens=1)])
    return [torch.as_tensor(np.array(rows)).float() for rows in answers.logits.values()]


@pytest.mark.parametrize(("name", "is_tied", "quantization"), [("llama", True, "int8"), ("lfm2", False, "int4")])
@torch.inference_mode()
def test_a_head_is_quantised_if_asked_and_the_embedding_that_shares_it(checkpoint, name, is_tied, quantization, memory):
    architecture, changes = MODELS[name]
    folder = checkpoint(architecture, **{**changes, "tie_word_embeddings": is_tied})
    plain, model = (load_model(folder, quantization=quantization, quantize_head=each) for each in (False, True))
    head, embedding = model.module.get_output_embeddings(), model.module.get_input_embeddings()
    assert isinstance(head, QuantisedLinear) and head.packed.bits == 8
    assert is_tied == hasattr(embedding, "packed")
    assert model.dtype == torch.float32 and num_parameters(model) == num_parameters(plain)
    (found,), (expected,) = (logits_of(each) for each in (model, plain))
    assert 0 < (found - expected).square().mean().sqrt() < 0.25 * expected.std()
    memory.check(model)


def test_a_checkpoints_numbers_are_the_same_codes_in_every_dtype(checkpoint):
    """The codes come from what the checkpoint has; the rest is in the dtype that is asked for."""
    folder = checkpoint("llama", **WIDE)
    wide, *others = (
        load_model(folder, dtype=dtype, quantization="int8") for dtype in ("float32", "bfloat16", "float16")
    )
    for model, dtype in zip(others, (torch.bfloat16, torch.float16), strict=True):
        assert torch.equal(*(each.module.model.layers[0].mlp.up_proj.packed.codes for each in (wide, model)))
        assert model.dtype == dtype
    logits_of(others[0])
    assert fused_decoder(others[1].module) is None


def test_without_a_compiler_quantising_is_refused_before_weights_are_read(checkpoint, monkeypatch):
    def fails():
        raise BuildFailed("there is no C compiler (cc, gcc or clang).")

    monkeypatch.setattr(placing, "coded_library", fails)
    with pytest.raises(UnsupportedModel, match='quantization="int8" is computed by C code, and there is no C compiler'):
        Engine(checkpoint("llama", hidden_size=48), quantization="int8")


EXPERT = "model.layers.1.block_sparse_moe.experts.3.w1.weight"


def module_with_infinity():
    module = nn.ModuleDict({"up": nn.Linear(32, 4), "head": nn.Linear(4, 4)})
    module.get_output_embeddings = lambda: module["head"]
    nn.init.constant_(module["up"].weight, torch.inf)
    return module


@pytest.mark.parametrize(("call", "shown"), shown_in("model/refused_quantising.txt", ">>>"))
def test_weights_that_cannot_become_codes_are_refused(call, shown, checkpoint, loaded, tmp_path):
    def harmed(name, change):
        folder = shutil.copytree(checkpoint(name, **WIDE), tmp_path / "harmed")
        weights = load_file(folder / "model.safetensors")
        change(weights, "model.layers.1.mlp.up_proj.weight")
        weights = {key: each.contiguous() for key, each in weights.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        load_model(folder, quantization="int8")

    odd = checkpoint("llama", hidden_size=48)
    names = {"at_load": at_load, "harmed": harmed, "checkpoint": checkpoint, "loaded": loaded, "odd": odd}
    assert_refused(call, shown, globals() | names)
