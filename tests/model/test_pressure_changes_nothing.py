"""An answer under memory pressure is the answer without it, tokens and logits, to the last bit."""

import os
import random
from dataclasses import replace

import pytest
from hypothesis import given, note, settings, strategies as st

from paged import Request, Retention
from paged.attention.kv_dtypes import KV_DTYPES
from paged.testing.engine_world import EngineWorld
from paged.testing.pressure import differences
from paged.testing.pressure_run import PressureRun, run_alone

# Sizes that no vector unit likes are among them.
ODD = {"num_attention_heads": 3, "num_key_value_heads": 1}
MODELS = {
    **{name: (name, {}) for name in ("llama", "gemma2", "gpt2", "gpt_oss", "mixtral")},
    "llama, odd": ("llama", {**ODD, "hidden_size": 45, "head_dim": 16}),
    "llama, odd heads": ("llama", {**ODD, "hidden_size": 42, "intermediate_size": 77}),
    "mixtral, odd": (
        "mixtral",
        # The least multiples that transformers' own products take.
        {**ODD, "hidden_size": 44, "head_dim": 16, "intermediate_size": 76, "num_local_experts": 3},
    ),
    "gpt2, odd heads": ("gpt2", {"n_embd": 33, "n_head": 3, "n_inner": 77}),
}
# Of worlds so short that requests are computed again, swapped and find what others left, one of each backend that is fast.
NATIVE, TORCH_GATHER = 41, 31
# Each is some seconds; `make pressure` names its own number.
FEW = settings() if "PAGED_EXAMPLES" in os.environ else settings(max_examples=10)


def press(model, conditions, requests):
    """(what pressure did, what it changed, and what was in a slot of somebody else's)."""
    answers = PressureRun(model, conditions).run(requests)
    alone = run_alone(model, requests, conditions.backend, conditions.kv_dtype)
    return answers, differences(answers, alone) + answers.violations + alone.violations


@settings(FEW)
@given(chance=st.randoms(use_true_random=False), name=st.sampled_from(["llama"] * 3 + list(MODELS)))
def test_pressure_changes_no_bit_of_an_answer(loaded, draw_world, chance, name):
    architecture, changes = MODELS[name]
    world = draw_world(chance)
    conditions = replace(world.conditions, kv_dtype=chance.choice(KV_DTYPES))
    note(f"{name}: {conditions}, {world.requests}")
    _, changed = press(loaded(architecture, **changes), conditions, world.requests)
    assert changed == []


@pytest.mark.parametrize(
    ("name", "kv_dtype", "seed"),
    [
        *((name, "auto", NATIVE) for name in MODELS),
        # With sinks, a soft cap, experts, positions that are learned, and in one call.
        *((name, "auto", TORCH_GATHER) for name in ("llama", "gemma2", "gpt2", "gpt_oss", "mixtral")),
        ("llama", "int8", NATIVE),
        ("llama, odd", "int4", TORCH_GATHER),
        ("gemma2", "int4", NATIVE),
        ("gpt2", "int8", TORCH_GATHER),
    ],
)
def test_every_model_is_pressed_by_every_backend(loaded, draw_world, name, kv_dtype, seed):
    architecture, changes = MODELS[name]
    world = draw_world(random.Random(seed))
    conditions = replace(world.conditions, kv_dtype=kv_dtype)
    answers, changed = press(loaded(architecture, **changes), conditions, world.requests)
    assert changed == []
    assert min(answers.recomputed, answers.swapped, answers.hit_tokens) > 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral, odd"])
def test_content_that_was_on_the_host_gives_the_same_bits(loaded, name):
    architecture, changes = MODELS[name]
    first, other = [3, 4, 5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18, 19, 20, 21]
    wanted = [first, other, [*first, 12], [*other, 3], [*first[:8], 20, 21]]
    requests = [
        Request(id=str(number), prompt=prompt, max_tokens=4, retention=Retention(lasts=3.0) if number == 1 else None)
        for number, prompt in enumerate(wanted)
    ]
    sizes = {"num_blocks": 4, "block_size": 4, "host_blocks": 6, "max_sequences": 1}
    world = EngineWorld(**sizes, host_caching=True, backend="torch_gather")
    answers, changed = press(loaded(architecture, **changes), world, requests)
    assert changed == []
    assert answers.host_hit_tokens >= 16


def test_the_sequences_of_a_group_are_told_apart(loaded):
    request = Request(id="group", prompt=list(range(3, 12)), max_tokens=5, num_sequences=3)
    answers, changed = press(loaded("llama"), EngineWorld(num_blocks=16, block_size=4), [request])
    assert changed == []
    assert [(who, len(tokens)) for who, tokens in answers.tokens.items()] == [(("group", i), 5) for i in range(3)]
