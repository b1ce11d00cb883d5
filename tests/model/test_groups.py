"""Models with layers that are alike, and with layers of several kinds on pages that any group may have: they write what `generate` writes, and the same
bits in chunks, on the smallest pool and after a swap, though every page that a row gives back is NaN until another row takes it.
"""

import os
from functools import partial
from types import SimpleNamespace

import pytest

from paged import Engine
from paged.engine.config import EngineConfig
from paged.engine.memory import DEFAULT_BLOCK_SIZE, block_size_of
from paged.errors import InvalidConfig, UnsupportedModel
from paged.model.capacity import bytes_per_block, plan_of, pool_for
from paged.model.hook import Mask, _mask, under_way
from paged.model.kept_layers import Sizes, kept_layers
from paged.model.states.plan import check_plan
from paged.testing.pressure import answers_of, differences

ARCHITECTURES = [
    "cohere2", "deepseek_v3", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm_moe_dsa", "gpt_oss",
    "llama4_text", "mimo_v2_flash", "minimax_m3_vl_text", "mistral",
]  # fmt: skip
WITH_STATES = [
    "falcon_h1", "jamba", "kimi_linear", "lfm2", "mamba", "mamba2", "minimax", "qwen3_5_text", "qwen3_next",
    "recurrent_gemma", "rwkv", "zaya",
]  # fmt: skip
STATES_IN_CI = ("falcon_h1", "jamba", "lfm2", "mamba", "mamba2", "minimax", "qwen3_next", "rwkv")

# All of them: `make architectures`.
ALL = bool(os.environ.get("PAGED_ALL_FAMILIES"))
IN_CI = (
    "deepseek_v3", "gemma3_text", "gemma3n_text", "glm_moe_dsa", "llama4_text", "mimo_v2_flash", "minimax_m3_vl_text",
)  # fmt: skip
CHOSEN = ARCHITECTURES if ALL else IN_CI
ALIKE = ("gemma", "gemma2", "gpt2", "gpt_neox", "gpt_oss", "llama", "mistral", "opt", "phi", "qwen2", "qwen3")
CASES = [
    *((each, "native") for each in ALIKE),
    # Where there are a soft cap and windows, and sinks.
    *((each, backend) for each in ("gemma2", "gpt_oss") for backend in ("torch_gather", "reference")),
    *((each, "native") for each in CHOSEN if each not in ALIKE),
    *(
        (each, "torch_gather")
        for each in (CHOSEN if ALL else ("gemma3_text", "glm_moe_dsa", "llama4_text"))
        if each not in ALIKE
    ),
    ("gemma3_text", "reference"),
    ("llama4_text", "reference"),
    # No backend attends.
    ("diffllama", "torch_gather"),
    # Nor here, and attention has states within.
    ("inkling_text", "torch_gather"),
    # And keeps an entry of several tokens; or chooses by embeddings of all positions, and embeds n-grams.
    ("deepseek_v4", "torch_gather"),
    ("qwen4_exp_text", "torch_gather"),
    # Their states are read and written by one code.
    *((each, "torch_gather") for each in (WITH_STATES if ALL else STATES_IN_CI)),
]
PACKED = [
    *((each, backend) for each in ("gemma2", "gpt_oss") for backend in ("native", "torch_gather")),
    *((each, "native") for each in ("gemma3_text", "glm_moe_dsa")),
    *((each, "torch_gather") for each in ("llama4_text", "jamba", "inkling_text", "deepseek_v4")),
]
# Their pages for the longest request hold all others, too, or what they keep does not grow.
NEVER_PREEMPTED = (
    "inkling_text", "kimi_linear", "llama4_text", "mamba", "mamba2", "mistral", "recurrent_gemma", "rwkv",
)  # fmt: skip


# What they keep beside K and V takes so many pages that only long answers in large blocks press each other.
PRESSED_LATE = ("deepseek_v4", "falcon_h1", "qwen4_exp_text")


@pytest.fixture
def memory(request, short_memory):
    is_late = "architecture" in request.fixturenames and request.getfixturevalue("architecture") in PRESSED_LATE
    return short_memory(24, (5, 24, 25)) if is_late else short_memory(16, (5, 12, 13), block_size=4)


@pytest.fixture(scope="module")
def is_that_of_generate(generate):
    """Whether an architecture's answers are what transformers writes."""
    known = {}

    def compare(model, memory, answers):
        prompts = [each.prompt for each in memory.requests()]
        if model.path not in known:
            known[model.path] = generate(model.path, prompts, [memory.max_tokens] * len(prompts))
            assert sum(len(set(text)) for text in known[model.path]) >= 4 * len(prompts)
        return list(answers.tokens.values()) == known[model.path]

    return compare


@pytest.mark.parametrize(("architecture", "backend"), CASES)
def test_the_text_is_that_of_generate_and_the_same_bits_when_memory_is_short(
    architecture, backend, loaded, memory, is_that_of_generate
):
    model = loaded(architecture)
    answers = memory.check(model, backend=backend, preempts=architecture not in NEVER_PREEMPTED)
    assert is_that_of_generate(model, memory, answers)


