"""Batches that are scheduled ahead and run later, in order, give the answers of stepping plainly, tokens and logits, to the last bit.

Our engine one step ahead, and our scheduler with two or three batches out, drafts included. The device is a queue; what a batch
does not carry is another by the time it runs, and free blocks hold NaN. And our engine with its model on a thread.
"""

import random
from collections import Counter
from copy import deepcopy
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, note, settings, strategies as st

from paged.testing.engine_rig import Alone
from paged.testing.engine_world import EngineRequest, build_engine, submit
from paged.testing.late_steps import DeviceLost, LateRun, run_late
from paged.testing.pressure import Answers, differences
from paged.testing.pressure_run import run_alone
from paged.testing.protocol import capabilities_of
from paged.testing.tiny_model import tiny_model

VOCABULARY = 97


def stops_of(answers, chance, who):
    """Perhaps a stop id that ends the sequence in the middle, which its answer then does, too."""
    if chance.random() >= 0.4:
        return ()
    stop = chance.choice(answers.tokens[who])
    cut(answers, who, answers.tokens[who].index(stop) + 1)
    answers.reasons[who] = "stop"
    return (stop,)


def cut(answers, who, length):
    """The answer is over after so many tokens."""
    del answers.tokens[who][length:], answers.logits[who][length:]


def judged(found, alone):
    """What is wrong: an aborted request has the beginning of its answer, all others have the whole; logits behind the last token count for
    nothing."""
    for who, tokens in found.tokens.items():
        del found.logits[who][len(tokens) :]
        if found.reasons.get(who) == "abort":
            cut(alone, who, len(tokens))
            alone.reasons[who] = "abort"
    return differences(found, alone) + found.violations + alone.violations


def scheduler_ahead(chance, draw_world):
    """(what is wrong, what happened): a world served by scheduler and runner with two or three batches out, and drafts."""
    world = draw_world(chance)
    model = tiny_model(VOCABULARY)
    guesses = run_alone(model, world.requests, world.conditions.backend)
    alone = deepcopy(guesses)
    requests = [
        msgspec.structs.replace(request, stop_token_ids=stops_of(alone, chance, (request.id, 0)))
        for request in world.requests
    ]
    run = LateRun(model, world.conditions, guesses, chance, depth=chance.choice([2, 2, 3]))
    return judged(run.run(requests), alone), run.events


def drawn(chance, draw_world):
    """A world for our engine, the answers to its requests alone, and the requests, some of them drawn by seeds."""
    world = draw_world(chance)
    conditions = replace(world.conditions, vocabulary=VOCABULARY)
    alone, requests = Answers(), []
    for request in world.requests:
        same = ("id", "max_tokens", "priority", "reads_cache", "writes_cache")
        asked = EngineRequest(
            **{name: getattr(request, name) for name in same},
            prompt=list(request.prompt),
            temperature=chance.choice([0.0, 0.0, 1.5]),
            seed=chance.randrange(3),
            keeps=request.retention and (request.retention.priority, request.retention.lasts),
        )
        stream, who = Alone(build_engine, conditions)(asked), (request.id, 0)
        alone.tokens[who], alone.logits[who] = list(stream.tokens), list(stream.logits)
        alone.reasons[who] = "length"
        requests.append(msgspec.structs.replace(asked, stop_token_ids=stops_of(alone, chance, who)))
    return conditions, alone, requests


def engine_ahead(chance, draw_world, spoil=None):
    """The same, served by our engine one step ahead."""
    conditions, alone, requests = drawn(chance, draw_world)
    engine = build_engine(conditions, steps_ahead=1)
    steps = run_late(engine)
    if spoil is not None:
        spoil(steps.late)
    engine.on_logits = lambda id, place, row: found.see((id, 0), place, row)
    found, events = Answers(violations=steps.late.violations), Counter()

    def fail():
        events["late"] += len(steps.late) > 0
        steps.fails = chance.choice(["before", "behind", "within"]) if chance.random() < 0.08 else None

    serve(engine, requests, chance, found, events, fail)
    return judged(found, alone), events


def engine_threaded(chance, draw_world):
    """The same on a thread of the model, whose logits are not read: steps run while others are ended and put out."""
    conditions, alone, requests = drawn(chance, draw_world)
    engine = build_engine(conditions, steps_ahead=1)
    logits, luck = engine.worker.logits, random.Random(chance.random())

    def fails(step):
        if luck.random() < 0.05:
            raise DeviceLost("within")
        return logits(step)

    engine.worker.logits = fails
    found, events = Answers(), Counter()
    try:
        serve(engine, requests, chance, found, events, lambda: None)
    finally:
        engine.close()
    found.logits = alone.logits = {who: [] for who in alone.tokens}
    return judged(found, alone), events


