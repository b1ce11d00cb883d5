"""A batch's life: what is in flight, what an end makes of it, and what a cancel takes back."""

from __future__ import annotations

import pytest

from paged import Costs, PagedError


def test_a_batch_in_flight_is_counted_apart_from_what_is_confirmed(make_scheduler, request_of):
    scheduler = make_scheduler(8, 4)
    scheduler.add(request_of("a", 6))
    batch = scheduler.schedule()
    row = int(batch.rows[0])
    manager = scheduler.manager
    assert (manager.num_computed[row], manager.num_scheduled[row]) == (0, 6)
    scheduler.update(batch, [7])
    assert (manager.num_computed[row], manager.num_scheduled[row], manager.num_tokens[row]) == (6, 0, 7)


@pytest.mark.parametrize("moved", [True, False])
def test_a_cancelled_batch_gives_its_blocks_back_and_is_scheduled_again(make_scheduler, make_engine, request_of, moved):
    scheduler = make_scheduler(8, 4)
    engine = make_engine(scheduler)
    engine.add(request_of("a", 6, max_tokens=6))
    engine.step()
    used = scheduler.manager.num_used
    for _ in range(3):
        batch = scheduler.schedule()
        engine.see_tables(batch)
        if moved:
            engine.move(batch.moves)
        scheduler.cancel(batch, moved=moved)
        assert scheduler.check() == []
        assert scheduler.manager.num_used == used
        assert int(scheduler.manager.num_scheduled.sum()) == 0
    assert len(engine.run()["a/0"]) == 6


def test_a_cancelled_prompt_leaves_nothing_in_the_cache(make_scheduler, request_of):
    scheduler = make_scheduler(8, 4)
    scheduler.add(request_of("a", list(range(10))))
    scheduler.cancel(scheduler.schedule())
    assert scheduler.manager.lookup(range(10)).num_tokens == 0
    assert scheduler.manager.cached_contents() == set()
    # An admission stands, and the next batch computes everything.
    batch = scheduler.schedule()
    assert batch.num_tokens.tolist() == [10]
    scheduler.update(batch, [7])
    assert scheduler.manager.lookup(range(10)).num_tokens == 8


def test_rows_that_shared_a_withdrawn_block_compute_it_themselves(make_scheduler, make_engine, request_of):
    scheduler = make_scheduler(20, 4)
    engine = make_engine(scheduler)
    for name in ("a", "b", "c"):
        engine.add(request_of(name, [*range(8), ord(name)], max_tokens=4))
    batch = scheduler.schedule()
    engine.see_tables(batch)
    assert batch.num_tokens.tolist() == [9, 1, 1]
    scheduler.cancel(batch)
    assert scheduler.check() == []
    again = scheduler.schedule()
    # Somebody computes the 8 tokens again, the others share them again.
    assert sorted(again.num_tokens.tolist()) == [1, 1, 9]
    engine.update(again, engine.forward(again))
    engine.run()
    assert {len(tokens) for tokens in engine.outputs.values()} == {4}


def test_an_abort_of_the_leader_before_a_cancel_leaves_the_sharers_whole(make_scheduler, make_engine, request_of):
    scheduler = make_scheduler(20, 4)
    engine = make_engine(scheduler)
    for name in ("a", "b"):
        engine.add(request_of(name, [*range(8), ord(name)], max_tokens=4))
    batch = scheduler.schedule()
    engine.see_tables(batch)
    scheduler.abort("a")
    scheduler.cancel(batch)
    assert scheduler.check() == []
    again = scheduler.schedule()
    assert (list(again.ids), again.num_tokens.tolist()) == (["b"], [9])
    engine.update(again, engine.forward(again))
    assert len(engine.run()["b/0"]) == 4


