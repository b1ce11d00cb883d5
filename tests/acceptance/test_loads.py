"""Blocks that somebody else fills: tokens computed elsewhere, and moves that run in the background."""

import pytest

from paged import PagedError
from paged.errors import RequestInFlight


@pytest.mark.parametrize(("arrived", "computed"), [(12, 6), (7, 11), (4, 14), (0, 18)])
def test_tokens_computed_elsewhere_are_loaded_and_the_rest_computed(
    make_scheduler, make_engine, request_of, arrived, computed
):
    scheduler = make_scheduler(20, 4)
    engine = make_engine(scheduler)
    engine.add(request_of("a", list(range(18)), max_tokens=3, num_computed=12))
    batch = scheduler.schedule()
    assert (batch.loads[:, 1].tolist(), scheduler.status("a")) == ([0, 4, 8], "loading")
    assert not batch.is_empty
    engine.see_tables(batch)
    engine.load(batch, "a")
    scheduler.update(batch, [])
    # Until it is told, nothing happens.
    assert scheduler.schedule().is_empty
    scheduler.loaded("a", arrived)
    assert scheduler.manager.lookup(range(18)).num_tokens == arrived // 4 * 4
    second = engine.step()
    assert (second.num_tokens.tolist(), second.positions.tolist()) == ([computed], list(range(18 - computed, 18)))
    assert len(engine.run()["a/0"]) == 3


@pytest.mark.parametrize(("policy", "kept"), [("vllm", 1), ("trtllm-guaranteed-no-evict", 1), ("tgi", 6)])
def test_blocks_for_what_did_not_arrive_go_back_unless_all_were_drawn(make_scheduler, request_of, step, policy, kept):
    scheduler = make_scheduler(9, 4, policy=policy, prefix_caching=False)
    scheduler.add(request_of("loads", 20, max_tokens=4, num_computed=8))
    step(scheduler)
    scheduler.loaded("loads", 3)
    assert scheduler.manager.device.num_used == kept


def test_a_loading_row_whose_shared_block_is_withdrawn_still_loads_into_blocks_of_its_own(
    make_scheduler, make_engine, request_of
):
    scheduler = make_scheduler(8, 1)
    engine = make_engine(scheduler, {"a": ([0, 0], 2)})
    engine.add(request_of("b", [0, 1, 1, 1], max_tokens=2, num_computed=2))
    batch = scheduler.schedule()
    engine.see_tables(batch)
    # "b" shares the token that "a" computes in this very batch, and the next one is to be loaded.
    assert scheduler.status("b") == "loading"
    scheduler.cancel(batch)
    assert scheduler.check() == []
    again = scheduler.schedule()
    (row,) = scheduler.rows_of("b")
    assert (scheduler.status("b"), again.loads.tolist()) == ("loading", [[row, 1, scheduler.manager.table(row)[1]]])
    tokens = engine.forward(again)
    engine.load(again, "b")
    with pytest.raises(RequestInFlight):
        scheduler.loaded("b", 1)
    engine.update(again, tokens)
    with pytest.raises(PagedError, match="1 were asked for"):
        scheduler.loaded("b", 2)
    scheduler.loaded("b", 1)
    assert scheduler.check() == []
    engine.run()
    assert [len(engine.outputs[name]) for name in ("a/0", "b/0")] == [2, 2]


def test_tokens_appended_while_loading_do_not_change_what_was_asked_for(make_scheduler, make_engine, request_of):
    scheduler = make_scheduler(12, 1)
    engine = make_engine(scheduler)
    engine.add(request_of("a", [1, 1, 2], max_tokens=2, num_computed=3))
    batch = scheduler.schedule()
    assert len(batch.loads) == 2
    engine.see_tables(batch)
    engine.load(batch, "a")
    scheduler.update(batch, [])
    scheduler.append("a", [2])
    engine.known["a", 0].append(2)
    with pytest.raises(PagedError):
        scheduler.loaded("a", 3)
    assert scheduler.status("a") == "loading"
    scheduler.loaded("a", 2)
    assert engine.step().num_tokens.tolist() == [2]
    engine.run()
    assert len(engine.outputs["a/0"]) == 2


def test_of_cancelled_batches_the_first_ones_loads_are_listed_first(make_scheduler, request_of):
    scheduler, batches = make_scheduler(20, 4), []
    for name in "ab":
        scheduler.add(request_of(name, 18, num_computed=12))
        batches.append(scheduler.schedule())
    for batch in reversed(batches):
        scheduler.cancel(batch)
    assert [scheduler.schedule().loads.tolist() for _ in batches] == [batch.loads.tolist() for batch in batches]


def test_nothing_is_loaded_for_a_request_that_is_rejected_as_its_batch_begins(make_scheduler, request_of):
    scheduler = make_scheduler(8, 4)
    scheduler.add(request_of("a", 18, num_computed=12))
    scheduler.cancel(scheduler.schedule())
    scheduler.append("a", [5] * 20)
    batch = scheduler.schedule()
    assert (batch.loads.tolist(), scheduler.status("a")) == ([], "rejected")


def test_each_time_it_is_admitted_what_may_exist_elsewhere_is_asked_for_and_nothing_else(
    make_scheduler, request_of, run
):
    asked, options = [], {"policy": "vllm", "prefix_caching": False}
    scheduler = make_scheduler(6, 1, elsewhere=lambda *request: (asked.append(request), (0, False))[1], **options)
    for name, length, fields in (("first", 1, {"reads_cache": False}), ("a", 3, {"num_computed": 1})):
        scheduler.add(request_of(name, length, max_tokens=3, **fields))
    run(scheduler)
    assert (scheduler.stats().preemptions, asked) == (1, [("a", 0), ("a", 0)])
