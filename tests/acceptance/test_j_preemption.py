"""Preemption and resumption: who gives memory back, what is computed again, and that nobody can tell from the words."""

import pytest

from paged import POLICIES, Costs


def test_J2_the_late_token_of_a_request_that_was_preempted_in_flight_is_recorded_once(make_scheduler, run):
    scheduler = make_scheduler(9, 16, {"a": (64, 5), "b": (64, 5)}, policy="vllm", max_tokens_per_step=160)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [id for id, _ in second.preempted] == ["b"]
    late = {output.id: output.token_ids for output in scheduler.update(first, [41, 42])}
    assert late == {"a": [41], "b": [42]}
    assert [output.id for output in scheduler.update(second, [7])] == ["a"]
    tokens = {"a": [41, 7], "b": [42]}
    for step in run(scheduler):
        for id, output in step.outputs.items():
            tokens[id] += output.token_ids
    assert tokens == {"a": [41, 7, 7, 7, 7], "b": [42, 7, 7, 7, 7]}
    assert scheduler.stats().preemptions_recompute == 1


def test_one_that_was_preempted_in_flight_and_got_no_token_stays_out_until_its_caller_appends(make_scheduler, step):
    scheduler = make_scheduler(9, 16, {"a": (64, 5), "b": (64, 5)}, policy="vllm", max_tokens_per_step=160)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [id for id, _ in second.preempted] == ["b"]
    scheduler.update(first, [41], [1, 0])
    scheduler.update(second, [7])
    scheduler.abort("a")
    assert step(scheduler).batch.is_empty
    scheduler.append("b", [5])
    assert step(scheduler).outputs["b"].token_ids == [7]


@pytest.mark.parametrize(("caching", "recomputed"), [(False, 32), (True, 16)])
def test_J4_the_lower_priority_gives_way_and_resumes(make_scheduler, request_of, step, run, caching, recomputed):
    scheduler = make_scheduler(4, 16, policy="vllm", prefix_caching=caching)
    scheduler.add(request_of("low", 30, max_tokens=5, priority=1))
    assert step(scheduler).outputs["low"].token_ids == [7]
    scheduler.add(request_of("high", 32, max_tokens=2, priority=0))
    assert step(scheduler).tokens == {"low": 1, "high": 32}
    third = step(scheduler)
    assert third.tokens == {"high": 1}
    assert third.batch.preempted == (("low", "recompute"),)
    assert third.outputs["high"].finish_reason == "length"
    fourth = step(scheduler)
    assert (fourth.tokens, fourth.outputs["low"].token_ids) == ({"low": recomputed}, [7])
    rest = run(scheduler)
    assert 3 + sum(len(taken.outputs["low"].token_ids) for taken in rest) == 5


def test_J5_the_third_gives_all_its_blocks_and_computes_its_whole_context_again(make_scheduler, step):
    scheduler = make_scheduler(6, 4, {"a": 8, "b": 8, "c": 8}, policy="vllm", prefix_caching=False)
    for tokens, blocks in (({"a": 8, "b": 8, "c": 8}, [2, 2, 2]), ({"a": 1, "b": 1}, [3, 3])):
        taken = step(scheduler)
        assert taken.tokens == tokens
        assert [scheduler.manager.rows.num_blocks[row] for row in taken.batch.rows] == blocks
    assert scheduler.manager.device.num_used == 6
    scheduler.abort("a")
    # Its 8 prompt tokens and the one that it generated, and one token of "b".
    assert step(scheduler).tokens == {"b": 1, "c": 9}


def test_J7_a_paused_row_keeps_its_head_and_computes_only_what_it_lost(make_scheduler, step):
    scheduler = make_scheduler(6, 4, {"a": 11, "b": 8}, policy="paged", prefix_caching=False)
    first = step(scheduler)
    assert first.tokens == {"a": 11, "b": 8}
    row = int(first.batch.rows[1])
    assert scheduler.manager.table(row).tolist() == [3, 4]
    second = step(scheduler)
    assert (second.tokens, scheduler.manager.table(row).tolist()) == ({"a": 1, "b": 1}, [3, 4, 5])
    third = step(scheduler)
    assert third.tokens == {"a": 1}
    assert third.batch.preempted == (("b", "recompute"),)
    assert (scheduler.status("b"), scheduler.manager.table(row).tolist()) == ("paused", [3, 4])
    scheduler.abort("a")
    fourth = step(scheduler)
    # One token whose KV was lost, and the last one, which never had any.
    assert (fourth.tokens, scheduler.stats().recomputed_tokens) == ({"b": 2}, 1)
    assert scheduler.manager.table(row).tolist() == [3, 4, 0]


