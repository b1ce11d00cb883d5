"""What runs steps needs nothing but the steps: from bytes it gives the same logits."""

import msgspec
import numpy as np
import pytest
import torch

from paged import Engine, SamplingParams
from paged.block_manager import Moves
from paged.engine.step_inputs import StepInputs
from paged.errors import EngineFailed, InvalidStep
from paged.model.loading import load_model
from paged.model.step_input import PageChanges, StepInput
from paged.testing.tiny_model import tiny_model

from ..driving import outputs_of  # noqa: TID252
from ..shown import assert_refused, shown_in  # noqa: TID252

TEXT = "Once upon a time there was a small dog who liked to run in the park with his friends every day"
PROMPTS = [TEXT[:start] + TEXT for start in (0, 40, 61, 7)]
# So few that requests are preempted, and the host's blocks are used where there are any.
TIGHT = {
    "embedded": {"num_blocks": 21, "host_blocks": 16, "block_size": 8},
    "hybrid": {"num_blocks": 16, "block_size": 16},
}


@pytest.mark.parametrize(("name", "steps_ahead"), [("embedded", 0), ("hybrid", 1)])
def test_steps_from_bytes_give_the_same_logits_on_a_worker_that_sees_nothing_else(name, steps_ahead):
    model, sizes = load_model(name), {**TIGHT[name], "max_tokens_per_step": 48}
    engine, other = Engine(model, **sizes, steps_ahead=steps_ahead), Engine(model, **sizes).worker
    worker, compared, num_unknown = engine.worker, [], 0
    begin, logits, keep = worker.begin, worker.logits, worker.keep

    def sent(step):
        return StepInput.decoded(step.encoded())

    def begin_both(step):
        other.begin(sent(step))
        begin(step)

    def logits_of_both(step, *more):
        nonlocal num_unknown
        found = logits(step, *more)
        compared.extend(map(torch.equal, found, other.logits(other.ready(sent(step.input)))))
        num_unknown += len(step.input.sources)
        return found

    def keep_both(step, tokens):
        other.keep(sent(step), tokens)
        keep(step, tokens)

    worker.begin, worker.logits, worker.keep = begin_both, logits_of_both, keep_both
    for number, prompt in enumerate(PROMPTS):
        # Two sequences of one prompt share blocks, and part.
        asked = SamplingParams(max_tokens=8 + number, temperature=1.0, seed=number, n=1 + (number == 1))
        engine.add_request(prompt, asked)
    outputs_of(engine)
    assert all(compared) and len(compared) >= engine.stats().output_tokens
    assert (num_unknown > 0) == (steps_ahead == 1)
    stats = engine.scheduler.stats()
    assert stats.preemptions > 0 and stats.hit_tokens > 0, stats
    assert name == "hybrid" or stats.swapped_out_blocks > 0


def step_of(**changes):
    """A step of two rows, the second of which goes on from step 6."""
    entries = PageChanges(np.arange(2), np.zeros(2, np.int64), np.arange(2, dtype=np.int32))
    numbers = {"number": 7, "oldest": 6, "rows": np.arange(2), "num_drafts": np.zeros(2, np.int64)}
    fields = numbers | {
        "num_tokens": np.array([2, 1]), "seq_lens": np.array([2, 1]), "samples": np.ones(2, np.bool_),
        "token_ids": np.array([3, 4, -1], np.int32), "sources": np.array([[2, 6, 0]]), "tables": (entries,),
        "moves": Moves(),
    }  # fmt: skip
    return StepInput(**fields | changes)


def test_a_step_comes_back_as_it_went():
    beside = {"reads": np.array([[-1], [4]], np.int32), "written_from": np.array([[0, 1]])}
    step = step_of(moves=Moves(device_to_host=np.array([[1, 2]], np.int32)), **beside)
    found = StepInput.decoded(step.encoded())
    assert found.encoded() == step.encoded()
    assert np.array_equal(found.moves.device_to_host, [[1, 2]]) and np.array_equal(found.reads, [[-1], [4]])
    assert np.array_equal(found.written_from, [[0, 1]])


def sent(**changes):
    return StepInput.decoded(step_of(**changes).encoded())


@pytest.mark.parametrize(("call", "shown"), shown_in("model/refused_steps.txt", ">>>"))
def test_what_is_no_step_is_refused(call, shown):
    assert isinstance(assert_refused(call, shown, globals()), InvalidStep)


def test_a_step_goes_on_from_those_that_are_out_alone():
    worker = Engine(tiny_model(), num_blocks=8, block_size=4).worker
    worker.begin(step_of())
    with pytest.raises(InvalidStep, match="step 7 goes on from step 6, of which no tokens are kept"):
        worker.ready(step_of())
    worker.keep(step_of(number=6, oldest=6), np.array([5, 0], np.int32))
    assert worker.ready(step_of()).token_ids.tolist() == [3, 4, 5]
    with pytest.raises(InvalidStep, match="step 7 takes token 2 of step 6, which sampled 2"):
        worker.ready(step_of(sources=np.array([[2, 6, 2]])))
    worker.keep(step_of(oldest=7), np.zeros(2, np.int32))
    with pytest.raises(InvalidStep):
        worker.ready(step_of())


def test_what_a_step_told_that_never_began_is_told_again():
    engine = Engine(load_model("hybrid"), **TIGHT["hybrid"])
    engine.add_request(TEXT, SamplingParams(max_tokens=4))
    inputs, batch = StepInputs(engine.manager.block_size), engine.scheduler.schedule()
    first, second = inputs.of(batch), inputs.of(batch)
    assert all(len(each.rows) for each in first.tables) and not any(len(each.rows) for each in second.tables)
    inputs.take_back(first)
    assert msgspec.structs.replace(inputs.of(batch), number=first.number).encoded() == first.encoded()


def test_an_engine_whose_worker_fails_to_begin_tells_it_all_again():
    engine = Engine(load_model("hybrid"), **TIGHT["hybrid"])
    begin, told = engine.worker.begin, []

    def fails_once(step):
        told.append(step)
        if len(told) == 1:
            raise MemoryError("no memory for a table")
        begin(step)

    engine.worker.begin = fails_once
    take_back, taken = engine._steps._inputs.take_back, []
    engine._steps._inputs.take_back = lambda step: (taken.append(step), take_back(step))
    engine.add_request(TEXT, SamplingParams(max_tokens=4))
    with pytest.raises(EngineFailed):
        engine.step()
    assert taken == told
