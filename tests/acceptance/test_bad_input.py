"""What callers give: numbers of every kind are taken as they are meant, and what is refused changes nothing (more: refused.txt)."""

import numpy as np
import pytest

from paged import BlockManager, Request
from paged.errors import InvalidTokens, NeverFits


def test_a_batch_is_confirmed_when_its_tokens_are_known(make_manager, unchanged):
    manager = make_manager(4, 4)
    row = manager.add([1, 2])
    manager.allocate(row, 3, unknown=1)
    with unchanged(manager), pytest.raises(InvalidTokens, match="up to 3, and 2 are known"):
        manager.confirm()
    manager.append(row, [7])
    manager.confirm()
    assert int(manager.rows.num_computed[row]) == 3


def test_calls_without_rows_begin_no_batch_and_change_nothing(make_manager, unchanged):
    manager = make_manager(4, 4, host_blocks=2)
    with unchanged(manager):
        for call in (manager.allocate, manager.reserve):
            call([], [])
            call(np.empty(0, np.int64), 1)
        for call in (manager.free, manager.swap_out, manager.swap_in):
            call([])


def test_int32_arrays_and_lists_are_the_same_prompt(make_scheduler, step):
    scheduler = make_scheduler(8, 4)
    prompt = np.array([3, 1, 2], np.int32)
    scheduler.add(Request(id="array", prompt=prompt))
    scheduler.add(Request(id="list", prompt=[3, 1, 2]))
    prompt[:] = 9  # what the caller does to its own array later is not our business
    assert step(scheduler).batch.token_ids.tolist() == [3, 1, 2, 3, 1, 2]


def test_a_prompt_over_the_pool_says_what_would_do(make_scheduler, request_of):
    scheduler = make_scheduler(96, 16)
    with pytest.raises(NeverFits) as caught:
        scheduler.add(request_of("a", 1600))
    assert (caught.value.blocks_needed, caught.value.num_blocks) == (101, 96)
    for part in ('"a"', "101", "1,600", "96", "1,535"):
        assert part in str(caught.value)
    with pytest.raises(NeverFits):
        scheduler.add(request_of("b", 1536))
    scheduler.add(request_of("c", 1535))
    assert (scheduler.counts()["rejected"], scheduler.waiting_ids()) == (2, ["c"])


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint32, np.uint64])
def test_small_and_unsigned_integers_of_numpy_count_as_what_they_say(kind):
    manager = BlockManager(kind(100), kind(100), host_blocks=kind(100))
    assert [type(each) for each in (manager.num_blocks, manager.block_size, manager.num_host_blocks)] == [int] * 3
    row = manager.add(np.arange(120).astype(kind))
    manager.allocate(np.array([row], kind), np.array([110], kind))
    manager.confirm()
    assert manager.slots(kind(row), kind(0), kind(110)).tolist() == manager.slots(row, 0, 110).tolist()
    assert manager.swap_out([row], keep=kind(1)).device_to_host.tolist() != []
    manager.swap_in([row])
    manager.truncate(row, kind(1))
    assert (int(manager.rows.num_computed[row]), manager.check()) == (100, [])
    assert manager.admission(kind(99), watermark=kind(100)).value == "later"


def test_any_kind_of_integer_names_a_sequence_and_a_count(make_scheduler, request_of):
    scheduler = make_scheduler(20, 4)
    scheduler.add(request_of("a", 18, num_computed=12))
    scheduler.update(scheduler.schedule(), [])
    scheduler.append("a", [5], sequence=np.uint8(0))
    scheduler.loaded("a", np.uint32(12))
    assert scheduler.schedule().num_tokens.tolist() == [7]


FIELDS = {
    "max_tokens": 100, "min_tokens": 2, "eos_token_id": 5, "priority": 1, "num_sequences": 1, "num_computed": 4,
    "expected_tokens": 90,
}  # fmt: skip


EACH = pytest.mark.parametrize("policy", ["paged", "vllm", "tgi", "static", "orca-max", "trtllm-guaranteed-no-evict"])


@EACH
@pytest.mark.parametrize("kind", [np.int8, np.uint64])
def test_numpys_integers_in_a_request_count_as_pythons_do(make_scheduler, policy, kind):
    # 128 tokens in all, so that a sum of int8 wraps; the end comes by max_tokens.
    runs = []
    for make in (int, kind):
        scheduler, steps = make_scheduler(40, 4, policy=policy), []
        fields = {name: make(value) for name, value in FIELDS.items()}
        scheduler.add(Request(id="a", prompt=list(range(40)), stop_token_ids=(make(6),), **fields))
        while scheduler.has_unfinished:
            batch = scheduler.schedule()
            outputs = scheduler.update(batch, [7 + len(steps) % 3] * int(batch.samples.sum()))
            if len(batch.loads):
                scheduler.loaded("a", 4)
            steps.append((batch.num_tokens.tolist(), len(batch.loads), scheduler.num_reserved, list(map(str, outputs))))
        runs.append(steps)
    assert runs[0] == runs[1] and "length" in runs[0][-1][3][0]


@EACH
@pytest.mark.parametrize("huge", [2**63 - 1, 2**63, 10**30])
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
