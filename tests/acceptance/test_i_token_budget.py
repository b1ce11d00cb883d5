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


FOUR = {"a": (800, 10), "b": (800, 10), "c": (10, 10), "d": (10, 10)}
OF_1024_AND_3 = {"max_tokens_per_step": 1024, "max_sequences": 3}


@pytest.mark.parametrize("policy", CHUNKING)
def test_I3_with_chunking_the_second_takes_what_is_left_and_nobody_overtakes_it(make_scheduler, step, policy):
    scheduler = make_scheduler(200, 16, FOUR, policy=policy, **OF_1024_AND_3)
    assert step(scheduler).tokens == {"a": 800, "b": 224}
    assert scheduler.waiting_ids() == ["c", "d"]


def test_I3_without_chunking_nobody_overtakes_the_head_that_does_not_fit(make_scheduler, step):
    scheduler = make_scheduler(400, 16, FOUR, policy="trtllm-max-utilization", **OF_1024_AND_3)
    assert step(scheduler).tokens == {"a": 800}
    assert scheduler.waiting_ids() == ["b", "c", "d"]


@pytest.mark.parametrize("policy", CHUNKING)
def test_I5_a_decode_the_rest_of_a_prompt_and_the_next_fill_the_budget(make_scheduler, request_of, step, policy):
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
    assert [step(scheduler).tokens for _ in range(3)] == [{"a": 1, "b": 1}] * 3
    scheduler.abort("a")
    assert step(scheduler).tokens == {"b": 1, "c": 1}


@pytest.mark.parametrize("policy", CHUNKING)
def test_I8_the_number_of_sequences_binds_before_the_budget(make_scheduler, step, policy):
    requests = {f"r{number}": 65 for number in range(5)}
    scheduler = make_scheduler(128, 4, requests, policy=policy, max_tokens_per_step=64, max_sequences=2)
    assert [step(scheduler).tokens for _ in range(3)] == [{"r0": 64}, {"r0": 1, "r1": 63}, {"r0": 1, "r1": 2}]


@pytest.mark.parametrize(
    ("lengths", "limits", "steps"),
    [
        # I9: a cap on chunks leaves room for other prompts.
        ({"a": 20, "b": 20, "c": 20}, (32, 12), [{"a": 12, "b": 12, "c": 8}, {"a": 8, "b": 8, "c": 12}]),
        # I10: a peer rounds the second chunk down to full blocks (12, in all 62): an option, which ours does not take.
        ({"a": 50, "b": 50}, (64, None), [{"a": 50, "b": 14}]),
    ],
)
@pytest.mark.parametrize("policy", CHUNKING)
def test_I9_I10_a_chunk_fills_what_is_left_of_the_budget(make_scheduler, step, policy, lengths, limits, steps):
    budget, most = limits
    scheduler = make_scheduler(64, 4, lengths, policy=policy, max_tokens_per_step=budget, max_chunk=most)
    assert [step(scheduler).tokens for _ in steps] == steps


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
    batch = make_scheduler(20, 4, {"a": 6}).schedule()
    kinds = {
        "int64": "rows num_tokens query_start_loc source_batches source_places positions slot_mapping seq_lens sequences",
        "int32": "token_ids block_tables loads",
        "bool": "samples",
    }
    for kind, names in kinds.items():
        assert {name: getattr(batch, name).dtype for name in names.split()} == dict.fromkeys(names.split(), kind)
    for moves in (batch.moves.device_to_host, batch.moves.host_to_device, batch.moves.device_to_device):
        assert (moves.shape, moves.dtype) == ((0, 2), "int32")
    assert not batch.block_tables.flags.writeable


def test_I17_a_row_that_has_its_last_token_in_flight_keeps_its_seat_until_its_batch_ends(make_scheduler):
    scheduler = make_scheduler(20, 4, {"a": (4, 1), "b": (4, 1)}, max_sequences=1)
    first = scheduler.schedule()
    assert (first.ids.tolist(), scheduler.schedule().is_empty) == (["a"], True)
    scheduler.update(first, [7])
    assert scheduler.schedule().ids.tolist() == ["b"]
