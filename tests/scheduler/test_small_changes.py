"""What no other test noticed when it was changed a little (`make mutants`)."""

from inspect import Parameter, signature

import msgspec
import numpy as np
import pytest

from paged import BlockManager, Drafts, Policy, Request, Retention, Scheduler
from paged.errors import NeverFits, UnknownRequest
from paged.scheduler import POLICIES
from paged.scheduler.request import Counted
from paged.study.simulator.stretch import steady_batch

from ..driving import step, steps_of  # noqa: TID252


def test_a_request_that_says_nothing_more_has_the_documented_defaults():
    said = Request(
        id="a", prompt=[1], max_tokens=16, min_tokens=0, eos_token_id=None, stop_token_ids=(), priority=0,
        num_sequences=1, num_computed=0, expected_tokens=None, salt=None, adapter=None, extra_key=None,
        reads_cache=True, writes_cache=True, retention=None,
    )  # fmt: skip
    assert Request(id="a", prompt=[1]) == said


def test_what_is_handed_out_cannot_be_changed_but_for_what_counts():
    kinds = [kind for kind in msgspec.Struct.__subclasses__() if kind.__module__.startswith("paged.scheduler.")]
    how = {kind.__name__: kind.__struct_config__ for kind in (*kinds, *Counted.__subclasses__())}
    # What comes with each request or step is nothing to the collector, and what leads to other objects is not compared.
    for flag, names in {
        "frozen": "Counted RequestState SchedulerStats Step Tenant",
        "gc": "Batch Counted Output Outputs Request RequestState RequestUsage SchedulerStats Step Ticket",
        "eq": "Batch Drafts Outputs Pin RequestState Step Tenant Ticket",
    }.items():
        assert sorted(name for name in how if not getattr(how[name], flag)) == names.split(), flag
    are_named = {each.__name__: {field.kind for field in signature(each).parameters.values()} for each in kinds}
    names = "Batch Costs Explanation Hint LayersView Limits Policy PrefixExplanation Request Retention SessionView"
    assert sorted(name for name in are_named if are_named[name] == {Parameter.KEYWORD_ONLY}) == names.split()


def test_outputs_keep_their_counts_when_the_engine_uses_its_array_again():
    scheduler = Scheduler(BlockManager(8, 2))
    for name in "ab":
        scheduler.add(Request(id=name, prompt=[1], max_tokens=3))
    counts = np.array([1, 0])
    outputs = scheduler.update(scheduler.schedule(), [5], counts)
    counts[:] = 9
    assert outputs.counts.tolist() == [1, 0]


def test_content_that_a_request_only_hit_is_retained_at_its_end():
    scheduler = Scheduler(BlockManager(4, 2))
    kept, other = [1, 2, 3, 4], [5, 6, 7, 8]
    scheduler.add(Request(id="computes", prompt=[*kept, 9], max_tokens=1))
    step(scheduler)
    # Its path is the other one's content: it has no node of its own.
    scheduler.add(Request(id="hits", prompt=[*kept, 8], max_tokens=1, retention=Retention(priority=2)))
    step(scheduler)
    scheduler.add(Request(id="evicts", prompt=[*other], max_tokens=1))
    step(scheduler)
    scheduler.add(Request(id="evicts again", prompt=[3, 3, 3, 3], max_tokens=1))
    step(scheduler)
    assert scheduler.manager.lookup([*kept, 0]).num_tokens == 4


def test_what_several_newcomers_of_a_step_still_need_adds_up():
    policy = Policy(name="plain", watermark=0.0, composition="in_order")
    scheduler = Scheduler(BlockManager(12, 1, prefix_caching=False), policy=policy, max_chunk=2)
    for name, length in (("a", 5), ("b", 5), ("c", 4)):
        scheduler.add(Request(id=name, prompt=[1] * length, max_tokens=1))
    # Of 12 blocks 4 are drawn, and 6 more are owed to "a" and "b".
    assert step(scheduler).ids.tolist() == ["a", "b"]
    assert scheduler.status("c") == "waiting"