def test_a_victim_whose_tail_is_not_enough_gives_all_before_the_next_one_gives_any(make_scheduler, step):
    scheduler = make_scheduler(8, 4, {"a": 3, "b": 11, "c": 11}, policy="paged", prefix_caching=False)
    step(scheduler)
    scheduler.append("a", [7] * 19)
    assert step(scheduler).tokens == {"a": 20}
    held = [[int(scheduler.manager.rows.num_blocks[row]) for row in scheduler.rows_of(name)] for name in "abc"]
    assert (held, scheduler.status("b"), scheduler.status("c")) == ([[6], [2], []], "paused", "waiting")


@pytest.mark.parametrize(("num_blocks", "a", "b", "again"), [(6, 11, 10, 12), (2, 4, 4, 5)], ids=["J9", "J12"])
def test_J9_J12_generated_tokens_are_computed_again_like_a_prompt(make_scheduler, step, num_blocks, a, b, again):
    scheduler = make_scheduler(num_blocks, 4, {"a": a, "b": b}, policy="vllm", prefix_caching=False)
    while not (taken := step(scheduler)).batch.preempted:
        assert set(taken.tokens) == {"a", "b"}
    assert (taken.tokens, taken.batch.preempted) == ({"a": 1}, (("b", "recompute"),))
    assert scheduler.counts()["waiting"] + scheduler.counts()["running"] == 2
    scheduler.abort("a")
    assert scheduler.counts()["waiting"] + scheduler.counts()["running"] == 1
    taken = step(scheduler)
    assert (taken.tokens, taken.batch.token_ids.tolist()[b:]) == ({"b": again}, [7] * (again - b))
    assert scheduler.stats().recomputed_tokens == again - 1


def test_J10_J11_a_group_is_preempted_and_comes_back_whole(make_scheduler, make_engine, request_of):
    scheduler = make_scheduler(10, 4, policy="paged")
    engine = make_engine(scheduler, {"alone": (8, 20)})
    engine.add(request_of("group", 6, max_tokens=10, num_sequences=3))
    preempted = False
    while scheduler.has_unfinished:
        batch = engine.step()
        if "group" in [id for id, _ in batch.preempted]:
            preempted = True
            assert "group" not in batch.ids and scheduler.status("group") == "waiting"
    assert preempted
    assert {key: len(tokens) for key, tokens in engine.outputs.items()} == {"alone/0": 20} | {
        f"group/{n}": 10 for n in range(3)
    }
    assert len({tuple(engine.outputs[f"group/{sequence}"]) for sequence in range(3)}) == 3


def test_J14_a_prompt_preempted_mid_way_starts_again_in_chunks(make_scheduler, step):
    # A peer spends a step of 0 tokens on it; ours computes the other's token in that step.
    scheduler = make_scheduler(16, 4, {"a": 3, "long": 60}, policy="vllm", prefix_caching=False, max_tokens_per_step=30)
    assert step(scheduler).tokens == {"a": 3, "long": 27}
    assert step(scheduler).tokens == {"a": 1, "long": 29}
    third = step(scheduler)
    assert third.tokens == {"a": 1}
    assert third.batch.preempted == (("long", "recompute"),)
    scheduler.abort("a")
    assert step(scheduler).tokens == {"long": 30}
    fifth = step(scheduler)
    assert (fifth.tokens, fifth.outputs["long"].token_ids) == ({"long": 30}, [7])


def test_J15_with_its_tail_on_the_host_a_request_resumes_with_one_token(make_scheduler, step):
    # The source takes the hits from a connector; here they are the host tier's.
    scheduler = make_scheduler(6, 2, {"a": (5, 4), "b": (5, 4)}, host_blocks=6, policy="paged")
    step(scheduler)
    step(scheduler)
    third = step(scheduler)
    assert third.tokens == {"a": 1}
    assert third.batch.preempted == (("b", "swap"),)
    assert len(third.batch.moves.device_to_host) == 1
    assert step(scheduler).outputs["a"].finish_reason == "length"
    fifth = step(scheduler)
    assert (fifth.tokens, scheduler.stats().recomputed_tokens) == ({"b": 1}, 0)


@pytest.mark.parametrize("policy", ["vllm", "paged"])
def test_J17_a_step_that_preempts_admits_nobody(make_scheduler, request_of, step, policy):
    scheduler = make_scheduler(6, 4, {"a": 8, "b": 16}, policy=policy, prefix_caching=False)
    step(scheduler)
    scheduler.add(request_of("small", 4))
    second = step(scheduler)
    assert [id for id, _ in second.batch.preempted] == ["b"]
    assert second.batch.admitted == ()
    assert second.tokens == {"a": 1}


