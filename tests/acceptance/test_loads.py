"""Blocks that somebody else fills: tokens computed elsewhere, and moves that run in the background."""

import pytest

from paged import PagedError


def test_tokens_computed_elsewhere_are_loaded_and_the_rest_is_computed(make_scheduler, make_engine, request_of):
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
    scheduler.loaded("a", 12)
    assert scheduler.manager.lookup(range(18)).num_tokens == 12
    second = engine.step()
    assert (second.num_tokens.tolist(), second.positions.tolist()) == ([6], list(range(12, 18)))
    assert len(engine.run()["a/0"]) == 3


def test_what_is_left_to_compute_of_a_loading_prompt_is_kept_from_newcomers(make_scheduler, request_of, step):
    scheduler = make_scheduler(9, 4, {"runs": 1}, policy="vllm", prefix_caching=False)
    scheduler.add(request_of("loads", 24, num_computed=8))
    step(scheduler)
    # One of nine blocks is for "runs", two are loaded into, and four are for the rest of the prompt.
    assert scheduler.manager.device.num_used == 3
    scheduler.add(request_of("late", 12))
    assert step(scheduler).tokens == {"runs": 1}
    assert scheduler.explain("late").blocks_free == 2
    scheduler.loaded("loads", 8)
    assert step(scheduler).tokens == {"runs": 1, "loads": 16}


def test_a_newcomer_takes_nothing_that_is_reserved_for_a_request_that_loads(make_scheduler, request_of, step):
    scheduler = make_scheduler(6, 4, policy="trtllm-guaranteed-no-evict", prefix_caching=False)
    scheduler.add(request_of("loads", 12, max_tokens=6, num_computed=6))
    step(scheduler)
    # Two blocks are loaded into, and three more are reserved; nothing else can run now.
    scheduler.add(request_of("late", 1, max_tokens=7))
    assert step(scheduler).tokens == {}
    assert scheduler.status("late") == "waiting"
    scheduler.loaded("loads", 6)
    while scheduler.status("loads") == "running" or scheduler.status("late") == "waiting":
        step(scheduler)
    assert scheduler.stats().preemptions_recompute == 0


@pytest.mark.parametrize("policy", ["vllm", "tgi", "static"])
def test_only_blocks_of_tokens_that_exist_elsewhere_are_loaded_into(make_scheduler, request_of, policy):
    scheduler = make_scheduler(9, 4, policy=policy, prefix_caching=False)
    scheduler.add(request_of("loads", 20, max_tokens=4, num_computed=6))
    batch = scheduler.schedule()
    assert batch.loads[:, 1].tolist() == [0, 4]
    scheduler.update(batch, [])


@pytest.mark.parametrize(("policy", "kept"), [("vllm", 1), ("trtllm-guaranteed-no-evict", 1), ("tgi", 6)])
def test_blocks_for_what_did_not_arrive_go_back_unless_all_were_drawn_at_once(
    make_scheduler, request_of, step, policy, kept
):
    scheduler = make_scheduler(9, 4, policy=policy, prefix_caching=False)
    scheduler.add(request_of("loads", 20, max_tokens=4, num_computed=8))
    step(scheduler)
    scheduler.loaded("loads", 3)
    assert scheduler.manager.device.num_used == kept


@pytest.mark.parametrize(("arrived", "computed"), [(12, 6), (7, 11), (4, 14), (0, 18)])
def test_what_did_not_arrive_is_computed(make_scheduler, make_engine, request_of, arrived, computed):
    scheduler = make_scheduler(20, 4)
    engine = make_engine(scheduler)
    engine.add(request_of("a", list(range(18)), max_tokens=2, num_computed=12))
    batch = scheduler.schedule()
    engine.see_tables(batch)
    engine.load(batch, "a")
    scheduler.update(batch, [])
    scheduler.loaded("a", arrived)
    assert engine.step().num_tokens.tolist() == [computed]
    assert len(engine.run()["a/0"]) == 2


def test_what_a_batch_that_is_out_computes_is_not_asked_for_from_elsewhere(make_scheduler, request_of):
    scheduler = make_scheduler(8, 1, {"a": ([0, 0, 0, 0], 1)})
    first = scheduler.schedule()
    scheduler.add(request_of("b", [0, 0, 0], max_tokens=1, num_computed=2))
    second = scheduler.schedule()
    assert (len(second.loads), second.ids.tolist(), second.positions.tolist()) == (0, ["b"], [2])
    for batch in (first, second):
        assert [output.finish_reason for output in scheduler.update(batch, [7])] == ["length"]


def test_prefix_hits_come_before_loads_and_one_token_is_left_to_compute(make_scheduler, make_engine, request_of):
    scheduler = make_scheduler(20, 4)
    engine = make_engine(scheduler, {"first": ([*range(8), 90], 1)})
    engine.run()
    # Tokens 0 to 7 are cached; everything is said to exist elsewhere, but the last token is ours.
    engine.add(request_of("second", list(range(16)), max_tokens=2, num_computed=16))
    batch = scheduler.schedule()
    assert batch.loads[:, 1].tolist() in ([8], [8, 12])
    engine.see_tables(batch)
    engine.load(batch, "second")
    scheduler.update(batch, [])
    # Of the 7 that were asked for, all arrived.
    scheduler.loaded("second", 7)
    assert engine.step().num_tokens.tolist() == [1]
    engine.run()
    assert len(engine.outputs["second/0"]) == 2


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
    row = scheduler.rows_of("b")[0] if scheduler.status("b") == "loading" else None
    for loading, _, block in again.loads:
        assert int(loading) == row
        assert int(block) in scheduler.manager.table(row)
    tokens = engine.forward(again)
    if len(again.loads):
        engine.load(again, "b")
    engine.update(again, tokens)
    if scheduler.status("b") == "loading":
        scheduler.loaded("b", len(again.loads))
    assert scheduler.check() == []
    engine.run()
    assert [len(engine.outputs[name]) for name in ("a/0", "b/0")] == [2, 2]


def test_what_lost_its_loads_and_finds_them_computed_runs_like_any_other(make_scheduler, request_of, run):
    scheduler = make_scheduler(12, 1, {"a": ([0, 0], 2)})
    scheduler.add(request_of("b", [0, 1, 1, 1], max_tokens=2, num_computed=2))
    batch = scheduler.schedule()
    assert scheduler.status("b") == "loading"
    scheduler.cancel(batch)
    # This one computes in the same batch what "b" was to load.
    scheduler.add(request_of("urgent", [0, 1, 1, 5], max_tokens=2, priority=-1))
    again = scheduler.schedule()
    assert (scheduler.status("b"), len(again.loads)) == ("running", 0)
    scheduler.cancel(again)
    assert (scheduler.status("b"), scheduler.check()) == ("running", [])
    run(scheduler)
    assert scheduler.stats().finished == 3


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


def test_a_cancelled_load_of_a_request_that_outgrew_the_pool_is_not_listed_again(make_scheduler, request_of, step):
    scheduler = make_scheduler(8, 4, policy="vllm")
    scheduler.add(request_of("grows", 12, num_computed=8))
    scheduler.add(request_of("goes on", 4))
    scheduler.cancel(scheduler.schedule())
    scheduler.append("grows", [1] * 200)
    # Its end is found in the step that would list the loads again.
    batch = scheduler.schedule()
    assert batch.loads.tolist() == []
    outputs = scheduler.update(batch, [7] * int(batch.samples.sum()))
    assert [(output.id, output.finish_reason) for output in outputs.others] == [("grows", "rejected")]
    assert step(scheduler).tokens == {"goes on": 1}