def test_a_row_grows_past_the_columns_that_its_prompt_made():
    scheduler = Scheduler(BlockManager(200, 1))
    scheduler.add(Request(id="a", prompt=[1], max_tokens=150))
    steps_of(scheduler)
    assert scheduler.stats().output_tokens == 150


def test_what_never_fits_says_so_in_one_unit():
    scheduler = Scheduler(BlockManager(4, 2), max_model_len=5)
    with pytest.raises(NeverFits) as caught:
        scheduler.add(Request(id="a", prompt=[1] * 6))
    error = caught.value
    assert (error.blocks_needed, error.num_blocks, error.max_model_len) == (None, None, 5)
    with pytest.raises(NeverFits) as caught:
        Scheduler(BlockManager(2, 2)).add(Request(id="a", prompt=[1] * 6))
    error = caught.value
    assert (error.tokens_needed, error.max_model_len, error.num_blocks) == (None, None, 2)


def test_where_nothing_runs_no_step_is_steady():
    first = steady_batch(Scheduler(BlockManager(4, 2)))
    assert (len(first.ids), len(first.seq_lens), first.num_samples) == (0, 0, 0)


def test_rows_in_lockstep_take_no_drafts():
    scheduler = Scheduler(BlockManager(16, 2), policy="static")
    scheduler.add(Request(id="a", prompt=[1, 2], max_tokens=6))
    while scheduler.has_unfinished:
        batch = scheduler.schedule(drafts={"a": [7, 7]}) if scheduler.status("a") == "running" else scheduler.schedule()
        assert not batch.num_drafts.any()
        scheduler.update(batch, [7] * int(batch.samples.sum()))
    assert scheduler.stats().drafted_tokens == 0


def test_what_was_loaded_once_is_not_asked_for_again():
    policy = Policy(name="plain", watermark=0.0, composition="in_order")
    scheduler = Scheduler(BlockManager(6, 2, prefix_caching=False), policy=policy)
    scheduler.add(Request(id="u", prompt=[2] * 4, max_tokens=6))
    scheduler.add(Request(id="a", prompt=[1] * 6, max_tokens=4, num_computed=4))
    asked = []
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        asked.append(len(batch.loads))
        if len(batch.loads):
            scheduler.loaded("a", 4)
        scheduler.update(batch, [7] * int(batch.samples.sum()))
        assert scheduler.check() == []
    assert (scheduler.stats().preemptions_recompute, [count for count in asked if count]) == (1, [2])


def test_a_row_for_which_just_enough_is_free_is_not_told_that_it_lacks_blocks():
    scheduler = Scheduler(BlockManager(2, 4), policy="fastgen")
    scheduler.add(Request(id="a", prompt=[1, 2, 3, 4], max_tokens=4))
    step(scheduler)
    assert scheduler.explain("a").reason == "it gets tokens in the next step, as the budget allows."


@pytest.mark.parametrize("rows", [[1, 0], []])
def test_drafts_are_of_rows_that_run_in_any_order(rows):
    scheduler = Scheduler(BlockManager(16, 2))
    for name in "ab":
        scheduler.add(Request(id=name, prompt=[1, 2]))
    step(scheduler)
    drafts = Drafts(np.array(rows, np.int64), np.ones(len(rows), np.int64), np.full(len(rows), 7, np.int32))
    assert scheduler.schedule(drafts=drafts).num_drafts.sum() == len(rows)


def test_a_row_that_samples_nothing_takes_no_drafts():
    scheduler = Scheduler(BlockManager(4, 4, prefix_caching=False), policy="vllm", max_chunk=2)
    scheduler.add(Request(id="first", prompt=[1] * 8, max_tokens=2))
    scheduler.add(Request(id="group", prompt=[1] * 3, num_sequences=2))
    # The first sequence of "group" gets no token, waits for its caller, is preempted with the other one and computed again.
    for number in range(7):
        batch = scheduler.schedule(drafts={("group", 0): [7]} if number == 6 else None)
        counts = batch.samples & ((batch.ids == "first") | (batch.sequences == 1))
        scheduler.update(batch, [7] * int(counts.sum()), counts=counts.astype(np.int64))
    assert (batch.ids.tolist(), batch.num_tokens.tolist(), batch.num_drafts.tolist()) == (["group"] * 2, [1, 2], [0, 0])


