"""What leaves a step that fails or is interrupted, and that the engine goes on as if it had not begun."""

from functools import cache
from itertools import count
from signal import SIGINT, raise_signal
from threading import current_thread, main_thread
from traceback import extract_tb

import pytest
import torch

from paged import LLM, Engine, SamplingParams
from paged.errors import EngineFailed
from paged.testing.tiny_model import tiny_model

from ..driving import around  # noqa: TID252

pytestmark = pytest.mark.usefixtures("handled_by_python")
SIX = SamplingParams(max_tokens=6)
PROMPTS = [[1, 2, 3, 4, 5], [4, 5, 1], [6, 7, 1, 2]]
# Little memory and few tokens a step: chunks, preemptions, copies to the host and back.
TIGHT = {"num_blocks": 7, "block_size": 2, "host_blocks": 8, "max_tokens_per_step": 4}


@cache
def undisturbed():
    """What each prompt is answered when nothing happens."""
    return [answer.token_ids for answer in LLM(tiny_model(), num_blocks=32).generate(PROMPTS, SIX)]


def engine_with_requests(**options):
    engine = Engine(tiny_model(), **{**TIGHT, **options})
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, SIX, id=str(number))
    return engine


def failing(engine, at, error):
    """The forward pass fails, once for each of the calls `at`."""
    calls = count()

    @around(engine.worker, "logits")
    def fails(logits, step):
        if next(calls) in at:
            raise error
        return logits(step)


def drained(engine, expected=(), most_steps=400):
    """All outputs by id, and the errors of the `expected` types that left step."""
    found, raised = {}, []
    for _ in range(most_steps):
        if not engine.has_unfinished:
            return found, raised
        try:
            for output in engine.step():
                found.setdefault(output.id, []).append(output)
        except expected as error:
            raised.append(error)
        assert engine.check() == []
    raise AssertionError("the engine does not come to an end")


def tokens(outputs):
    return [token for output in outputs for token in output.token_ids]


def answers_as_ever(found):
    return [tokens(found[str(number)]) for number in range(len(PROMPTS))] == undisturbed()


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(1), ZeroDivisionError(), RuntimeError("device lost")]
)
@pytest.mark.parametrize("at", [{0}, {1, 2, 5, 9}], ids=str)
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_what_stops_a_forward_pass_leaves_step_once_and_costs_no_token(error, at, steps_ahead):
    engine = engine_with_requests(steps_ahead=steps_ahead)
    failing(engine, at, error)
    found, raised = drained(engine, expected=type(error))
    assert raised == [error] * len(at)
    assert {extract_tb(each.__traceback__)[-1].name for each in raised} == {"fails"}
    assert answers_as_ever(found)
    assert engine.stats().failed_steps == 0


def interrupting(look):
    """A clock at whose `look`-th look Ctrl-C comes. Those of a model's own thread do not count."""
    looks = count(1)

    def clock():
        if current_thread() is not main_thread():
            return 0.0
        now = next(looks)
        if now == look:
            raise_signal(SIGINT)
        return float(now)

    return clock


@pytest.mark.parametrize("steps_ahead", [0, 1])
# There are five looks a step: each of them is met, in another step.
@pytest.mark.parametrize("look", range(1, 31, 6))
def test_ctrl_c_at_whichever_look_at_the_clock_costs_no_token(look, steps_ahead):
    """The clock is looked at before, within and after each half of a step, also while the books are written."""
    # Not while the requests are added, three looks.
    engine = engine_with_requests(clock=interrupting(3 + look), steps_ahead=steps_ahead)
    found, raised = drained(engine, expected=KeyboardInterrupt)
    assert len(raised) == 1
    assert answers_as_ever(found)


@pytest.mark.parametrize("look", range(1, 31, 6))
def test_ctrl_c_at_whichever_look_at_the_clock_aborts_what_generate_has_added(look):
    llm = LLM(tiny_model(), **TIGHT, clock=interrupting(look))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SIX)
    assert not llm.engine.has_unfinished
    assert llm.engine.manager.device.num_used == 0
    assert [answer.token_ids for answer in llm.generate(PROMPTS, SIX)] == undisturbed()


with pytest.raises(RuntimeError) as refused:
    torch.empty(2**60, dtype=torch.uint8)
OUT_OF_MEMORY = {
    "of an accelerator": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "of Python": MemoryError(),
    "of torch's CPU allocator": refused.value,
}


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("error", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
def test_a_forward_pass_that_is_out_of_memory_is_tried_again(error, steps_ahead):
    engine = engine_with_requests(max_retries=2, steps_ahead=steps_ahead)
    failing(engine, {1, 2, 5}, error)
    found, _ = drained(engine)
    assert answers_as_ever(found)
    assert engine.stats().failed_steps == 3


def test_a_step_that_is_always_out_of_memory_ends_its_requests_with_the_reason():
    engine = engine_with_requests(num_blocks=32, max_tokens_per_step=32, max_retries=1)
    failing(engine, {0, 1}, MemoryError("48 GiB wanted"))
    found, _ = drained(engine)
    ends = [[(each.finish_reason, each.error) for each in outputs] for outputs in found.values()]
    assert ends == [[("error", "MemoryError: 48 GiB wanted")]] * 3
    assert engine.manager.device.num_used == 0
    engine.add_request(PROMPTS[0], SIX, id="0")
    assert tokens(drained(engine)[0]["0"]) == undisturbed()[0]


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_request_whose_logits_are_no_numbers_ends_with_error_alone(steps_ahead):
    engine = engine_with_requests(num_blocks=32, max_tokens_per_step=32, steps_ahead=steps_ahead)

    @around(engine.worker, "logits")
    def poisoned(logits, step):
        found, its = logits(step).clone(), step.input
        # Rows are given in order.
        found[torch.from_numpy(its.rows[its.samples] == 1)] = float("nan")
        return found

    found, _ = drained(engine)
    assert found["1"][-1].finish_reason == "error"
    assert "a logit is NaN" in found["1"][-1].error
    assert ([tokens(found[id]) for id in ("0", "2")], engine.manager.device.num_used) == (undisturbed()[::2], 0)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_copies_that_fail_midway_end_all_requests_and_the_next_ones_read_nothing_of_them(steps_ahead):
    engine = engine_with_requests(steps_ahead=steps_ahead)
    calls = []

    @around(engine.pool, "host_to_device")
    def fails(copy, sources, destinations):
        calls.append(1)
        if len(calls) == 1:
            raise OSError("the bus is gone")
        copy(sources, destinations)

    found, raised = drained(engine, expected=EngineFailed)
    assert len(raised) == 1, "no step copied a block from the host"
    ended_by_it = [outputs[-1] for outputs in found.values() if outputs[-1].finish_reason == "error"]
    assert ended_by_it
    assert all("the copies failed: the bus is gone" in output.error for output in ended_by_it)
    assert engine.manager.device.num_used == engine.manager.device.num_cached == 0
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, SIX, id=str(number))
    assert answers_as_ever(drained(engine)[0])


def test_a_step_that_stops_within_the_books_says_so_ever_after():
    engine = engine_with_requests()

    def fails(*_, **__):
        raise ZeroDivisionError("a bug")

    engine.scheduler.update = fails
    with pytest.raises(ZeroDivisionError, match="^a bug$"):
        engine.step()
    for call in (engine.step, lambda: engine.add_request(PROMPTS[0])):
        with pytest.raises(EngineFailed, match=r"ZeroDivisionError\('a bug'\).*Make a new engine"):
            call()