@pytest.mark.parametrize(("architecture", "backend"), CASES if ALL else PACKED)
def test_packed_the_text_is_that_of_generate(architecture, backend, loaded, memory, is_that_of_generate):
    model = loaded(architecture)
    engine = memory.engine(model, backend=backend, batch_invariant=False, max_tokens_per_step=16, max_chunk=7)
    assert is_that_of_generate(model, memory, answers_of(engine, memory.requests()))


@pytest.mark.parametrize("architecture", ["gemma3_text", "lfm2"])
def test_a_step_ahead_and_swapped_each_answers_as_it_does_alone(architecture, loaded, memory):
    model = loaded(architecture)
    assert not differences(memory.check(model, steps_ahead=1), memory.alone(model))


def test_a_window_of_a_layer_that_attends_by_itself_frees_its_front(loaded):
    groups = plan_of(loaded("inkling_text"), block_size=4).groups
    assert [(each.kind, each.reach) for each in groups] == [("window", 7), ("full", 0), ("state", 0)]


def test_a_block_is_a_whole_number_of_compressed_entries(loaded, tmp_path):
    model, refused = loaded("deepseek_v4"), r"block_size is 6; .* an entry of every 2 and of every 4 .* block_size=8"
    with pytest.raises(InvalidConfig, match=refused):
        Engine(model, block_size=6, num_blocks=50)
    # Before weights are read: these cannot be.
    model.module.config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(InvalidConfig, match=refused):
        Engine(tmp_path, block_size=6)
    assert block_size_of(EngineConfig.of(tmp_path), [1, 4, 128], tmp_path) == 128
    assert block_size_of(EngineConfig.of(tmp_path), [1, 1], tmp_path) == DEFAULT_BLOCK_SIZE


@pytest.mark.parametrize(("architecture", "page_bytes"), [("deepseek_v3", 256), ("glm_moe_dsa", 512)])
def test_latents_of_a_block_may_lie_on_several_pages(
    architecture, page_bytes, loaded, memory, is_that_of_generate, monkeypatch
):
    monkeypatch.setattr("paged.engine.memory.plan_of", partial(plan_of, page_bytes=page_bytes))
    model = loaded(architecture)
    assert is_that_of_generate(model, memory, memory.alone(model))


@pytest.mark.parametrize("architecture", [*CHOSEN, "deepseek_v4", *WITH_STATES])
def test_the_plan_keeps_what_the_configuration_says(architecture, loaded):
    model = loaded(architecture)
    plan, said = plan_of(model, block_size=16), kept_layers(model.module.config, Sizes(element=4, state=4))
    assert {(group.kind, group.reach) for group in plan.groups} == {(each.kind, each.reach) for each in said}
    for length in (1, 5, 64, 100):
        # Units of states are rounded up.
        kept = sum(each.kept_bytes(length) for each in said)
        assert kept <= plan.kept_bytes(length) <= 1.02 * kept


def test_state_layers_that_keep_other_than_the_configuration_says_are_refused(loaded, tmp_path):
    model = loaded("lfm2")
    check_plan(model.state_layers, model.module.config, tmp_path)
    with pytest.raises(UnsupportedModel, match="its state layers keep other than their configuration says"):
        check_plan(model.state_layers[:-1], model.module.config, tmp_path)


def test_a_decoder_of_llama_s_family_with_windows_alone_is_one_call(loaded, memory, is_that_of_generate, monkeypatch):
    engine = memory.engine(loaded("mistral"))
    monkeypatch.setattr(engine.runner.backend, "attend", None)
    assert [group.kind for group in engine.manager.layout.groups] == ["window"]
    assert is_that_of_generate(engine.model, memory, answers_of(engine, memory.requests()))


class Refused(Exception):
    """What a layer wants."""


def refused(what, **_):
    raise Refused(what)


def test_a_mask_says_chunks_by_the_configuration_and_what_may_be_either_is_refused():
    chunks, both = SimpleNamespace(attention_chunk_size=8), SimpleNamespace(attention_chunk_size=8, sliding_window=8)
    assert _mask(config=chunks, local_size=8) == Mask(None, 8)
    assert _mask(config=chunks, local_size=5) == Mask(5)
    assert _mask(config=SimpleNamespace(), local_size=8) == Mask(8)
    with under_way(SimpleNamespace(refuse=refused)), pytest.raises(Refused, match="a window and chunks of one size"):
        _mask(config=both, local_size=8)


@pytest.mark.parametrize("architecture", ["gemma4_text", "mamba2"])
def test_blocks_of_all_layers_are_refused_where_layers_are_not_alike(architecture, loaded):
    for ask in (lambda model: pool_for(model, num_blocks=1, block_size=4), lambda model: bytes_per_block([model], 4)):
        with pytest.raises(
            UnsupportedModel, match="its layers keep states, K and V of several shapes, or attend through"
        ):
            ask(loaded(architecture))