def test_no_more_outputs_are_expected_than_the_model_has_room_for():
    scheduler = Scheduler(BlockManager(8, 2), max_model_len=12)
    scheduler.add(Request(id="a", prompt=[1, 2, 3, 4], max_tokens=50, expected_tokens=40))
    assert scheduler.outlook().left.tolist() == [8]


def test_of_ended_requests_the_latest_10_000_are_remembered():
    scheduler = Scheduler(BlockManager(8, 2))
    for number in range(10_001):
        scheduler.add(Request(id=str(number), prompt=[1]))
        scheduler.abort(str(number))
    with pytest.raises(UnknownRequest):
        scheduler.explain("0")
    assert [scheduler.explain(name).status for name in ("1", "9999", "10000")] == ["aborted"] * 3


def test_a_row_forgets_as_many_stop_ids_as_a_column_holds():
    scheduler = Scheduler(BlockManager(8, 2))
    scheduler.add(Request(id="eight", prompt=[1], max_tokens=1, stop_token_ids=(2, 3, 4, 5, 6, 7, 8, 9)))
    step(scheduler, token=1)
    # The other one keeps the column wide. "next" has the row of "eight".
    scheduler.add(Request(id="next", prompt=[1], max_tokens=9, stop_token_ids=(20,)))
    scheduler.add(Request(id="wide", prompt=[1], max_tokens=9, stop_token_ids=(30, 31, 32, 33, 34, 35, 36, 37)))
    step(scheduler, token=9)
    step(scheduler, token=9)
    assert [scheduler.status(name) for name in ("next", "wide")] == ["running", "running"]


def test_of_a_group_that_ends_at_once_the_last_output_has_the_usage():
    scheduler = Scheduler(BlockManager(8, 2))
    scheduler.add(Request(id="group", prompt=[1], num_sequences=2))
    batch = scheduler.schedule()
    scheduler.update(batch, [7] * int(batch.samples.sum()))
    scheduler.append("group", [1] * 99)
    outputs = scheduler.update(scheduler.schedule(), []).others
    assert [(output.sequence, output.usage is None) for output in outputs] == [(0, True), (1, False)]


def test_a_paused_request_that_gets_no_token_gives_its_blocks_back_until_its_caller_appends_some():
    scheduler = Scheduler(BlockManager(5, 1, prefix_caching=False))
    for name in "ab":
        scheduler.add(Request(id=name, prompt=[1], max_tokens=6))
    step(scheduler)
    first, second = scheduler.schedule(), scheduler.schedule()
    # One more block is free: "b" pauses with those that it has.
    assert (second.preempted, scheduler.request("b").status, scheduler.request("b").device_blocks) == ((), "paused", 2)
    scheduler.update(first, [7], [1, 0])
    assert (scheduler.status("b"), scheduler.request("b").device_blocks) == ("waiting", 0)
    scheduler.update(second, [7])
    assert [step(scheduler).preempted for _ in range(3)] == [(("b", "recompute"),), (), ()]
    assert (scheduler.status("a"), step(scheduler).is_empty) == ("finished", True)
    scheduler.append("b", [5])
    assert [batch.num_tokens.tolist() for batch in steps_of(scheduler)] == [[3], [1]]
    assert (scheduler.stats().recomputed_tokens, scheduler.stats().preemptions) == (2, 1)


def test_a_waiting_group_is_foreseen_and_enters_with_its_sequences_that_have_not_ended():
    policy = msgspec.structs.replace(POLICIES["paged"], name="certain", watermark=0.0, known_outputs=0)
    scheduler = Scheduler(BlockManager(5, 1, prefix_caching=False), policy=policy)
    for name, num in (("first", 1), ("group", 2)):
        scheduler.add(Request(id=name, prompt=[1], max_tokens=4, num_sequences=num))
    step(scheduler)
    scheduler.finish("group", 0)
    assert "would need 9 tokens at their peak" in scheduler.explain("group").reason
    assert [batch.sequences.tolist() for batch in steps_of(scheduler) if batch.admitted] == [[1]]