def test_a_row_that_filled_a_block_which_another_batch_has_pending_switches_when_its_own_ends(
    make_scheduler, make_engine, request_of
):
    scheduler = make_scheduler(20, 4, max_sequences=4)
    engine = make_engine(scheduler)
    engine.add(request_of("a", [*range(8), 70], max_tokens=4))
    first = scheduler.schedule()
    first_tokens = engine.forward(first)
    engine.add(request_of("b", [*range(8), 80], max_tokens=4))
    second = scheduler.schedule()
    # A pending block is seen only within its own batch: "b" computes everything.
    assert second.num_tokens.tolist() == [9]
    second_tokens = engine.forward(second)
    assert scheduler.manager.num_used == 6
    engine.update(first, first_tokens)
    engine.update(second, second_tokens)
    assert scheduler.manager.num_used == 4
    engine.run()
    assert {len(tokens) for tokens in engine.outputs.values()} == {4}


def test_the_later_batch_may_be_cancelled_after_the_earlier_one_was_updated(make_scheduler, make_engine, request_of):
    scheduler = make_scheduler(20, 4, max_tokens_per_step=9)
    engine = make_engine(scheduler)
    for name in ("a", "b"):
        engine.add(request_of(name, 9, max_tokens=4))
    first = scheduler.schedule()
    tokens = engine.forward(first)
    second = scheduler.schedule()
    engine.see_tables(second)
    engine.update(first, tokens)
    third = scheduler.schedule()
    assert list(third.ids) == ["a"]
    engine.see_tables(third)
    scheduler.cancel(third)
    scheduler.cancel(second)
    assert scheduler.check() == []
    engine.run()
    assert {len(tokens) for tokens in engine.outputs.values()} == {4}


def test_moves_that_did_not_run_go_into_the_next_batch(make_scheduler, make_engine, request_of):
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
        engine = make_engine(scheduler)
        for name in ("a", "b"):
            engine.add(request_of(name, [ord(name)] * 14, max_tokens=9))
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


def test_cancels_at_random_places_change_no_word(make_scheduler, make_engine, request_of):
    prompts = [[(number * position) % 3 for position in range(4 + 2 * number)] for number in range(6)]

    def outputs(cancel_every, moved, num_blocks):
        scheduler = make_scheduler(num_blocks, 4, host_blocks=6, max_tokens_per_step=12, max_sequences=4)
        engine = make_engine(scheduler)
        for number, prompt in enumerate(prompts):
            engine.add(request_of(f"r{number}", prompt, max_tokens=8))
        for count in range(1, 1000):
            if not scheduler.has_unfinished:
                return engine.outputs
            batch = scheduler.schedule()
            if batch.is_empty:
                continue
            if cancel_every and count % cancel_every == 0:
                engine.see_tables(batch)
                if moved:
                    engine.move(batch.moves)
                scheduler.cancel(batch, moved=moved)
            else:
                engine.update(batch, engine.forward(batch))
            assert scheduler.check() == []
        raise AssertionError("no end")

    plain = outputs(0, False, 60)
    for num_blocks in (7, 9):
        for cancel_every in (2, 3):
            for moved in (True, False):
                assert outputs(cancel_every, moved, num_blocks) == plain


def test_an_engine_that_keeps_two_batches_in_the_air_says_the_same_words(make_scheduler, make_engine, request_of):
    prompts = [[(number + position) % 3 for position in range(3 + 3 * number)] for number in range(6)]
    plain = {}
    for number, prompt in enumerate(prompts):
        engine = make_engine(make_scheduler(60, 4))
        engine.add(request_of(f"r{number}", prompt, max_tokens=8))
        plain |= engine.run()
    for num_blocks in (8, 10, 14):
        scheduler = make_scheduler(num_blocks, 4, host_blocks=5, max_tokens_per_step=8, max_sequences=5)
        engine = make_engine(scheduler)
        for number, prompt in enumerate(prompts):
            engine.add(request_of(f"r{number}", prompt, max_tokens=8))
        outstanding = []
        for _ in range(2000):
            if not scheduler.has_unfinished:
                break
            batch = scheduler.schedule()
            assert scheduler.check() == []
            if not batch.is_empty:
                outstanding.append((batch, engine.forward(batch)))
            if batch.is_empty or len(outstanding) == 2:
                engine.update(*outstanding.pop(0))
                assert scheduler.check() == []
        for batch, tokens in outstanding:
            engine.update(batch, tokens)
        assert engine.outputs == plain


