"""Blocks that somebody else reads when their request has ended, and loads that come with the batch that lists them."""

import numpy as np
import pytest

from paged import PagedError
from paged.errors import DuplicateRequest, InvalidRequest, UnknownRequest, UnsupportedByLayers


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
def test_whatever_ends_it_its_blocks_are_held(make_scheduler, request_of, step, end):
    scheduler = make_scheduler(6, 4)
    scheduler.add(request_of("a", list(range(9)), max_tokens=8, saves=True))
    step(scheduler)
    getattr(scheduler, end)("a")
    assert scheduler.manager.device.num_used == 3
    scheduler.saved("a")
    assert scheduler.manager.device.num_used == 0


def test_one_that_is_aborted_while_it_loads_holds_them_beyond_the_batch_that_listed_the_loads(
    make_scheduler, request_of
):
    scheduler = make_scheduler(6, 4)
    scheduler.add(request_of("a", list(range(9)), max_tokens=8, num_computed=8, saves=True))
    batch = scheduler.schedule()
    scheduler.abort("a")
    scheduler.update(batch, [])
    assert scheduler.manager.device.num_used == 2
    scheduler.saved("a")
    assert (scheduler.manager.device.num_used, scheduler.check()) == (0, [])


def test_one_that_waits_holds_nothing_and_is_saved_all_the_same(make_scheduler, request_of):
    scheduler = make_scheduler(6, 4)
    scheduler.add(request_of("a", [1], saves=True))
    scheduler.abort("a")
    assert len(scheduler.saving_blocks("a")) == 0
    scheduler.saved("a")


def test_while_blocks_are_saved_a_step_may_be_empty_and_nothing_ends_for_want_of_memory(
    make_scheduler, request_of, step
):
    scheduler = ended(make_scheduler(4, 4), request_of, step)
    scheduler.add(request_of("b", [7] * 5, max_tokens=9))
    for _ in range(3):
        assert step(scheduler).tokens == {}
    scheduler.saved("a")
    assert step(scheduler).tokens == {"b": 5}


def test_a_row_that_lacks_a_block_waits_for_it_while_others_are_saved(make_scheduler, request_of, step):
    scheduler = make_scheduler(4, 4, policy="vllm")
    scheduler.add(request_of("b", [7, 8], max_tokens=8))
    ended(scheduler, request_of, step)
    while len(scheduler.tokens_of("b")) < 5:
        step(scheduler)
    for _ in range(3):
        assert step(scheduler).tokens == {}
    scheduler.saved("a")
    assert step(scheduler).tokens != {} and scheduler.status("b") == "running"


def test_an_id_is_free_again_when_it_is_saved(make_scheduler, request_of, step):
    scheduler = ended(make_scheduler(6, 4), request_of, step)
    with pytest.raises(DuplicateRequest):
        scheduler.add(request_of("a", [1]))
    scheduler.saved("a")
    scheduler.add(request_of("a", [1]))


def test_wrong_calls_of_saved_change_nothing(make_scheduler, request_of, step):
    scheduler = make_scheduler(6, 4, {"plain": 1})
    scheduler.add(request_of("lives", [1], saves=True))
    step(scheduler)
    for call in (scheduler.saved, scheduler.saving_blocks):
        with pytest.raises(UnknownRequest):
            call("nobody")
    with pytest.raises(InvalidRequest, match='request "lives": it has not ended'):
        scheduler.saved("lives")
    scheduler.abort("plain")
    with pytest.raises(InvalidRequest, match='request "plain": nothing is held: it saves nothing, or is saved'):
        scheduler.saved("plain")
    assert (scheduler.saving_blocks("plain").tolist(), scheduler.check()) == ([], [])


@pytest.mark.parametrize(("given", "words"), [({"saves": 1}, "saves has to be True or False"), ({"saves": True, "num_sequences": 2}, "saves goes with one sequence")])  # fmt: skip
def test_what_saves_cannot_be_is_refused(make_scheduler, request_of, given, words):
    with pytest.raises(InvalidRequest, match=words):
        make_scheduler(6, 4).add(request_of("a", [1], **given))


def test_regions_layers_of_several_kinds_and_forks_are_refused_beside_saves(make_scheduler, request_of, step):
    import paged.study  # noqa: F401  (registers its policies)
    from paged import LayerGroup

    with pytest.raises(InvalidRequest, match="policy orca-max gives regions back whole"):
        make_scheduler(6, 4, policy="orca-max").add(request_of("a", [1], saves=True))
    groups = (LayerGroup("full"), LayerGroup("window", 4))
    with pytest.raises(UnsupportedByLayers):
        make_scheduler(12, 4, groups=groups).add(request_of("a", [1], saves=True))
    scheduler = make_scheduler(6, 4)
    scheduler.add(request_of("a", [1], saves=True))
    step(scheduler)
    with pytest.raises(PagedError, match="or saves its blocks, has no forks"):
        scheduler.fork("a")


def loads_with_the_batch(make_scheduler, num, **given):
    return make_scheduler(20, 4, elsewhere=lambda id, have: (num, False), **given)


def test_what_comes_with_a_batch_is_listed_and_the_rest_computed_in_it(make_scheduler, make_engine, request_of):
    scheduler = loads_with_the_batch(make_scheduler, 8)
    engine = make_engine(scheduler)
    engine.add(request_of("a", list(range(18)), max_tokens=3, num_computed=18))
    batch = scheduler.schedule()
    assert (batch.loads[:, 1].tolist(), scheduler.status("a")) == ([0, 4], "running")
    assert (batch.positions.tolist(), batch.num_tokens.tolist(), batch.seq_lens.tolist()) == (
        [*range(8, 18)],
        [10],
        [18],
    )
    engine.see_tables(batch)
    engine.load(batch, "a")
    engine.update(batch, engine.forward(batch))
    assert scheduler.manager.lookup([*range(16), 99]).num_tokens == 16
    assert len(engine.run()["a/0"]) == 3


def test_the_budget_counts_what_is_computed_and_not_what_is_loaded(make_scheduler, request_of):
    scheduler = loads_with_the_batch(make_scheduler, 40, max_tokens_per_step=8)
    scheduler.add(request_of("a", list(range(44)), max_tokens=3, num_computed=44))
    batch = scheduler.schedule()
    assert (len(batch.loads), batch.num_tokens.tolist()) == (10, [4])


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


def test_a_late_load_of_a_whole_prompt_has_a_block_for_each_of_its_tokens(make_scheduler, request_of):
    scheduler = make_scheduler(20, 4, elsewhere=lambda id, have: (9 - have, True))
    scheduler.add(request_of("a", list(range(9)), max_tokens=3, num_computed=9))
    batch = scheduler.schedule()
    assert np.array_equal(batch.loads[:, 1], [0, 4, 8])
    scheduler.update(batch, [])
    scheduler.loaded("a", 8)
    assert scheduler.schedule().positions.tolist() == [8]
