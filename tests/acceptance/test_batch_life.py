"""A batch's life: what is in flight, what an end makes of it, and what a cancel takes back."""

from paged import Policy, Request, Scheduler


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


def test_while_two_cancelled_batches_have_moves_to_run_nothing_is_written(make_manager):
    policy = Policy(name="swaps", take="tail", preemption="swap")
    scheduler = Scheduler(make_manager(7, 1, host_blocks=20, prefix_caching=False), policy=policy)
    for name, length in {"z": 1, "a": 1, "b": 1, "e": 4}.items():
        scheduler.add(Request(id=name, prompt=[1] * length, max_tokens=20))
    scheduler.update(scheduler.schedule(), [], [0, 0, 0, 0])
    scheduler.append("e", [9])
    scheduler.append("a", [6])
    first = scheduler.schedule()
    scheduler.append("b", [6])
    second = scheduler.schedule()
    moves = [batch.moves.device_to_host.tolist() for batch in (first, second)]
    assert all(moves)
    scheduler.append("z", [6])
    scheduler.cancel(second)
    scheduler.cancel(first)
    again = scheduler.schedule()
    # The source of the second copy may be written only once it has been copied.
    assert (again.moves.device_to_host.tolist(), len(again.slot_mapping)) == (moves[0], 0)
    assert scheduler.schedule().moves.device_to_host.tolist() == moves[1]