def test_an_output_of_no_tokens_leaves_a_row_waiting_for_the_caller(make_scheduler, request_of, step, scheduled):
    scheduler = make_scheduler(8, 4)
    scheduler.add(request_of("a", 4, max_tokens=8))
    batch = scheduler.schedule()
    outputs = list(scheduler.update(batch, [], [0]))
    assert [output.token_ids for output in outputs] in ([], [[]])
    assert scheduler.status("a") == "running"
    assert scheduler.has_unfinished
    # With nothing known beyond what is computed there is nothing to run.
    assert scheduler.schedule().is_empty
    scheduler.append("a", [50, 51])
    assert step(scheduler).batch.token_ids.tolist() == [50, 51]


def test_appended_tokens_are_computed_with_the_next_step(make_scheduler, make_engine, request_of):
    scheduler = make_scheduler(8, 4)
    engine = make_engine(scheduler)
    engine.add(request_of("a", 4, max_tokens=4))
    engine.step()
    scheduler.append("a", [30, 31, 32])
    engine.known["a", 0] += [30, 31, 32]
    batch = engine.step()
    # The sampled one, and the three of the caller.
    assert batch.num_tokens.tolist() == [4]
    assert batch.context_lens.tolist() == [8]
    engine.run()
    assert scheduler.status("a") == "finished"


def test_appended_tokens_that_can_never_fit_end_the_request_as_rejected(make_scheduler, request_of, step):
    scheduler = make_scheduler(4, 4)
    scheduler.add(request_of("a", 6, max_tokens=50))
    scheduler.add(request_of("b", 3, max_tokens=3))
    step(scheduler)
    scheduler.append("a", list(range(20)))
    reasons = {}
    for _ in range(6):
        for id, output in step(scheduler).outputs.items():
            if output.finish_reason:
                reasons[id] = output.finish_reason
    assert reasons == {"a": "rejected", "b": "length"}
    assert not scheduler.has_unfinished
    assert scheduler.manager.num_used == 0


def test_a_group_samples_in_every_sequence_and_shares_its_prompt(make_scheduler, make_engine, request_of):
    scheduler = make_scheduler(20, 4)
    engine = make_engine(scheduler)
    engine.add(request_of("group", 10, max_tokens=5, num_sequences=3))
    batch = engine.step()
    assert sum(batch.num_tokens) <= 10 + 2 * 10
    engine.step()
    # Two full prompt blocks are shared; each sequence has a tail of its own.
    assert scheduler.manager.num_used == 2 + 3
    engine.run()
    assert sorted(engine.outputs) == ["group/0", "group/1", "group/2"]
    assert {len(tokens) for tokens in engine.outputs.values()} == {5}
    assert scheduler.counts()["finished"] == 1


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


def test_an_aborted_group_goes_whole(make_scheduler, request_of, step):
    scheduler = make_scheduler(20, 4)
    scheduler.add(request_of("group", 10, num_sequences=3))
    step(scheduler)
    step(scheduler)
    scheduler.abort("group")
    assert scheduler.manager.num_used == 0
    assert scheduler.counts()["aborted"] == 1
    assert not scheduler.has_unfinished


def test_tokens_computed_elsewhere_are_loaded_and_the_rest_is_computed(make_scheduler, make_engine, request_of):
    scheduler = make_scheduler(20, 4)
    engine = make_engine(scheduler)
    engine.add(request_of("a", list(range(18)), max_tokens=3, num_computed=12))
    batch = scheduler.schedule()
    assert batch.loads[:, 1].tolist() == [0, 4, 8]
    assert scheduler.status("a") == "loading"
    assert not batch.is_empty
    engine.see_tables(batch)
    engine.load(batch, "a")
    scheduler.update(batch, [])
    # Until it is told, nothing happens.
    assert scheduler.schedule().is_empty
    scheduler.loaded("a", 12)
    assert scheduler.manager.lookup(range(18)).num_tokens == 12
    second = engine.step()
    assert (second.num_tokens.tolist(), second.positions.tolist()) == ([6], list(range(12, 18)))
    assert len(engine.run()["a/0"]) == 3