def test_J19_a_preemption_is_counted_once_in_total_and_for_its_request(make_scheduler, step, run):
    scheduler = make_scheduler(4, 4, {"a": (8, 3), "b": (8, 3)}, policy="vllm", prefix_caching=False)
    step(scheduler)
    assert scheduler.stats().preemptions_recompute == 0
    step(scheduler)
    stats = scheduler.stats()
    assert (stats.preemptions_recompute, stats.preemptions_swap, stats.max_preemptions) == (1, 0, 1)
    usage = {id: output.usage for taken in run(scheduler) for id, output in taken.outputs.items() if output.usage}
    assert (usage["a"].preemptions, usage["b"].preemptions) == (0, 1)
    assert scheduler.stats().preemptions_recompute == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("host_blocks", "caching"), [(0, True), (3, False), (40, True)])
def test_J20_pressure_changes_no_word(make_scheduler, make_engine, request_of, policy, host_blocks, caching):
    prompts = [[token % 3 for token in range(number, number + 5 + 3 * number)] for number in range(7)]
    options = {"host_blocks": host_blocks, "prefix_caching": caching, "max_tokens_per_step": 13, "max_sequences": 4}
    schedulers = [make_scheduler(num_blocks, 4, policy=policy, **options) for num_blocks in (9, 11, 14)]
    for scheduler in schedulers:
        engine = make_engine(scheduler)
        alone = {f"r{number}/0": engine.alone(prompt, 9) for number, prompt in enumerate(prompts)}
        for number, prompt in enumerate(prompts):
            engine.add(request_of(f"r{number}", prompt, max_tokens=9))
        assert engine.run() == alone
        assert scheduler.manager.device.num_used == 0


@pytest.mark.parametrize(
    ("host_blocks", "seconds", "kind"),
    [(6, 1e-9, "swap"), (6, 1e9, "recompute"), (1, 1e-9, "swap"), (0, 1e-9, "recompute")],
)
def test_J22_the_cheaper_way_is_taken_if_the_host_has_room(make_scheduler, make_engine, host_blocks, seconds, kind):
    scheduler = make_scheduler(6, 4, host_blocks=host_blocks, costs=Costs(seconds_per_swapped_block=seconds))
    engine = make_engine(scheduler, {"a": (12, 3), "b": (12, 3)})
    engine.step()
    assert engine.step().preempted == (("b", kind),)
    assert [len(tokens) for tokens in engine.run().values()] == [3, 3]
    stats = scheduler.stats()
    assert (stats.preemptions_swap > 0, stats.swapped_out_blocks > 0) == (kind == "swap",) * 2
    assert (stats.preemptions_recompute > 0, stats.recomputed_tokens > 0) == (kind == "recompute",) * 2


def test_J23_blocks_that_somebody_else_still_holds_do_not_count_as_taken(make_scheduler, make_engine, request_of):
    # "c" shares its first two blocks with "b": taking them from it would give nothing.
    scheduler = make_scheduler(7, 4)
    engine = make_engine(scheduler)
    shared = list(range(8))
    engine.add(request_of("a", 8, max_tokens=8))
    engine.add(request_of("b", [*shared, 60, 61], max_tokens=3))
    engine.add(request_of("c", [*shared, 70, 71], max_tokens=3))
    engine.step()
    assert scheduler.manager.device.num_used == 6
    while scheduler.has_unfinished:
        batch = engine.step()
        assert batch.num_scheduled_tokens >= 1
    assert [len(engine.outputs[name]) for name in ("a/0", "b/0", "c/0")] == [8, 3, 3]


def test_J25_a_request_preempted_often_enough_is_let_be(make_scheduler, request_of, run):
    scheduler = make_scheduler(12, 4, prefix_caching=False, max_sequences=8)
    for number in range(30):
        scheduler.add(request_of(f"r{number}", 5 + number % 7, max_tokens=24))
    usage = {}
    for taken in run(scheduler):
        usage |= {id: output.usage for id, output in taken.outputs.items() if output.usage is not None}
    assert len(usage) == 30
    # Three times, and once more if it is dropped while it is paused.
    assert max(each.preemptions for each in usage.values()) <= 4
    assert sum(each.preemptions for each in usage.values()) == scheduler.stats().preemptions


def test_J26_a_chunk_is_cut_to_the_rest_of_its_own_block_where_there_is_no_other(make_scheduler, step):
    scheduler = make_scheduler(6, 4, {"a": 4, "b": 20}, max_tokens_per_step=9, prefix_caching=False)
    assert [step(scheduler).tokens for _ in range(2)] == [{"a": 4, "b": 5}, {"a": 1, "b": 8}]
    third = step(scheduler)
    # "a" has 2 of 6 blocks and "b" 4, with 13 tokens in them: 3 more fit.
    assert (third.tokens, third.batch.preempted) == ({"a": 1, "b": 3}, ())
    # The last one is full now: "b" pauses, loses nothing, and is not counted.
    fourth = step(scheduler)
    assert (fourth.tokens, fourth.batch.preempted, scheduler.status("b")) == ({"a": 1}, (), "paused")
    assert scheduler.manager.rows.num_blocks[scheduler.rows_of("b")].tolist() == [4]
