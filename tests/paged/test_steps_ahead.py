"""One step ahead: the engine puts a step out before the one before it is ended, and says the same words."""

import pytest
import torch

from paged import LLM, Engine, SamplingParams

PROMPTS = ["The with statement", "Return a new list", "The with statement is used", "A generator", "def", "Return a"]


@pytest.fixture(scope="module")
def model():
    return LLM().engine.model


def answers(model, **options):
    """What each prompt gets, the logits that each token was chosen from, and the figures."""
    llm = LLM(model, max_sequences=4, max_tokens_per_step=48, block_size=4, **options)
    wishes = [
        SamplingParams(max_tokens=6 + 5 * number, temperature=0.7 * (number % 2)) for number in range(len(PROMPTS))
    ]
    logits = {}

    def note(id, place, row):
        logits[id, place] = row.clone()

    llm.engine.on_logits = note
    found = [(answer.token_ids, answer.finish_reason) for answer in llm.generate(PROMPTS, wishes)]
    assert llm.engine.check() == []
    assert (llm.engine.manager.device.num_used, llm.engine.has_unfinished) == (0, False)
    assert not llm.engine.scheduler.has_unfinished
    return found, logits, llm.engine.scheduler.stats()


@pytest.mark.parametrize("memory", [{"num_blocks": 99}, {"num_blocks": 12}, {"num_blocks": 12, "host_blocks": 12}])
def test_tokens_and_logits_are_the_same_bit_for_bit_with_ample_memory_and_without(model, memory):
    plain, logits, _ = answers(model, **memory)
    ahead, logits_ahead, stats = answers(model, steps_ahead=1, **memory)
    assert ahead == plain
    # One step ahead there are some more, after the last tokens.
    assert all(torch.equal(row, logits_ahead[key]) for key, row in logits.items())
    assert memory["num_blocks"] == 99 or stats.preemptions > 0


def test_what_comes_after_the_last_token_is_void_and_counted(model):
    engine = Engine(model, steps_ahead=1)
    stop = engine.model.tokenizer.encode("The with statement")[0]
    for number in range(3):
        engine.add_request(
            "The with statement is used to", SamplingParams(max_tokens=30, stop_token_ids=(stop,)), id=str(number)
        )
    while engine.has_unfinished:
        engine.step()
    stats = engine.scheduler.stats()
    assert stats.voided_tokens <= 3
    assert engine.check() == []


def test_a_request_may_be_aborted_while_a_step_is_out(model):
    engine = Engine(model, steps_ahead=1)
    engine.add_request("The with statement", SamplingParams(max_tokens=20), id="a")
    engine.add_request("Return a new list", SamplingParams(max_tokens=5), id="b")
    for _ in range(3):
        engine.step()
    assert engine.abort("a").finish_reason == "abort"
    reasons = {}
    while engine.has_unfinished:
        reasons |= {output.id: output.finish_reason for output in engine.step()}
    assert reasons == {"b": "length"}
    assert (engine.manager.device.num_used, engine.check()) == (0, [])


def test_a_step_that_fails_takes_back_what_is_out_and_costs_no_word(model):
    expected = LLM(model).generate(PROMPTS[:3], SamplingParams(max_tokens=12))
    llm = LLM(model, steps_ahead=1)
    logits, calls = llm.engine.runner.logits, []

    def failing(batch):
        calls.append(batch)
        if len(calls) % 5 == 4:
            raise MemoryError
        return logits(batch)

    llm.engine.runner.logits = failing
    found = llm.generate(PROMPTS[:3], SamplingParams(max_tokens=12))
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
