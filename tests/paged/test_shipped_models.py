"""The models that ship: names, sizes, and states that the hybrid begins at; and dtypes that a processor is slow in."""

import json
import warnings

import pytest
import torch

from paged import LLM, Engine, SamplingParams
from paged.errors import BuildFailed, CheckpointNotFound, PagedWarning
from paged.model import dtypes
from paged.model.checkpoint import NAMES, checkpoint_path, hybrid_path, is_shipped, named_or_shipped
from paged.model.native import packed

from ..driving import driven  # noqa: TID252

MOST_BYTES = 2_000_000
TEXT = "The with statement is used to wrap the execution of a block with methods defined by a context manager. "


def test_both_names_are_folders_and_nothing_else_is_a_name(tmp_path):
    assert [named_or_shipped(name) for name in (None, *NAMES)] == [checkpoint_path(), checkpoint_path(), hybrid_path()]
    assert named_or_shipped("./hybrid") == "./hybrid"
    assert named_or_shipped(tmp_path) is tmp_path
    assert is_shipped(hybrid_path())
    assert not is_shipped(tmp_path)
    with pytest.raises(CheckpointNotFound, match="hybird: no such folder.* a model that ships, embedded or hybrid;"):
        Engine("hybird")


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_ships_has_its_capacity_by_name(printed, name):
    assert printed("capacity", name) == printed("capacity", str(named_or_shipped(name)))


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_ships_is_small_and_has_learned(name):
    folder = named_or_shipped(name)
    assert sum(file.stat().st_size for file in folder.glob("*.*") if file.suffix != ".py") <= MOST_BYTES
    report = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    assert report["training_loss"] < 0.5 < report["held_out_loss"]
    assert "Python Software Foundation" in report["text"]


def test_the_hybrid_speaks_the_same_tokens_and_has_both_kinds_of_layers(hybrid, model):
    assert hybrid.tokenizer.get_vocab() == model.tokenizer.get_vocab()
    groups = Engine(hybrid, num_blocks=40).manager.layout.groups
    assert [(group.kind, group.pages) for group in groups] == [("full", 2), ("state", 1)]


def test_the_hybrid_knows_the_text_it_has_read(hybrid):
    (answer,) = LLM(hybrid, num_blocks=60).generate("The with statement is used to wrap", SamplingParams(max_tokens=8))
    assert answer.text.startswith(" the execution of a block")


def answered(engine, prompts):
    """Tokens and logits of each prompt, one after the other, and the first token of each step that a row wrote K and V of."""
    logits, found, firsts = [], [], []
    engine.on_logits = lambda id, place, row: logits.append(row.clone())
    begin = engine.worker.begin
    engine.worker.begin = lambda step: (firsts.append(step.written_from), begin(step))
    for prompt in prompts:
        request = engine.live_request(engine.add_request(prompt, SamplingParams(max_tokens=8)))
        driven(engine)
        found.append(request.completion().outputs[0].token_ids)
    return found, torch.stack(logits), [each for each in firsts if each is not None]


@pytest.mark.parametrize("max_tokens_per_step", [11, 64])
def test_bits_are_those_of_a_prompt_that_is_computed_once(hybrid, max_tokens_per_step):
    prompts = [TEXT * 2, TEXT * 2 + "So be it.", TEXT + TEXT[:60] + "what?", TEXT * 2]
    options = {"num_blocks": 400, "block_size": 8, "max_tokens_per_step": max_tokens_per_step}
    tokens, logits, firsts = answered(Engine(hybrid, **options), prompts)
    expected, their_logits, nothing = answered(Engine(hybrid, **options, prefix_caching=False), prompts)
    assert tokens == expected and torch.equal(logits, their_logits)
    assert len(firsts) > 0 and not nothing


HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture
def processor(monkeypatch):
    """processor(*instructions): what it has; and no C compiler."""

    def refuse(*_arguments):
        raise BuildFailed("there is no C compiler.")

    monkeypatch.setattr(packed, "model_library", refuse)

    def has(*instructions):
        monkeypatch.setattr(dtypes, "has_instructions", lambda *names: set(names) <= set(instructions))

    return has


@pytest.mark.parametrize(
    ("has", "dtype", "is_native", "faster"),
    [
        # float32 is never slow, bfloat16 not in native code, and in torch where there are units for it.
        ((), SINGLE, True, ()),
        ((), SINGLE, False, ()),
        ((), BRAIN, True, ()),
        *((("avx2", units), BRAIN, False, ()) for units in ("avx512_bf16", "amx_bf16", "bf16")),
        (("avx2",), BRAIN, False, ("float32",)),
        # float16 always is.
        (("avx512_bf16",), HALF, False, ("float32", "bfloat16")),
        (("avx2",), HALF, False, ("float32",)),
    ],
)
def test_what_is_faster_than_a_dtype_depends_on_the_processor(processor, has, dtype, is_native, faster):
    processor(*has)
    assert dtypes.faster_dtypes(dtype, is_native) == faster


def warned(dtype):
    """What an LLM of this dtype warns of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        LLM(dtype=dtype, num_blocks=8, backend="torch_gather").generate(
            ["a"], SamplingParams(max_tokens=1), use_tqdm=False
        )
    assert {each.category for each in said} <= {PagedWarning}
    return [str(each.message) for each in said]


def test_it_is_said_once_a_process_and_dtype(processor):
    processor("avx2")
    dtypes._say_once.cache_clear()
    half, brain = (f"dtype {name} is slow on this processor; float32 is faster." for name in ("float16", "bfloat16"))
    assert [warned(name) for name in ("float16", "bfloat16", "float16", "bfloat16", "float32", "auto")] == [
        [half], [brain], [], [], [], [],
    ]  # fmt: skip
    dtypes._say_once.cache_clear()
