"""Numbers of every kind at the door of the memory layer: taken as they are meant, or refused with nothing changed."""

import numpy as np
import pytest

from paged import BlockManager, PagedError, Request, Scheduler
from paged.errors import InvalidConfig, InvalidTokens, OutOfBlocks, UnknownRow, WrongTokens
from paged.testing.snapshots import snapshot

NO_COUNTS = [
    True, 1.0, "1", None, [True, 1], [1.0, 1.0], [[1, 1]], [[1], [1, 1]], [1, 1, 1],
    np.ma.array([1, 1], mask=[False, True]), 2**63, 2**64, np.array([1, 2**63], np.uint64),
]  # fmt: skip


@pytest.fixture
def two_rows(make_manager):
    manager = make_manager(8, 4, host_blocks=8)
    return manager, [manager.add(range(6)), manager.add(range(10, 16))]


@pytest.mark.parametrize("count", [2**62, 2**63 - 1, [2**62, 2**62], np.uint64(2**62), 9, [8, 9]])
def test_more_blocks_than_the_pool_has_are_refused_whatever_their_sum_is_in_64_bits(two_rows, count, unchanged):
    manager, rows = two_rows
    with unchanged(manager), pytest.raises(OutOfBlocks):
        manager.reserve(rows, count)
    assert manager.check() == []


def test_four_counts_that_add_up_to_nothing_in_64_bits_leave_the_pool_as_it_was(make_manager):
    manager = make_manager(8, 4)
    rows = [manager.add([row]) for row in range(4)]
    with pytest.raises(OutOfBlocks, match="18,446,744,073,709,551,616 blocks wanted, 8 free"):
        manager.reserve(rows, [2**62] * 4)
    assert (manager.device.num_free, manager.check()) == (8, [])


@pytest.mark.parametrize("count", NO_COUNTS, ids=repr)
def test_what_is_no_integer_a_row_is_refused_by_reserve_and_allocate(two_rows, count, unchanged):
    manager, rows = two_rows
    with unchanged(manager):
        with pytest.raises(InvalidConfig, match="num_blocks has to be an int64, or 2 of them"):
            manager.reserve(rows, count)
        with pytest.raises(InvalidConfig, match="counts has to be an int64, or 2 of them"):
            manager.allocate(rows, count)


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


@pytest.mark.parametrize("rows", [True, [True], 0.0, [0.0], None, "0", [[0]], [[0], [0, 1]], 2**63, 2**64, np.uint64(2**64 - 1),
                                  np.ma.array([0, 1], mask=[False, True])], ids=repr)  # fmt: skip
def test_what_names_no_row_is_refused(two_rows, rows, unchanged):
    manager, _ = two_rows
    with unchanged(manager):
        for call in (manager.allocate, manager.reserve):
            with pytest.raises(UnknownRow):
                call(rows, 1)
        for call in (manager.free, manager.swap_out, manager.swap_in):
            with pytest.raises(UnknownRow):
                call(rows)


TOKENS_THAT_ARE_NONE = [
    np.ma.array([1, -2, 3], mask=[False, True, False]), np.ma.array([1, 2, 3], mask=False, dtype=np.int32),
    [[1.7, 2.9]], [1.7, 2.9], [[1, 2]], [[1], [2, 3]], [2**31], [2**64], np.array([2**63], np.uint64),
    [-1], [1.5], ["a"], [None], [[1, 2], [3, 4]], [1, -7, 2], "abc", 5,
]  # fmt: skip


@pytest.mark.parametrize("tokens", TOKENS_THAT_ARE_NONE, ids=repr)
def test_masked_nested_ragged_and_broken_numbers_are_no_tokens(two_rows, tokens, unchanged):
    manager, (row, _) = two_rows
    with unchanged(manager):
        for call in (manager.add, manager.lookup, manager.retain):
            with pytest.raises(InvalidTokens):
                call(tokens)
        with pytest.raises(InvalidTokens):
            manager.append(row, tokens)
    scheduler = Scheduler(BlockManager(8, 4))
    with pytest.raises(PagedError):
        scheduler.add(Request(id="a", prompt=tokens))
    assert scheduler.counts()["waiting"] == 0


@pytest.mark.parametrize("switch", ["no", "", 0, 1, None, 1.0])
def test_only_true_and_false_switch_anything(make_manager, switch, unchanged):
    for name in ("prefix_caching", "host_caching"):
        with pytest.raises(InvalidConfig, match=f"{name} has to be True or False; got {switch!r}"):
            BlockManager(8, 4, host_blocks=8, **{name: switch})
    manager = make_manager(8, 4)
    with unchanged(manager):
        for name in ("reads", "writes"):
            with pytest.raises(InvalidConfig, match=f"{name} has to be True or False; got {switch!r}"):
                manager.add([1, 2, 3], **{name: switch})


@pytest.mark.parametrize("time", [float("nan"), "x", None, True, 10**400, [1.0]])
def test_what_is_no_time_ends_nothing(make_manager, fill, time):
    manager = make_manager(8, 4)
    manager.free(fill(manager, range(8)))
    manager.retain(range(8), until=5.0)
    before = snapshot(manager)
    with pytest.raises(InvalidConfig, match="now has to be a logical time"):
        manager.expire(time)
    if time is not None:
        with pytest.raises(InvalidConfig, match="until has to be a"):
            manager.retain(range(8), until=time)
    assert snapshot(manager) == before
    manager.expire(np.float32(5.0))
    assert manager.device.num_used == 0


def test_a_tier_that_there_is_not_has_no_contents(make_manager):
    with pytest.raises(InvalidConfig, match='tier has to be "device" or "host"; got "disk"'):
        make_manager(8, 4).cached_contents("disk")


@pytest.mark.parametrize(
    "counts", [[2**62] * 4, [2**63 - 1, 1, 0, 0], np.array([2**64 - 1, 1, 0, 0], np.uint64), np.ma.array([1, 1, 0, 0], mask=[0, 0, 0, 1])],
    ids=repr,
)  # fmt: skip
def test_counts_that_add_up_to_the_tokens_in_64_bits_alone_end_no_batch(counts):
    scheduler = Scheduler(BlockManager(32, 4))
    for name in "abcd":
        scheduler.add(Request(id=name, prompt=[1, 2, 3]))
    batch = scheduler.schedule()
    with pytest.raises(WrongTokens, match="counts"):
        scheduler.update(batch, [], counts)
    assert len(scheduler.update(batch, [1, 2, 3, 4])) == 4
    assert scheduler.check() == []


FIELDS = {
    "max_tokens": 100, "min_tokens": 2, "eos_token_id": 5, "stop_token_ids": 6, "priority": 1, "num_sequences": 1,
    "num_computed": 4, "expected_tokens": 90,
}  # fmt: skip


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


POLICIES = pytest.mark.parametrize(
    "policy", ["paged", "vllm", "tgi", "static", "orca-max", "trtllm-guaranteed-no-evict"]
)


@POLICIES
@pytest.mark.parametrize("kind", [np.int8, np.uint64])
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


@POLICIES
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
