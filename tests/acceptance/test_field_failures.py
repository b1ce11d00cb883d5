"""Failures of the field, made small: each of these hung, leaked or crashed somewhere."""

from __future__ import annotations

import numpy as np
import pytest

from paged import POLICIES, BlockManager, Request, Scheduler
from paged.errors import NeverFits, UnknownRequest


@pytest.mark.parametrize(
    "policy", ["vllm", "fastgen", "sarathi", "trtllm-max-utilization", "trtllm-guaranteed-no-evict", "tgi", "paged"]
)
def test_a_large_prompt_that_is_mostly_computed_elsewhere_gets_in_between_others(make_scheduler, request_of, policy):
    scheduler = make_scheduler(270, 16, {"long": (1600, 16)}, policy=policy)
    scheduler.add(request_of("loaded", 4080, max_tokens=16, num_computed=4000))
    scheduler.add(request_of("short", 160, max_tokens=16))
    for _ in range(200):
        if not scheduler.has_unfinished:
            break
        batch = scheduler.schedule()
        if not batch.is_empty:
            scheduler.update(batch, np.full(int(batch.samples.sum()), 7))
        if len(batch.loads):
            scheduler.loaded("loaded", 4000)
        assert scheduler.check() == []
    assert (scheduler.counts()["finished"], scheduler.manager.device.num_used) == (3, 0)
    assert scheduler.stats().computed_tokens <= 1600 + 80 + 160 + 3 * 15 + scheduler.stats().recomputed_tokens


@pytest.mark.parametrize("policy", [name for name, policy in POLICIES.items() if policy.layout != "region"])
def test_two_prompts_that_fill_the_pool_to_the_last_block_both_finish(make_scheduler, run, policy):
    # 4 + 1 and 3 + 1 blocks, and 7 in all.
    scheduler = make_scheduler(7, 4, {"four": (16, 4), "three": (12, 4)}, policy=policy)
    run(scheduler, max_steps=60)
    assert scheduler.counts()["finished"] == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_over_the_pool_but_under_the_models_length_is_refused_and_does_not_wait(
    make_scheduler, request_of, run, policy
):
    scheduler = make_scheduler(8, 4, {"before": (8, 2)}, policy=policy, max_model_len=1000)
    with pytest.raises(NeverFits):
        scheduler.add(request_of("over", 40, max_tokens=2))
    scheduler.add(request_of("after", 8, max_tokens=2))
    run(scheduler, max_steps=20)
    counts = scheduler.counts()
    assert (counts["finished"], counts["rejected"]) == (2, 1)


def test_ten_thousand_requests_leave_the_free_count_where_it_was():
    manager = BlockManager(64, 4, host_blocks=32)
    scheduler = Scheduler(manager, max_tokens_per_step=64, max_sequences=16)
    rng = np.random.default_rng(7)
    added = steps = 0
    while added < 10_000 or scheduler.has_unfinished:
        for _ in range(int(rng.integers(0, 6))):
            if added < 10_000 and scheduler.counts()["waiting"] < 40:
                prompt = rng.integers(0, 3, int(rng.integers(1, 30))).tolist()
                scheduler.add(Request(id=str(added), prompt=prompt, max_tokens=int(rng.integers(1, 9)), eos_token_id=2))
                added += 1
        if added and rng.random() < 0.2:
            victim = str(int(rng.integers(max(0, added - 30), added)))
            scheduler.abort(victim)
        batch = scheduler.schedule()
        if not batch.is_empty:
            if rng.random() < 0.03:
                scheduler.cancel(batch, moved=bool(rng.random() < 0.5))
            else:
                scheduler.update(batch, rng.integers(0, 3, int(batch.samples.sum())))
        steps += 1
        assert steps < 100_000
        if steps % 50 == 0:
            assert scheduler.check() == []
    assert scheduler.check() == []
    assert (manager.device.num_used, manager.host.num_used) == (0, 0)
    assert (manager.device.num_available, manager.host.num_free + manager.host.num_cached) == (64, 32)
    counts = scheduler.counts()
    assert counts["finished"] + counts["aborted"] == counts["submitted"] == 10_000
    assert manager.reset_cache()
    assert manager.device.num_free == 64