@pytest.mark.parametrize(("arrived", "computed"), [(12, 6), (7, 11), (4, 14), (0, 18)])
def test_what_did_not_arrive_is_computed(make_scheduler, make_engine, request_of, arrived, computed):
    scheduler = make_scheduler(20, 4)
    engine = make_engine(scheduler)
    engine.add(request_of("a", list(range(18)), max_tokens=2, num_computed=12))
    batch = scheduler.schedule()
    engine.see_tables(batch)
    engine.load(batch, "a")
    scheduler.update(batch, [])
    scheduler.loaded("a", arrived)
    assert engine.step().num_tokens.tolist() == [computed]
    assert len(engine.run()["a/0"]) == 2


def test_prefix_hits_come_before_loads_and_one_token_is_left_to_compute(make_scheduler, make_engine, request_of):
    scheduler = make_scheduler(20, 4)
    engine = make_engine(scheduler)
    engine.add(request_of("first", [*range(8), 90], max_tokens=1))
    engine.run()
    # Tokens 0 to 7 are cached; everything is said to exist elsewhere, but the last token is ours.
    engine.add(request_of("second", list(range(16)), max_tokens=2, num_computed=16))
    batch = scheduler.schedule()
    assert batch.loads[:, 1].tolist() in ([8], [8, 12])
    engine.see_tables(batch)
    engine.load(batch, "second")
    scheduler.update(batch, [])
    # Of the 7 that were asked for, all arrived.
    scheduler.loaded("second", 7)
    assert engine.step().num_tokens.tolist() == [1]
    engine.run()
    assert len(engine.outputs["second/0"]) == 2


def test_a_loading_request_can_be_aborted(make_scheduler, request_of):
    scheduler = make_scheduler(20, 4)
    scheduler.add(request_of("a", 18, num_computed=12))
    batch = scheduler.schedule()
    scheduler.update(batch, [])
    assert scheduler.abort("a").finish_reason == "abort"
    assert scheduler.check() == []
    assert not scheduler.has_unfinished


def test_others_run_while_one_is_loading(make_scheduler, request_of, step):
    scheduler = make_scheduler(20, 4)
    scheduler.add(request_of("loads", 18, num_computed=12))
    scheduler.add(request_of("runs", 6, max_tokens=3))
    assert step(scheduler).tokens == {"runs": 6}
    assert step(scheduler).tokens == {"runs": 1}
    assert scheduler.counts()["loading"] == 1


def test_with_moves_in_the_background_a_returning_row_waits_until_they_are_reported(
    make_scheduler, make_engine, request_of
):
    plain = make_engine(make_scheduler(60, 4))
    scheduler = make_scheduler(9, 4, host_blocks=12, async_moves=True)
    engine = make_engine(scheduler)
    for name in ("a", "b"):
        prompt = [ord(name)] * 14
        plain.add(request_of(name, prompt, max_tokens=9))
        engine.add(request_of(name, prompt, max_tokens=9))
    pending = []
    seen = set()
    for _ in range(300):
        if not scheduler.has_unfinished:
            break
        batch = scheduler.schedule()
        seen |= {scheduler.status(id) for id in ("a", "b")}
        if len(batch.moves):
            pending.append(batch)
        if not batch.is_empty:
            engine.update(batch, engine.forward(batch, moves_first=False))
        assert scheduler.check() == []
        # Transfers end a step later than the batch that ordered them.
        if pending and pending[0] is not batch:
            done = pending.pop(0)
            engine.move(done.moves)
            scheduler.moved(done)
            assert scheduler.check() == []
    for batch in pending:
        scheduler.moved(batch)
    assert engine.outputs == plain.run()
    assert scheduler.stats().swapped_in_blocks >= 1
    assert "loading" in seen
    assert scheduler.manager.host_used == 0


