"""Engines whose K and V are in 8 or 4 bits: how many sequences fit, what layers of several kinds do, and what is refused."""

import pytest

from paged import Engine
from paged.errors import UnsupportedByBackend
from paged.model.capacity import plan_of
from paged.model.layer_plan import plan_layers
from paged.serving.engine_process import ready
from paged.study.hardware import layers_named
from paged.testing.pressure import answers_of, differences

from ..shown import assert_refused, shown_in  # noqa: TID252

WINDOWS = ("sliding_window",)
each_kv_dtype = pytest.mark.parametrize("kv_dtype", ["int8", "int4"])


@pytest.fixture
def memory(short_memory):
    return short_memory(max_tokens=12)


@pytest.mark.parametrize(
    ("architecture", "skipped", "kv_dtype", "max_tokens"),
    # Windows in floats beside full layers, and gated delta rules beside full layers, whose pages hold more tokens.
    [("gemma3_text", WINDOWS, "int4", 16), ("qwen3_next", (), "int8", 48)],
)
def test_layers_of_several_kinds_answer_under_pressure_as_they_do_alone(
    architecture, skipped, kv_dtype, max_tokens, loaded, short_memory
):
    memory, model = short_memory(max_tokens), loaded(architecture)
    stored = {"kv_cache_dtype": kv_dtype, "kv_cache_dtype_skip_layers": skipped}
    assert not Engine(model, num_blocks=500, block_size=8, **stored).manager.layout.is_plain
    answers = memory.check(model, **stored)
    assert differences(answers, memory.alone(model)) != []
    assert not skipped or differences(answers, memory.alone(model, kv_cache_dtype=kv_dtype)) != []


@each_kv_dtype
def test_states_keep_their_dtype_and_attention_beside_them_does_not(kv_dtype, loaded):
    model = loaded("qwen3_next")
    plain, ours = (plan_of(model, block_size=16, kv_dtype=each) for each in ("auto", kv_dtype))
    full, state = ({group.kind: group.used_bytes for group in plan.groups} for plan in (plain, ours))
    assert state["state"] == full["state"]
    assert state["full"] < full["full"] / 3


@pytest.mark.parametrize(("architecture", "kv_dtype"), [("lfm2", "int8"), ("jamba", "int4"), ("qwen3_next", "int8")])
def test_capacity_counts_k_and_v_beside_states_as_the_engine_keeps_them(architecture, kv_dtype, checkpoint, loaded):
    known = layers_named(str(checkpoint(architecture)), kv_dtype=kv_dtype).layers
    plan = plan_of(loaded(architecture), block_size=16, kv_dtype=kv_dtype)
    of_engine = {each.entry for group in plan.groups for each in group.layers if group.kind == "full"}
    assert {each.entry for each in known if each.kind == "full"} == of_engine


@each_kv_dtype
def test_capacity_keeps_windows_in_floats_as_the_engine_does(kv_dtype, checkpoint, loaded):
    skipped = {"kv_cache_dtype": kv_dtype, "kv_cache_dtype_skip_layers": WINDOWS}
    found = Engine(loaded("gemma3_text"), num_blocks=64, **skipped).model
    of_engine = plan_of(found, block_size=16, kv_dtype=kv_dtype)
    known = layers_named(str(checkpoint("gemma3_text")), kv_dtype=kv_dtype, kv_dtype_skip_layers=WINDOWS, floats="fp32")
    assert plan_layers(known.layers, block_size=16).held_bytes(999) == of_engine.held_bytes(999)


@pytest.mark.parametrize(
    ("given", "stored", "told"),
    [
        *(("auto", "auto", "float32"), ("int4", "int4", "int4"), ("float32", "auto", "float32")),
        *(("int8_per_token_head", "int8", "int8"), ("int4_per_token_head", "int4", "int4")),
    ],
)
def test_vllm_s_names_mean_what_they_mean_there_and_a_server_says_what_is_stored(given, stored, told, loaded):
    engine = Engine(loaded("llama"), num_blocks=4, kv_cache_dtype=given)
    assert (engine.pool.kv_dtype, ready(engine).cache_dtype) == (stored, told)


def test_layers_stay_in_floats_by_their_numbers_where_all_are_alike(loaded, memory):
    model, stored = loaded("llama"), {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": "1"}
    engine = Engine(model, num_blocks=500, block_size=8, **stored)
    assert [engine.pool.layer(each).keys.kv_dtype for each in (0, 1)] == ["int8", "auto"]
    assert answers_of(engine, memory.requests()).tokens == memory.alone(model, **stored).tokens
    assert not model.layers[1].in_floats, "the caller's model stays as it is"


@pytest.fixture
def drafting(loaded):
    """Makes an engine whose model drafts for itself."""
    model = loaded("llama")
    return lambda **options: Engine(model, num_blocks=64, speculate="draft", draft_model=model, **options)


@pytest.mark.parametrize(("call", "shown"), shown_in("model/refused_kv_dtypes.txt", ">>>"))
def test_what_k_and_v_cannot_be_stored_in_is_refused_by_name(call, shown, loaded, checkpoint, drafting):
    assert_refused(call, shown, globals() | {"loaded": loaded, "checkpoint": checkpoint, "drafting": drafting})


def test_a_backend_that_cannot_read_it_is_refused(loaded, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UnsupportedByBackend):
        Engine(loaded("llama"), num_blocks=4, kv_cache_dtype="int8", backend="xformers_splitk")


def test_a_draft_model_s_blocks_are_stored_alike(drafting, loaded, memory):
    answers = answers_of(drafting(kv_cache_dtype="int8"), memory.requests())
    assert answers.tokens == memory.alone(loaded("llama"), kv_cache_dtype="int8").tokens
