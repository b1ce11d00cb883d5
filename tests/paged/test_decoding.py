"""How answers are chosen, through LLM, on the model that ships: several answers, log-probabilities, stop strings, penalties, drafts."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM  # noqa: E402

from paged import LLM, SamplingParams, load_model  # noqa: E402
from paged.errors import InvalidChat, InvalidConfig, InvalidRequest, InvalidSampling  # noqa: E402
from paged.model.checkpoint import checkpoint_path  # noqa: E402

PROMPT = "The with statement is used to"
# Each in a request of its own, all of them at once.
WISHES = {
    "plain": {},
    "three answers": {"n": 3, "temperature": 0.9, "seed": 5},
    "the best of four": {"n": 2, "best_of": 4, "temperature": 1.2, "seed": 6},
    "likelihoods": {"logprobs": 3, "prompt_logprobs": 2},
    "likelihoods of three": {"n": 3, "temperature": 0.7, "logprobs": 0, "prompt_logprobs": 1, "seed": 2},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "no bigram twice": {"no_repeat_ngram_size": 2, "temperature": 0.5, "seed": 3},
    "a bias": {"logit_bias": {300: 5.0, 12: -100}, "typical_p": 0.8, "temperature": 1.0, "seed": 8},
    "bad words": {"bad_words": ("the", "statement"), "min_p": 0.05, "temperature": 1.1, "seed": 1},
    "a stop string": {"stop": ("e d", "\n\n"), "max_tokens": 60},
    "at least so many": {"min_tokens": 20, "stop": "e"},
    "few tokens": {"allowed_token_ids": tuple(range(200, 205)), "max_tokens": 40},
    "few tokens, drawn": {"allowed_token_ids": (200, 201, 202), "max_tokens": 40, "temperature": 0.6, "seed": 4},
}


@pytest.fixture(scope="module")
def model():
    return load_model(checkpoint_path())


def wish(name):
    return SamplingParams(**{"max_tokens": 24, **WISHES[name]})


def answers(model, names=tuple(WISHES), **options):
    llm = LLM(model, block_size=4, **options)
    prompts = [PROMPT + " be" * (number % 3) for number in range(len(WISHES))]
    picked = [(prompt, wish(name)) for prompt, name in zip(prompts, WISHES, strict=True) if name in names]
    found = llm.generate([prompt for prompt, _ in picked], [params for _, params in picked])
    assert llm.engine.check() == [] and llm.engine.manager.device.num_used == 0
    assert not llm.engine._sampling.adjustments._number.any(), "no lane is left"
    return llm, {
        name: (
            [(each.index, each.token_ids, each.text, each.finish_reason, each.logprobs) for each in answer.outputs],
            answer.prompt_logprobs,
        )
        for name, answer in zip([name for name in WISHES if name in names], found, strict=True)
    }


@pytest.fixture(scope="module")
def alone(model):
    """What each of them gets when nobody else is there."""
    return {name: answers(model, (name,), num_blocks=400)[1][name] for name in WISHES}


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 400},
        {"num_blocks": 40},
        {"num_blocks": 40, "host_blocks": 40},
        {"num_blocks": 40, "max_tokens_per_step": 16},
        {"num_blocks": 40, "steps_ahead": 1},
        {"num_blocks": 40, "speculate": "lookup"},
        {"num_blocks": 40, "policy": "vllm", "speculate": "lookup", "num_drafts": 2},
    ],
    ids=lambda options: ", ".join(f"{name} {value}" for name, value in options.items()),
)
def test_every_request_gets_what_it_gets_alone(model, alone, options):
    llm, found = answers(model, **options)
    for name in WISHES:
        assert found[name] == alone[name], name
    stats = llm.engine.scheduler.stats()
    assert stats.preemptions > 0 or options["num_blocks"] == 400
    assert stats.accepted_tokens > 0 or "speculate" not in options


def test_answers_of_one_prompt_differ_and_the_first_is_the_one_that_comes_alone(model):
    llm = LLM(model)
    params = {"temperature": 1.5, "seed": 3, "max_tokens": 12}
    (single,) = llm.generate("def", SamplingParams(**params))
    (several,) = llm.generate("def", SamplingParams(n=4, **params))
    assert [each.index for each in several.outputs] == [0, 1, 2, 3]
    assert several.outputs[0].token_ids == single.token_ids == several.token_ids
    assert len({tuple(each.token_ids) for each in several.outputs}) == 4


def test_the_prompt_of_several_answers_is_held_once(model):
    engine = LLM(model, block_size=4).engine
    prompt = list(range(40))
    engine.add_request(prompt, SamplingParams(n=4, temperature=1.0, max_tokens=2, ignore_eos=True))
    while engine.has_unfinished and engine.manager.device.num_used < 10:
        engine.step()
    # Nine full blocks of the prompt once, and its last one, which each computes, and what each writes.
    assert engine.manager.device.num_used <= 9 + 4 * 2
    while engine.has_unfinished:
        engine.step()


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
    for start in range(3, len(whole.text) - 4, 5):
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


def test_echo_repeats_the_prompt(model):
    plain, echoed = LLM(model).generate(
        [PROMPT] * 2, [SamplingParams(max_tokens=5, echo=echo) for echo in (False, True)]
    )
    assert echoed.text == PROMPT + plain.text


def test_a_processor_of_transformers_does_its_work(model):
    from transformers import SuppressTokensLogitsProcessor

    llm = LLM(model)
    (plain,) = llm.generate(PROMPT, SamplingParams(max_tokens=10))
    banned = plain.token_ids[3]
    (found,) = llm.generate(
        PROMPT, SamplingParams(max_tokens=10, logits_processors=(SuppressTokensLogitsProcessor([banned]),))
    )
    assert found.token_ids[:3] == plain.token_ids[:3] and banned not in found.token_ids


def test_a_processor_that_fails_ends_its_own_request(model):
    def fails(ids, logits):
        if ids.shape[1] > 10:
            raise ValueError("no more")
        return logits

    llm = LLM(model)
    (plain,) = llm.generate(PROMPT, SamplingParams(max_tokens=10))
    failed, other = llm.generate(
        [PROMPT] * 2, [SamplingParams(logits_processors=(fails,)), SamplingParams(max_tokens=10)]
    )
    assert failed.finish_reason == "error" and "ValueError: no more" in failed.error
    assert other.token_ids == plain.token_ids and llm.engine.check() == []


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("options", [{}, {"num_blocks": 20, "block_size": 4}], ids=["ample", "short of memory"])
def test_guesses_change_nothing_but_the_number_of_steps(model, options, temperature):
    prompts = [PROMPT + " close" * number for number in range(4)]
    params = [
        SamplingParams(
            max_tokens=40,
            temperature=temperature,
            seed=number if temperature else None,
            # Of few tokens, so that they repeat themselves.
            allowed_token_ids=tuple(range(200, 204)),
        )
        for number in range(4)
    ]
    logits: dict[bool, dict] = {True: {}, False: {}}
    found, stats = {}, {}
    for drafts in (False, True):
        llm = LLM(model, speculate="lookup" if drafts else None, **options)
        llm.engine.on_logits = lambda id, place, row, kept=logits[drafts]: kept.__setitem__((id, place), row.clone())
        found[drafts] = [answer.token_ids for answer in llm.generate(prompts, params)]
        stats[drafts] = llm.engine.stats()
        assert llm.engine.check() == []
    assert found[True] == found[False]
    assert logits[True].keys() == logits[False].keys()
    assert all(torch.equal(row, logits[True][key]) for key, row in logits[False].items())
    assert stats[False].drafted_tokens == 0 < stats[True].drafted_tokens
    assert 0 < stats[True].accepted_tokens < stats[True].drafted_tokens


def test_all_guesses_may_be_right(model):
    llm = LLM(model, speculate="lookup")
    prompt = [7, 8, 9, 10] * 5
    only = {7: (8,), 8: (9,), 9: (10,), 10: (7,)}

    def next_in_the_circle(ids, logits):
        return torch.full_like(logits, -torch.inf).index_fill_(1, torch.tensor(only[int(ids[0, -1])]), 0.0)

    (answer,) = llm.generate([prompt], SamplingParams(max_tokens=24, logits_processors=(next_in_the_circle,)))
    assert answer.token_ids == [7, 8, 9, 10] * 6
    stats = llm.engine.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 12 and stats.steps < 12


def test_no_guess_may_be_right(model):
    llm = LLM(model, speculate="lookup")

    def never_again(ids, logits):
        return logits.index_fill(1, ids[0], -torch.inf)

    params = SamplingParams(max_tokens=12, logits_processors=(never_again,), ignore_eos=True)
    plain = LLM(model).generate([[5, 6, 7] * 5], params)
    assert llm.generate([[5, 6, 7] * 5], params)[0].token_ids == plain[0].token_ids
    stats = llm.engine.stats()
    assert stats.accepted_tokens == 0 and stats.output_tokens == 12


def test_a_conversation_goes_on_from_what_is_known(model):
    llm = LLM(model, block_size=4)
    talk = [{"role": "system", "content": "Say what Python does."}, {"role": "user", "content": "What is a list?"}]
    (first,) = llm.chat(talk, SamplingParams(max_tokens=12))
    assert first.text
    talk += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And a tuple?"}]
    (second,) = llm.chat(talk, SamplingParams(max_tokens=12))
    # All that was computed, but for what the tokenizer writes otherwise once more text follows.
    assert second.usage.hit_tokens >= len(first.prompt_token_ids) + 12 - 8
    assert [each.token_ids for each in llm.chat([talk[:2], talk], SamplingParams(max_tokens=12))] == [
        first.token_ids,
        second.token_ids,
    ]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "there is no message"),
        ("hello", "messages have to be a list of mappings with role and content; got 'hello'"),
        ([{"role": "user"}], "message 0 has to be a mapping with role and content"),
        ([{"role": "user", "content": 3}], "message 0: content has to be text; got 3"),
        ([{"role": "robot", "content": "x"}], "role has to be one of system, user, assistant, tool; got 'robot'"),
        ([{"role": "assistant", "content": "x"}], "the last message is the assistant's"),
    ],
)
def test_messages_of_the_wrong_shape_are_refused(model, messages, message):
    with pytest.raises(InvalidChat, match=message):
        LLM(model).chat(messages)


def test_half_a_surrogate_pair_is_no_message(model):
    with pytest.raises(InvalidRequest, match="half of a surrogate pair"):
        LLM(model).chat([{"role": "user", "content": "\ud800"}])


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1e-6},
        {"repetition_penalty": 1e6},
        {"temperature": 5e-324},
        {"temperature": 1.7e308, "top_p": 0.5, "min_p": 0.1},
        {"temperature": 1e-40, "repetition_penalty": 1e-6, "logit_bias": {5: 100}, "logprobs": 3},
        {"temperature": 1, "top_p": 5e-324},
        {"temperature": 1, "min_p": 5e-324},
        {"temperature": 1, "typical_p": 5e-324},
    ],
    ids=str,
)
def test_the_farthest_numbers_that_may_be_given_are_answered(model, fields):
    (answer,) = LLM(model).generate("def", SamplingParams(max_tokens=3, ignore_eos=True, **fields))
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n has to be an integer of at least 1; got 0"),
        ({"n": 2}, "n 2 goes with a temperature above 0; temperature 0 gives the same answer each time"),
        ({"n": 3, "best_of": 2, "temperature": 1}, r"best_of has to be an integer of at least n \(3\), or None; got 2"),
        ({"min_p": 0.5}, "min_p 0.5 goes with a temperature above 0"),
        ({"temperature": 1, "min_p": 2}, "min_p has to be a number above 0 and at most 1, or None; got 2"),
        ({"temperature": 1, "typical_p": 0}, "typical_p has to be a number above 0 and at most 1, or None; got 0"),
        ({"repetition_penalty": 0}, "repetition_penalty has to be a number from 1e-6 to 1e6; got 0"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty has to be a number from 1e-6 to 1e6; got 1e-38"),
        ({"repetition_penalty": 1e39}, "repetition_penalty has to be a number from 1e-6 to 1e6; got 1e[+]39"),
        ({"presence_penalty": 2.5}, "presence_penalty has to be a number from -2 to 2; got 2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty has to be a number from -2 to 2; got nan"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size has to be an integer of at least 0; got -1"),
        ({"logit_bias": [1]}, "logit_bias has to be a mapping from token ids to numbers, or None"),
        ({"logit_bias": {1: 101}}, "logit_bias has to be from -100 to 100; got 101"),
        ({"logit_bias": {99: 1}}, "keys of logit_bias have to be token ids from 0 to 9; got 99"),
        ({"allowed_token_ids": ()}, "allowed_token_ids has to be a tuple of token ids, or None"),
        ({"allowed_token_ids": (10,)}, "allowed_token_ids have to be token ids from 0 to 9; got 10"),
        ({"bad_words": ("",)}, "bad_words have to be strings or token ids, not empty; got ''"),
        ({"bad_words": ((10,),)}, "bad_words have to be token ids from 0 to 9; got 10"),
        ({"bad_words": "word"}, "bad_words has to be a tuple of strings or of token ids; got 'word'"),
        ({"stop": ("a", "")}, "stop has to be of strings that are not empty; got ''"),
        ({"stop": ""}, "stop has to be of strings that are not empty; got ''"),
        ({"stop": 3}, "stop has to be a string, or a tuple of strings; got 3"),
        ({"logprobs": -1}, "logprobs has to be an integer from 0 to .*, or None; got -1"),
        ({"prompt_logprobs": 11}, "prompt_logprobs has to be an integer from 0 to 10, or None; got 11"),
        ({"echo": 1}, "echo has to be True or False; got 1"),
        ({"logits_processors": (3,)}, "logits_processors has to be a tuple of callables"),
    ],
)
def test_what_makes_no_sense_is_refused_in_the_words_of_the_parameter(fields, message):
    with pytest.raises(InvalidSampling, match=message):
        SamplingParams(**fields).check(10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculate": "magic"}, 'speculate has to be "lookup", "lookahead" or "draft"; got "magic"'),
        ({"speculate": "lookup", "num_drafts": 0}, "num_drafts has to be an integer of at least 1; got 0"),
        ({"speculate": "lookup", "steps_ahead": 1}, "speculate does not go with steps_ahead"),
    ],
)
def test_ways_to_guess_that_there_are_not_are_refused(model, options, message):
    with pytest.raises(InvalidConfig, match=message):
        LLM(model, **options)
