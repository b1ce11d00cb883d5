"""Steps scheduled before the update of those before them: each sentence of what order promises, by a program of a few calls."""

import pytest

from paged import Policy
from paged.errors import BatchError, RequestInFlight, TooManyOutstanding, WrongTokens

SWAPS = Policy(name="swaps", take="tail", preemption="swap")
PAUSES = Policy(name="pauses", take="tail", preemption="recompute")


def told(outputs):
    """What an update delivers, as (id, tokens, why it ended)."""
    return [(output.id, output.token_ids, output.finish_reason) for output in outputs]


@pytest.fixture
def pair(make_scheduler, request_of):
    """Two requests that run, and two batches that are out: both sample in each."""
    scheduler = make_scheduler(20, 4)
    for name in ("a", "b"):
        scheduler.add(request_of(name, 4, max_tokens=5, eos_token_id=9))
    return scheduler, scheduler.schedule(), scheduler.schedule()


def test_a_token_that_is_being_sampled_is_minus_one_and_its_batch_and_place_are_said(pair):
    _scheduler, first, second = pair
    assert (second.token_ids.tolist(), second.positions.tolist()) == ([-1, -1], [4, 4])
    assert second.source_batches.tolist() == [first.number] * 2
    assert (second.source_places.tolist(), first.source_batches.tolist()) == ([0, 1], [-1] * 8)


def test_a_token_that_has_been_told_is_in_token_ids(pair):
    scheduler, first, _second = pair
    scheduler.update(first, [5, 6])
    third = scheduler.schedule()
    assert third.source_batches.tolist() == [_second.number] * 2
    scheduler.update(_second, [7, 8])
    scheduler.cancel(third)
    fourth = scheduler.schedule()
    assert (fourth.token_ids.tolist(), fourth.source_batches.tolist()) == ([7, 8], [-1, -1])


def test_a_chunk_may_end_in_a_token_that_nobody_knows_behind_known_ones(make_scheduler, request_of):
    # "b" gives way while its first token is being sampled, and comes back when "a" has ended.
    scheduler = make_scheduler(9, 16, policy="vllm", max_tokens_per_step=160, max_outstanding=5)
    scheduler.add(request_of("a", 64, max_tokens=5))
    scheduler.add(request_of("b", 64, max_tokens=5))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [id for id, _ in second.preempted] == ["b"]
    scheduler.abort("a")
    third = scheduler.schedule()
    assert (third.ids.tolist(), third.seq_lens.tolist(), third.samples.tolist()) == (["b"], [65], [True])
    assert third.token_ids.tolist()[-1] == -1
    assert (third.source_batches.tolist()[-1], third.source_places.tolist()[-1]) == (first.number, 1)
    # What "b" computed is content of the first batch: it shares that, and computes the last block again.
    assert set(third.source_batches.tolist()[:-1]) <= {-1}
    assert told(scheduler.update(first, [7, 7])) == [("b", [7], None)]
    assert told(scheduler.update(second, [7])) == []
    assert told(scheduler.update(third, [8])) == [("b", [8], None)]


def test_a_row_that_came_back_goes_on_behind_what_it_samples_in_both_its_lives(make_scheduler, request_of):
    scheduler = make_scheduler(9, 16, policy="vllm", max_tokens_per_step=160, max_outstanding=5)
    scheduler.add(request_of("a", 64, max_tokens=5))
    scheduler.add(request_of("b", 64, max_tokens=5))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.abort("a")
    third, fourth, fifth = (scheduler.schedule() for _ in range(3))
    # Token 65 is of the first batch, 66 of the third and 67 of the fourth.
    for batch, before in ((fourth, third), (fifth, fourth)):
        assert (batch.ids.tolist(), batch.token_ids.tolist()) == (["b"], [-1])
        assert (batch.source_batches.tolist(), batch.source_places.tolist()) == ([before.number], [0])
    assert (fourth.seq_lens.tolist(), fifth.seq_lens.tolist()) == ([66], [67])
    batches = [(first, [7, 7]), (second, [7]), (third, [8]), (fourth, [9]), (fifth, [10])]
    outputs = [told(scheduler.update(batch, tokens)) for batch, tokens in batches]
    assert outputs == [[("b", [token], None)] if token else [] for token in (7, 0, 8, 9, 10)]
    # Of its four blocks it shared three with its first life, and computed the last one again.
    assert scheduler.stats().recomputed_tokens == 16


