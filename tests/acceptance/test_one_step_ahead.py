"""Steps scheduled before the update of those before them: each sentence of what order promises, by a program of a few calls."""

from paged import Policy

PAUSES = Policy(name="pauses", take="tail", preemption="recompute")


def told(outputs):
    """What an update delivers, as (id, tokens, why it ended)."""
    return [(output.id, output.token_ids, output.finish_reason) for output in outputs]


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


def test_a_stop_that_is_found_late_makes_the_rest_void(make_scheduler, request_of):
    scheduler = make_scheduler(20, 4)
    for name in ("a", "b"):
        scheduler.add(request_of(name, 4, max_tokens=5, eos_token_id=9))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert told(scheduler.update(first, [9, 6])) == [("a", [9], "stop"), ("b", [6], None)]
    # Its blocks are free at once; its row still runs in the second batch, and needs a token there.
    assert scheduler.manager.device.num_used == 2
    assert told(scheduler.update(second, [5, 7])) == [("b", [7], None)]
    assert (scheduler.stats().voided_tokens, scheduler.stats().output_tokens) == (1, 3)


def test_no_token_makes_void_what_rests_on_it_in_a_row_that_was_given_back(make_scheduler):
    scheduler = make_scheduler(4, 1, {"a": (1, 9), "b": (1, 9)}, policy="vllm", prefix_caching=False)
    batches = [scheduler.schedule() for _ in range(3)]
    # Both have two blocks, and want a third.
    assert [id for id, _ in batches[2].preempted] == ["b"]
    assert told(scheduler.update(batches[0], [7], [1, 0])) == [("a", [7], None), ("b", [], None)]
    assert told(scheduler.update(batches[1], [7, 8])) == [("a", [7], None)]
    assert told(scheduler.update(batches[2], [7])) == [("a", [7], "length")]
    assert (scheduler.stats().voided_tokens, scheduler.counts()["waiting"]) == (1, 1)
