"""`finish`: the engine ends one sequence with a reason of its own, in whatever state it is."""

import numpy as np
import pytest

from paged import Costs, Request, Retention
from paged.errors import DuplicateRequest, InvalidRequest, UnknownRequest


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


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_others_of_a_group_go_on_and_the_last_one_has_the_usage(make_scheduler, make_engine, request_of, first):
    scheduler = make_scheduler(20, 4)
    engine = make_engine(scheduler)
    engine.add(request_of("group", 10, max_tokens=6, num_sequences=3))
    for _ in range(3):
        engine.step()
    assert known(scheduler.finish("group", first)) == ("group", first, [], "stop", False)
    assert scheduler.check() == []
    assert scheduler.finish("group", first) is None
    batch = engine.step()
    others = [sequence for sequence in range(3) if sequence != first]
    assert sorted(batch.sequences.tolist()) == others
    assert known(scheduler.finish("group", others[0], "length"))[4] is False
    usages = []
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        usages += [output.usage for output in engine.update(batch, engine.forward(batch)) if output.finish_reason]
        assert scheduler.check() == []
    (usage,) = usages
    assert usage.output_tokens == sum(len(tokens) for tokens in engine.outputs.values())
    assert (scheduler.counts()["finished"], scheduler.manager.device.num_used) == (1, 0)


def test_a_sequence_of_a_waiting_group_never_runs(make_scheduler, request_of, run):
    scheduler = make_scheduler(8, 4)
    scheduler.add(request_of("group", 4, max_tokens=2, num_sequences=3))
    assert known(scheduler.finish("group", 1))[4] is False
    seen = {sequence for each in run(scheduler) for sequence in each.batch.sequences.tolist()}
    assert seen == {0, 2}


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


@pytest.mark.parametrize("end", ["update", "counts", "cancel"])
def test_in_flight_one_sequence_of_a_group_goes_when_its_batch_ends(make_scheduler, request_of, step, end):
    scheduler = make_scheduler(20, 4)
    scheduler.add(request_of("group", 4, num_sequences=3))
    step(scheduler)
    batch = scheduler.schedule()
    assert batch.sequences.tolist() == [0, 1, 2]
    assert known(scheduler.finish("group", 1))[4] is False
    assert scheduler.finish("group", 1) is None
    assert scheduler.check() == []
    if end == "cancel":
        scheduler.cancel(batch)
    else:
        counts = [1, 2, 1] if end == "counts" else None
        outputs = list(scheduler.update(batch, [5] * (4 if counts else 3), counts))
        assert [(output.sequence, output.token_ids) for output in outputs] == [(0, [5]), (2, [5])]
    assert (scheduler.check(), len(scheduler.rows_of("group"))) == ([], 2)
    batch = scheduler.schedule()
    assert batch.sequences.tolist() == [0, 2]
    assert known(scheduler.finish("group", 0))[4] is False
    output = scheduler.finish("group", 2)
    # Two tokens each but for the one that ended first, or one each.
    assert output.usage.output_tokens == (3 if end == "cancel" else 5)
    assert list(scheduler.update(batch, [5, 5])) == []
    assert not scheduler.has_unfinished
    assert scheduler.check() == []


def test_a_group_whose_last_sequence_stops_while_another_is_in_a_later_batch_tells_its_usage(
    make_scheduler, request_of
):
    scheduler = make_scheduler(20, 4, max_tokens_per_step=4, policy="vllm")
    scheduler.add(request_of("group", 4, num_sequences=2, eos_token_id=9))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert (first.sequences.tolist(), second.sequences.tolist()) == ([0], [0, 1])
    assert known(scheduler.finish("group", 1))[4] is False
    (output,) = scheduler.update(first, [9])
    assert (output.finish_reason, output.usage.output_tokens) == ("stop", 1)
    assert scheduler.abort("group") is None
    assert list(scheduler.update(second, [7] * int(second.samples.sum()))) == []
    assert not scheduler.has_unfinished
    assert scheduler.check() == []


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


@pytest.mark.parametrize("num_sequences", [1, 2])
@pytest.mark.parametrize(
    ("policy", "host_blocks", "status"), [("vllm", 0, "waiting"), ("paged", 0, "paused"), ("paged", 12, "swapped")]
)
def test_a_preempted_request_ends(make_scheduler, request_of, step, policy, host_blocks, status, num_sequences):
    costs = Costs(seconds_per_swapped_block=1e-9)
    scheduler = make_scheduler(6, 4, policy=policy, host_blocks=host_blocks, costs=costs)
    for name, count in (("a", 1), ("b", num_sequences)):
        scheduler.add(request_of(name, 7, num_sequences=count, retention=Retention()))
    # Only one that is alone gives up its tail alone.
    wanted = "waiting" if (status, num_sequences) == ("paused", 2) else status
    step(scheduler)
    for _ in range(30):
        if scheduler.status("b") == wanted:
            break
        step(scheduler)
    assert scheduler.status("b") == wanted
    for sequence in range(num_sequences):
        output = scheduler.finish("b", sequence)
        assert known(output)[:4] == ("b", sequence, [], "stop")
        assert scheduler.check() == []
    assert output.usage.preemptions >= 1
    assert (scheduler.status("b"), scheduler.manager.host.num_used) == ("finished", 0)


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


def test_its_content_is_kept_as_the_request_wishes(make_scheduler, step):
    scheduler = make_scheduler(6, 4)
    scheduler.add(Request(id="a", prompt=list(range(9)), max_tokens=9, retention=Retention(priority=2)))
    step(scheduler)
    scheduler.finish("a")
    for number in range(4):
        scheduler.add(Request(id=f"r{number}", prompt=[1000 * number + i + 100 for i in range(13)], max_tokens=1))
        step(scheduler)
    assert scheduler.manager.lookup(range(9)).num_tokens == 8


def test_what_has_ended_or_never_was(make_scheduler, step):
    scheduler = make_scheduler(8, 4, {"a": (4, 1)})
    step(scheduler)
    assert scheduler.finish("a") is None
    for name in ("nobody", None, 3):
        with pytest.raises(UnknownRequest):
            scheduler.finish(name)


@pytest.mark.parametrize("sequence", [-1, 2, True, 0.0, "0", None])
def test_another_sequence_is_refused(make_scheduler, request_of, sequence):
    scheduler = make_scheduler(8, 4)
    scheduler.add(request_of("a", 4, num_sequences=2))
    with pytest.raises(InvalidRequest, match='request "a" has no sequence'):
        scheduler.finish("a", sequence)
    assert scheduler.finish("a", np.int64(1)).sequence == 1


@pytest.mark.parametrize("reason", ["abort", "rejected", "error", "", None, 1, ["stop"]])
def test_another_reason_is_refused(make_scheduler, reason):
    scheduler = make_scheduler(8, 4, {"a": 4})
    with pytest.raises(InvalidRequest, match='reason has to be "stop" or "length"'):
        scheduler.finish("a", reason=reason)
    assert scheduler.status("a") == "waiting"
