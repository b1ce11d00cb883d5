"""A shape becomes a model of that shape, which runs; what no Llama can be is refused by name."""

# ruff: noqa: F401  # the calls of the file take them from here

import msgspec
import pytest
import torch

from paged import LLM, SamplingParams
from paged.model.random_weights import random_model
from paged.model.shape import num_parameters, shape_of
from paged.study.hardware import ModelShape, model_named

from ..shown import assert_refused, shown_in  # noqa: TID252

SIZES = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 192}
SHAPE = ModelShape(name="small", **SIZES, vocab=128, max_length=128, tied_embeddings=True)


@pytest.mark.parametrize(("tied", "quantization"), [(True, None), (False, None), (True, "int8"), (False, "int4")])
def test_the_model_has_the_shape_and_as_many_parameters(tied, quantization):
    shape = msgspec.structs.replace(SHAPE, tied_embeddings=tied)
    model = random_model(shape, quantization=quantization)
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (2, 4, 2, 32)
    assert (model.vocabulary_size, model.max_length, model.eos_token_ids) == (128, 128, ())
    assert num_parameters(model) == shape.parameters
    assert (model.path.name, model.tokenizer, model.dtype) == ("small", None, torch.float32)
    assert random_model(SHAPE, dtype="bfloat16").dtype is torch.bfloat16
    [answer] = LLM(model, num_blocks=16).generate([[5, 6, 7]], SamplingParams(max_tokens=4))
    assert len(answer.token_ids) == 4


def test_a_model_whose_layers_have_a_width_each_has_no_shape(loaded):
    assert shape_of(loaded("gemma3n_text")) is None


def test_a_seed_gives_the_same_weights_and_leaves_torchs_own_alone():
    before = torch.random.get_rng_state()
    first, same, other = (random_model(SHAPE, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = [next(model.module.parameters()) for model in (first, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(("call", "shown"), shown_in("model/refused_shapes.txt", ">>>"))
def test_what_no_llama_has_and_what_this_machine_has_not_is_named(call, shown):
    assert_refused(call, shown, globals())
