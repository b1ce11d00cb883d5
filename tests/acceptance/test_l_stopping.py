"""Stopping, finishing and aborting: where a sequence ends, and that its end is told once."""

import pytest

from paged.errors import DuplicateRequest

EOS = 2


def outputs_of(scheduler, batch, tokens, counts=None):
    return {output.id: output for output in scheduler.update(batch, tokens, counts)}


def test_L1_the_end_token_is_kept_and_the_others_run_on(make_scheduler, request_of):
    scheduler = make_scheduler(20, 4)
    for name in ("a", "b"):
        scheduler.add(request_of(name, 4, eos_token_id=EOS))
    outputs = outputs_of(scheduler, scheduler.schedule(), [EOS, 9])
    assert (outputs["a"].token_ids, outputs["a"].finish_reason) == ([EOS], "stop")
    assert (outputs["b"].token_ids, outputs["b"].finish_reason) == ([9], None)
    assert scheduler.running_ids() == ["b"]


@pytest.mark.parametrize(
    ("most", "tokens", "kept", "reason"),
    [(2, [10, 11, 12], 2, "length"), (9, [10, EOS, 12], 2, "stop"), (2, [10, EOS, 12], 2, "stop")],
)
def test_L3_tokens_beyond_the_limit_or_behind_a_stop_are_dropped(
    make_scheduler, request_of, most, tokens, kept, reason
):
    scheduler = make_scheduler(20, 4)
    scheduler.add(request_of("a", 4, max_tokens=most, eos_token_id=EOS))
    output = outputs_of(scheduler, scheduler.schedule(), tokens, [3])["a"]
    assert (output.token_ids, output.finish_reason) == (tokens[:kept], reason)


@pytest.mark.parametrize("stop", [{"eos_token_id": EOS}, {"stop_token_ids": (EOS,)}])
@pytest.mark.parametrize(("at", "stops"), [(3, False), (4, False), (5, True), (9, True)])
def test_L5_before_min_tokens_neither_the_end_token_nor_a_stop_id_counts(make_scheduler, request_of, stop, at, stops):
    scheduler = make_scheduler(20, 4)
    scheduler.add(request_of("a", 4, max_tokens=12, min_tokens=5, **stop))
    for number in range(1, at + 1):
        output = outputs_of(scheduler, scheduler.schedule(), [EOS if number == at else 9])["a"]
        assert output.finish_reason == ("stop" if number == at and stops else None)


def test_L6_aborting_those_that_wait_touches_no_memory(make_scheduler, unchanged):
    scheduler = make_scheduler(20, 4, {f"r{number}": 4 for number in range(10)})
    with unchanged(scheduler.manager):
        for number in range(10):
            assert scheduler.counts()["waiting"] == 10 - number
            assert scheduler.abort(f"r{number}").finish_reason == "abort"
            assert scheduler.check() == []
    assert (scheduler.counts()["waiting"], scheduler.counts()["aborted"]) == (0, 10)
    assert not scheduler.has_unfinished


def test_L8_an_end_is_told_exactly_once(make_scheduler, step):
    scheduler = make_scheduler(20, 4, {"short": (4, 2), "long": (4, 6)})
    told = [id for _ in range(8) for id, output in step(scheduler).outputs.items() if output.finish_reason]
    assert (told, scheduler.counts()["finished"]) == (["short", "long"], 2)


def test_L9_an_abort_in_flight_takes_effect_at_once_and_frees_the_id_when_its_batch_ends(make_scheduler, request_of):
    scheduler = make_scheduler(20, 4, {"a": 6, "b": 6})
    batch = scheduler.schedule()
    output = scheduler.abort("a")
    assert (output.id, output.finish_reason) == ("a", "abort")
    assert (scheduler.status("a"), scheduler.manager.device.num_used) == ("aborted", 2)
    with pytest.raises(DuplicateRequest):
        scheduler.add(request_of("a", 6))
    assert scheduler.check() == []
    outputs = outputs_of(scheduler, batch, [8, 9])
    assert (list(outputs), outputs["b"].token_ids) == (["b"], [9])
    assert scheduler.stats().voided_tokens == 6
    scheduler.add(request_of("a", 6))
    assert scheduler.counts()["submitted"] == 3


def test_L14_hits_on_withdrawn_blocks_are_no_hits(make_scheduler, run):
    scheduler = make_scheduler(20, 4, {"a": ([*range(8), ord("a")], 1), "b": ([*range(8), ord("b")], 1)})
    scheduler.cancel(scheduler.schedule())
    scheduler.abort("a")
    assert run(scheduler)[-1].outputs["b"].usage.hit_tokens == 0
