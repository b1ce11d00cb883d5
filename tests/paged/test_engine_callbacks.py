"""What callbacks of the engine and of LLM may do, what becomes of what they raise, and that a second thread is told that it is in use."""

from contextlib import contextmanager
from functools import cache
from threading import Event, Thread

import pytest

from paged import LLM, Engine, SamplingParams
from paged.errors import EngineInUse
from paged.testing.tiny_model import tiny_model

from ..driving import around, tokens_of  # noqa: TID252

SIX = SamplingParams(max_tokens=6)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 1, 2]]


class Broken(Exception):
    pass


def fresh_llm(**options):
    return LLM(tiny_model(), num_blocks=16, block_size=4, **options)


@cache
def undisturbed():
    """What each prompt is answered when nothing happens."""
    return [answer.token_ids for answer in fresh_llm().generate(PROMPTS, SIX)]


def is_as_new(engine):
    return not engine.has_unfinished and engine.manager.device.num_used == 0 and engine.check() == []


def generated_with(llm, callback, function, prompts):
    """What generate answers while it calls this function back."""
    if callback == "on_output":
        return llm.generate(prompts, SIX, on_output=function)
    setattr(llm.engine, callback, function)
    return llm.generate(prompts, SIX)


@pytest.mark.parametrize(
    ("callback", "call", "victim"),
    [*(("on_output", 4, victim) for victim in range(3)), ("on_logits", 3, 1), ("on_batch", 1, 1)],
)
def test_a_request_that_a_callback_aborts_ends_with_abort(callback, call, victim):
    llm, seen, aborted = fresh_llm(), [], f"request-{victim}"

    def note(its, *_):
        seen.append(getattr(its, "id", its))
        if len(seen) == call:
            llm.engine.abort(aborted)

    answers = generated_with(llm, callback, note, PROMPTS)
    assert [answer.finish_reason == "abort" for answer in answers] == [number == victim for number in range(3)]
    for answer, tokens in zip(answers, undisturbed(), strict=True):
        assert answer.token_ids == tokens[: len(answer.token_ids)]
    assert len(answers[victim].token_ids) <= 2
    assert aborted not in seen[call:]
    assert is_as_new(llm.engine)


@pytest.fixture
def outgrowing():
    """Alone in the pool "a" outgrows it; the step that ends it runs "b", which has waited."""
    engine = Engine(tiny_model(), num_blocks=5, block_size=4)
    engine.add_request([6, 7, 1, 2, 3], SamplingParams(max_tokens=100), id="a")
    engine.step()
    engine.add_request([7] * 18, SamplingParams(max_tokens=1), id="b")
    return engine


@pytest.mark.parametrize("end", ["abort", "finish"])
def test_a_request_that_has_ended_by_itself_is_not_ended_again_and_its_end_is_returned(outgrowing, end):
    returned, ends = [], {}
    outgrowing.on_logits = lambda id, *_: id == "b" and returned.append(getattr(outgrowing, end)("a"))
    while outgrowing.has_unfinished:
        for output in outgrowing.step():
            ends.setdefault(output.id, []).append(output.finish_reason)
    assert returned == [None]
    assert (ends["a"][-1], ends["b"]) == ("length", ["length"])
    assert outgrowing.check() == []


def test_generate_that_is_left_by_an_exception_leaves_no_end_that_is_still_to_come(outgrowing):
    def breaks(id, *_):
        if id == "b":
            outgrowing.forget(["a"])
            raise Broken

    outgrowing.on_logits = breaks
    with pytest.raises(Broken):
        tokens_of(outgrowing)
    outgrowing.on_logits = None
    assert set(tokens_of(outgrowing)) == {"b"}


def test_a_callback_that_finishes_a_request_gets_what_it_had_not_been_handed_out():
    llm, seen = fresh_llm(), []
    llm.engine.on_batch = lambda batch: seen or seen.append(llm.engine.finish("request-0"))
    answers = llm.generate(PROMPTS, SIX)
    assert (seen[0].token_ids, seen[0].finish_reason) == (answers[0].token_ids, "stop")
    assert [answer.finish_reason for answer in answers] == ["stop", "length", "length"]
    assert is_as_new(llm.engine)


@pytest.mark.parametrize("callback", ["on_output", "on_batch", "on_logits"])
@pytest.mark.parametrize("call", ["step", "generate", "close"])
def test_a_step_within_a_callback_is_refused_and_the_engine_goes_on(callback, call):
    llm, caught = fresh_llm(), []
    calls = {"step": llm.engine.step, "generate": lambda: llm.generate(PROMPTS), "close": llm.engine.close}

    def nest(*_):
        with pytest.raises(EngineInUse, match=f"^{call} was called from a callback of generate") as error:
            calls[call]()
        caught.append(error.value)

    answers = generated_with(llm, callback, nest, PROMPTS)
    assert [answer.token_ids for answer in answers] == undisturbed()
    assert (caught[0].call, caught[0].running, caught[0].thread) == (call, "generate", None)


