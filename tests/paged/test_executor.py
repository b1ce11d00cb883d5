"""An engine's model on a thread of its own: what is done at once, what waits, and that the thread ends."""

import gc
import threading
import time
import weakref
from signal import SIGINT, pthread_kill

import pytest

from paged import Engine, SamplingParams
from paged.errors import EngineClosed
from paged.testing.device_trace import traced
from paged.testing.tiny_model import tiny_model

from ..driving import around, tokens_of  # noqa: TID252

PROMPTS = [[1, 2, 3, 4, 5], [4, 5, 1], [6, 7, 1, 2]]
SIX = SamplingParams(max_tokens=6, ignore_eos=True)
SOON_S = 30


def engine_with_requests(params=SIX, **options):
    engine = Engine(tiny_model(), **{"num_blocks": 32, "block_size": 4, "steps_ahead": 1, **options})
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, params, id=str(number))
    return engine


def threads_of_models():
    return [each for each in threading.enumerate() if each.name.startswith("paged-model")]


def test_a_result_is_given_out_when_the_step_behind_it_computes():
    """The Python that prepares a step, and that which ends the one before it, take turns: a GPU waits for the first alone."""
    engine, trace, is_told = engine_with_requests(), [], threading.Event()

    @around(engine.worker, "begin")
    def begins(begin, step):
        # Time for a result that comes too early.
        is_told.wait(0.05)
        begin(step)

    @around(engine.worker, "logits")
    def computes(logits, step):
        trace.append(("computes", step.input.number))
        return logits(step)

    @around(engine._steps._executor, "result")
    def told(result, launched):
        found = result(launched)
        trace.append(("told", launched.step.number))
        is_told.set()
        return found

    tokens_of(engine)
    engine.close()
    last = engine.stats().steps
    assert last > 3
    for number in range(1, last):
        assert trace.index(("computes", number + 1)) < trace.index(("told", number))


def test_a_step_that_has_ended_is_held_by_nothing_and_holds_no_later_one():
    """It has logits, which may be large."""
    engine, all_of_them = engine_with_requests(), []

    @around(engine._steps._executor, "launch")
    def launches(launch, step, asked, *, samples):
        launched = launch(step, asked, samples=samples)
        all_of_them.append(weakref.ref(launched))
        return launched

    engine.step()
    kept = all_of_them[0]()
    gc.collect()
    gc.disable()
    try:
        tokens_of(engine)
        # The thread lets go of the last one a little after its result.
        engine.close()
        assert len(all_of_them) > 4 and [each() for each in all_of_them] == [kept] + [None] * (len(all_of_them) - 1)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("wish", "waits"),
    [
        ({}, False), ({"temperature": 1.0, "top_p": 0.9, "seed": 3}, False), ({"frequency_penalty": 0.5}, True),
        ({"logprobs": 1}, True), ({"logits_processors": (lambda ids, logits: logits,)}, True),
    ],
    ids=lambda its: next(iter(its), "greedy") if isinstance(its, dict) else "",
)  # fmt: skip
def test_no_launch_waits_for_the_device_one_step_ahead_unless_the_engine_does_something_to_logits(wish, waits):
    """The trace of the kit's device: with no step ahead the engine waits in every step, with one only for the last."""
    params = SamplingParams(max_tokens=6, ignore_eos=True, **wish)
    plain, ahead = (engine_with_requests(params, steps_ahead=number) for number in (0, 1))
    before, after = traced(plain), traced(ahead)
    assert tokens_of(plain) == tokens_of(ahead)
    assert before[:6] == ["launch 1", "wait 1", "read 1", "launch 2", "wait 2", "read 2"]
    assert sum(line.startswith("wait") for line in before) == plain.stats().steps
    last = max(at for at, line in enumerate(after) if line.startswith("launch"))
    assert any(line.startswith("wait") for line in after[:last]) == waits
    assert after[:6] == (before[:6] if waits else ["launch 1", "launch 2", "read 1", "launch 3", "read 2", "launch 4"])


def test_callbacks_are_called_in_the_thread_of_the_step():
    engine, threads = engine_with_requests(), set()
    engine.on_logits = lambda *_: threads.add(threading.current_thread())
    engine.on_batch = lambda _: threads.add(threading.current_thread())
    tokens_of(engine)
    assert threads == {threading.current_thread()}


