"""Engines whose K and V are in 8 or 4 bits: how many sequences fit, what layers of several kinds do, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from paged import Engine
from paged.errors import InvalidConfig, UnsupportedByBackend
from paged.model.capacity import plan_of
from paged.serving.engine_process import ready
from paged.study.hardware import layers_named
from paged.testing.pressure import answers_of, differences

# A window beside full layers, and gated delta rules beside full layers.
ARCHITECTURES = ("gemma3_text", "qwen3_next")
each_kv_dtype = pytest.mark.parametrize("kv_dtype", ["int8", "int4"])


@pytest.fixture
def memory(short_memory):
    return short_memory(max_tokens=64)


@each_kv_dtype
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_of_several_kinds_answer_under_pressure_as_they_do_alone(architecture, kv_dtype, loaded, memory):
    model = loaded(architecture)
    assert not Engine(model, num_blocks=500, block_size=8, kv_cache_dtype=kv_dtype).manager.layout.is_plain
    assert differences(memory.check(model, kv_cache_dtype=kv_dtype), memory.alone(model)) != []


@each_kv_dtype
@pytest.mark.parametrize("backend", ["native", "torch_gather"])
def test_backends_read_the_same_codes(backend, kv_dtype, loaded, memory):
    model = loaded("gemma3_text")
    found, expected = (memory.alone(model, kv_cache_dtype=kv_dtype, backend=each) for each in (backend, "reference"))
    for who, rows in expected.logits.items():
        np.testing.assert_allclose(found.logits[who][0], rows[0], rtol=1e-4, atol=1e-4)


@each_kv_dtype
def test_the_same_bytes_hold_more_pages(kv_dtype, loaded):
    model = loaded("llama", head_dim=64, dtype="bfloat16")
    times = {"int8": 3.8, "int4": 7.2}[kv_dtype]  # of float32
    few, many = (
        Engine(model, kv_cache_bytes=2**20, kv_cache_dtype=each).manager.num_blocks for each in ("auto", kv_dtype)
    )
    assert many >= times * few


@each_kv_dtype
def test_states_keep_their_dtype_and_attention_beside_them_does_not(kv_dtype, loaded):
    model = loaded("qwen3_next")
    plain, ours = (plan_of(model, block_size=16, kv_dtype=each) for each in ("auto", kv_dtype))
    full, state = ({group.kind: group.used_bytes for group in plan.groups} for plan in (plain, ours))
    assert state["state"] == full["state"]
    assert state["full"] < full["full"] / 3


@each_kv_dtype
@pytest.mark.parametrize("architecture", ["lfm2", "jamba", "qwen3_next"])
def test_capacity_counts_k_and_v_beside_states_as_the_engine_keeps_them(architecture, kv_dtype, checkpoint, loaded):
    known = layers_named(str(checkpoint(architecture)), kv_dtype=kv_dtype).layers
    plan = plan_of(loaded(architecture), block_size=16, kv_dtype=kv_dtype)
    of_engine = {each.entry for group in plan.groups for each in group.layers if group.kind == "full"}
    assert {each.entry for each in known if each.kind == "full"} == of_engine


@each_kv_dtype
def test_capacity_refuses_scales_where_a_configuration_keeps_latents(kv_dtype, checkpoint):
    with pytest.raises(InvalidConfig, match=f'kv_dtype is "{kv_dtype}", with a scale a head'):
        layers_named(str(checkpoint("deepseek_v3")), kv_dtype=kv_dtype)


@each_kv_dtype
@pytest.mark.parametrize(("architecture", "kept"), [("deepseek_v3", "latents"), ("mamba2", "states")])
def test_a_model_that_keeps_no_k_and_v_is_refused_by_name(architecture, kept, kv_dtype, loaded):
    with pytest.raises(InvalidConfig, match=f'kv_cache_dtype="{kv_dtype}": .* keeps {kept}, which stay in the model'):
        Engine(loaded(architecture), num_blocks=500, kv_cache_dtype=kv_dtype)


@pytest.mark.parametrize("given", ["fp8", "fp8_e5m2", "bfloat16", "int2", "", 8, None])
def test_any_other_kv_dtype_is_refused_with_what_can_be_had(given, loaded):
    with pytest.raises(InvalidConfig, match='kv_cache_dtype has to be "auto", "int8" or "int4"; got '):
        Engine(loaded("llama"), kv_cache_dtype=given)


def test_vllm_s_name_of_a_scale_a_token_and_head_is_int8(loaded):
    assert Engine(loaded("llama"), num_blocks=4, kv_cache_dtype="int8_per_token_head").pool.kv_dtype == "int8"


def test_a_server_says_what_k_and_v_are_stored_in(loaded):
    for given, told in (("auto", "float32"), ("int4", "int4")):
        assert ready(Engine(loaded("llama"), num_blocks=4, kv_cache_dtype=given)).cache_dtype == told


def test_a_backend_that_cannot_read_it_is_refused(loaded, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UnsupportedByBackend):
        Engine(loaded("llama"), num_blocks=4, kv_cache_dtype="int8", backend="xformers_splitk")


def test_a_draft_model_s_blocks_are_stored_alike(loaded, memory):
    engine = Engine(
        loaded("llama"), num_blocks=64, kv_cache_dtype="int8", speculate="draft", draft_model=loaded("llama")
    )
    answers = answers_of(engine, memory.requests())
    expected = memory.alone(loaded("llama"), kv_cache_dtype="int8")
    assert answers.tokens == expected.tokens
