"""Two threads on one engine: the second is told so, and the first goes on."""

import pickle
from contextlib import contextmanager
from threading import Event, Thread

import pytest

pytest.importorskip("torch")

from paged import LLM, SamplingParams
from paged.errors import EngineInUse
from paged.testing.tiny_model import tiny_model

SIX = SamplingParams(max_tokens=6)
PROMPTS = [[1, 2, 3], [4, 5]]


@contextmanager
def generating(llm, answers):
    """Another thread, "first", is in a forward pass of generate."""
    is_inside, may_go_on = Event(), Event()
    logits = llm.engine.runner.logits

    def waits(batch):
        is_inside.set()
        assert may_go_on.wait(600)
        return logits(batch)

    llm.engine.runner.logits = waits
    thread = Thread(target=lambda: answers.extend(llm.generate(PROMPTS, SIX)), name="first")
    thread.start()
    try:
        assert is_inside.wait(600)
        yield
    finally:
        may_go_on.set()
        thread.join(600)


def test_a_second_thread_on_one_engine_is_told_that_it_is_in_use():
    llm, answers = LLM(tiny_model(), num_blocks=16), []
    calls = {
        "generate": lambda: llm.generate(PROMPTS),
        "step": llm.engine.step,
        "add_request": lambda: llm.engine.add_request([1]),
        "abort": lambda: llm.engine.abort("request-0"),
    }
    with generating(llm, answers):
        for name, call in calls.items():
            with pytest.raises(
                EngineInUse, match=f"^{name}: .* in use by another thread, first, .* in generate"
            ) as caught:
                call()
            assert (caught.value.call, caught.value.running, caught.value.thread) == (name, "generate", "first")
    assert [answer.token_ids for answer in answers] == [
        answer.token_ids for answer in LLM(tiny_model(), num_blocks=16).generate(PROMPTS, SIX)
    ]
    assert not llm.engine.has_unfinished


def test_threads_that_take_turns_are_not_refused():
    llm, answers = LLM(tiny_model(), num_blocks=16), []
    for _ in range(2):
        thread = Thread(target=lambda: answers.extend(llm.generate(PROMPTS, SIX)))
        thread.start()
        thread.join(600)
    assert len(answers) == 4


def test_an_engine_in_use_survives_pickle():
    for error in (EngineInUse("step", "generate", "first"), EngineInUse("step", "generate")):
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.call, again.running, again.thread) == (
            str(error),
            error.call,
            error.running,
            error.thread,
        )