@pytest.mark.parametrize(
    "policy", ["vllm", "fastgen", "sarathi", "trtllm-max-utilization", "trtllm-guaranteed-no-evict", "tgi", "paged"]
)
def test_less_and_less_memory_is_slower_and_never_stuck(make_scheduler, request_of, run, policy):
    # 12 requests of 40 + 20 tokens: 180 blocks hold all, 15 hold one.
    num_blocks, slowest = 190.0, 0
    while num_blocks >= 15:
        scheduler = make_scheduler(int(num_blocks), 4, policy=policy, max_tokens_per_step=64)
        for number in range(12):
            scheduler.add(request_of(f"r{number}", 40, max_tokens=20))
        steps = len(run(scheduler, max_steps=2000))
        assert scheduler.counts()["finished"] == 12
        assert scheduler.stats().max_preemptions <= (4 if policy == "paged" else 30)
        if num_blocks == 190.0:
            ample = steps
            assert scheduler.stats().max_preemptions == 0
        assert steps >= ample
        slowest = max(slowest, steps)
        num_blocks *= 0.9
    # One after the other would be 12 × (1 + 19) steps.
    assert ample < slowest <= 12 * 20


def test_an_abort_in_every_state_leaves_nothing_behind(make_scheduler, request_of, step):
    scheduler = make_scheduler(12, 4, host_blocks=12, max_tokens_per_step=16, max_sequences=3)

    def aborted(id):
        output = scheduler.abort(id)
        assert (output.id, output.finish_reason) == (id, "abort")
        assert scheduler.check() == []
        assert scheduler.abort(id) is None

    scheduler.add(request_of("waiting", 4))
    aborted("waiting")
    scheduler.add(request_of("mid-chunk", 30))
    step(scheduler)
    aborted("mid-chunk")
    scheduler.add(request_of("running", 4))
    step(scheduler)
    assert scheduler.status("running") == "running"
    aborted("running")
    scheduler.add(request_of("loading", 12, num_computed=8))
    scheduler.update(scheduler.schedule(), [])
    assert scheduler.status("loading") == "loading"
    aborted("loading")
    scheduler.add(request_of("finished", 4, max_tokens=1))
    step(scheduler)
    assert scheduler.abort("finished") is None
    with pytest.raises(UnknownRequest):
        scheduler.abort("unknown")
    scheduler.add(request_of("in flight", 4))
    batch = scheduler.schedule()
    assert scheduler.abort("in flight").finish_reason == "abort"
    assert list(scheduler.update(batch, [7])) == []
    assert scheduler.abort("in flight") is None
    assert scheduler.manager.device.num_used == 0
    assert not scheduler.has_unfinished


@pytest.mark.parametrize("host_blocks", [0, 12])
def test_an_abort_of_a_preempted_request_leaves_nothing_behind(make_scheduler, step, host_blocks):
    for policy in ("vllm", "paged"):
        scheduler = make_scheduler(6, 4, {"a": 12, "b": 12}, policy=policy, host_blocks=host_blocks)
        step(scheduler)
        assert [id for id, _ in step(scheduler).batch.preempted] == ["b"]
        assert scheduler.status("b") in ("waiting", "paused", "swapped")
        assert scheduler.abort("b").finish_reason == "abort"
        assert scheduler.check() == []
        scheduler.abort("a")
        assert (scheduler.manager.device.num_used, scheduler.manager.host.num_used) == (0, 0)


FIELDS = ("salt", "adapter", "extra_key")


@pytest.mark.parametrize("first", FIELDS)
@pytest.mark.parametrize("second", FIELDS)
def test_a_salt_an_adapter_and_a_key_of_the_same_spelling_share_nothing(make_scheduler, run, first, second):
    scheduler = make_scheduler(20, 4)
    prompt = list(range(13))
    for id, fields in (("one", {first: "x"}), ("two", {second: "x"}), ("three", {second: "y"}), ("four", {})):
        scheduler.add(Request(id=id, prompt=prompt, max_tokens=1, **fields))
        steps = run(scheduler)
        expected = 1 if (id, first) == ("two", second) else 13
        assert steps[0].tokens == {id: expected}
