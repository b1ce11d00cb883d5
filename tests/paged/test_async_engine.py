"""Many tasks on one engine: cancelled, late, failing and aborted ones, on a pool far too small; every answer is the one that comes alone."""

import asyncio
import random
from functools import wraps

import pytest

from paged import AsyncEngine, BeamSearchParams, SamplingParams
from paged.errors import DeadlineExceeded, DuplicateRequest, EngineClosed, InvalidRequest, NeverFits
from paged.testing.tiny_model import tiny_model

PROMPTS = ["The with statement", "Return a new list", "def", "A generator is", "The with statement is used to"]


def fails(ids, logits):
    if ids.shape[1] > 8:
        raise ValueError("no more")
    return logits


def wishes(number):
    chance = random.Random(number)
    if number % 11 == 0:
        return BeamSearchParams(beam_width=3, max_tokens=8)
    if number % 7 == 0:
        return SamplingParams(max_tokens=12, logits_processors=(fails,))
    return SamplingParams(
        max_tokens=chance.randint(1, 20),
        temperature=chance.choice([0.0, 0.0, 0.9]),
        stop=chance.choice([(), ("e",), (" the",)]),
        repetition_penalty=chance.choice([1.0, 1.3]),
    )


async def ask(engine, number, trouble=""):
    """The text of an answer, or why there is none."""
    text, prompt = "", PROMPTS[number % len(PROMPTS)]
    late = {"deadline_s": 0.05} if trouble == "late" else {}
    pieces = 0
    async for output in engine.generate(prompt, wishes(number), request_id=str(number), **late):
        text += output.text
        pieces += 1
        if trouble == "leaves" and pieces == 2:
            return "left"
        if trouble == "raises" and pieces == 2:
            raise RuntimeError(number)
        if output.finished:
            return f"{output.finish_reason}: {text}" if output.error is None else output.error
    raise AssertionError("the last output is finished")


async def alone(model, numbers):
    async with AsyncEngine(model) as engine:
        return [await ask(engine, number) for number in numbers]


def test_many_tasks_leave_nothing_and_get_what_they_get_alone(model):
    chance = random.Random(0)
    troubles = [chance.choice(["", "", "", "late", "leaves", "raises", "cancelled"]) for _ in range(120)]

    async def together():
        async with AsyncEngine(model, num_blocks=40, block_size=4, max_sequences=12) as engine:
            tasks = []
            for number, trouble in enumerate(troubles):
                tasks.append(asyncio.create_task(ask(engine, number, trouble)))
                await asyncio.sleep(chance.choice([0, 0, 0.01]))
                if trouble == "cancelled":
                    asyncio.get_running_loop().call_later(chance.random() / 5, tasks[-1].cancel)
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert engine.engine.check() == []
            while engine.engine.scheduler.has_unfinished:
                engine.engine.step()
            assert engine.engine.manager.device.num_used == 0
            assert not engine._queues and not engine.engine._searches
            return found

    found, expected = asyncio.run(together()), asyncio.run(alone(model, range(len(troubles))))
    kinds = {"late": DeadlineExceeded, "raises": RuntimeError, "cancelled": asyncio.CancelledError}
    num_whole = 0
    for got, wanted, trouble in zip(found, expected, troubles, strict=True):
        if isinstance(got, BaseException):
            assert isinstance(got, kinds[trouble]), (trouble, got)
        elif got != "left":
            assert got == wanted
            num_whole += 1
    assert num_whole > 36 and "ValueError: no more" in " ".join(expected)


def asynchronous(test):
    """Run a test that is a coroutine to its end."""

    @wraps(test)
    def run(*arguments, **fixtures):
        return asyncio.run(test(*arguments, **fixtures))

    return run


@asynchronous
async def test_what_is_wrong_is_raised_where_it_was_asked_and_disturbs_nobody(model):
    async with AsyncEngine(model, num_blocks=8, block_size=4) as engine:
        going = asyncio.create_task(ask(engine, 3))
        await asyncio.sleep(0)
        for error, words, prompt, id in (
            (NeverFits, None, list(range(100)), None),
            (InvalidRequest, None, [{}], None),
            (DuplicateRequest, None, "a", "3"),
            (InvalidRequest, "id has to be a non-empty string", "a", ["3"]),
        ):
            with pytest.raises(error, match=words):
                await anext(engine.generate(prompt, request_id=id))
        with pytest.raises(InvalidRequest, match="no task waits"):
            await engine.abort("nobody")
        assert [await going] == await alone(model, [3])


@asynchronous
async def test_an_abort_by_id_gives_the_task_its_last_output(model):
    async with AsyncEngine(model) as engine:
        outputs = []
        async for output in engine.generate("def", SamplingParams(max_tokens=500, ignore_eos=True), request_id="a"):
            outputs.append(output)
            if len(outputs) == 3:
                await engine.abort("a")
        assert (output.finish_reason, output.finished) == ("abort", True)


@asynchronous
async def test_a_step_that_raises_is_told_to_all_who_wait_and_the_next_request_is_answered(model):
    async with AsyncEngine(model) as engine:
        engine.engine.worker.logits = lambda step: 1 / 0
        found = await asyncio.gather(*(ask(engine, number) for number in (1, 2, 3)), return_exceptions=True)
        assert [type(each) for each in found] == [ZeroDivisionError] * 3
        del engine.engine.worker.logits
        assert (await ask(engine, 1)).partition(":")[0] in ("stop", "length")


@asynchronous
async def test_a_task_without_an_id_gets_one_that_no_other_has():
    async with AsyncEngine(tiny_model(), num_blocks=8) as engine:
        both = [engine.generate([1, 2, 3], request_id=id) for id in ("async-0", None)]
        assert [(await anext(each)).id for each in both] == ["async-0", "async-1"]


@asynchronous
async def test_a_step_that_raises_is_told_though_its_requests_cannot_be_ended():
    async with AsyncEngine(tiny_model(), num_blocks=8) as engine:
        engine.engine.scheduler.update = lambda *_, **__: 1 / 0
        engine.engine.scheduler.abort = lambda _: {}["torn"]
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(anext(engine.generate([1, 2, 3])), 60)
        del engine.engine.scheduler.abort


@asynchronous
async def test_an_engine_whose_requests_cannot_be_ended_is_closed_all_the_same():
    engine = AsyncEngine(tiny_model(), num_blocks=8)
    outputs = engine.generate([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
    await anext(outputs)
    engine.engine.scheduler.abort = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        await engine.close()
    with pytest.raises(EngineClosed):
        engine.engine.step()


async def read_on(outputs):
    async for _ in outputs:
        pass


@asynchronous
async def test_a_closed_engine_says_so(model):
    engine = AsyncEngine(model)
    # Far longer than it waits for the first token.
    long = engine.generate("def", SamplingParams(max_tokens=900, ignore_eos=True))
    await anext(long)
    waiting = asyncio.create_task(read_on(long))
    await asyncio.sleep(0)
    await engine.close()
    await engine.close()
    for task in (waiting, ask(engine, 2)):
        with pytest.raises(EngineClosed):
            await task
    assert engine.engine.manager.device.num_used == 0