def test_what_was_appended_is_no_output_of_one_that_gave_its_row_back(make_scheduler, request_of):
    scheduler = make_scheduler(9, 16, {"a": (63, 5)}, policy="vllm", max_tokens_per_step=160)
    scheduler.add(request_of("b", 48, max_tokens=5, min_tokens=2, eos_token_id=9))
    scheduler.update(scheduler.schedule(), [7], counts=[1, 0])
    scheduler.append("b", range(100, 116))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [id for id, _ in second.preempted] == ["b"]
    # Its first output is a stop id that does not count yet.
    assert told(scheduler.update(first, [7, 9])) == [("a", [7], None), ("b", [9], None)]
    scheduler.update(second, [7])


def test_a_stop_that_is_found_late_makes_the_rest_void(pair):
    scheduler, first, second = pair
    assert told(scheduler.update(first, [9, 6])) == [("a", [9], "stop"), ("b", [6], None)]
    # Its blocks are free at once; its row still runs in the second batch, and needs a token there.
    assert scheduler.manager.device.num_used == 2
    assert told(scheduler.update(second, [5, 7])) == [("b", [7], None)]
    assert (scheduler.stats().voided_tokens, scheduler.stats().output_tokens) == (1, 3)


def test_an_abort_in_flight_gives_blocks_back_at_once_and_the_next_batch_draws_them(make_scheduler, request_of):
    scheduler = make_scheduler(2, 4, {"a": 6}, policy="vllm", prefix_caching=False)
    first = scheduler.schedule()
    blocks = scheduler.manager.table(0).tolist()
    assert scheduler.abort("a").finish_reason == "abort"
    assert scheduler.manager.device.num_used == 0
    scheduler.add(request_of("b", 6))
    second = scheduler.schedule()
    assert sorted(scheduler.manager.table(int(second.rows[0])).tolist()) == sorted(blocks)
    assert told(scheduler.update(first, [7])) == []
    assert told(scheduler.update(second, [8])) == [("b", [8], None)]


def test_a_row_that_is_swapped_in_flight_gets_its_token_and_goes_on(make_scheduler, make_engine):
    def tokens(num_blocks, host_blocks, ahead):
        scheduler = make_scheduler(num_blocks, 4, host_blocks=host_blocks, policy=SWAPS)
        engine = make_engine(scheduler, {"a": ([ord("a")] * 8, 8), "b": ([ord("b")] * 8, 8)})
        out, kinds = [], []
        for _ in range(100):
            if not scheduler.has_unfinished:
                break
            batch = scheduler.schedule()
            kinds += [kind for _, kind in batch.preempted]
            out += [] if batch.is_empty else [batch]
            if out and (batch.is_empty or len(out) > ahead):
                engine.update(out[0], engine.forward(out.pop(0)))
        return engine.outputs, kinds

    plain, _ = tokens(20, 0, 0)
    for ahead in (1, 2):
        assert tokens(5, 8, ahead) == (plain, ["swap"])


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_prefix_hit_on_a_batch_that_is_out_goes_with_that_batch(make_scheduler, request_of, is_cancelled):
    scheduler = make_scheduler(20, 4, {"a": range(9)})
    first = scheduler.schedule()
    scheduler.add(request_of("b", [*range(8), 80]))
    second = scheduler.schedule()
    assert (second.num_tokens.tolist(), scheduler.stats().shared_in_flight_tokens) == ([1, 1], 8)
    if not is_cancelled:
        scheduler.update(first, [7])
        assert told(scheduler.update(second, [7, 8])) == [("a", [7], None), ("b", [8], None)]
        return
    scheduler.cancel(second)
    scheduler.cancel(first)
    # One of them computes the prefix now, and the other shares it.
    assert scheduler.schedule().num_tokens.tolist() == [9, 1]


def test_no_token_makes_later_shares_void_that_rest_on_it(pair):
    scheduler, first, second = pair
    assert told(scheduler.update(first, [6], [0, 1])) == [("a", [], None), ("b", [6], None)]
    with pytest.raises(RequestInFlight):
        # A void share is a share.
        scheduler.append("a", [5])
    assert told(scheduler.update(second, [4, 7])) == [("b", [7], None)]
    assert scheduler.stats().voided_tokens == 1
    assert scheduler.schedule().ids.tolist() == ["b"]
    with pytest.raises(BatchError):
        scheduler.update(second, [4, 7])
    scheduler.append("a", [5])
    third = scheduler.schedule()
    assert (third.ids.tolist(), third.token_ids.tolist()) == (["a", "b"], [5, -1])


