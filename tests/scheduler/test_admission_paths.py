"""The ordinary request's short way in decides, draws and counts as the long way does."""

import random

import numpy as np
import pytest

from paged.block_manager import BlockManager, Memory
from paged.block_manager.pool import Pool
from paged.scheduler import POLICIES, Request, Scheduler


def trace_of(seed: int, policy: str, *, takes_the_long_way: bool) -> list[tuple]:
    """Every decision of one random run on a small pool, as plain values."""
    rng = random.Random(seed)
    manager = BlockManager(
        rng.randint(3, 24),
        rng.choice([1, 2, 4]),
        host_blocks=rng.choice([0, 6]),
        prefix_caching=rng.random() < 0.8,
    )
    scheduler = Scheduler(
        manager,
        policy=policy,
        max_tokens_per_step=rng.choice([3, 8, 32]),
        max_sequences=rng.choice([2, 4, 8]),
        max_chunk=rng.choice([None, 3]),
    )
    if takes_the_long_way:
        scheduler._state.admission.takes_plain_ones = False
    told: list[tuple] = []
    capacity = manager.num_blocks * manager.block_size
    longest = max(1, min(12, capacity - 9))
    for step in range(60):
        for i in range(rng.choice([0, 0, 1, 3])):
            prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, longest))]
            several = rng.choice([1, 1, 1, 2]) if 2 * (len(prompt) + 9) <= capacity else 1
            priority = rng.choice([0, 0, 1])
            scheduler.add(
                Request(
                    id=f"{step}-{i}",
                    prompt=prompt,
                    max_tokens=rng.randint(1, 8),
                    priority=priority,
                    num_sequences=min(several, scheduler.limits.max_sequences),
                )
            )
        batch = scheduler.schedule()
        arrays = (
            batch.num_tokens,
            batch.token_ids,
            batch.positions,
            batch.slot_mapping,
            batch.seq_lens,
            batch.samples,
        )
        changes = (batch.table_rows, batch.table_columns, batch.table_blocks)
        told.append((batch.ids.tolist(), batch.admitted, batch.preempted, [array.tolist() for array in arrays]))
        # Rows may be told of in another order; of two entries for one place the later one counts.
        entries = {(row, column): block for row, column, block in zip(*(a.tolist() for a in changes), strict=True)}
        told.append(tuple(sorted(entries.items())))
        ends_it = rng.random() < 0.9
        tokens = [rng.randint(0, 1) for _ in range(int(np.count_nonzero(batch.samples)))]
        if batch.is_empty:
            continue
        if ends_it:
            outputs = scheduler.update(batch, tokens)
            told.append(tuple((output.id, output.token_ids, output.finish_reason, output.usage) for output in outputs))
        else:
            scheduler.cancel(batch)
        assert scheduler.check() == []
    told.append((scheduler.stats(), manager.stats()))
    return told


@pytest.mark.parametrize("policy", POLICIES)
def test_the_short_way_in_decides_as_the_long_way_does(policy):
    for seed in range(15):
        short, long = (trace_of(seed, policy, takes_the_long_way=way) for way in (False, True))
        for ours, theirs in zip(short, long, strict=True):
            assert ours == theirs, seed


def test_what_the_draw_evicts_is_computed_once_for_all_who_come_with_it():
    scheduler = Scheduler(BlockManager(3, 4), policy="vllm")
    for token in (1, 2, 3):
        scheduler.add(Request(id=str(token), prompt=[token] * 4, max_tokens=1))
        scheduler.update(scheduler.schedule(), [9])
    scheduler.add(Request(id="a", prompt=[1] * 4, max_tokens=1))
    scheduler.add(Request(id="b", prompt=[1] * 4 + [2], max_tokens=1))
    assert scheduler.schedule().num_tokens.tolist() == [4, 1]


def test_prompts_shorter_than_a_block_are_drawn_at_once(monkeypatch):
    counts = []
    draw = Pool.draw
    monkeypatch.setattr(Pool, "draw", lambda self, count: counts.append(count) or draw(self, count))
    scheduler = Scheduler(BlockManager(300, 16), policy="fastgen", max_tokens_per_step=4000)
    for number in range(200):
        scheduler.add(Request(id=str(number), prompt=[number] * 10))
    assert len(scheduler.schedule().rows) == 200
    assert counts == [200]


def test_the_short_way_is_taken(monkeypatch):
    calls = []
    admit = Memory.admit
    monkeypatch.setattr(Memory, "admit", lambda self, *arguments: calls.append(1) or admit(self, *arguments))
    stats, _ = trace_of(1, "paged", takes_the_long_way=False)[-1]
    assert len(calls) > stats.admitted / 4 > 0
