"""Forks of a sequence that runs: shared blocks, one copy, and branches of drafts, of which one goes on."""

import pytest

from paged import BlockManager, Request, Scheduler
from paged.errors import InvalidRequest, OutOfBlocks, RequestInFlight, UnknownRequest


def running(num_blocks=16, prompt=(1, 2, 3, 4, 5, 6), policy="paged", **limits):
    """A request "a" whose prompt has been computed, and that has sampled 7."""
    scheduler = Scheduler(BlockManager(num_blocks, 4), policy=policy, **limits)
    scheduler.add(Request(id="a", prompt=list(prompt), max_tokens=8))
    scheduler.update(scheduler.schedule(), [7])
    return scheduler


def tables(scheduler, id="a"):
    return [scheduler.manager.table(row).tolist() for row in scheduler.rows_of(id)]


def refuses_in_flight(scheduler, call):
    batch = scheduler.schedule()
    with pytest.raises(RequestInFlight):
        call()
    scheduler.update(batch, [8])


def test_a_fork_shares_full_blocks_and_has_a_copy_of_the_partial_one():
    scheduler = running()
    before = scheduler.manager.device.num_available
    assert scheduler.fork("a") == 1
    ours, theirs = tables(scheduler)
    assert ours[:1] == theirs[:1] and ours[1] != theirs[1]
    assert scheduler.manager.device.num_available == before - 1
    batch = scheduler.schedule()
    assert batch.moves.device_to_device.tolist() == [[ours[1], theirs[1]]]
    assert batch.sequences.tolist() == [0, 1] and batch.positions.tolist() == [6, 6]
    assert scheduler.check() == []


def test_a_tree_of_drafts_ends_in_its_best_branch():
    scheduler = running()
    branches = [0, scheduler.fork("a"), scheduler.fork("a")]
    proposed = {("a", 0): [8, 9], ("a", 1): [10, 11], ("a", 2): [12]}
    batch = scheduler.schedule(drafts=proposed)
    assert batch.num_drafts.tolist() == [2, 2, 1]
    # 10 and 11 were right, and 20 comes after them.
    scheduler.update(batch, [10, 10, 11, 20, 10], [1, 3, 1])
    table = tables(scheduler)[1]
    for branch in (branches[0], branches[2]):
        scheduler.finish("a", branch)
    assert tables(scheduler) == [table]
    (row,) = scheduler.rows_of("a")
    assert scheduler.manager.rows.tokens[row, :10].tolist() == [1, 2, 3, 4, 5, 6, 7, 10, 11, 20]
    batch = scheduler.schedule()
    assert (batch.ids.tolist(), batch.sequences.tolist(), batch.positions.tolist()) == (["a"], [1], [9])
    assert scheduler.check() == []


def test_copies_of_forks_of_forks_can_run_at_once():
    scheduler = running()
    first = scheduler.fork("a")
    second = scheduler.fork("a", first)
    (source, *copies) = [table[1] for table in tables(scheduler)]
    assert scheduler.schedule().moves.device_to_device.tolist() == [[source, copy] for copy in copies]
    assert (first, second) == (1, 2) and scheduler.check() == []


def test_a_block_that_is_read_for_a_fork_is_written_by_no_other_copy_of_its_group():
    scheduler = running(num_blocks=3)
    fork = scheduler.fork("a")
    # Its block is free, and the only one that is: the next fork's copy goes where the first one's comes from.
    scheduler.finish("a")
    scheduler.fork("a", fork)
    groups = [scheduler.schedule().moves.device_to_device.tolist() for _ in range(2)]
    assert groups == [[[1, 2]], [[2, 1]]]


def test_what_cannot_be_forked_says_why_and_changes_nothing():
    scheduler = running(max_sequences=1)
    with pytest.raises(InvalidRequest, match="max_sequences is 1"):
        scheduler.fork("a")
    with pytest.raises(UnknownRequest):
        scheduler.fork("b")
    for sequence in (1, -1, "0", True):
        with pytest.raises(InvalidRequest, match="no .*sequence"):
            scheduler.fork("a", sequence)
    refuses_in_flight(scheduler, lambda: scheduler.fork("a"))
    scheduler.add(Request(id="w", prompt=[1], max_tokens=1))
    with pytest.raises(InvalidRequest, match="waiting"):
        scheduler.fork("w")
    assert tables(scheduler) == [[0, 1]] and scheduler.check() == []


def test_without_a_block_for_the_copy_there_is_no_fork():
    scheduler = running(num_blocks=2)
    with pytest.raises(OutOfBlocks) as caught:
        scheduler.fork("a")
    assert (caught.value.wanted, caught.value.free) == (1, 0)
    assert len(tables(scheduler)) == 1 and scheduler.check() == []


def test_a_policy_that_reserves_has_no_forks():
    with pytest.raises(InvalidRequest, match='policy "orca-max" reserves'):
        running(num_blocks=64, policy="orca-max", max_model_len=32).fork("a")


@pytest.mark.parametrize("wish", ["reads_cache", "writes_cache"])
def test_a_private_request_has_no_forks_as_it_may_be_no_group(wish):
    scheduler = Scheduler(BlockManager(16, 4))
    scheduler.add(Request(id="a", prompt=[1, 2, 3, 4, 5], max_tokens=8, **{wish: False}))
    scheduler.update(scheduler.schedule(), [7])
    with pytest.raises(InvalidRequest, match="shares nothing"):
        scheduler.fork("a")
    assert tables(scheduler) == [[0, 1]] and scheduler.check() == []
