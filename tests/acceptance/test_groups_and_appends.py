"""Requests of several sequences, and tokens that the caller adds to a living one."""

import numpy as np
import pytest

from paged import Policy
from paged.errors import NeverFits


def test_sequences_of_a_group_that_fill_the_same_block_in_one_step_end_with_one_block(
    make_scheduler, make_engine, request_of
):
    scheduler = make_scheduler(8, 4, policy="vllm", max_chunk=3)
    engine = make_engine(scheduler)
    engine.add(request_of("group", [0, 2, 2, 2, 2, 1, 0, 1], max_tokens=5, num_sequences=3))
    while scheduler.has_unfinished:
        engine.step()
    assert {len(tokens) for tokens in engine.outputs.values()} == {5}


def test_tokens_that_can_never_fit_are_not_kept_until_their_request_is_rejected(make_scheduler, step):
    scheduler = make_scheduler(8, 4, {"a": (5, 3)})
    step(scheduler)
    room = scheduler.manager.rows.tokens.shape
    scheduler.append("a", np.ones(1_000_000, np.int32))
    assert scheduler.manager.rows.tokens.shape == room
    output = step(scheduler).outputs["a"]
    assert (output.finish_reason, output.usage.output_tokens) == ("rejected", 1)
    assert scheduler.check() == []


@pytest.mark.parametrize(("prompt_len", "num_blocks"), [(3, 2), (4, 4), (5, 3), (8, 5), (9, 4)])
def test_a_group_needs_the_full_blocks_of_its_prompt_once(make_scheduler, request_of, run, prompt_len, num_blocks):
    with pytest.raises(NeverFits, match=f"needs {num_blocks} blocks"):
        make_scheduler(num_blocks - 1, 4).add(request_of("group", prompt_len, max_tokens=1, num_sequences=2))
    scheduler = make_scheduler(num_blocks, 4)
    scheduler.add(request_of("group", prompt_len, max_tokens=1, num_sequences=2))
    run(scheduler)
    assert scheduler.stats().output_tokens == 2


def test_a_group_that_fits_only_without_what_the_host_has_twice_is_computed_again(make_scheduler, request_of):
    policy = Policy(name="swaps", composition="in_order", preemption="swap")
    scheduler = make_scheduler(5, 1, {"first": (1, 9)}, policy=policy, host_blocks=4)
    scheduler.update(scheduler.schedule(), [], [0])
    scheduler.add(request_of("group", 1, max_tokens=5, num_sequences=2))
    # Each sequence has a block of its own for the one token of their prompt, for it is swapped before a batch that computed it ended.
    batches = [scheduler.schedule(), scheduler.schedule()]
    scheduler.append("first", [5])
    while not batches[-1].preempted:
        batches.append(scheduler.schedule())
    assert batches[-1].preempted == (("group", "swap"),)
    for batch in batches:
        scheduler.update(batch, range(int(batch.samples.sum())))
    scheduler.abort("first")
    batch = scheduler.schedule()
    assert (batch.ids.tolist(), batch.samples.tolist()) == (["group"] * 2, [True, True])
    scheduler.update(batch, [7, 8])
