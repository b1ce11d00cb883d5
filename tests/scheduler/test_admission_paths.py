"""The ordinary request's short way in decides, draws and counts as the long way does."""

import random

import pytest

from paged.block_manager import BlockManager, Memory
from paged.block_manager.pool import Pool
from paged.scheduler import POLICIES, Request, Scheduler


def decisions_of(seed: int, policy: str, *, is_ordinary: bool) -> list[object]:
    """All that a random run on a small pool without a cache decides. A request that keeps to itself takes the long way in, and nothing
    else is different without a cache."""
    chance = random.Random(seed)
    manager = BlockManager(
        chance.randint(8, 24), chance.choice([1, 2, 4]), host_blocks=chance.choice([0, 6]), prefix_caching=False
    )
    scheduler = Scheduler(
        manager,
        policy=policy,
        max_tokens_per_step=chance.choice([3, 8, 32]),
        max_sequences=chance.choice([2, 4, 8]),
        max_chunk=chance.choice([None, 3]),
    )
    decided: list[object] = []
    for step in range(60):
        for number in range(chance.choice([0, 0, 1, 3])):
            prompt = [0] * chance.randint(1, min(12, manager.num_blocks * manager.block_size // 2 - 1))
            max_tokens, priority = chance.randint(1, 8), chance.choice([0, 0, 1])
            request = Request(
                id=f"{step}-{number}",
                prompt=prompt,
                max_tokens=max_tokens,
                priority=priority,
                reads_cache=is_ordinary,
            )
            scheduler.add(request)
        batch = scheduler.schedule()
        decided += batch.ids.tolist(), batch.slot_mapping.tolist(), batch.admitted, batch.preempted
        if not batch.is_empty and chance.random() < 0.1:
            scheduler.cancel(batch)
        else:
            scheduler.update(batch, [0] * int(batch.samples.sum()))
    return [*decided, scheduler.stats(), manager.stats()]


HAVE_SHORT_WAY = [name for name, policy in POLICIES.items() if policy.chunked and policy.reservation == "prompt"]


@pytest.mark.parametrize("policy", HAVE_SHORT_WAY)
def test_the_short_way_in_decides_as_the_long_way_does(policy):
    for seed in range(15):
        assert decisions_of(seed, policy, is_ordinary=True) == decisions_of(seed, policy, is_ordinary=False), seed


def test_what_the_draw_evicts_is_computed_once_for_all_who_come_with_it():
    scheduler = Scheduler(BlockManager(3, 4), policy="vllm")
    for token in (1, 2, 3):
        scheduler.add(Request(id=str(token), prompt=[token] * 4, max_tokens=1))
        scheduler.update(scheduler.schedule(), [9])
    scheduler.add(Request(id="a", prompt=[1] * 4, max_tokens=1))
    scheduler.add(Request(id="b", prompt=[1] * 4 + [2], max_tokens=1))
    assert scheduler.schedule().num_tokens.tolist() == [4, 1]


def count_calls(monkeypatch, owner, name):
    """The first argument of each call of this method."""
    calls, method = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, first, *rest: calls.append(first) or method(self, first, *rest))
    return calls


def test_prompts_shorter_than_a_block_are_drawn_at_once(monkeypatch):
    counts = count_calls(monkeypatch, Pool, "draw")
    scheduler = Scheduler(BlockManager(300, 16), policy="fastgen", max_tokens_per_step=4000)
    for number in range(200):
        scheduler.add(Request(id=str(number), prompt=[number] * 10))
    assert len(scheduler.schedule().rows) == 200
    assert counts == [200]


@pytest.mark.parametrize("is_ordinary", [True, False])
def test_the_short_way_is_taken_by_ordinary_requests_alone(monkeypatch, is_ordinary):
    short = count_calls(monkeypatch, Memory, "admit")
    *_, stats, _ = decisions_of(1, "paged", is_ordinary=is_ordinary)
    assert (len(short) > stats.admitted / 4 > 0) if is_ordinary else short == []
