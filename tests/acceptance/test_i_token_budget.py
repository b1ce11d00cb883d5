"""Token budget and chunked prefill: how a step is filled."""

import pytest

from paged import POLICIES

CHUNKING = ["paged", "vllm", "fastgen", "sarathi"]


@pytest.mark.parametrize("policy", CHUNKING)
def test_I1_with_an_ample_budget_all_are_scheduled_whole_in_arrival_order(make_scheduler, step, policy):
    scheduler = make_scheduler(200, 4, {f"r{number}": 20 + number for number in range(10)}, policy=policy)
    batch = step(scheduler).batch
    assert list(batch.ids) == [f"r{number}" for number in range(10)]
    assert batch.num_tokens.tolist() == [20 + number for number in range(10)]
    assert len(scheduler.running_ids()) == 10


@pytest.mark.parametrize("policy", CHUNKING)
def test_I3_with_chunking_the_second_takes_what_is_left_and_nobody_overtakes_it(
    make_scheduler, request_of, step, policy
):
    scheduler = make_scheduler(200, 16, policy=policy, max_tokens_per_step=1024, max_sequences=3)
    for name, length in (("a", 800), ("b", 800), ("c", 10), ("d", 10)):
        scheduler.add(request_of(name, length))
    assert step(scheduler).tokens == {"a": 800, "b": 224}
    assert scheduler.waiting_ids() == ["c", "d"]


def test_I3_without_chunking_nobody_overtakes_the_head_that_does_not_fit(make_scheduler, request_of, step):
    scheduler = make_scheduler(400, 16, policy="trtllm-max-utilization", max_tokens_per_step=1024, max_sequences=3)
    for name, length in (("a", 800), ("b", 800), ("c", 10), ("d", 10)):
        scheduler.add(request_of(name, length, max_tokens=10))
    assert step(scheduler).tokens == {"a": 800}
    assert scheduler.waiting_ids() == ["b", "c", "d"]


@pytest.mark.parametrize("policy", CHUNKING)
def test_I5_a_decode_the_rest_of_a_prompt_and_the_start_of_the_next_fill_the_budget(
    make_scheduler, request_of, step, policy
):
    scheduler = make_scheduler(64, 4, {"a": 60, "b": 60}, policy=policy, max_tokens_per_step=64)
    step(scheduler)
    for name in ("c", "d"):
        scheduler.add(request_of(name, 60))
    second = step(scheduler)
    assert (second.tokens, second.batch.num_scheduled_tokens) == ({"a": 1, "b": 56, "c": 7}, 64)
    assert step(scheduler).tokens == {"a": 1, "b": 1, "c": 53, "d": 9}


@pytest.mark.parametrize("policy", CHUNKING)
def test_I6_decodes_come_first_and_a_third_waits_until_one_is_gone(make_scheduler, request_of, step, policy):
    scheduler = make_scheduler(8, 4, {"a": 2, "b": 2}, policy=policy, max_tokens_per_step=2, max_sequences=2)
    assert step(scheduler).tokens == {"a": 2}
    scheduler.add(request_of("c", 2))
    assert step(scheduler).tokens == {"a": 1, "b": 1}
    assert step(scheduler).tokens == {"a": 1, "b": 1}
    assert step(scheduler).tokens == {"a": 1, "b": 1}
    scheduler.abort("a")
    assert step(scheduler).tokens == {"b": 1, "c": 1}


@pytest.mark.parametrize("policy", CHUNKING)
def test_I8_the_number_of_sequences_binds_before_the_budget(make_scheduler, request_of, step, policy):
    scheduler = make_scheduler(128, 4, policy=policy, max_tokens_per_step=64, max_sequences=2)
    for number in range(5):
        scheduler.add(request_of(f"r{number}", 65))
    assert step(scheduler).tokens == {"r0": 64}
    assert step(scheduler).tokens == {"r0": 1, "r1": 63}
    assert step(scheduler).tokens == {"r0": 1, "r1": 2}


@pytest.mark.parametrize("policy", CHUNKING)
def test_I9_a_cap_on_chunks_leaves_room_for_other_prompts(make_scheduler, step, policy):
    scheduler = make_scheduler(64, 4, {"a": 20, "b": 20, "c": 20}, policy=policy, max_tokens_per_step=32, max_chunk=12)
    assert step(scheduler).tokens == {"a": 12, "b": 12, "c": 8}
    assert step(scheduler).tokens == {"a": 8, "b": 8, "c": 12}


@pytest.mark.parametrize("policy", CHUNKING)
def test_I10_a_chunk_fills_the_budget_and_need_not_end_with_a_block(make_scheduler, step, policy):
    # A peer rounds the second chunk down to full blocks (12, in all 62): an option, which ours does not take.
    scheduler = make_scheduler(64, 4, {"a": 50, "b": 50}, policy=policy, max_tokens_per_step=64)
    assert step(scheduler).tokens == {"a": 50, "b": 14}