def serve(engine, requests, chance, answers, events, fail, most_steps=2000):
    """Answer all requests, with aborts and steps that `fail` lets fail in between."""
    arriving = list(requests)

    def receive(outputs):
        for output in outputs:
            answers.take(output)

    for _ in range(most_steps):
        if not (arriving or engine.has_unfinished):
            break
        while arriving and (chance.random() < 0.4 or not engine.has_unfinished):
            answers.expect((arriving[0].id, 0))
            submit(engine, arriving.pop(0), capabilities_of(engine))
        live = [who[0] for who in answers.tokens if who not in answers.reasons]
        if live and chance.random() < 0.03:
            events["aborted"] += 1
            events["aborted in flight"] += engine._steps.num_outstanding > 0
            receive(filter(None, [engine.abort(chance.choice(live))]))
        fail()
        try:
            receive(engine.step())
        except DeviceLost as error:
            events["cancelled"] += 1
            events[f"cancelled {error}"] += 1
        events["ahead"] += engine._steps.num_outstanding > 0
    stats = engine.scheduler.stats()
    events.update(recomputed=stats.preemptions_recompute, swapped=stats.preemptions_swap)
    events.update(hit=stats.hit_tokens, void=stats.voided_tokens)
    answers.violations += engine.check()
    if engine.manager.device.num_used:
        answers.violations.append(f"{engine.manager.device.num_used} blocks are held when all have ended.")


KINDS = {"scheduler": scheduler_ahead, "engine": engine_ahead, "thread": engine_threaded}

# A world costs as much as ten examples of the other tests.
FEW = settings(max_examples=max(1, settings().max_examples // 10))


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(chance=st.randoms(use_true_random=False))
def test_batches_that_run_late_change_no_bit_of_an_answer(kind, chance, draw_world):
    wrong, events = KINDS[kind](chance, draw_world)
    note(dict(events))
    assert wrong == []


HAPPENS = ["recomputed", "swapped", "hit", "void", "aborted in flight", "cancelled within"]
LATE = [*HAPPENS, "late", "cancelled before", "cancelled behind"]
DRAFTED = ["drafts accepted", "drafts rejected", "unknown", "preempted in flight", "cancelled with copies"]


@pytest.mark.parametrize(
    ("kind", "seeds", "happens"),
    # Of the first forty worlds those in which most happens.
    [
        ("scheduler", (4, 26), LATE + DRAFTED),
        ("engine", (4, 16, 39), LATE),
        ("thread", (4, 9, 24, 39), [*HAPPENS, "ahead"]),
    ],
)
def test_all_that_can_come_between_a_batch_and_its_end_does(kind, seeds, happens, draw_world):
    total = Counter()
    for seed in seeds:
        wrong, events = KINDS[kind](random.Random(seed), draw_world)
        assert wrong == [], seed
        total += events
    assert [name for name in happens if total[name] < 2] == []


def reads_the_tables_of_the_scheduler(late):
    """Those of the time when it runs, by which later batches have been scheduled."""
    put, ready, live = late.put, late.ready, {}

    def put_and_keep(batch, step, free):
        live[batch.number] = batch
        put(batch, step, free)

    def as_they_are_now(step):
        right = ready(step)
        num_columns = right.tokens.block_tables.shape[1]
        now = live[step.number].block_tables[step.rows, :num_columns]
        return right._replace(tokens=replace(right.tokens, block_tables=now))

    late.put, late.ready = put_and_keep, as_they_are_now


def copies_as_soon_as_it_can(late):
    """Before batches that wait have run."""
    put = late.put

    def put_and_begin(batch, step, free):
        put(batch, step, free)
        late._waiting, waiting = late._waiting[-1:], late._waiting
        late.begin_oldest()
        late._waiting = waiting

    late.put = put_and_begin


def takes_values_from_the_next_place(late):
    keep = late.keep
    late.keep = lambda step, tokens: keep(step, np.roll(tokens, 1))


@pytest.mark.parametrize(
    "fault", [reads_the_tables_of_the_scheduler, copies_as_soon_as_it_can, takes_values_from_the_next_place]
)
def test_a_device_that_takes_what_is_not_its_batch_s_own_is_found(fault, draw_world):
    for seed in range(100):
        try:
            wrong, _ = engine_ahead(random.Random(seed), draw_world, fault)
        except (IndexError, ValueError):
            return
        if wrong:
            return
    pytest.fail("nothing was found")
