"""A batch's life: what is in flight, what an end makes of it, and what a cancel takes back."""

import pytest

from paged.errors import ForeignBatch


def test_moves_that_did_not_run_go_into_the_next_batch(make_scheduler, make_engine):
    def until_swap(scheduler, engine):
        for _ in range(50):
            batch = scheduler.schedule()
            if len(batch.moves):
                return batch
            engine.update(batch, engine.forward(batch))
        raise AssertionError("nothing was ever swapped")

    outputs = []
    for ending in ("ran", "moved", "not moved"):
        scheduler = make_scheduler(9, 4, host_blocks=12, policy="paged")
        engine = make_engine(scheduler, {"a": ([ord("a")] * 14, 9), "b": ([ord("b")] * 14, 9)})
        batch = until_swap(scheduler, engine)
        if ending == "ran":
            engine.update(batch, engine.forward(batch))
        else:
            engine.see_tables(batch)
            if ending == "moved":
                engine.move(batch.moves)
            scheduler.cancel(batch, moved=ending == "moved")
            assert scheduler.check() == []
            after = scheduler.schedule()
            pairs = [tuple(pair) for pair in after.moves.device_to_host.tolist()]
            went_again = all(tuple(pair) in pairs for pair in batch.moves.device_to_host.tolist())
            assert went_again is (ending == "not moved")
            engine.update(after, engine.forward(after))
        outputs.append(engine.run())
    assert outputs[0] == outputs[1] == outputs[2]


def test_an_engine_that_does_not_end_empty_batches_still_hears_of_every_end(make_scheduler, step):
    scheduler = make_scheduler(3, 1, {"a": [0]})
    scheduler.append("a", [1, 2, 2, 1, 2])
    reasons = [output.finish_reason for _ in range(3) for output in step(scheduler).outputs.values()]
    assert reasons == ["rejected"]
    assert not scheduler.has_unfinished


def test_an_empty_batch_may_be_cancelled_by_its_scheduler_and_by_no_other(make_scheduler):
    ours, other = make_scheduler(4, 4), make_scheduler(4, 4)
    batch = ours.schedule()
    assert batch.is_empty
    ours.cancel(batch)
    ours.cancel(batch)
    for end in (other.cancel, lambda foreign: other.update(foreign, [])):
        with pytest.raises(ForeignBatch):
            end(batch)
    assert ours.update(batch, []) is not None


@pytest.mark.parametrize("row", ["x", None, 1.0, -1, 10**30])
def test_what_is_no_row_serves_no_request(make_scheduler, row):
    assert make_scheduler(8, 4).id_of(row) is None


def test_what_is_confirmed_goes_before_what_a_later_batch_has_pending(make_manager):
    manager = make_manager(4, 2)
    first = manager.add([0, 1, 0, 1, 0, 1])
    manager.allocate(first, 6)
    manager.confirm()
    # Its content stays cached, so that it makes no pending node when it computes the same again ...
    manager.truncate(first, 0)
    manager.allocate(first, 6)
    manager.next_batch()
    # ... and then is evicted, and a row of the next batch has it pending.
    second = manager.add([0, 1])
    manager.allocate(second, 2)
    manager.confirm()
    assert manager.lookup([0, 1, 0, 1, 0, 1, 9]).num_tokens == 6
    manager.confirm()
    assert manager.table(second).tolist() == manager.table(first).tolist()[:1]
