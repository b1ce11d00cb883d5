"""Liveness: the ways in which schedulers of the field have hung, starved or thrashed."""

import pytest

from paged import POLICIES
from paged.errors import NeverFits


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("host_blocks", [0, 20])
def test_P1_long_prompts_all_finish(make_scheduler, request_of, run, policy, caching, host_blocks):
    # 4 × (60 + 20) tokens over 24 blocks of 4: at most one whole sequence and a bit.
    scheduler = make_scheduler(
        24, 4, policy=policy, prefix_caching=caching, host_blocks=host_blocks, max_tokens_per_step=16, max_sequences=4
    )
    for number in range(6):
        scheduler.add(request_of(f"r{number}", 60, max_tokens=20))
    steps = run(scheduler, max_steps=3000)
    assert all(step.batch.num_scheduled_tokens >= 1 for step in steps)
    assert (scheduler.counts()["finished"], scheduler.manager.device.num_used) == (6, 0)
    if policy == "paged":
        assert scheduler.stats().max_preemptions <= 4


@pytest.mark.parametrize("policy", ["vllm", "paged"])
def test_P2_a_preempted_request_is_not_starved_by_fresh_ones(make_scheduler, request_of, step, policy):
    scheduler = make_scheduler(6, 4, policy=policy, prefix_caching=False)
    for number, (name, prompt) in enumerate((("survivor", 8), ("victim", 16))):
        scheduler.add(request_of(name, prompt, max_tokens=4), now=float(number))
    step(scheduler)
    preempted = []
    while scheduler.status("victim") != "finished":
        number = scheduler.counts()["submitted"]
        assert number < 60
        scheduler.add(request_of(f"fresh{number}", 8, max_tokens=4), now=float(number))
        preempted += step(scheduler).batch.preempted
    assert "victim" in dict(preempted)


@pytest.mark.parametrize("policy", POLICIES)
def test_P4_nobody_is_preempted_for_a_request_that_can_never_fit(make_scheduler, request_of, step, policy):
    scheduler = make_scheduler(8, 4, {"a": (8, 8)}, policy=policy)
    step(scheduler)
    with pytest.raises(NeverFits):
        scheduler.add(request_of("huge", 40))
    second = step(scheduler)
    assert (second.tokens, second.batch.preempted) == ({"a": 1}, ())


@pytest.mark.parametrize("policy", POLICIES)
def test_P4_a_waiting_request_preempts_nobody(make_scheduler, request_of, step, policy):
    scheduler = make_scheduler(8, 4, policy=policy)
    scheduler.add(request_of("a", 20, max_tokens=8, priority=5))
    step(scheduler)
    scheduler.add(request_of("urgent", 16, max_tokens=2, priority=0))
    while scheduler.status("a") != "finished":
        taken = step(scheduler)
        assert taken.batch.preempted == ()
        assert list(taken.tokens) == ["a"]
    assert list(step(scheduler).tokens) == ["urgent"]


@pytest.mark.parametrize("policy", ["vllm", "paged"])
def test_P6_a_preemption_neither_skips_nor_repeats_another_row(make_scheduler, request_of, step, policy):
    # Ten rows cross a block boundary in one step, and 5 blocks are there.
    scheduler = make_scheduler(25, 4, policy=policy, prefix_caching=False)
    for number in range(10):
        scheduler.add(request_of(f"r{number}", 8, max_tokens=4))
    step(scheduler)
    taken = step(scheduler)
    victims = [id for id, _ in taken.batch.preempted]
    assert sorted([*victims, *taken.tokens]) == [f"r{number}" for number in range(10)]
    # Two victims suffice: without them 8 rows want 8 blocks, and they give what is missing beside the 5.
    assert list(taken.tokens.values()) == [1] * 8


@pytest.mark.parametrize("policy", POLICIES)
def test_P7_a_partial_last_block_takes_new_tokens_in_a_full_pool(make_scheduler, step, policy):
    scheduler = make_scheduler(4, 4, {"a": (5, 3), "b": (5, 3)}, policy=policy, prefix_caching=False, max_model_len=8)
    step(scheduler)
    assert scheduler.manager.device.num_available == 0
    for _ in range(2):
        taken = step(scheduler)
        assert (taken.tokens, taken.batch.preempted) == ({"a": 1, "b": 1}, ())
    assert not scheduler.has_unfinished


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("host_blocks", [0, 8])
def test_P10_a_request_that_waits_for_its_caller_does_not_stop_the_others(
    make_scheduler, request_of, run, step, policy, host_blocks
):
    scheduler = make_scheduler(4, 4, {"idle": (13, 3)}, policy=policy, host_blocks=host_blocks)
    scheduler.update(scheduler.schedule(), [], [0])
    scheduler.add(request_of("other", 4, max_tokens=2))
    for _ in range(6):
        step(scheduler)
    assert scheduler.status("other") == "finished"
    # It goes on when the caller does.
    scheduler.append("idle", [5])
    run(scheduler, max_steps=20)
    assert scheduler.status("idle") == "finished"


@pytest.mark.parametrize("policy", POLICIES)
def test_P11_a_group_whose_worst_case_is_over_the_pool_ends_all_the_same(make_scheduler, request_of, run, policy):
    scheduler = make_scheduler(4, 4, policy=policy)
    try:
        scheduler.add(request_of("group", 4, max_tokens=8, num_sequences=2))
    except NeverFits:
        assert policy == "static", "only who reserves the worst case may refuse it"
    run(scheduler, max_steps=60)
    assert scheduler.manager.device.num_used == 0


def test_P12_tokens_computed_elsewhere_wait_for_room_like_any_other(make_scheduler, request_of, step):
    scheduler = make_scheduler(4, 4, {"runs": (9, 2)})
    step(scheduler)
    scheduler.add(request_of("loads", 13, num_computed=12))
    assert step(scheduler).tokens == {"runs": 1}
    batch = scheduler.schedule()
    assert batch.loads[:, 1].tolist() == [0, 4, 8]
    scheduler.update(batch, [])
    scheduler.loaded("loads", 12)
    assert step(scheduler).tokens == {"loads": 1}


def test_a_soak_that_shares_with_its_victims_ends_nothing_that_fits():
    from paged.testing import soak

    # What the first request shares with a victim costs nothing until that victim gives it up, and a block afterwards.
    assert soak(150, seed=466).num_free == 12
