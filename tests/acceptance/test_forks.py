"""Forks of a sequence that runs: shared blocks, one copy, and branches of drafts, of which one goes on."""

import pytest

from paged import BlockManager, Request, Scheduler
from paged.errors import InvalidRequest
from paged.study.policies import static


def running(num_blocks=16, prompt=(1, 2, 3, 4, 5, 6), policy="paged", **limits):
    """A request "a" whose prompt has been computed, and that has sampled 7."""
    scheduler = Scheduler(BlockManager(num_blocks, 4), policy=policy, **limits)
    scheduler.add(Request(id="a", prompt=list(prompt), max_tokens=8))
    scheduler.update(scheduler.schedule(), [7])
    return scheduler


def tables(scheduler, id="a"):
    return [scheduler.manager.table(row).tolist() for row in scheduler.rows_of(id)]


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


@pytest.mark.parametrize("is_out", [False, True])
def test_content_that_the_copy_for_a_fork_evicts_goes_to_the_host_unless_a_batch_is_out(
    make_scheduler, request_of, step, is_out
):
    scheduler = make_scheduler(6, 4, {"served": ([0] * 8, 1)}, host_blocks=8, host_caching=True)
    step(scheduler)
    scheduler.add(request_of("forked", 6))
    # It waits for a token from its caller, so that the batch that is out has no row of it.
    scheduler.update(scheduler.schedule(), [], [0])
    scheduler.add(request_of("other", 6))
    _ = scheduler.schedule() if is_out else step(scheduler)
    scheduler.fork("forked")
    assert scheduler.manager.lookup([0] * 9).host_tokens == (0 if is_out else 4)


def test_a_policy_of_whole_batches_that_reserves_nothing_says_so_when_it_refuses_a_fork():
    scheduler = running(policy=static("whole", reserves=False))
    with pytest.raises(InvalidRequest, match='policy "whole" lets no sequence join those that run; it has no forks'):
        scheduler.fork("a")
