"""Drafts: guesses ride along with the token before them, are the first to go, and are never content."""

import numpy as np
import pytest

from paged import UNKNOWN_DRAFT, Drafts, Request
from paged.errors import WrongTokens


def started(scheduler, request_of, length=5, **options):
    """Request "a", whose prompt is computed and whose first output, 70, is known."""
    scheduler.add(request_of("a", length, **options))
    scheduler.update(scheduler.schedule(), [70])
    return scheduler


def test_I13_drafts_wait_for_the_end_of_the_prompt(make_scheduler):
    scheduler = make_scheduler(20, 16, {"a": 80}, max_tokens_per_step=50)
    seen = []
    for tokens in ([], [7], [1, 2, 3, 8]):
        batch = scheduler.schedule(drafts={"a": [1, 2, 3]} if scheduler.status("a") == "running" else None)
        seen.append((batch.num_tokens.tolist(), batch.num_drafts.tolist()))
        scheduler.update(batch, tokens, [len(tokens)])
    assert (seen, scheduler.stats().accepted_tokens) == ([([50], [0]), ([30], [0]), ([4], [3])], 3)


@pytest.mark.parametrize(("tokens", "launched"), [([9], 6), ([71, 9], 7), ([71, 72, 9], 8)])
def test_accepted_drafts_are_computed_and_slots_of_others_written_again(make_scheduler, request_of, tokens, launched):
    scheduler = started(make_scheduler(8, 4), request_of)
    batch = scheduler.schedule(drafts={"a": [71, 72]})
    assert (batch.token_ids.tolist(), batch.positions.tolist()) == ([70, 71, 72], [5, 6, 7])
    assert (batch.num_tokens.tolist(), batch.num_drafts.tolist(), batch.seq_lens.tolist()) == ([3], [2], [8])
    assert (batch.query_start_loc.tolist(), batch.samples.tolist()) == ([0, 3], [True])
    (output,) = scheduler.update(batch, tokens, [len(tokens)])
    assert output.token_ids == tokens
    row, manager = scheduler.row_of("a"), scheduler.manager
    assert (int(manager.rows.num_computed[row]), int(manager.rows.num_tokens[row])) == (launched, launched + 1)
    block = int(manager.table(row)[1])
    batch = scheduler.schedule()
    assert (batch.token_ids.tolist(), batch.positions.tolist()) == ([9], [launched])
    assert launched == 8 or batch.slot_mapping.tolist() == [4 * block + launched % 4]
    stats = scheduler.stats()
    assert (stats.drafted_tokens, stats.accepted_tokens) == (2, len(tokens) - 1)
    assert scheduler.check() == []


def test_drafts_are_the_first_to_go_when_the_budget_is_short(make_scheduler, request_of):
    scheduler = started(make_scheduler(20, 4, max_tokens_per_step=6), request_of)
    scheduler.add(request_of("b", 4))
    batch = scheduler.schedule(drafts={"a": [1, 2, 3]})
    assert (batch.num_tokens.tolist(), batch.num_drafts.tolist()) == ([2, 4], [1, 0])


def test_nothing_is_preempted_or_evicted_from_its_row_for_drafts(make_scheduler):
    scheduler = make_scheduler(4, 4, {"a": 6, "b": 6})
    scheduler.update(scheduler.schedule(), [7, 8])
    batch = scheduler.schedule(drafts={"a": [1, 2, 3], "b": [1, 2, 3]})
    # Each row's last block has one place left behind its next token.
    assert (batch.num_drafts.tolist(), batch.preempted) == ([1, 1], ())


def test_no_draft_lies_beyond_the_full_length(make_scheduler, request_of):
    scheduler = started(make_scheduler(20, 4), request_of, max_tokens=4)
    batch = scheduler.schedule(drafts={"a": [1, 2, 3, 4, 5]})
    assert batch.num_drafts.tolist() == [2]
    (output,) = scheduler.update(batch, [1, 2, 9], [3])
    assert (output.token_ids, output.finish_reason) == ([1, 2, 9], "length")


