"""Order: who comes first, and that waiting costs nobody their place."""

import pytest

from paged import POLICIES, Request


@pytest.mark.parametrize("policy", POLICIES)
def test_K2_K5_one_at_a_time_they_come_by_priority_and_equal_ones_by_arrival(make_scheduler, request_of, run, policy):
    scheduler = make_scheduler(20, 4, policy=policy, max_sequences=1)
    for number, (priority, arrival) in enumerate(
        [(2, 3.0), (2, 1.0), (2, 2.0), *((p, 0.0) for p in (5, 1, 8, 3, 7, 4, 6))]
    ):
        scheduler.add(request_of(f"p{priority} {number}", 4, max_tokens=1, priority=priority), now=arrival)
    order = [id for step in run(scheduler) for id in step.batch.admitted]
    assert order == ["p1 4", "p2 1", "p2 2", "p2 0", "p3 6", "p4 8", "p5 3", "p6 9", "p7 7", "p8 5"]


@pytest.mark.parametrize("policy", POLICIES)
def test_K4_with_two_places_the_first_two_run_and_the_rest_wait_in_order(make_scheduler, request_of, step, policy):
    # Room for two of the longest sequences, also where each gets a region of its own.
    scheduler = make_scheduler(32, 4, policy=policy, max_sequences=2, max_model_len=64)
    for number, priority in enumerate([3, 1, 2, 0]):
        scheduler.add(request_of(f"r{number}", 4, max_tokens=40, priority=priority))
    assert step(scheduler).tokens == {"r3": 4, "r1": 4}
    assert (set(scheduler.running_ids()), scheduler.waiting_ids()) == ({"r3", "r1"}, ["r2", "r0"])


def test_K7_a_head_that_does_not_fit_keeps_its_place(make_scheduler, request_of, step):
    scheduler = make_scheduler(6, 4, {"running": 14}, policy="vllm")
    step(scheduler)
    for name, length in (("big", 12), ("small", 4), ("tiny", 2)):
        scheduler.add(request_of(name, length))
    for _ in range(3):
        assert step(scheduler).tokens == {"running": 1}
        assert scheduler.waiting_ids() == ["big", "small", "tiny"]
    scheduler.abort("running")
    assert list(step(scheduler).tokens) == ["big", "small", "tiny"]


def test_K7_a_follower_keeps_its_place_and_does_not_stop_the_queue(make_scheduler, request_of, step):
    # The second goes on with what the first computes next: it is admitted with 0 tokens. The third is nobody's follower.
    scheduler = make_scheduler(40, 4, max_tokens_per_step=16, max_chunk=8)
    shared = list(range(24))
    scheduler.add(request_of("leader", [*shared, 50], max_tokens=3))
    scheduler.add(request_of("follower", [*shared, 60], max_tokens=3))
    scheduler.add(request_of("other", 8, max_tokens=3))
    first = step(scheduler)
    # The follower shares the 8 tokens that are computed now, and waits for the next ones.
    assert first.tokens == {"leader": 8, "other": 8}
    assert scheduler.running_ids() == ["leader", "follower", "other"]
    assert step(scheduler).tokens == {"leader": 8, "other": 1}
    # The last shared blocks are in this step, and it goes on with them at once.
    assert step(scheduler).tokens == {"leader": 8, "follower": 1, "other": 1}
    assert step(scheduler).tokens == {"leader": 1, "follower": 1}


def test_K7_the_last_block_of_a_prompt_is_waited_for_too(make_scheduler, request_of, step):
    scheduler = make_scheduler(40, 4, max_tokens_per_step=40, max_chunk=20)
    scheduler.add(request_of("leader", range(24), max_tokens=3))
    scheduler.add(request_of("follower", [*range(24), 60], max_tokens=3))
    assert step(scheduler).tokens == {"leader": 20}


def test_K9_a_request_that_is_gone_before_it_is_scheduled_uses_no_block(make_scheduler, step):
    scheduler = make_scheduler(6, 4, {"gone": 4, "stays": 4})
    output = scheduler.abort("gone")
    assert (output.id, output.token_ids, output.finish_reason) == ("gone", [], "abort")
    assert scheduler.waiting_ids() == ["stays"]
    assert step(scheduler).tokens == {"stays": 4}
    assert scheduler.manager.device.num_used == 1


def test_K10_the_same_requests_give_the_same_decisions(make_scheduler, step):
    def decisions():
        scheduler = make_scheduler(12, 4, host_blocks=4, max_tokens_per_step=11, max_sequences=5)
        taken = []
        for number in range(30):
            prompt = [(number * 7 + position) % 3 for position in range(1 + number * 5 % 17)]
            scheduler.add(Request(id=str(number), prompt=prompt, max_tokens=1 + number % 6, priority=number % 2))
            if number % 7 == 3:
                scheduler.abort(str(number - 2))
            batch = step(scheduler, token=number % 3).batch
            taken.append((list(batch.ids), batch.slot_mapping.tolist(), batch.token_ids.tolist(), batch.preempted))
        return taken

    assert decisions() == decisions()
