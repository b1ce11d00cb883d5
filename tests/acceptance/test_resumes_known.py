"""Steps ahead for an engine that takes a row's tokens from the scheduler when it is told the row anew (`resumes_known`)."""

import numpy as np
import pytest

from paged import Policy

PAUSES = Policy(name="pauses", take="tail", preemption="recompute")
IN_ORDER = Policy(name="in order", order="priority", composition="in_order")


def told(outputs):
    """What an update delivers, as (id, tokens, why it ended)."""
    return [(output.id, output.token_ids, output.finish_reason) for output in outputs]


def tokens_for(batch, token=7):
    """One token for each row that samples."""
    return [token] * int(np.count_nonzero(batch.samples))


@pytest.mark.parametrize("policy", ["vllm", PAUSES], ids=["dropped", "paused"])
def test_who_gave_way_while_its_token_is_sampled_comes_in_when_that_is_known(make_scheduler, request_of, policy):
    scheduler = make_scheduler(9, 16, policy=policy, max_tokens_per_step=160, resumes_known=True)
    scheduler.add(request_of("a", 64, max_tokens=5))
    scheduler.add(request_of("b", 64, max_tokens=5))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.ids.tolist() == ["a"] and scheduler.status("b") != "running"
    scheduler.abort("a")
    assert scheduler.schedule().is_empty
    assert "a batch samples for it" in str(scheduler.explain("b"))
    assert told(scheduler.update(first, [7, 7])) == [("b", [7], None)]
    fourth = scheduler.schedule()
    assert (fourth.ids.tolist(), fourth.seq_lens.tolist(), fourth.samples.tolist()) == (["b"], [65], [True])
    assert fourth.token_ids.tolist()[-1] == 7


def test_a_row_whose_block_was_switched_is_left_out_until_its_token_is_known(make_scheduler):
    # Both know and say the same, and what both computed is kept once: one of them gets the other's block.
    scheduler = make_scheduler(20, 2, {"a": ([1, 2, 3], 8), "b": ([1, 2, 3], 8)}, resumes_known=True)
    out, alone = [scheduler.schedule()], 0
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        changed = set(zip(batch.table_rows.tolist(), batch.table_columns.tolist()))
        starts = (batch.seq_lens - batch.num_tokens).tolist()
        for row, start, source in zip(batch.rows.tolist(), starts, batch.source_batches.tolist()):
            assert source == -1 or not {(row, column) for column in range(-(-start // 2))} & changed
        alone += len(batch.rows) == 1
        out += [] if batch.is_empty else [batch]
        oldest = out.pop(0)
        scheduler.update(oldest, tokens_for(oldest))
    assert alone > 0, "one was left out"


@pytest.mark.parametrize("resumes_known", [False, True])
def test_a_row_that_a_batch_left_out_computes_its_token_when_it_is_known(make_scheduler, request_of, resumes_known):
    scheduler = make_scheduler(20, 4, policy=IN_ORDER, max_tokens_per_step=4, resumes_known=resumes_known)
    scheduler.add(request_of("b", 4, priority=1))
    first = scheduler.schedule()
    scheduler.add(request_of("a", 7, priority=0))
    second, third = scheduler.schedule(), scheduler.schedule()
    assert [batch.ids.tolist() for batch in (first, second, third)] == [["b"], ["b", "a"], ["a"]]
    fourth = scheduler.schedule()
    assert fourth.ids.tolist() == (["a"] if resumes_known else ["a", "b"])
    scheduler.update(first, [7])
    scheduler.update(second, [8])
    fifth = scheduler.schedule()
    assert (fifth.ids.tolist(), fifth.token_ids.tolist()) == (["a", "b"], [-1, 8 if resumes_known else -1])
