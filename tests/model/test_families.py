"""What is accepted answers as transformers' `generate` does, one request at a time; what cannot is refused by name, before its weights are read."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig

from paged import Engine, SamplingParams
from paged.errors import InvalidRequest, UnsupportedModel
from paged.model.loading import load_model
from paged.model.shrinking import VOCABULARY, Shrunk

from ..driving import tokens_of  # noqa: TID252

MAX_TOKENS, LIMIT = 10, 9
# Fields of configurations: of what is accepted, among which youtu and longcat_flash do not say that they use transformers' attention interface,
# and of what is refused, with the reason. Positions change beyond LIMIT tokens where rope is "longrope".
FAMILIES, REFUSED = json.loads(Path(__file__).with_name("families.json").read_text()).values()


@pytest.fixture(scope="module")
def folder_of(saved):
    """folder_of(architecture, changes): a checkpoint of that configuration made small, with random weights."""
    return lambda architecture, changes: saved(
        Shrunk(AutoConfig.for_model(architecture.split()[0], **changes)).config, 0.15, seed=1
    )


def answers(engine, prompts, most):
    ids = [
        engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        for prompt, max_tokens in zip(prompts, most, strict=True)
    ]
    found = tokens_of(engine)
    return [found[each] for each in ids]


def prompts_of(*lengths):
    """Each begins as the longest does."""
    words = np.random.default_rng(1).integers(4, VOCABULARY, max(lengths)).tolist()
    return [[*words[: length - 1], length] for length in lengths]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_is_accepted_answers_as_generate_does(architecture, folder_of, generate):
    model = load_model(folder_of(architecture, FAMILIES[architecture]))
    prompts, most = prompts_of(3, 14, 40, 30), [LIMIT - 3 + 1, MAX_TOKENS, MAX_TOKENS, MAX_TOKENS]
    # All but the longest have to wait, and are cut into chunks.
    layout = Engine(model, num_blocks=500, block_size=4).manager.layout
    num_blocks = layout.pages_for(50) + layout.spare_pages + 1
    engine = Engine(model, num_blocks=num_blocks, block_size=4, host_blocks=6, max_tokens_per_step=16, max_chunk=7)
    assert answers(engine, prompts, most) == generate(model.path, prompts, most)


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_would_answer_wrongly_is_refused_with_the_layer(architecture, folder_of):
    changes, message = REFUSED[architecture]
    with pytest.raises(UnsupportedModel, match=message):
        load_model(folder_of(architecture, changes))


@pytest.fixture(scope="module")
def longrope(folder_of):
    return load_model(folder_of("llama", FAMILIES["llama"]))


def test_a_request_that_would_cross_the_limit_is_refused_with_what_would_do(longrope):
    engine = Engine(longrope, num_blocks=30, block_size=4)
    [prompt] = prompts_of(5)
    with pytest.raises(InvalidRequest, match="max_tokens=6 cross 9 tokens.*max_tokens can be 5 at most"):
        engine.add_request(prompt, SamplingParams(max_tokens=6))
    engine.add_request(prompt, SamplingParams(max_tokens=5))
    engine.add_request(prompts_of(10)[0], SamplingParams(max_tokens=5))


def test_k_and_v_of_the_other_side_are_no_hit(longrope):
    engine = Engine(longrope, num_blocks=30, block_size=4)
    short, long, again = prompts_of(9, 12, 14)
    answers(engine, [short, long], [1, 1])
    assert engine.scheduler.stats().hit_tokens == 0
    answers(engine, [again], [1])
    assert engine.scheduler.stats().hit_tokens == 8