def test_a_row_that_drafts_carry_past_others_ends_at_its_full_length(make_scheduler, request_of):
    scheduler = make_scheduler(40, 4)
    for name, most in (("a", 20), ("b", 12)):
        scheduler.add(request_of(name, 4, most))
    for _ in range(2):
        scheduler.update(scheduler.schedule(), [7, 7])
    outputs = []
    for drafts in ({"b": [7, 7, 7]}, {"b": [7, 7, 7]}, None, None):
        batch = scheduler.schedule(drafts=drafts)
        counts = 1 + batch.num_drafts
        outputs += scheduler.update(batch, [7] * int(counts.sum()), counts.tolist())
    assert [output.id for output in outputs if output.finish_reason == "length"] == ["b"]
    assert (sum(len(output.token_ids) for output in outputs if output.id == "b"), scheduler.status("a")) == (
        10,
        "running",
    )


def test_tokens_after_a_stop_among_the_accepted_ones_are_not_delivered(make_scheduler, request_of):
    scheduler = started(make_scheduler(20, 4), request_of, stop_token_ids=(2,))
    batch = scheduler.schedule(drafts={"a": [1, 2, 3]})
    (output,) = scheduler.update(batch, [1, 2, 3, 4], [4])
    assert (output.token_ids, output.finish_reason) == ([1, 2], "stop")
    assert (scheduler.manager.device.num_used, scheduler.check()) == (0, [])


def test_a_row_with_undecided_drafts_gives_no_block_to_one_behind_it(make_scheduler, request_of):
    scheduler = make_scheduler(5, 1, policy="vllm", max_outstanding=2)
    for id, prompt in (("a", [1]), ("b", [2])):
        scheduler.add(Request(id=id, prompt=prompt, max_tokens=6))
    scheduler.update(scheduler.schedule(), [5, 6])
    second = scheduler.schedule(drafts={"a": [7]})
    assert (second.ids.tolist(), scheduler.manager.device.num_available) == (["a", "b"], 0)
    # "a" cannot go on before its drafts are decided, and "b" asks for a block.
    third = scheduler.schedule()
    assert third.is_empty and not third.preempted
    scheduler.update(second, [7, 8, 9], [2, 1])
    fourth = scheduler.schedule()
    assert (fourth.ids.tolist(), [id for id, _ in fourth.preempted]) == (["a"], ["b"])


def test_arrays_by_row_say_the_same_as_a_mapping(make_scheduler):
    scheduler = make_scheduler(20, 4, {"a": 5, "b": 5, "c": 5})
    first = scheduler.schedule()
    scheduler.update(first, [7, 8, 9])
    rows = first.rows[[2, 0]]
    batch = scheduler.schedule(drafts=Drafts(rows, np.array([1, 2]), np.array([5, 3, 4], np.int32)))
    assert (batch.num_drafts.tolist(), batch.token_ids.tolist()) == ([2, 0, 1], [7, 3, 4, 8, 9, 5])


@pytest.mark.parametrize(
    ("drafts", "tokens", "message"),
    [
        ([1, 2], [1, 2, 3, 4], "got 4 tokens; it had 2 drafts"),
        ([1], [1, 1, 9], "got 3 tokens; it had 1 drafts"),
        ([1, 2], [1, 5, 9], "got token 5 where its draft was 2"),
    ],
)
def test_what_was_not_drafted_cannot_have_been_accepted(make_scheduler, request_of, drafts, tokens, message, unchanged):
    scheduler = started(make_scheduler(20, 4), request_of)
    batch = scheduler.schedule(drafts={"a": drafts})
    with unchanged(scheduler), pytest.raises(WrongTokens, match=message):
        scheduler.update(batch, tokens, [len(tokens)])
    scheduler.update(batch, [*drafts, 9], [len(drafts) + 1])


