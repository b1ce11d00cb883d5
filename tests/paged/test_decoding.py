"""How answers are chosen, through LLM, on the model that ships: several answers, log-probabilities, stop strings, penalties, drafts."""

import pytest
import torch
from transformers import AutoModelForCausalLM, SuppressTokensLogitsProcessor

from paged import LLM, BeamSearchParams, ContrastiveSearchParams, SamplingParams
from paged.model.checkpoint import checkpoint_path
from paged.testing.tiny_model import tiny_model

PROMPT = "The with statement is used to"
# In a request of its own each, all at once. In more worlds, but for a step ahead: tests/properties/test_wishes.py.
WISHES = [
    {},
    {"n": 3, "temperature": 0.9, "seed": 5},
    {"n": 2, "best_of": 4, "temperature": 1.2, "seed": 6},
    {"logprobs": 3, "prompt_logprobs": 2},
    {"n": 3, "temperature": 0.7, "logprobs": 0, "prompt_logprobs": 1, "seed": 2},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "seed": 2**64 - 1},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"no_repeat_ngram_size": 2, "temperature": 0.5, "seed": 3},
    {"logit_bias": {300: 5.0, 12: -100}, "typical_p": 0.8, "temperature": 1.0, "seed": 8},
    {"bad_words": ("the", "statement"), "min_p": 0.05, "temperature": 1.1, "seed": 1},
    {"stop": ("e d", "\n\n"), "max_tokens": 60},
    {"min_tokens": 20, "stop": "e"},
    {"allowed_token_ids": tuple(range(200, 205)), "max_tokens": 40},
    {"allowed_token_ids": (200, 201, 202), "max_tokens": 40, "temperature": 0.6, "seed": 4},
]
PROMPTS = [PROMPT + " be" * (number % 3) for number in range(len(WISHES))]


def answers(llm, prompts, wishes):
    found = llm.generate(prompts, [SamplingParams(**{"max_tokens": 24, **wish}) for wish in wishes])
    assert llm.engine.check() == [] and llm.engine.manager.device.num_used == 0
    assert not llm.engine._sampling.adjustments._number.any(), "no lane is left"
    return [(answer.outputs, answer.prompt_logprobs) for answer in found]


def test_under_pressure_and_a_step_ahead_every_request_gets_what_it_gets_alone(model):
    llm = LLM(model, block_size=4, num_blocks=40, max_tokens_per_step=16, steps_ahead=1)
    ample = LLM(model, block_size=4, num_blocks=400)
    alone = [answers(ample, [prompt], [wish])[0] for prompt, wish in zip(PROMPTS, WISHES, strict=True)]
    assert answers(llm, PROMPTS, WISHES) == alone
    assert llm.engine.scheduler.stats().preemptions > 0


def test_answers_of_one_prompt_differ_and_the_first_is_the_one_that_comes_alone(model):
    llm = LLM(model)
    params = {"temperature": 1.5, "seed": 3, "max_tokens": 12}
    (single,) = llm.generate("def", SamplingParams(**params))
    (several,) = llm.generate("def", SamplingParams(n=4, **params))
    assert [each.index for each in several.outputs] == [0, 1, 2, 3]
    assert several.outputs[0].token_ids == single.token_ids == several.token_ids
    assert len({tuple(each.token_ids) for each in several.outputs}) == 4


def test_the_best_are_the_likeliest(model):
    llm = LLM(model)
    params = {"temperature": 1.3, "seed": 4, "max_tokens": 8, "logprobs": 0}
    (every,) = llm.generate(PROMPT, SamplingParams(n=5, **params))
    (best,) = llm.generate(PROMPT, SamplingParams(n=2, best_of=5, **params))
    ranked = sorted(every.outputs, key=lambda each: -each.cumulative_logprob)
    assert best.outputs == ranked[:2]


def test_log_probabilities_are_those_of_transformers(model):
    (answer,) = LLM(model).generate(PROMPT, SamplingParams(max_tokens=10, logprobs=4, prompt_logprobs=2))
    tokens = torch.tensor([answer.prompt_token_ids + answer.token_ids])
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = theirs(input_ids=tokens, use_cache=False).logits[0]
    expected = logits.double().log_softmax(-1)
    places = [*answer.prompt_logprobs[1:], *answer.outputs[0].logprobs]
    assert answer.prompt_logprobs[0] is None and len(places) == tokens.shape[1] - 1
    for place, (found, token) in enumerate(zip(places, tokens[0, 1:].tolist(), strict=True)):
        num_top = 2 if place < len(answer.prompt_token_ids) - 1 else 4
        _, ids = expected[place].topk(num_top)
        assert set(found) == {token, *ids.tolist()}
        assert found[token].rank == int((expected[place] > expected[place, token]).sum()) + 1
        for id, each in found.items():
            assert each.logprob == pytest.approx(float(expected[place, id]), abs=1e-4)
        assert [found[id].rank for id in ids.tolist()] == list(range(1, num_top + 1))
        assert found[token].decoded_token == model.tokenizer.decode([token])


