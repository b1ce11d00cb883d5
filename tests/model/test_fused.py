"""A decoder of Llama's family in one call gives the logits and hidden states that transformers' own modules give."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paged.attention import StepTokens
from paged.model.capacity import pool_for, trial_memory, trial_step
from paged.model.loading import load_model
from paged.model.native.fused import fused_decoder


def rope(kind, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
ODD = {"hidden_size": 45, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 18}
MODELS = {
    **{name: (name, {}) for name in ("llama", "mistral", "qwen2", "qwen3")},
    "llama, odd sizes": ("llama", ODD),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, llama3 positions": ("llama", rope("llama3", **LLAMA3)),
    "llama, linear positions": ("llama", rope("linear", factor=2.0)),
    "lfm2": ("lfm2", {}),
    "lfm2, odd sizes": ("lfm2", {**ODD, "conv_L_cache": 4, "intermediate_size": 30, "block_auto_adjust_ff_dim": False}),
    "lfm2, biases": ("lfm2", {"conv_bias": True}),
}
LENGTH = 61


@pytest.fixture(scope="module")
def theirs(checkpoint):
    """theirs(architecture, **changes): token ids, and what transformers' module says after each of them."""

    @torch.inference_mode()
    def say(architecture, **changes):
        folder = checkpoint(architecture, **changes)
        module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        ids = torch.randint(3, 97, (1, LENGTH), generator=torch.Generator().manual_seed(2))
        out = module(ids, output_hidden_states=True)
        return ids[0].numpy().astype(np.int32), out.logits[0], out.hidden_states[-1][0]

    return say


def step_of(first, last, block_size=4):
    """Tokens first to last - 1 of one sequence whose blocks lie backwards."""
    positions = np.arange(first, last)
    table = np.arange(-(-LENGTH // block_size), dtype=np.int32)[::-1].copy()
    slots = table[positions // block_size].astype(np.int64) * block_size + positions % block_size
    return StepTokens(positions, slots, np.array([0, last - first]), np.array([last]), table[None], block_size)


def said(fused, model, ids, cuts, kv_dtype="auto"):
    """Hidden states and logits of all tokens, the prompt being cut there."""
    if model.state_layers:
        pool, tables = trial_memory(model, 1, LENGTH)
    else:
        pool, tables = pool_for(model, num_blocks=-(-LENGTH // 4), block_size=4, kv_dtype=kv_dtype), None
    return said_on(pool, fused, ids, cuts, tables)


def said_on(pool, fused, ids, cuts, tables=None):
    pool.poison(torch.arange(pool.num_blocks))
    assert fused.fits(pool)
    parts = []
    for first, last in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        step = step_of(first, last)
        if tables is not None:
            step = trial_step(pool, step.positions, step.query_start_loc, step.seq_lens, tables)
        parts.append(fused.forward(step, pool, ids[first:last], np.arange(last - first)))
    return [torch.cat(each) for each in zip(*parts, strict=True)]


@pytest.mark.parametrize("name", MODELS)
def test_states_and_logits_are_transformers_and_the_same_bits_however_a_prompt_is_cut(loaded, theirs, name):
    architecture, changes = MODELS[name]
    model = loaded(architecture, **changes)
    fused = fused_decoder(model.module)
    assert fused is not None
    ids, logits, states = theirs(architecture, **changes)
    whole = said(fused, model, ids, [])
    torch.testing.assert_close(whole, [states, logits], rtol=1e-4, atol=5e-5)
    for cuts in ([1], [7, 8, 30], list(range(1, LENGTH))):
        for found, expected in zip(said(fused, model, ids, cuts), whole, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "llama, odd sizes", "qwen3"])
def test_k_and_v_are_quantised_to_the_bytes_that_a_pool_makes_of_them_however_a_prompt_is_cut(loaded, name, kv_dtype):
    architecture, changes = MODELS[name]
    model = loaded(architecture, **changes)
    fused, ids = fused_decoder(model.module), np.arange(3, 3 + LENGTH).astype(np.int32)
    sizes = {"num_blocks": -(-LENGTH // 4), "block_size": 4}
    # K and V of the first layer do not depend on how any are stored.
    plain, made, expected = (pool_for(model, **sizes, kv_dtype=each) for each in ("auto", kv_dtype, kv_dtype))
    said_on(plain, fused, ids, [])
    whole = said_on(made, fused, ids, [])
    slots = torch.from_numpy(step_of(0, LENGTH).slot_mapping)
    expected.write_kv(0, slots, *(each(0).flatten(0, 1)[slots] for each in (plain.keys, plain.values)))
    for of_made, of_expected in zip(parts_of(made), parts_of(expected), strict=True):
        assert torch.equal(of_made.flatten(0, 1)[slots], of_expected.flatten(0, 1)[slots])
    for found, wanted in zip(said(fused, model, ids, [1, 7, 8, 30], kv_dtype), whole, strict=True):
        assert torch.equal(found, wanted)


def parts_of(pool):
    """Scales, as bits, and codes of K and V of the first layer, by block."""
    own = pool.layer(0)
    for scales, codes in (own.keys.stored, own.values.stored):
        yield from (scales.blocks.view(torch.int16), codes.blocks)


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_in_bfloat16_it_is_as_near_to_the_truth_as_transformers_is_and_bits_do_not_depend_on_cuts(
    checkpoint, theirs, family
):
    folder = checkpoint(family)
    ids, truth, _ = theirs(family)
    model = load_model(folder, dtype="bfloat16")
    fused = fused_decoder(model.module)
    whole = _, found = said(fused, model, ids, [])
    assert all(map(torch.equal, said(fused, model, ids, [1, 7, 8, 30]), whole))
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.inference_mode():
        other = module(torch.from_numpy(ids)[None].long()).logits[0].float()
    assert (found - truth).square().mean() <= 1.2 * (other - truth).square().mean()


@pytest.mark.parametrize(
    ("architecture", "changes"),
    # Other families, another activation, positions that depend on the length.
    [("gpt2", {}), ("gemma2", {}), ("llama", {"hidden_act": "gelu"}), ("llama", rope("dynamic", factor=2.0))],
)
def test_what_it_does_not_know_it_leaves_alone(loaded, architecture, changes):
    assert fused_decoder(loaded(architecture, **changes).module) is None
