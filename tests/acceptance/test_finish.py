"""`finish`: the engine ends one sequence with a reason of its own, in whatever state it is."""

import pytest

from paged.errors import DuplicateRequest, UnknownRequest


def known(output):
    return output.id, output.sequence, output.token_ids, output.finish_reason, output.usage is not None


def test_a_running_request_of_one_sequence_ends_with_its_usage(make_scheduler, step):
    scheduler = make_scheduler(8, 4, {"a": 4, "b": 4})
    step(scheduler)
    step(scheduler)
    output = scheduler.finish("a")
    assert known(output) == ("a", 0, [], "stop", True)
    assert (output.usage.prompt_tokens, output.usage.output_tokens) == (4, 2)
    assert scheduler.status("a") == "finished"
    assert "stop" in str(scheduler.explain("a"))
    assert (scheduler.counts()["finished"], scheduler.check()) == (1, [])
    assert step(scheduler).tokens == {"b": 1}


def test_in_flight_it_ends_at_once_and_the_id_is_free_when_the_batch_has_ended(make_scheduler, request_of):
    scheduler = make_scheduler(8, 4, {"a": 4, "b": 4})
    batch = scheduler.schedule()
    assert known(scheduler.finish("a")) == ("a", 0, [], "stop", True)
    assert (scheduler.status("a"), scheduler.manager.device.num_used) == ("finished", 1)
    assert scheduler.finish("a") is None
    assert scheduler.abort("a") is None
    with pytest.raises(UnknownRequest):
        scheduler.append("a", [1])
    with pytest.raises(DuplicateRequest):
        scheduler.add(request_of("a", 4))
    assert scheduler.check() == []
    assert [output.id for output in scheduler.update(batch, [7, 7])] == ["b"]
    assert (scheduler.status("a"), scheduler.counts()["aborted"]) == ("finished", 0)
    assert scheduler.check() == []
    scheduler.add(request_of("a", 4))


def test_in_flight_one_sequence_of_a_group_goes_when_its_batch_ends(make_scheduler, request_of, step):
    scheduler = make_scheduler(20, 4)
    scheduler.add(request_of("group", 4, num_sequences=3))
    step(scheduler)
    batch = scheduler.schedule()
    assert known(scheduler.finish("group", 1))[4] is False
    assert scheduler.finish("group", 1) is None
    outputs = list(scheduler.update(batch, [5] * 4, [1, 2, 1]))
    assert [(output.sequence, output.token_ids) for output in outputs] == [(0, [5]), (2, [5])]
    assert (scheduler.check(), len(scheduler.rows_of("group"))) == ([], 2)
    batch = scheduler.schedule()
    assert batch.sequences.tolist() == [0, 2]
    assert known(scheduler.finish("group", 0))[4] is False
    # Two tokens each but for the one that ended first.
    assert scheduler.finish("group", 2).usage.output_tokens == 5
    assert list(scheduler.update(batch, [5, 5])) == []
    assert (scheduler.has_unfinished, scheduler.check()) == (False, [])


@pytest.mark.parametrize(("ended", "other"), [(0, 1), (1, 0)])
def test_an_aborted_group_forgets_that_one_of_it_was_ended(make_scheduler, request_of, ended, other):
    scheduler = make_scheduler(20, 4)
    scheduler.add(request_of("group", 4, num_sequences=2))
    batch = scheduler.schedule()
    scheduler.finish("group", ended)
    # Of the one that goes on: what has ended is not told twice.
    assert known(scheduler.abort("group")) == ("group", other, [], "abort", True)
    assert scheduler.finish("group", other) is None
    assert list(scheduler.update(batch, [7] * int(batch.samples.sum()))) == []
    assert (scheduler.counts()["aborted"], scheduler.check()) == (1, [])


def test_a_loading_request_ends_at_once_and_its_blocks_go_back_when_the_batch_that_lists_its_loads_has_ended(
    make_scheduler, request_of
):
    scheduler = make_scheduler(20, 4)
    scheduler.add(request_of("a", 18, num_computed=12))
    batch = scheduler.schedule()
    assert known(scheduler.finish("a")) == ("a", 0, [], "stop", True)
    assert (scheduler.status("a"), scheduler.manager.device.num_used) == ("finished", 3)
    with pytest.raises(UnknownRequest):
        scheduler.loaded("a", 4)
    scheduler.update(batch, [])
    assert scheduler.manager.device.num_used == 0
    scheduler.add(request_of("b", 18, num_computed=12))
    scheduler.update(scheduler.schedule(), [])
    assert scheduler.finish("b").finish_reason == "stop"
    assert (scheduler.status("b"), scheduler.manager.device.num_used) == ("finished", 0)
    assert scheduler.check() == []