def test_a_loading_row_whose_shared_block_is_withdrawn_still_loads_into_blocks_of_its_own(
    make_scheduler, make_engine, request_of
):
    scheduler = make_scheduler(8, 1)
    engine = make_engine(scheduler)
    engine.add(request_of("a", [0, 0], max_tokens=2))
    engine.add(request_of("b", [0, 1, 1, 1], max_tokens=2, num_computed=2))
    batch = scheduler.schedule()
    engine.see_tables(batch)
    # "b" shares the token that "a" computes in this very batch, and the next one is to be loaded.
    assert scheduler.status("b") == "loading"
    scheduler.cancel(batch)
    assert scheduler.check() == []
    again = scheduler.schedule()
    row = scheduler.rows_of("b")[0] if scheduler.status("b") == "loading" else None
    for loading, _, block in again.loads:
        assert int(loading) == row
        assert int(block) in scheduler.manager.table(row)
    tokens = engine.forward(again)
    if len(again.loads):
        engine.load(again, "b")
    engine.update(again, tokens)
    if scheduler.status("b") == "loading":
        scheduler.loaded("b", len(again.loads))
    assert scheduler.check() == []
    engine.run()
    assert [len(engine.outputs[name]) for name in ("a/0", "b/0")] == [2, 2]


def test_tokens_appended_while_loading_do_not_change_what_was_asked_for(make_scheduler, make_engine, request_of):
    scheduler = make_scheduler(12, 1)
    engine = make_engine(scheduler)
    engine.add(request_of("a", [1, 1, 2], max_tokens=2, num_computed=3))
    batch = scheduler.schedule()
    assert len(batch.loads) == 2
    engine.see_tables(batch)
    engine.load(batch, "a")
    scheduler.update(batch, [])
    scheduler.append("a", [2])
    engine.known["a", 0].append(2)
    with pytest.raises(PagedError):
        scheduler.loaded("a", 3)
    assert scheduler.status("a") == "loading"
    scheduler.loaded("a", 2)
    assert engine.step().num_tokens.tolist() == [2]
    engine.run()
    assert len(engine.outputs["a/0"]) == 2


def test_sequences_of_a_group_that_fill_the_same_block_in_one_step_end_with_one_block(
    make_scheduler, make_engine, request_of
):
    scheduler = make_scheduler(8, 4, policy="vllm", max_chunk=3)
    engine = make_engine(scheduler)
    engine.add(request_of("group", [0, 2, 2, 2, 2, 1, 0, 1], max_tokens=5, num_sequences=3))
    while scheduler.has_unfinished:
        engine.step()
    assert {len(tokens) for tokens in engine.outputs.values()} == {5}


@pytest.mark.parametrize("length", range(3, 10))
@pytest.mark.parametrize("host_blocks", [2, 3, 6])
def test_background_moves_of_any_tail_lose_no_block(make_scheduler, make_engine, request_of, length, host_blocks):
    plain = make_engine(make_scheduler(60, 2))
    costs = Costs(seconds_per_swapped_block=1e-9)
    scheduler = make_scheduler(length // 2 + 5, 2, host_blocks=host_blocks, async_moves=True, costs=costs)
    engine = make_engine(scheduler)
    for number in range(3):
        prompt = [number, *range(length - 1)]
        plain.add(request_of(f"r{number}", prompt, max_tokens=7))
        engine.add(request_of(f"r{number}", prompt, max_tokens=7))
    in_the_air = []
    for _ in range(300):
        if not scheduler.has_unfinished:
            break
        batch = scheduler.schedule()
        assert scheduler.check() == []
        if len(batch.moves):
            in_the_air.append(batch)
        if not batch.is_empty:
            engine.update(batch, engine.forward(batch, moves_first=False))
        assert scheduler.check() == []
        if in_the_air and in_the_air[0] is not batch:
            done = in_the_air.pop(0)
            engine.move(done.moves)
            scheduler.moved(done)
            assert scheduler.check() == []
    assert engine.outputs == plain.run()
    for batch in in_the_air:
        scheduler.moved(batch)
    assert (scheduler.manager.num_used, scheduler.manager.host_used) == (0, 0)


def test_an_engine_that_does_not_end_empty_batches_still_hears_of_every_end(make_scheduler, request_of, step):
    scheduler = make_scheduler(3, 1)
    scheduler.add(request_of("a", [0]))
    scheduler.append("a", [1, 2, 2, 1, 2])
    reasons = [output.finish_reason for _ in range(3) for output in step(scheduler).outputs.values()]
    assert reasons == ["rejected"]
    assert not scheduler.has_unfinished
