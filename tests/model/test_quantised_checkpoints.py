"""Checkpoints in the formats that users have: made by the libraries that write them (tools/make_quantised_checkpoints.py), read, run and refused."""

from __future__ import annotations

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
from paged.model.loading import load_model
from paged.model.quantised.checkpoints import QuantisedCheckpoint, reader_of

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
