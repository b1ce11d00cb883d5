"""Integers of any kind and size in what a caller passes: numpy's count as Python's do, and none overflows later."""

from __future__ import annotations

import numpy as np
import pytest

from paged import POLICIES, Request

FIELDS = {
    "max_tokens": 100,
    "min_tokens": 2,
    "eos_token_id": 5,
    "stop_token_ids": 6,
    "priority": 1,
    "num_sequences": 1,
    "num_computed": 4,
    "expected_tokens": 90,
}


def outcome(scheduler, fields, tokens):
    """What the request is scheduled for, step by step, until it ends; its loads arrive at once."""
    scheduler.add(Request(id="a", prompt=list(range(40)), **fields))
    steps = []
    while scheduler.has_unfinished:
        assert len(steps) < 200
        batch = scheduler.schedule()
        sampled = [tokens[len(steps) % len(tokens)]] * int(batch.samples.sum())
        outputs = list(scheduler.update(batch, sampled))
        if len(batch.loads):
            scheduler.loaded("a", 4)
        steps.append((batch.num_tokens.tolist(), len(batch.loads), scheduler.num_reserved, [str(o) for o in outputs]))
    assert scheduler.check() == []
    return steps


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.uint32, np.int64, np.uint64])
def test_numpys_integers_in_a_request_count_as_pythons_do(make_scheduler, policy, kind):
    def request(make):
        fields = {name: make(value) for name, value in FIELDS.items()}
        return {**fields, "stop_token_ids": (fields["stop_token_ids"],)}

    # 128 tokens in all, so that a sum of int8 wraps; the end comes by max_tokens.
    plain = outcome(make_scheduler(40, 4, policy=policy), request(int), [9, 8, 7])
    assert outcome(make_scheduler(40, 4, policy=policy), request(kind), [9, 8, 7]) == plain
    assert "length" in plain[-1][3][0]


@pytest.mark.parametrize("token", [5, 6])
def test_stop_ids_of_numpys_kinds_stop(make_scheduler, token):
    fields = {"eos_token_id": np.uint8(5), "stop_token_ids": [np.int8(6)], "min_tokens": np.int8(2)}
    steps = outcome(make_scheduler(40, 4), fields, [token])
    assert len(steps) == 2
    assert "stop" in steps[-1][3][0]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("huge", [2**62, 2**63 - 1, 2**63, 2**64, 2**70, 10**30])
def test_a_count_that_no_memory_holds_is_no_limit(make_scheduler, policy, huge):
    scheduler = make_scheduler(
        16, 4, policy=policy, max_tokens_per_step=huge, max_sequences=huge, max_chunk=huge, max_waiting=huge
    )
    fields = {"max_tokens": huge, "min_tokens": huge, "eos_token_id": 7, "priority": huge, "expected_tokens": huge}
    for name in ("a", "b"):
        scheduler.add(Request(id=name, prompt=[ord(name)] * 9, num_computed=0, **fields))
    for _ in range(200):
        if not scheduler.has_unfinished:
            break
        batch = scheduler.schedule()
        scheduler.update(batch, [7] * int(batch.samples.sum()))
        assert scheduler.check() == []
    counts = scheduler.counts()
    assert (counts["finished"], counts["submitted"]) == (2, 2)


def test_a_row_budget_of_any_size_leaves_room_for_fewer_rows_than_run(make_scheduler, request_of):
    scheduler = make_scheduler(16, 4, max_tokens_per_step=2**64, max_sequences=2, max_chunk=2**63)
    for name in ("a", "b", "c"):
        scheduler.add(request_of(name, 4, max_tokens=3))
    for _ in range(8):
        batch = scheduler.schedule()
        scheduler.update(batch, [7] * int(batch.samples.sum()))
    assert not scheduler.has_unfinished
