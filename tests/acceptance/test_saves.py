"""Blocks that somebody else reads when their request has ended, and loads that come with the batch that lists them."""

import pytest

from paged.errors import DuplicateRequest


def ended(scheduler, request_of, step, **given):
    """A request "a" of two full blocks and one token more that has ended."""
    scheduler.add(request_of("a", list(range(9)), max_tokens=1, saves=True, **given))
    step(scheduler)
    return scheduler


def test_blocks_of_a_request_that_saves_stay_held_until_it_is_saved_and_are_content(make_scheduler, request_of, step):
    scheduler = ended(make_scheduler(6, 4), request_of, step)
    assert (scheduler.status("a"), scheduler.manager.device.num_used) == ("finished", 3)
    assert scheduler.saving_blocks("a").tolist() == [0, 1, 2]
    assert scheduler.manager.lookup(range(9)).num_tokens == 8
    assert scheduler.check() == [] and not scheduler.has_unfinished
    scheduler.saved("a")
    assert (scheduler.manager.device.num_used, scheduler.check()) == (0, [])
    assert scheduler.manager.lookup(range(9)).num_tokens == 8


@pytest.mark.parametrize("end", ["finish", "abort"])
def test_whatever_ends_it_its_blocks_and_its_id_are_held_until_it_is_saved(make_scheduler, request_of, step, end):
    scheduler = make_scheduler(6, 4)
    scheduler.add(request_of("a", list(range(9)), max_tokens=8, saves=True))
    step(scheduler)
    getattr(scheduler, end)("a")
    assert scheduler.manager.device.num_used == 3
    with pytest.raises(DuplicateRequest):
        scheduler.add(request_of("a", [1]))
    scheduler.saved("a")
    assert scheduler.manager.device.num_used == 0
    scheduler.add(request_of("a", [1]))


def test_while_blocks_are_saved_steps_may_be_empty_and_nothing_ends(make_scheduler, request_of, step):
    scheduler = ended(make_scheduler(4, 4), request_of, step)
    scheduler.add(request_of("b", [7] * 5, max_tokens=9))
    for _ in range(3):
        assert step(scheduler).tokens == {}
    scheduler.saved("a")
    assert step(scheduler).tokens == {"b": 5}


def test_a_row_that_lacks_a_block_waits_for_it_while_others_are_saved(make_scheduler, request_of, step):
    scheduler = make_scheduler(4, 4, {"b": (2, 8)}, policy="vllm")
    ended(scheduler, request_of, step)
    while len(scheduler.tokens_of("b")) < 5:
        step(scheduler)
    assert [step(scheduler).tokens for _ in range(3)] == [{}, {}, {}]
    scheduler.saved("a")
    assert step(scheduler).tokens != {} and scheduler.status("b") == "running"


def test_what_comes_with_a_batch_is_listed_and_the_rest_computed_in_it(make_scheduler, make_engine, request_of):
    scheduler = make_scheduler(20, 4, elsewhere=lambda id, have: (8, False))
    engine = make_engine(scheduler)
    engine.add(request_of("a", list(range(18)), max_tokens=3, num_computed=18))
    batch = scheduler.schedule()
    assert (batch.loads[:, 1].tolist(), scheduler.status("a")) == ([0, 4], "running")
    # The budget counts what is computed.
    assert (batch.positions.tolist(), batch.num_tokens.tolist()) == ([*range(8, 18)], [10])
    engine.see_tables(batch)
    engine.load(batch, "a")
    engine.update(batch, engine.forward(batch))
    assert scheduler.manager.lookup([*range(16), 99]).num_tokens == 16
    assert len(engine.run()["a/0"]) == 3


def test_a_batch_that_is_taken_back_leaves_nothing_of_what_it_was_to_load(make_scheduler, request_of, step):
    answers = [(8, False)]
    scheduler = make_scheduler(20, 4, elsewhere=lambda id, have: answers.pop() if answers else (0, False))
    scheduler.add(request_of("a", list(range(18)), max_tokens=3, num_computed=18))
    scheduler.cancel(scheduler.schedule())
    assert (scheduler.manager.lookup(range(18)).num_tokens, scheduler.check()) == (0, [])
    again = scheduler.schedule()
    assert (len(again.loads), again.positions.tolist()) == (0, list(range(18)))


def test_it_is_asked_about_behind_what_is_here_each_time_a_request_is_admitted(make_scheduler, request_of, step):
    asked = []
    scheduler = make_scheduler(
        6, 4, policy="vllm", elsewhere=lambda id, have: (asked.append((id, have)), (0, False))[1]
    )
    scheduler.add(request_of("first", list(range(8)), max_tokens=20, num_computed=8))
    step(scheduler)
    scheduler.add(request_of("second", [*range(8), 9], max_tokens=20, num_computed=9, priority=1))
    while ("second", 8) not in asked[:-1]:
        step(scheduler)
        assert len(asked) < 9
    assert asked[0] == ("first", 0)