def test_a_prompt_whose_likelihoods_are_wanted_is_computed_and_shared(model):
    llm = LLM(model, block_size=4)
    first, again, after = (
        llm.generate(PROMPT, SamplingParams(max_tokens=2, prompt_logprobs=count))[0] for count in (1, 1, None)
    )
    assert first.prompt_logprobs == again.prompt_logprobs and None not in again.prompt_logprobs[1:]
    assert (first.usage.hit_tokens, again.usage.hit_tokens) == (0, 0) < (after.usage.hit_tokens,) * 2


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_ends_the_text_wherever_it_begins(model, included):
    llm = LLM(model)
    (whole,) = llm.generate(PROMPT, SamplingParams(max_tokens=40))
    for start in range(3, len(whole.text) - 4, 25):
        stop = whole.text[start : start + 4]
        place = whole.text.find(stop)
        pieces = []
        params = SamplingParams(max_tokens=40, stop=("never said", stop), include_stop_str_in_output=included)
        (answer,) = llm.generate(PROMPT, params, on_output=pieces.append)
        assert answer.text == "".join(piece.text for piece in pieces) == whole.text[: place + included * len(stop)]
        assert (answer.finish_reason, answer.outputs[0].stop_reason) == ("stop", stop)
        assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
        assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert answer.usage is not None and llm.engine.manager.device.num_used == 0


def test_text_that_only_begins_a_stop_string_is_not_lost(model):
    llm = LLM(model)
    (whole,) = llm.generate(PROMPT, SamplingParams(max_tokens=12))
    (answer,) = llm.generate(PROMPT, SamplingParams(max_tokens=12, stop=whole.text[-2:] + "and more"))
    assert (answer.text, answer.finish_reason) == (whole.text, "length")


def test_a_processor_of_transformers_does_its_work_and_one_that_fails_ends_its_own_request(model):
    def fails(ids, logits):
        if ids.shape[1] > 10:
            raise ValueError("no more")
        return logits

    llm = LLM(model)
    (plain,) = llm.generate(PROMPT, SamplingParams(max_tokens=10))
    banned = plain.token_ids[3]
    processors = ((fails,), (), (SuppressTokensLogitsProcessor([banned]),))
    wishes = [SamplingParams(max_tokens=10, logits_processors=each) for each in processors]
    failed, other, without = llm.generate([PROMPT] * 3, wishes)
    assert failed.finish_reason == "error" and "ValueError: no more" in failed.error
    assert other.token_ids == plain.token_ids and llm.engine.check() == []
    assert without.token_ids[:3] == plain.token_ids[:3] and banned not in without.token_ids


def test_a_conversation_goes_on_from_what_is_known(model):
    llm = LLM(model, block_size=4)
    talk = [{"role": "system", "content": "Say what Python does."}, {"role": "user", "content": "What is a list?"}]
    (first,) = llm.chat(talk, SamplingParams(max_tokens=12))
    assert first.text
    assert llm.chat(iter(talk), SamplingParams(max_tokens=12))[0].prompt_token_ids == first.prompt_token_ids
    talk += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And a tuple?"}]
    (second,) = llm.chat(talk, SamplingParams(max_tokens=12))
    # All that was computed, but for what the tokenizer writes otherwise once more text follows.
    assert second.usage.hit_tokens >= len(first.prompt_token_ids) + 12 - 8
    both = llm.chat([talk[:2], talk], SamplingParams(max_tokens=12))
    assert [each.token_ids for each in both] == [first.token_ids, second.token_ids]


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1e-6}, {"repetition_penalty": 1e6}, {"temperature": 5e-324},
        {"temperature": 1.7e308, "top_p": 0.5, "min_p": 0.1},
        {"temperature": 1e-40, "repetition_penalty": 1e-6, "logit_bias": {5: 100}, "logprobs": 3},
        {"temperature": 1, "top_p": 5e-324}, {"temperature": 1, "min_p": 5e-324},
        {"temperature": 1, "typical_p": 5e-324},
    ],
    ids=str,
)  # fmt: skip
def test_the_farthest_numbers_that_may_be_given_are_answered(model, fields):
    (answer,) = LLM(model).generate("def", SamplingParams(max_tokens=3, ignore_eos=True, **fields))
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 3)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=3, n=2, temperature=1.0), BeamSearchParams(beam_width=3, n=3, max_tokens=3),
        ContrastiveSearchParams(max_tokens=3),
    ],
    ids=lambda params: type(params).__name__,
)  # fmt: skip
def test_an_end_is_told_exactly_once(params):
    told = []
    LLM(tiny_model(), block_size=4).generate([[1, 2, 3]] * 3, params, on_output=told.append, use_tqdm=False)
    ends = [(output.id, output.sequence) for output in told if output.finish_reason is not None]
    assert len(ends) == len(set(ends)) == 3 * params.n
    assert sum(output.finished for output in told) == 3
