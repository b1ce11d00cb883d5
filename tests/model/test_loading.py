"""A checkpoint that cannot be run says so before anything runs: which folder, what is wrong, and what would do."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration
from transformers.utils import logging

from paged import LLM, SamplingParams, StructuredOutputsParams
from paged.base.budget import blocks_within
from paged.errors import BudgetTooSmall, InvalidRequest, ModelError
from paged.model.capacity import bytes_per_block
from paged.model.loading import load_model

from ..shown import assert_refused, shown_in  # noqa: TID252

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(checkpoint, tmp_path):
    """A Llama of one's own to harm."""
    return shutil.copytree(checkpoint("llama"), tmp_path / "a-llama")


def change_weights(folder, change):
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def change_json(folder, name, **changes):
    values = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(values | changes))


def write_tokenizer(folder):
    words = {"<unk>": 0, "a": 1, "block": 2, "is": 3, "free": 4}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>").save_pretrained(folder)


def test_a_checkpoint_is_what_its_configuration_says(loaded):
    model = loaded("llama")
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (2, 4, 2, 12)
    assert (model.vocabulary_size, model.max_length, model.eos_token_ids) == (97, 128, (2,))
    assert (model.dtype, model.device.type) == (torch.float32, "cpu")
    assert not model.module.training
    # A head can be larger than its share of the hidden size.
    assert loaded("qwen3").head_dim == 16


@pytest.mark.parametrize(("name", "soft_cap", "sinks"), [("llama", 0, 0), ("gemma2", 1, 0), ("gpt_oss", 0, 1)])
def test_soft_caps_and_attention_sinks_show(loaded, name, soft_cap, sinks):
    assert (loaded(name).has_soft_cap, loaded(name).has_sinks) == (soft_cap, sinks)


def test_a_tokenizer_is_loaded_where_there_is_one(folder):
    model = load_model(str(folder))
    assert (model.path, model.tokenizer) == (folder, None)
    write_tokenizer(folder)
    assert load_model(folder).tokenizer.encode("a free block") == [1, 4, 2]


def test_a_token_that_the_tokenizer_does_not_have_has_no_text_and_a_form_that_it_cannot_follow_is_refused(folder):
    pytest.importorskip("llguidance")
    write_tokenizer(folder)
    llm = LLM(folder, num_blocks=9)
    [answer] = llm.generate(["a block"], SamplingParams(max_tokens=6, ignore_eos=True, logit_bias={96: 100.0}))
    assert (answer.token_ids, answer.text) == ([96] * 6, "")
    with pytest.raises(InvalidRequest, match="structured_outputs cannot be followed with its tokenizer"):
        llm.generate(["a block"], SamplingParams(structured_outputs=StructuredOutputsParams(choice=["free"])))


@pytest.mark.parametrize(
    ("dtype", "found"), [("bfloat16", torch.bfloat16), ("float16", torch.float16), ("auto", torch.float32)]
)
def test_a_dtype_can_be_asked_for_and_auto_is_float32_on_a_cpu_whatever_is_stored(folder, dtype, found):
    change_weights(folder, lambda weights: weights.update({name: each.half() for name, each in weights.items()}))
    change_json(folder, "config.json", dtype="float16")
    assert load_model(folder, dtype=dtype).dtype is found


def test_a_generation_config_names_what_ends_a_sequence_and_without_one_the_configuration_does(folder):
    # Those outside the vocabulary do not.
    change_json(folder, "generation_config.json", eos_token_id=[2, 5, 500])
    assert load_model(folder).eos_token_ids == (2, 5)
    (folder / "generation_config.json").unlink()
    assert load_model(folder).eos_token_ids == (2,)


def with_text(name, text):
    """A harm: the file has this text."""
    return lambda folder: (folder / name).write_text(text)


def without(name, now="gone"):
    """A harm: the file has another name."""
    return lambda folder: (folder / name).rename(folder / now)


def with_weights(change):
    """A harm: this was done to the dictionary of the weights."""
    return lambda folder: change_weights(folder, change)


def weights_that_are_cut(folder):
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])


def shard_that_is_missing(folder):
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


LAST_KEYS = "model.layers.1.self_attn.k_proj.weight"


def with_quantisation(**settings):
    """A harm: the configuration says this of its weights."""
    return lambda folder: change_json(folder, "config.json", quantization_config=settings)


def encoder_with_a_decoder(folder):
    config = T5Config(vocab_size=97, d_model=48, d_kv=12, d_ff=64, num_layers=2, num_heads=4)
    T5ForConditionalGeneration(config).save_pretrained(folder / "t5")
    return folder / "t5"


@pytest.mark.parametrize(("call", "shown"), shown_in("model/refused_folders.txt", ">>>"))
def test_a_checkpoint_that_cannot_be_run_is_told_by_its_folder_and_its_fault(folder, checkpoint, call, shown):
    def harmed(harm):
        harm(folder)
        load_model(folder)

    names = globals() | {"harmed": harmed, "folder": folder, "checkpoint": checkpoint}
    assert isinstance(assert_refused(call, shown, names), ModelError)


def test_loading_leaves_how_much_transformers_says_as_it_was(folder):
    logging.set_verbosity_info()
    logging.disable_progress_bar()
    try:
        load_model(folder)
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.INFO, False)
    finally:
        logging.set_verbosity_error()


def test_a_block_takes_what_its_k_and_v_take_and_there_are_as_many_as_fit(loaded, folder):
    # K and V, 2 layers, 16 tokens, 2 heads of 12 numbers of 4 bytes.
    assert bytes_per_block([loaded("llama")], 16) == 2 * 2 * 16 * 2 * 12 * 4 == 6144
    assert bytes_per_block([load_model(folder, dtype="bfloat16")], 16) == 3072
    assert [blocks_within(num_bytes, 6144, 16) for num_bytes in (6144, 12287, 12288)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("num_bytes", "longest", "wanted", "message"),
    [
        (6143, 1, 6144, "6,143 bytes do not hold one block of 16 tokens; that takes 6,144."),
        (6143, 33, 18432, "6,143 bytes hold 0 tokens; one sequence of 33 takes 18,432."),
    ],
)
def test_a_budget_that_is_too_small_says_what_would_do_and_that_does(num_bytes, longest, wanted, message):
    with pytest.raises(BudgetTooSmall, match=re.escape(message)) as raised:
        blocks_within(num_bytes, 6144, 16, longest)
    assert (raised.value.wanted, raised.value.given) == (wanted, num_bytes)
    assert blocks_within(wanted, 6144, 16, longest) == wanted // 6144
