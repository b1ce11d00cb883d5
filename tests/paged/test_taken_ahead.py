"""A prompt that begins where a state is not kept computes again what K and V are there of, and changes no bit of them."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from paged import Engine, SamplingParams  # noqa: E402
from paged.model.loading import load_model  # noqa: E402

TEXT = "The with statement is used to wrap the execution of a block with methods defined by a context manager. "


@pytest.fixture(scope="module")
def hybrid():
    return load_model("hybrid")


def answered(engine, prompts):
    """Tokens and logits of each prompt, one after the other, and the first token of each step that a row wrote K and V of."""
    logits, found, firsts = [], [], []
    engine.on_logits = lambda id, place, row: logits.append(row.clone())
    begin = engine.worker.begin
    engine.worker.begin = lambda step: (firsts.append(step.written_from), begin(step))
    for prompt in prompts:
        request = engine.live_request(engine.add_request(prompt, SamplingParams(max_tokens=8)))
        while engine.has_unfinished:
            engine.step()
            assert engine.check() == []
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