def test_behind_a_step_that_failed_none_begins():
    """Chunks of a prompt, which await nothing that is sampled."""
    engine = Engine(tiny_model(), num_blocks=32, block_size=4, steps_ahead=1, max_tokens_per_step=2)
    engine.add_request([1, 2, 3, 4, 5, 6, 7, 1], SIX)
    begun, is_second_out = [], threading.Event()

    @around(engine.worker, "begin")
    def begins(begin, step):
        begun.append(step.number)
        begin(step)

    @around(engine._steps._executor, "launch")
    def launches(launch, step, asked, *, samples):
        launched = launch(step, asked, samples=samples)
        if step.number == 2:
            is_second_out.set()
        return launched

    @around(engine.worker, "logits")
    def fails(logits, step):
        assert is_second_out.wait(SOON_S)
        if step.input.number == 1:
            raise ZeroDivisionError
        return logits(step)

    engine.step()
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert begun == [1]
    assert engine._steps.num_outstanding == 0
    assert len(tokens_of(engine)["request-0"]) == 6 and 2 not in begun


@pytest.mark.usefixtures("handled_by_python")
def test_ctrl_c_while_a_step_is_waited_for_costs_no_token():
    engine, is_awaited = engine_with_requests(), threading.Event()

    @around(engine._steps._executor, "result")
    def read(result, launched):
        if launched.step.number == 2:
            is_awaited.set()
        return result(launched)

    @around(engine.worker, "logits")
    def interrupts(logits, step):
        if step.input.number == 2:
            assert is_awaited.wait(SOON_S)
            pthread_kill(threading.main_thread().ident, SIGINT)
        return logits(step)

    found = {}
    with pytest.raises(KeyboardInterrupt):
        tokens_of(engine, found)
    assert found and engine.check() == []
    assert tokens_of(engine, found) == tokens_of(engine_with_requests(steps_ahead=0))


def test_a_closed_engine_has_no_thread_holds_nothing_and_says_so():
    before = set(threads_of_models())
    tokens_of(engine_with_requests(steps_ahead=0))
    assert set(threads_of_models()) == before, "without a step ahead there is no thread"
    engine = engine_with_requests()
    engine.step()
    (its,) = set(threads_of_models()) - before
    engine.close()
    engine.close()
    assert not its.is_alive()
    for call in (engine.step, lambda: engine.add_request([1])):
        with pytest.raises(EngineClosed, match=r"the engine was closed"):
            call()
    for number in range(len(PROMPTS)):
        engine.abort(str(number))
    assert engine.manager.device.num_used == 0 and engine.check() == []


def test_the_thread_of_an_engine_without_a_reference_ends():
    before = threads_of_models()
    engine = engine_with_requests()
    engine.step()
    (thread,) = set(threads_of_models()) - set(before)
    del engine
    gc.collect()
    thread.join(SOON_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("params", [SIX, SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1)])
def test_what_a_step_wrote_counts_as_content_only_once_it_was_sampled_from(params):
    engine, seen, has_failed = engine_with_requests(params, steps_ahead=0), [], []
    logits = engine.worker.logits

    def breaks(run, *arguments):
        found = run(*arguments)
        if has_failed:
            return found
        has_failed.append(True)
        return found * float("nan") if run == logits else found._replace(logits=found.logits * float("nan"))

    for name in ("logits", "read"):
        around(engine.worker, name)(breaks)
    engine._steps.on_ran = lambda batch, seconds: seen.append(batch.number)
    engine.step()
    assert has_failed and seen == []
    tokens_of(engine)
    assert seen


@pytest.mark.usefixtures("handled_by_python")
def test_copies_that_fail_while_a_step_is_taken_back_end_what_rests_on_them():
    engine, is_awaited, is_taken_back = engine_with_requests(), threading.Event(), threading.Event()
    executor = engine._steps._executor

    @around(executor, "result")
    def read(result, launched):
        # It is given out when step 2 computes.
        if launched.step.number == 1:
            is_awaited.set()
            # The interrupt comes here, and the copies fail after it. One long wait would not end if it came just before.
            for _ in range(100 * SOON_S):
                time.sleep(0.01)
        return result(launched)

    @around(engine.worker, "begin")
    def begins(begin, step):
        if step.number == 2:
            assert is_awaited.wait(SOON_S)
            pthread_kill(threading.main_thread().ident, SIGINT)
            assert is_taken_back.wait(SOON_S)
            raise RuntimeError("the copy failed")
        return begin(step)

    @around(executor, "drop")
    def drops(drop, launched):
        is_taken_back.set()
        return drop(launched)

    with pytest.raises(KeyboardInterrupt):
        tokens_of(engine)
    assert {each.finish_reason for each in engine.step()} == {"error"}
    assert not engine._steps.content_is_lost and engine.check() == []