@pytest.mark.parametrize("policy", CHUNKING)
def test_I11_a_chunk_that_does_not_finish_its_prompt_yields_no_token(make_scheduler, step, policy):
    scheduler = make_scheduler(64, 4, {"a": (50, 2)}, policy=policy, max_tokens_per_step=20)
    for computed in (20, 40):
        taken = step(scheduler)
        assert (taken.batch.samples.tolist(), taken.batch.seq_lens.tolist()) == ([False], [computed])
        assert "a" not in taken.outputs or taken.outputs["a"].token_ids == []
    taken = step(scheduler)
    assert (taken.batch.samples.tolist(), taken.outputs["a"].token_ids) == ([True], [7])


@pytest.mark.parametrize("policy", POLICIES)
def test_I15_with_nothing_to_do_the_batch_is_empty(make_scheduler, request_of, run, policy):
    scheduler = make_scheduler(8, 4, policy=policy)
    for _ in range(2):
        batch = scheduler.schedule()
        assert batch.is_empty
        assert (batch.num_scheduled_tokens, len(batch.rows), len(batch.moves)) == (0, 0, 0)
    scheduler.add(request_of("a", 3, max_tokens=2))
    run(scheduler)
    assert scheduler.schedule().is_empty


def test_I16_the_first_of_two_goes_on_while_the_other_is_still_out(make_scheduler, request_of, scheduled):
    scheduler = make_scheduler(20, 4, {"a": 6})
    first = scheduler.schedule()
    scheduler.add(request_of("b", 5))
    second = scheduler.schedule()
    # "a" need not wait for its own batch either: the token that comes next is the one that place 0 of it samples.
    assert (scheduled(first), scheduled(second)) == ({"a": 6}, {"a": 1, "b": 5})
    assert second.token_ids.tolist()[0] == -1
    assert (second.source_batches.tolist()[0], second.source_places.tolist()[0]) == (first.number, 0)
    scheduler.update(first, [7])
    third = scheduler.schedule()
    assert scheduled(third) == {"a": 1, "b": 1}
    sources = list(zip(third.source_batches.tolist(), third.source_places.tolist(), strict=True))
    assert sources == [(second.number, 0), (second.number, 1)]
    scheduler.update(second, [7, 8])
    scheduler.update(third, [7, 8])
    assert scheduler.check() == []


def test_I17_budget_and_number_of_rows_hold_for_each_batch(make_scheduler, scheduled):
    scheduler = make_scheduler(20, 4, {"a": 4, "b": 4, "c": 4, "d": 4}, max_sequences=3, max_tokens_per_step=8)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (scheduled(first), scheduled(second)) == ({"a": 4, "b": 4}, {"a": 1, "b": 1, "c": 4})
    # "d" waits for a row, not for a batch.
    assert scheduled(scheduler.schedule()) == {"a": 1, "b": 1, "c": 1}


def test_I20_a_batch_is_arrays_that_a_runner_takes_as_they_are(make_scheduler):
    scheduler = make_scheduler(20, 4, {"a": 6})
    batch = scheduler.schedule()
    for name, dtype in (
        ("rows", "int64"),
        ("num_tokens", "int64"),
        ("query_start_loc", "int64"),
        ("token_ids", "int32"),
        ("source_batches", "int64"),
        ("source_places", "int64"),
        ("positions", "int64"),
        ("slot_mapping", "int64"),
        ("seq_lens", "int64"),
        ("samples", "bool"),
        ("sequences", "int64"),
        ("block_tables", "int32"),
        ("loads", "int32"),
    ):
        assert getattr(batch, name).dtype == dtype, name
    for moves in (batch.moves.device_to_host, batch.moves.host_to_device, batch.moves.device_to_device):
        assert (moves.shape, moves.dtype) == ((0, 2), "int32")
    assert not batch.block_tables.flags.writeable
    with pytest.raises(AttributeError):
        batch.number = 7
    scheduler.update(batch, [7])


def test_I17_a_row_that_has_its_last_token_in_flight_keeps_its_seat_until_its_batch_ends(make_scheduler):
    scheduler = make_scheduler(20, 4, {"a": (4, 1), "b": (4, 1)}, max_sequences=1)
    first = scheduler.schedule()
    assert (first.ids.tolist(), scheduler.schedule().is_empty) == (["a"], True)
    scheduler.update(first, [7])
    assert scheduler.schedule().ids.tolist() == ["b"]


def test_I17_rows_that_wait_for_their_caller_take_no_seat_and_others_do(make_scheduler, request_of):
    scheduler = make_scheduler(20, 4, max_sequences=2)
    for name in ("waits", "last", "next", "late"):
        scheduler.add(request_of(name, 4, max_tokens=2 if name == "last" else 9))
    scheduler.update(scheduler.schedule(), [7], counts=[0, 1])
    second = scheduler.schedule()
    assert second.ids.tolist() == ["last", "next"]
    # "last" has its last token in flight, so only "next" has one to go; nobody else may come in beside these two.
    third = scheduler.schedule()
    assert third.ids.tolist() == ["next"]
    scheduler.update(second, [7, 7])
    scheduler.update(third, [7])
    assert scheduler.schedule().ids.tolist() == ["next", "late"]