def test_no_token_makes_void_what_rests_on_it_in_a_row_that_was_given_back(make_scheduler):
    scheduler = make_scheduler(4, 1, {"a": (1, 9), "b": (1, 9)}, policy="vllm", prefix_caching=False)
    batches = [scheduler.schedule() for _ in range(3)]
    # Both have two blocks, and want a third.
    assert [id for id, _ in batches[2].preempted] == ["b"]
    assert told(scheduler.update(batches[0], [7], [1, 0])) == [("a", [7], None), ("b", [], None)]
    assert told(scheduler.update(batches[1], [7, 8])) == [("a", [7], None)]
    assert told(scheduler.update(batches[2], [7])) == [("a", [7], "length")]
    assert (scheduler.stats().voided_tokens, scheduler.counts()["waiting"]) == (1, 1)


def test_a_paused_request_that_gets_no_token_stays_out_until_the_caller_appends(make_scheduler):
    scheduler = make_scheduler(3, 1, {"a": (1, 4), "b": (2, 4)}, policy=PAUSES, prefix_caching=False)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert ([id for id, _ in second.preempted], scheduler.status("b")) == (["b"], "paused")
    scheduler.update(first, [7], [1, 0])
    assert (scheduler.status("b"), scheduler.rows_of("b")) == ("waiting", [])
    scheduler.update(second, [7])
    scheduler.abort("a")
    assert scheduler.schedule().is_empty
    assert "waits for append()" in str(scheduler.explain("b"))


def test_the_last_of_a_group_that_is_paused_and_gets_no_token_does_not_sample_again(make_scheduler, request_of):
    scheduler = make_scheduler(7, 1, {"a": (3, 9)}, policy=PAUSES)
    scheduler.add(request_of("b", 2, num_sequences=2))
    scheduler.finish("b", 0)
    batches = [scheduler.schedule() for _ in range(3)]
    assert (batches[2].preempted, scheduler.status("b")) == ((("b", "recompute"),), "paused")
    # Its prompt, all that it knows, is still computed.
    scheduler.update(batches[0], [7], [1, 0])
    scheduler.update(batches[1], [7], [1, 0])
    batches.append(scheduler.schedule())
    assert batches[3].ids.tolist() == ["a"]
    scheduler.abort("a")
    assert scheduler.schedule().is_empty
    scheduler.append("b", [5], 1)
    assert scheduler.schedule().samples.tolist() == [True]


def test_several_tokens_where_a_later_batch_rests_on_one_are_refused(pair):
    scheduler, first, second = pair
    with pytest.raises(WrongTokens, match=f"row 0 got 2 tokens, and batch {second.number} rests on one"):
        scheduler.update(first, [5, 6, 7], [2, 1])
    assert told(scheduler.update(first, [5, 6], [1, 1])) == [("a", [5], None), ("b", [6], None)]


def test_more_batches_than_max_outstanding_are_refused_with_the_number(make_scheduler):
    scheduler = make_scheduler(20, 4, {"a": 4}, max_outstanding=2)
    first, _second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(TooManyOutstanding, match="2 batches are out, which is the limit"):
        scheduler.schedule()
    scheduler.update(first, [7])
    assert scheduler.schedule().ids.tolist() == ["a"]


def test_moves_that_did_not_run_are_refused_before_those_of_a_later_batch_that_did(make_scheduler, request_of):
    scheduler = make_scheduler(7, 1, host_blocks=20, policy=SWAPS, prefix_caching=False, max_outstanding=8)
    for name in ("a", "b", "c"):
        scheduler.add(request_of(name, 1, max_tokens=9))
    batches = []
    while sum(len(batch.moves) > 0 for batch in batches) < 2:
        batches.append(scheduler.schedule())
        assert len(batches) < 8
    while not len(batches[-1].moves):
        scheduler.cancel(batches.pop())
    scheduler.cancel(batches.pop(), moved=True)
    while not len(batches[-1].moves):
        scheduler.cancel(batches.pop())
    with pytest.raises(BatchError, match="cancelled after its moves had run"):
        scheduler.cancel(batches[-1])
    scheduler.cancel(batches[-1], moved=True)
