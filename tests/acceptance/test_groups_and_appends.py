"""Requests of several sequences, and tokens that the caller adds to a living one."""

import numpy as np
import pytest

from paged import Policy, Request
from paged.errors import NeverFits


def test_an_output_of_no_tokens_leaves_a_row_waiting_for_the_caller(make_scheduler, step):
    scheduler = make_scheduler(8, 4, {"a": (4, 8)})
    batch = scheduler.schedule()
    outputs = list(scheduler.update(batch, [], [0]))
    assert [output.token_ids for output in outputs] in ([], [[]])
    assert scheduler.status("a") == "running"
    assert scheduler.has_unfinished
    # With nothing known beyond what is computed there is nothing to run.
    assert scheduler.schedule().is_empty
    scheduler.append("a", [50, 51])
    assert step(scheduler).batch.token_ids.tolist() == [50, 51]


def test_appended_tokens_that_can_never_fit_end_the_request_as_rejected(make_scheduler, step):
    scheduler = make_scheduler(4, 4, {"a": (6, 50), "b": (3, 3)})
    step(scheduler)
    scheduler.append("a", list(range(20)))
    reasons = {}
    for _ in range(6):
        for id, output in step(scheduler).outputs.items():
            if output.finish_reason:
                reasons[id] = output.finish_reason
    assert reasons == {"a": "rejected", "b": "length"}
    assert not scheduler.has_unfinished
    assert scheduler.manager.device.num_used == 0


def test_a_group_samples_in_every_sequence_and_shares_its_prompt(make_scheduler, make_engine, request_of):
    scheduler = make_scheduler(20, 4)
    engine = make_engine(scheduler)
    engine.add(request_of("group", 10, max_tokens=5, num_sequences=3))
    batch = engine.step()
    assert sum(batch.num_tokens) <= 10 + 2 * 10
    engine.step()
    # Two full prompt blocks are shared; each sequence has a tail of its own.
    assert scheduler.manager.device.num_used == 2 + 3
    engine.run()
    assert sorted(engine.outputs) == ["group/0", "group/1", "group/2"]
    assert ({len(tokens) for tokens in engine.outputs.values()}, scheduler.counts()["finished"]) == ({5}, 1)


def test_a_group_ends_when_its_last_sequence_ends(make_scheduler, request_of):
    scheduler = make_scheduler(20, 4)
    scheduler.add(request_of("group", 4, max_tokens=5, num_sequences=2, eos_token_id=2))
    batch = scheduler.schedule()
    while not batch.samples.all() or len(batch.rows) < 2:
        scheduler.update(batch, [9] * int(batch.samples.sum()))
        batch = scheduler.schedule()
    tokens = [2 if sequence == 0 else 9 for sequence in batch.sequences]
    outputs = {output.sequence: output for output in scheduler.update(batch, tokens)}
    assert (outputs[0].finish_reason, outputs[1].finish_reason) == ("stop", None)
    assert (outputs[0].usage, scheduler.status("group")) == (None, "running")
    batch = scheduler.schedule()
    assert batch.sequences.tolist() == [1]
    (output,) = scheduler.update(batch, [2])
    assert (output.sequence, output.finish_reason) == (1, "stop")
    assert output.usage is not None
    assert not scheduler.has_unfinished


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


def test_a_sequence_that_waits_for_its_caller_is_computed_again_and_its_row_samples_for_the_next_request(
    make_scheduler, request_of, step
):
    scheduler = make_scheduler(4, 4, {"first": (8, 2)}, policy="vllm", prefix_caching=False)
    scheduler.add(request_of("group", 3, num_sequences=2))
    scheduler.update(scheduler.schedule(), [7, 7], counts=[1, 0, 1])
    assert step(scheduler).batch.preempted == (("group", "recompute"),)
    batch = scheduler.schedule()
    assert (batch.num_tokens.tolist(), batch.samples.tolist()) == ([3, 4], [False, True])
    scheduler.update(batch, [7])
    rows = scheduler.rows_of("group")
    scheduler.abort("group")
    for name in ("a", "b"):
        scheduler.add(request_of(name, 3))
    batch = scheduler.schedule()
    assert (sorted(batch.rows.tolist()), batch.samples.tolist()) == (sorted(rows), [True, True])
    scheduler.update(batch, [7, 7])


@pytest.mark.parametrize(("prompt_len", "num_blocks"), [(3, 2), (4, 4), (5, 3), (8, 5), (9, 4)])
def test_a_group_needs_the_full_blocks_before_its_last_prompt_token_once(
    make_scheduler, request_of, run, prompt_len, num_blocks
):
    with pytest.raises(NeverFits, match=f"needs {num_blocks} blocks"):
        make_scheduler(num_blocks - 1, 4).add(request_of("group", prompt_len, max_tokens=1, num_sequences=2))
    scheduler = make_scheduler(num_blocks, 4)
    scheduler.add(request_of("group", prompt_len, max_tokens=1, num_sequences=2))
    run(scheduler)
    assert scheduler.stats().output_tokens == 2


def test_a_waiting_prompt_that_gets_more_tokens_finds_what_is_cached_of_them(make_scheduler, run):
    scheduler = make_scheduler(8, 4, {})
    scheduler.add(Request(id="a", prompt=[1, 2, 3, 4, 5], max_tokens=1))
    run(scheduler)
    scheduler.add(Request(id="b", prompt=[1, 2], max_tokens=1))
    scheduler.append("b", [3, 4, 6, 7, 8, 9, 9])
    batch = scheduler.schedule()
    assert batch.num_tokens.tolist() == [5] and scheduler.check() == []
    assert scheduler.stats().hit_tokens == 4
    scheduler.update(batch, [1])


@pytest.fixture
def swapped_twice(make_scheduler, request_of):
    """Builds a scheduler with a group of two sequences of 3 tokens on the host. Each has a block of its own for the one
    token of their prompt, because they were swapped before a batch that computed it ended."""

    def build(num_blocks, num_missing, **limits):
        policy = Policy(name="swaps", composition="in_order", preemption="swap")
        scheduler = make_scheduler(num_blocks, 1, {"first": (1, 9)}, policy=policy, host_blocks=4, **limits)
        scheduler.update(scheduler.schedule(), [], [0])
        scheduler.add(request_of("group", 1, max_tokens=5, num_sequences=2))
        batches = [scheduler.schedule(), scheduler.schedule()]
        scheduler.append("first", [5] * num_missing)
        while not batches[-1].preempted:
            batches.append(scheduler.schedule())
        assert batches[-1].preempted == (("group", "swap"),)
        for batch in batches:
            scheduler.update(batch, range(int(batch.samples.sum())))
        scheduler.abort("first")
        return scheduler

    return build


def test_a_group_that_fits_only_without_what_the_host_has_twice_is_computed_again(swapped_twice):
    scheduler = swapped_twice(5, 1)
    batch = scheduler.schedule()
    assert (batch.ids.tolist(), batch.samples.tolist()) == (["group"] * 2, [True, True])
    scheduler.update(batch, [7, 8])


def test_a_group_that_fits_only_without_what_came_back_twice_is_computed_again(swapped_twice):
    scheduler = swapped_twice(7, 3, max_tokens_per_step=2)
    scheduler.append("group", [4], 0)
    # The first sequence takes the budget, then the last block. The other one has not run since it came back.
    scheduler.update(scheduler.schedule(), [7])
    scheduler.update(scheduler.schedule(), [], [0])
    batch = scheduler.schedule()
    assert batch.preempted == (("group", "recompute"),)
    scheduler.update(batch, [])
    assert scheduler.update(scheduler.schedule(), [8]).sequences.tolist() == [1]
