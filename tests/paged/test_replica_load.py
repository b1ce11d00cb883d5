"""A replica's report: what its scheduler foresees, in the seconds that its steps take, and how those are learnt."""

import pytest

from paged import BlockManager, Request, Scheduler
from paged.engine.pace import Pace
from paged.engine.replica_load import load_of


def pace():
    """Steps of 0.1 s, and 0.01 s for each token."""
    found = Pace()
    for at, tokens in enumerate((10, 20, 10, 20)):
        found.rest()
        found.note(tokens, float(at), at + 0.1 + 0.01 * tokens)
    return found


def scheduler_of(num_blocks=100, **limits):
    return Scheduler(BlockManager(num_blocks, 4), max_tokens_per_step=50, **limits)


def step(scheduler):
    batch = scheduler.schedule()
    scheduler.update(batch, [7] * int(batch.samples.sum()))


def load(scheduler, **told):
    return load_of(scheduler.outlook(), pace(), **told)


def test_an_idle_replica_begins_at_once():
    found = load(scheduler_of(max_sequences=3), received={"r": 4})
    assert (found.begin_s, found.num_running) == (0.0, 0)
    # In a full step.
    assert abs(found.token_s - (0.1 + 50 * 0.01) / 50) < 1e-9
    assert (found.received, found.cache_tokens) == ({"r": 4}, 400)


def test_a_prompt_that_waits_counts_without_what_is_cached_of_it():
    begins = []
    for prompt in (range(1000, 1040), range(40)):
        scheduler = scheduler_of(max_sequences=1)
        scheduler.add(Request(id="before", prompt=range(40), max_tokens=1))
        step(scheduler)
        scheduler.add(Request(id="runs", prompt=range(100, 104), max_tokens=5, expected_tokens=5))
        step(scheduler)
        scheduler.add(Request(id="waits", prompt=prompt, max_tokens=1, expected_tokens=1))
        begins.append(load(scheduler).begin_s)
    # Nine blocks of it are: the last one is computed again.
    assert abs(begins[0] - begins[1] - 36 * 0.01) < 1e-9


def test_where_places_or_memory_are_short_a_request_begins_later():
    for places, num_blocks in ((1, 100), (8, 12)):
        scheduler = scheduler_of(num_blocks=num_blocks, max_sequences=places)
        scheduler.add(Request(id="a", prompt=range(40), max_tokens=4, expected_tokens=4))
        step(scheduler)
        assert load(scheduler).begin_s > 0


def test_where_no_request_joins_a_batch_it_begins_when_the_batch_has_ended():
    scheduler = scheduler_of(policy="static")
    assert load(scheduler).begin_s == 0
    scheduler.add(Request(id="a", prompt=range(4), max_tokens=4, expected_tokens=4))
    step(scheduler)
    # Three decodes of 0.11 s.
    assert abs(load(scheduler).begin_s - 0.33) < 1e-9


def test_what_is_queued_of_a_tenant_is_what_is_left_to_compute_of_its_waiting_requests():
    scheduler = scheduler_of(max_sequences=1)
    scheduler.add(Request(id="before", prompt=range(40), max_tokens=1))
    step(scheduler)
    assert load(scheduler).queued == {}
    scheduler.add(Request(id="runs", prompt=range(100, 104), max_tokens=5, tenant="c"))
    step(scheduler)
    for number, (prompt, tenant) in enumerate(
        [(range(40), "a"), (range(200, 210), "a"), (range(20), None), (range(7), "b")]
    ):
        scheduler.add(Request(id=str(number), prompt=prompt, max_tokens=1, tenant=tenant))
    # Of 40 tokens 36 are cached, of 20 there are 16, of 7 there are 4.
    assert load(scheduler).queued == {"a": 4 + 10, "": 4, "b": 3}


def noted(steps, between=0.0, rests=False):
    """A pace after steps of (tokens, seconds), with so many seconds between them."""
    pace, now = Pace(), 100.0
    for tokens, seconds in steps:
        pace.note(tokens, now, now + seconds)
        now += seconds + between
        if rests:
            pace.rest()
    return pace


STEPS = [(tokens, 0.002 + 0.001 * tokens) for tokens in (1, 5, 9, 2, 40, 3) * 20]


def test_a_step_and_a_token_have_their_seconds():
    assert noted(STEPS).seconds(10, 100) == pytest.approx(0.12)


@pytest.mark.parametrize(
    ("steps", "more", "found"),
    [
        (STEPS, {}, (0.002, 0.001)),
        # What is done between steps is waited for too, all but the very first; time with nothing to do is nobody's.
        (STEPS, {"between": 0.003}, (0.005, 0.001)),
        (STEPS, {"between": 5.0, "rests": True}, (0.002, 0.001)),
        # Steps that computed nothing say nothing, and steps that are all alike the seconds of their tokens.
        ([(0, 3.0)], {}, (0.0, 0.0)),
        ([(8, 0.016)] * 9, {}, (0.0, 0.002)),
    ],
)
def test_seconds_of_a_step_and_of_a_token_are_told_apart(steps, more, found):
    assert noted(steps, **more).coefficients() == pytest.approx(found, rel=0.02 if "between" in more else 1e-6)
