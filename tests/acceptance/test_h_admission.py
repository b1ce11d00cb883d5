"""Admission and watermark: who may enter, who waits, and who is refused at the door."""

import pytest

from paged import Admission, PagedError, Policy
from paged.errors import NeverFits, WaitingFull


@pytest.mark.parametrize("num_blocks", [8, 40, 80])
@pytest.mark.parametrize("share", [0, 0.5])
def test_H1_never_is_what_no_empty_pool_holds_and_a_watermark_delays(make_manager, fill, num_blocks, share):
    # A peer answers NEVER when the watermark would be touched; ours answers LATER.
    manager = make_manager(num_blocks, 16)
    watermark = int(share * num_blocks)
    for used in (0, 1):
        for need in range(1, num_blocks + 3):
            has_room = not used or need + watermark <= num_blocks - used
            expected = Admission.NEVER if need > num_blocks else Admission.OK if has_room else Admission.LATER
            assert manager.admission(need, watermark=watermark) is expected
        fill(manager, range(16))


HALF = Policy(name="half", composition="in_order", watermark=0.5)


def test_H3_a_watermark_never_keeps_the_first_out(make_scheduler, step):
    scheduler = make_scheduler(120, 16, {"first": 1600}, policy=HALF)
    assert step(scheduler).tokens == {"first": 1600}
    assert scheduler.manager.device.num_used == 100


def test_H3_a_watermark_delays_the_second_and_is_no_refusal(make_scheduler, step):
    scheduler = make_scheduler(20, 4, {"first": (20, 3), "second": (24, 3)}, policy=HALF)
    # 5 of 20 blocks are taken: 6 more would leave 9, and 10 are to be left.
    assert step(scheduler).tokens == {"first": 20}
    step(scheduler)
    step(scheduler)
    assert scheduler.status("first") == "finished"
    assert step(scheduler).tokens == {"second": 24}
    whole = make_scheduler(20, 4, {"first": 20, "second": 20}, policy=HALF)
    assert step(whole).tokens == {"first": 20, "second": 20}


def test_H4_a_watermark_is_not_kept_from_decoding(make_scheduler, run):
    scheduler = make_scheduler(10, 4, {"grows": (8, 32)}, policy=HALF)
    run(scheduler)
    assert (scheduler.stats().output_tokens, scheduler.stats().max_preemptions) == (32, 0)


def test_H5_a_prompt_without_room_for_an_output_is_refused_with_the_numbers(make_scheduler, request_of, run):
    scheduler = make_scheduler(63, 16)
    for name, length, blocks in (("long", 1023, 64), ("exact", 1008, 64)):
        with pytest.raises(NeverFits) as caught:
            scheduler.add(request_of(name, length, max_tokens=1))
        assert (caught.value.blocks_needed, caught.value.num_blocks) == (blocks, 63)
        assert name in str(caught.value)
    assert scheduler.counts()["rejected"] == 2
    assert not scheduler.has_unfinished
    assert scheduler.schedule().is_empty
    scheduler.add(request_of("fits", 1007, max_tokens=1))
    steps = run(scheduler)
    last = steps[-1].outputs["fits"]
    assert (last.token_ids, last.finish_reason) == ([7], "length")
    stats = scheduler.stats()
    assert (stats.computed_tokens, stats.preemptions_recompute, stats.preemptions_swap) == (1007, 0, 0)


@pytest.mark.parametrize(("prompt", "max_model_len", "num_outputs"), [(1000, None, 8), (30, 40, 10)], ids=["H6", "H7"])
def test_H6_H7_a_sequence_stops_at_the_end_of_the_pool_or_model(
    make_scheduler, run, prompt, max_model_len, num_outputs
):
    steps = run(scheduler := make_scheduler(63, 16, {"grows": (prompt, 24)}, max_model_len=max_model_len))
    tokens = [token for step in steps for token in step.outputs["grows"].token_ids]
    assert (tokens, steps[-1].outputs["grows"].finish_reason) == ([7] * num_outputs, "length")
    assert scheduler.stats().max_preemptions == 0


@pytest.mark.parametrize("length", [48, 33, 32])
def test_H8_a_prompt_over_the_models_length_is_refused_and_never_scheduled(make_scheduler, request_of, length):
    # At 32 of 32 there is no place for an output.
    scheduler = make_scheduler(16, 4, max_model_len=32, max_tokens_per_step=64)
    with pytest.raises(PagedError, match="32"):
        scheduler.add(request_of("long", length))
    assert not scheduler.has_unfinished
    assert scheduler.schedule().is_empty


def test_a_prompt_enters_where_one_block_is_free_and_the_others_are_shared(make_scheduler, request_of, step):
    scheduler = make_scheduler(4, 4, {"a": (list(range(8)), 4)}, policy="vllm")
    for _ in range(2):
        step(scheduler)
    scheduler.add(request_of("b", list(range(9)), max_tokens=1))
    assert (scheduler.manager.device.num_available, step(scheduler).tokens) == (1, {"a": 1, "b": 1})


def test_H10_a_request_whose_prefix_is_still_loading_holds_its_whole_reservation(make_scheduler, request_of, run, step):
    scheduler = make_scheduler(9, 4)
    # 8 and 5 blocks in all, 4 of each computed elsewhere.
    for name, length in (("a", 30), ("b", 18)):
        scheduler.add(request_of(name, length, max_tokens=2, num_computed=16))
    batch = scheduler.schedule()
    assert (scheduler.status("a"), scheduler.status("b")) == ("loading", "waiting")
    assert (len(batch.rows), batch.loads[:, 1].tolist()) == (0, [0, 4, 8, 12])
    assert len(set(batch.loads[:, 2].tolist())) == 4
    scheduler.update(batch, [])
    scheduler.loaded("a", 16)
    assert step(scheduler).tokens == {"a": 14}
    assert scheduler.status("b") == "waiting"
    step(scheduler)
    assert (scheduler.status("a"), step(scheduler).tokens, scheduler.status("b")) == ("finished", {}, "loading")
    scheduler.loaded("b", 16)
    run(scheduler)
    assert scheduler.stats().max_preemptions == 0


def test_H12_a_limit_on_waiting_requests_refuses_and_changes_nothing(make_scheduler, request_of, step):
    scheduler = make_scheduler(8, 4, {"a": 4, "b": 4}, max_waiting=2)
    with pytest.raises(WaitingFull, match="2"):
        scheduler.add(request_of("c", 4))
    assert scheduler.waiting_ids() == ["a", "b"]
    step(scheduler)
    scheduler.add(request_of("c", 4))
    assert scheduler.waiting_ids() == ["c"]


def test_H14_a_group_is_admitted_whole_or_not_at_all(make_scheduler, request_of, step):
    scheduler = make_scheduler(40, 4, {"one": 4}, max_sequences=4)
    scheduler.add(request_of("group", 4, num_sequences=4))
    assert step(scheduler).tokens == {"one": 4}
    scheduler.abort("one")
    # All four are in: each prompt is one block, and the last token of it is everyone's own to compute.
    step(scheduler)
    assert len(scheduler.rows_of("group")) == 4