def test_a_block_that_held_rejected_drafts_goes_back_and_the_next_token_has_the_slot_before_it(
    make_scheduler, request_of
):
    scheduler = started(make_scheduler(8, 4), request_of, length=4)
    scheduler.add(request_of("between", 4))
    scheduler.update(scheduler.schedule(), [71, 80])
    batch = scheduler.schedule(drafts={"a": [1, 2, 3]})
    assert scheduler.manager.rows.num_blocks[scheduler.rows_of("a")].tolist() == [3]
    scheduler.update(batch, [72, 81], counts=[1, 1])
    (row,) = scheduler.rows_of("a")
    table = scheduler.manager.table(row).tolist()
    # The third block did not lie beside the second one, in which the seventh token is the third.
    assert (table, scheduler.check()) == ([0, 1], [])
    assert scheduler.schedule().slot_mapping[0] == 4 * table[1] + 2


def test_a_row_that_comes_back_waits_to_hear_how_many_of_its_drafts_were_right(make_scheduler):
    scheduler = make_scheduler(8, 16, {"a": (63, 9), "b": (62, 9)}, policy="vllm", max_tokens_per_step=160)
    scheduler.update(scheduler.schedule(), [7, 7])
    first = scheduler.schedule(drafts={"b": [5]})
    second = scheduler.schedule()
    assert [id for id, _ in second.preempted] == ["b"]
    scheduler.abort("a")
    third = scheduler.schedule()
    # Whether it goes on behind one token or behind two is not known before the first update.
    assert third.is_empty
    outputs = scheduler.update(first, [7, 5, 8], counts=[1, 2])
    assert [(output.id, output.token_ids) for output in outputs] == [("b", [5, 8])]
    scheduler.update(second, [7])
    assert scheduler.schedule().seq_lens.tolist() == [65]


def test_a_draft_may_be_guessed_when_the_batch_runs_and_is_what_the_engine_says_then(make_scheduler, request_of):
    scheduler = started(make_scheduler(8, 4), request_of)
    row = scheduler.row_of("a")
    drafts = Drafts(np.array([row]), np.array([3]), np.array([UNKNOWN_DRAFT, 72, UNKNOWN_DRAFT], np.int32))
    batch = scheduler.schedule(drafts=drafts)
    assert (batch.token_ids.tolist(), batch.num_drafts.tolist()) == ([70, -1, 72, -1], [3])
    assert batch.slot_mapping.tolist() == [int(scheduler.manager.table(row)[p // 4]) * 4 + p % 4 for p in (5, 6, 7, 8)]
    with pytest.raises(WrongTokens, match="got token 73 where its draft was 72"):
        scheduler.update(batch, [71, 73, 9], [3])
    (output,) = scheduler.update(batch, [71, 72, 9], [3])
    assert (output.token_ids, scheduler.manager.rows.tokens[row, 5:9].tolist()) == ([71, 72, 9], [70, 71, 72, 9])
    assert (scheduler.stats().accepted_tokens, scheduler.check()) == (2, [])


def test_what_was_computed_behind_a_stop_is_content_of_nobody(make_scheduler):
    """Found by 24,000 random runs: row 0 still had the 9 of "a" where "b" computed the 5 behind its stop, and the block of that 5 was taken
    for the 9, which only the host had."""
    scheduler = make_scheduler(7, 1, host_blocks=8, host_caching=True, policy="vllm")
    scheduler.add(Request(id="a", prompt=[7, 8, 3, 4, 9, 1], max_tokens=1))
    scheduler.update(scheduler.schedule(), [2])
    scheduler.add(Request(id="b", prompt=[7, 8], max_tokens=5, stop_token_ids=(4,)))
    scheduler.update(scheduler.schedule(), [3])
    batch = scheduler.schedule(drafts={"b": [4, 5]})
    [host_block] = [to for of, to in batch.moves.device_to_host.tolist() if of == batch.slot_mapping[2]]
    (output,) = scheduler.update(batch, [4, 5, 6], [3])
    assert (output.token_ids, output.finish_reason) == ([4], "stop")
    scheduler.add(Request(id="c", prompt=[7, 8, 3, 4, 9, 1], max_tokens=1))
    batch = scheduler.schedule()
    assert (batch.positions.tolist(), batch.moves.host_to_device[:, 0].tolist()) == ([5], [host_block])