def test_a_callback_may_add_requests_and_step_returns_their_outputs():
    llm = fresh_llm()

    def add(output):
        if not llm.engine.live_request("later"):
            llm.engine.add_request(PROMPTS[1], SIX, id="later")

    answers = llm.generate(PROMPTS[:1], SIX, on_output=add)
    assert [answer.id for answer in answers] == ["request-0"]
    assert tokens_of(llm.engine) == {"later": undisturbed()[1]}


@pytest.mark.parametrize("callback", ["on_output", "on_batch", "on_logits"])
@pytest.mark.parametrize("error", [Broken("callback"), MemoryError("callback"), KeyboardInterrupt()], ids=repr)
def test_what_a_callback_raises_leaves_generate_as_it_is_and_its_requests_are_aborted(callback, error):
    llm, calls = fresh_llm(), []
    llm.engine.add_request(PROMPTS[1], SIX, id="other")

    def fail(*_):
        calls.append(1)
        if len(calls) == 3:
            raise error

    with pytest.raises(type(error)) as caught:
        generated_with(llm, callback, fail, PROMPTS[:1])
    assert caught.value is error
    assert llm.engine.live_request("request-1") is None
    assert llm.engine.check() == []
    assert tokens_of(llm.engine) == {"other": undisturbed()[1]}
    assert [answer.token_ids for answer in llm.generate(PROMPTS, SIX)] == undisturbed()
    assert is_as_new(llm.engine)


@pytest.mark.parametrize("callback", ["on_batch", "on_logits"])
def test_a_callback_that_raises_now_and_then_costs_step_no_token(callback):
    engine, calls, found = fresh_llm().engine, [], {}
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, SIX, id=str(number))

    def fail(*_):
        calls.append(1)
        if len(calls) % 4 == 0:
            raise Broken

    setattr(engine, callback, fail)
    num_raised = 0
    while engine.has_unfinished:
        try:
            for output in engine.step():
                found.setdefault(output.id, []).extend(output.token_ids)
        except Broken:
            num_raised += 1
        assert engine.check() == []
    assert num_raised > 0
    assert (list(found.values()), engine.stats().failed_steps) == (undisturbed(), 0)


def breaks(*_):
    raise Broken


@pytest.mark.parametrize(("max_tokens", "steps", "reason"), [(1, 1, "length"), (6, 2, "abort")])
def test_abort_returns_the_tokens_and_the_end_that_step_could_not_return(max_tokens, steps, reason):
    engine = fresh_llm().engine
    engine.add_request(PROMPTS[0], SamplingParams(max_tokens=max_tokens), id="a")
    engine.on_batch = breaks
    for _ in range(steps):
        with pytest.raises(Broken):
            engine.step()
    assert engine.has_unfinished
    last = engine.abort("a")
    assert (last.finish_reason, last.token_ids) == (reason, undisturbed()[0][:steps])
    assert engine.abort("a") is None
    assert is_as_new(engine)


@contextmanager
def generating(llm, answers):
    """Another thread, "first", is in a forward pass of generate."""
    is_inside, may_go_on = Event(), Event()

    @around(llm.engine.worker, "logits")
    def waits(logits, step):
        is_inside.set()
        assert may_go_on.wait(600)
        return logits(step)

    thread = Thread(target=lambda: answers.extend(llm.generate(PROMPTS, SIX)), name="first")
    thread.start()
    try:
        assert is_inside.wait(600)
        yield
    finally:
        may_go_on.set()
        thread.join(600)


def test_a_second_thread_on_one_engine_is_told_that_it_is_in_use():
    llm, answers = fresh_llm(), []
    calls = {
        "generate": (llm, PROMPTS),
        "step": (llm.engine,),
        "add_request": (llm.engine, [1]),
        "abort": (llm.engine, "a"),
    }
    with generating(llm, answers):
        for name, (its, *arguments) in calls.items():
            with pytest.raises(EngineInUse, match=f"^{name}: .* by another thread, first, .* in generate") as caught:
                getattr(its, name)(*arguments)
            assert (caught.value.call, caught.value.running, caught.value.thread) == (name, "generate", "first")
    assert [answer.token_ids for answer in answers] == undisturbed()
    assert not llm.engine.has_unfinished
