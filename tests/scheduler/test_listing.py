"""Requests in a list: their figures against the scheduler's other answers, and the sentence of `explain` by itself."""

from random import Random

import pytest

from paged import BlockManager, Request, Scheduler


def run(policy, seed):
    """Steps of a scheduler under pressure; yields it after each."""
    random = Random(seed)
    scheduler = Scheduler(BlockManager(24, 4, host_blocks=8), policy=policy, max_sequences=5, max_tokens_per_step=40)
    for number in range(14):
        prompt = [random.randrange(50) for _ in range(random.randint(1, 20))]
        groups = random.randint(1, 2) if policy == "paged" else 1
        scheduler.add(Request(id=f"r{number}", prompt=prompt, max_tokens=random.randint(1, 30), num_sequences=groups))
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        yield scheduler
        scheduler.update(batch, [random.randrange(50) for _ in range(int(batch.samples.sum()))])
        yield scheduler


@pytest.mark.parametrize("policy", ["paged", "vllm", "paged-fair"])
def test_every_request_that_is_alive_is_listed_once_and_in_order(policy):
    has_been_away = False
    for scheduler in run(policy, 3):
        views = scheduler.requests(100)
        counts = scheduler.counts()
        running, away = counts["running"], len(views) - counts["running"] - counts["waiting"]
        has_been_away = has_been_away or away > 0
        assert [view.id for view in views[:running]] == scheduler.running_ids()
        assert [view.id for view in views[running + away :]] == scheduler.waiting_ids()
        assert scheduler.requests(3) == views[:3]
        assert scheduler.next_id == next(iter(scheduler.waiting_ids()), None)
        for view in views:
            answer = scheduler.explain(view.id)
            assert (view.status, scheduler.explain(view.id, with_holders=False).reason) == (
                answer.status,
                answer.reason,
            )
            assert scheduler.request(view.id) == view
            rows = scheduler.rows_of(view.id)
            assert view.device_blocks == sum(int(scheduler.manager.rows.num_blocks[row]) for row in rows)
            if len(rows) <= 1:
                assert view.output_tokens >= len(scheduler.tokens_of(view.id)) - view.prompt_tokens
    assert has_been_away or policy != "paged"


def test_one_that_is_not_alive_is_not_listed_but_has_a_reason():
    *_, scheduler = run("paged", 1)
    assert scheduler.requests(10) == scheduler.requests(2**62 - 1) == []
    assert scheduler.explain("r0", with_holders=False).reason == scheduler.explain("r0").reason
