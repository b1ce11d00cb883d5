"""What vLLM asks of a scheduler, answered by ours: requests, steps, outputs, ends, statistics, pauses, and what is held back or refused."""

from types import SimpleNamespace

import pytest
from integrations import vllm_things
from integrations.vllm_things import answer, core_of, plug_in, reasons, request, step

from paged.errors import WrongAnswer


def test_a_request_is_told_once_and_then_by_what_changes():
    core = core_of(request("a", [1, 2, 3], most=3))
    assert (core.has_request("a"), core.has_request("b")) == (True, False)
    output, made = step(core)
    (new,) = output.scheduled_new_reqs
    assert (new.req_id, new.prompt_token_ids, new.num_computed_tokens) == ("a", [1, 2, 3], 0)
    assert new.block_ids == ([1, 2],), "block 0 is vLLM's"
    assert output.num_scheduled_tokens == {"a": 3} and output.total_num_scheduled_tokens == 3
    assert made["a"].new_token_ids == [5] and made["a"].finish_reason is None
    output, _ = step(core)
    told = output.scheduled_cached_reqs
    assert (told.req_ids, told.num_computed_tokens, told.num_output_tokens) == (["a"], [3], [1])
    assert told.new_block_ids == [None], "the token has room in the second block"
    output, made = step(core)
    assert output.scheduled_cached_reqs.new_block_ids == [([3],)]
    assert reasons(made) == {"a": "LENGTH"}
    assert not core.has_request("a") and core.get_num_unfinished_requests() == 0
    assert core.has_finished_requests()
    output, made = step(core)
    assert output.finished_req_ids == {"a"} and made == {}
    assert not core.has_finished_requests()


def test_a_stop_id_ends_a_request_and_is_named_and_the_end_of_sequence_is_not():
    ends = {"stop_token_ids": [7], "eos_token_id": 6}
    _, made = step(core_of(*(request(id, [1], sampling=ends) for id in "ab")), {"a": [7], "b": [6]})
    assert reasons(made) == {"a": "STOP", "b": "STOP"}
    assert (made["a"].stop_reason, made["b"].stop_reason) == (7, None)


def test_a_prompt_that_another_one_has_computed_is_found_and_the_statistics_say_so():
    core = core_of(request("a", [1, 2, 3, 4, 5], most=1), log_stats=True)
    step(core)
    core.add_request(request("b", [1, 2, 3, 4, 9]))
    output = core.schedule()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 4
    made = core.update_from_output(output, answer(output, {"b": [5]}))
    hits = made[0].scheduler_stats.prefix_cache_stats
    assert (hits.queries, hits.hits) == (5, 4)
    told = made[0].outputs[0].prefill_stats
    assert (told.num_prompt_tokens, told.num_cached_tokens) == (5, 4)


@pytest.mark.parametrize(
    "given",
    [{"cache_salt": "x"}, {"lora_request": SimpleNamespace(lora_name="x")}, {"skip_reading_prefix_cache": True}],
)
def test_another_salt_or_adapter_or_one_that_wants_log_probabilities_of_its_prompt_shares_nothing(given):
    core = core_of(
        request("a", [1, 2, 3, 4, 5]), request("b", [1, 2, 3, 4, 5], **given), lora_config=SimpleNamespace(max_loras=2)
    )
    output, _ = step(core)
    assert output.num_scheduled_tokens == {"a": 5, "b": 5}


def test_whoever_gives_way_is_told_as_resumed_with_a_whole_table():
    both = (request(id, prompt, most=7) for id, prompt in (("a", [1, 2, 3, 4]), ("b", [6, 7, 8, 9])))
    core = core_of(*both, num_blocks=6, log_stats=True)
    resumed, events, ended = set(), [], {}
    for output, made in (step(core) for _ in range(40)):
        resumed |= output.scheduled_cached_reqs.resumed_req_ids
        events += [event for each in made.values() for event in each.events or ()]
        ended |= {id: name for id, name in reasons(made).items() if name}
    assert resumed and ended == {"a": "LENGTH", "b": "LENGTH"}
    if not vllm_things.IS_REAL:
        assert {"QUEUED", "SCHEDULED", "PREEMPTED"} <= {name for name, _ in events}


def test_an_abort_in_flight_gives_every_block_back_and_its_id_is_free_when_its_step_has_ended():
    core = core_of(request("a", [1, 2, 3]))
    output = core.schedule()
    status = core._live["a"].request.status.__class__
    (ended,) = core.finish_requests("a", status.FINISHED_ABORTED)
    assert ended.request_id == "a" and ended.status == status.FINISHED_ABORTED
    assert core.finish_requests(["a", "unknown"], status.FINISHED_ABORTED) == []
    core.add_request(request("a", [7, 8]))
    made = core.update_from_output(output, answer(output, {"a": [5]}))
    assert made == {} or made[0].outputs == []
    assert core.manager.device.num_used == 0
    output, made = step(core, {"a": [9]})
    assert output.finished_req_ids == {"a"} and output.scheduled_new_reqs[0].prompt_token_ids == [7, 8]
    assert made["a"].new_token_ids == [9]


def test_an_id_that_lives_is_refused_and_its_first_request_goes_on():
    core = core_of(request("a", [1, 2, 3]))
    with pytest.raises(WrongAnswer, match='request "a" lives already'):
        core.add_request(request("a", [4]))
    assert step(core)[1]["a"].new_token_ids == [5]


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"resumable": True}, "streams in"),
        ({"mm_features": [object()]}, "multi-modal"),
        ({"prompt_embeds": object()}, "embeddings"),
        ({"sampling_params": SimpleNamespace(prompt_logprob_token_ids=[[1]])}, "prompt_logprob_token_ids"),
    ],
)
def test_a_request_that_is_not_carried_ends_with_error_and_others_go_on(given, word, caplog):
    core = plug_in()
    made = request("a", [1, 2])
    vars(made).update(given)
    with caplog.at_level("ERROR"):
        core.add_request(made)
    core.add_request(request("b", [1, 2]))
    assert vllm_things.IS_REAL or word in caplog.text
    _, made = step(core)
    assert reasons(made) == {"a": "ERROR", "b": None}
    assert core.get_num_unfinished_requests() == 1


def test_a_prompt_that_no_empty_pool_holds_ends_with_error_even_if_nothing_else_runs(caplog):
    core = core_of(request("a", list(range(12))), num_blocks=4, block_size=2)
    assert core.get_num_unfinished_requests() == 1
    output, made = step(core)
    assert output.total_num_scheduled_tokens == 0 and reasons(made) == {"a": "ERROR"}
    assert vllm_things.IS_REAL or "The pool has 4" in caplog.text or "the pool has 4" in caplog.text


def test_a_grammar_is_waited_for_masks_what_samples_and_ends_what_it_does_not_take():
    grammar = SimpleNamespace(grammar=None)
    core = core_of(request("a", [1, 2], structured_output_request=grammar), request("b", [3]))
    output, made = step(core)
    assert list(made) == ["b"] and core.get_grammar_bitmask(output) is None
    grammar.grammar = lambda token: token != 9
    output = core.schedule()
    assert output.has_structured_output_requests
    mask = core.get_grammar_bitmask(output)
    assert mask.structured_output_request_ids == ["a"] and mask.grammar_bitmask == "mask of a"
    core.update_from_output(output, answer(output, {"a": [4], "b": [5]}))
    assert list(core._live["a"].request.output_token_ids) == [4]
    _, made = step(core, {"a": [9]})
    assert reasons(made) == {"a": "ERROR", "b": None}
    assert core.get_num_unfinished_requests() == 1
    # One that cannot be compiled ends its request.
    core.add_request(request("c", [1, 2], structured_output_request=SimpleNamespace(grammar=ValueError("no"))))
    assert reasons(step(core)[1]) == {"b": None, "c": "ERROR"}


def test_repetitions_end_a_request_where_vllms_own_rule_says_so(monkeypatch):
    from paged.integrations.vllm import answers

    seen = []

    def repeats(tokens, params):
        seen.append(list(tokens))
        return len(tokens) == 2

    monkeypatch.setattr(answers, "check_sequence_repetition", repeats)
    core = plug_in()
    made = request("a", [1, 2])
    made.sampling_params.repetition_detection = object()
    core.add_request(made)
    assert reasons(step(core)[1]) == {"a": None}
    _, made = step(core)
    assert reasons(made) == {"a": "REPETITION"} and made["a"].stop_reason == "repetition_detected"
    assert seen == [[5], [5, 5]] and core.manager.device.num_used == 0


def test_log_probabilities_go_with_their_request():
    core = core_of(request("a", [1, 2]), request("b", [3], sampling={"logprobs": 1}))
    output = core.schedule()
    logprobs = SimpleNamespace(slice_request=lambda place, count: (place, count))
    told = answer(output, {"a": [4], "b": [5]}, logprobs=logprobs)
    (made,) = core.update_from_output(output, told).values()
    by_id = {each.request_id: each for each in made.outputs}
    assert by_id["a"].new_logprobs is None
    assert by_id["b"].new_logprobs == (told.req_id_to_index["b"], 1)


def test_each_client_hears_of_its_own_requests_and_one_of_them_the_statistics():
    both = request("a", [1, 2], client_index=0, most=1), request("b", [3], client_index=3)
    core = core_of(*both, log_stats=True, include_finished_set=True)
    output = core.schedule()
    made = core.update_from_output(output, answer(output, {"a": [4], "b": [5]}))
    heard = {client: [each.request_id for each in outputs.outputs] for client, outputs in made.items()}
    assert heard == {0: ["a"], 3: ["b"]}
    assert sum(outputs.scheduler_stats is not None for outputs in made.values()) == 1
    assert made[0].finished_requests == {"a"}
    output = core.schedule()
    made = core.update_from_output(output, answer(output, {"b": [5]}))
    assert list(made) == [3]
    assert not made[3].finished_requests


def test_adapters_beyond_the_runners_slots_wait_until_one_is_free():
    core = plug_in(lora_config=SimpleNamespace(max_loras=1))
    for id, name in (("a", "x"), ("b", "y"), ("c", "x")):
        core.add_request(request(id, [1, 2], lora_request=SimpleNamespace(lora_name=name), most=2))
    assert set(step(core)[1]) == {"a", "c"}
    assert core.make_stats() is None
    step(core)
    assert set(step(core)[1]) == {"b"}


def test_while_new_ones_are_paused_those_that_run_go_on():
    from vllm.v1.core.sched.interface import PauseState

    core = core_of(request("a", [1, 2], most=2), request("b", [3]), max_num_seqs=1)
    step(core)
    core.set_pause_state(PauseState.PAUSED_NEW)
    core.add_request(request("c", [4]))
    assert core.get_num_unfinished_requests() == 1
    assert reasons(step(core)[1]) == {"a": "LENGTH"}
    assert core.get_num_unfinished_requests() == 0
    core.set_pause_state(PauseState.UNPAUSED)
    assert core.get_num_unfinished_requests() == 2
    assert set(step(core)[1]) == {"b"}


NGRAM = {"log_stats": True, "num_speculative_tokens": 3, "speculative_config": SimpleNamespace(method="ngram")}


def test_guesses_are_placed_counted_and_cut_where_the_answer_ends():
    core = core_of(request("a", [1, 2], most=9, sampling={"stop_token_ids": [8]}), **NGRAM)
    output, _ = step(core)
    assert output.num_spec_tokens_to_schedule == 3, "so many the runner may guess"
    core.update_draft_token_ids(SimpleNamespace(req_ids=["a", "gone"], draft_token_ids=[[6, 7, 8], [1]]))
    output = core.schedule()
    assert output.scheduled_spec_decode_tokens == {"a": [6, 7, 8]}
    assert output.num_scheduled_tokens == {"a": 4}
    made = core.update_from_output(output, answer(output, {"a": [6, 9]}))
    assert made[0].outputs[0].new_token_ids == [6, 9]
    assert made[0].scheduler_stats.spec_decoding_stats is not None
    output, _ = step(core)
    assert output.scheduled_cached_reqs.num_computed_tokens == [4]
    assert output.scheduled_cached_reqs.num_output_tokens == [3]
    core.update_draft_token_ids(SimpleNamespace(req_ids=["a"], draft_token_ids=[[8, 4]]))
    output = core.schedule()
    made = core.update_from_output(output, answer(output, {"a": [8, 4, 1]}))
    assert made[0].outputs[0].new_token_ids == [8] and made[0].outputs[0].finish_reason.name == "STOP"
    # Draft tokens without a verdict are not counted.
    core.add_request(request("b", [1, 2], most=9))
    step(core)
    core.update_draft_token_ids(SimpleNamespace(req_ids=["b"], draft_token_ids=[[6, 7, 8]]))
    output = core.schedule()
    made = core.update_from_output(output, answer(output, {"b": []}))
    assert made[0].scheduler_stats.spec_decoding_stats is None


@pytest.mark.parametrize(
    ("sampled", "words"),
    [
        ({"a": [5, 6]}, 'sampled 2 tokens for request "a", which has 0 drafts'),
        ({"a": [5], "b": [5]}, "does not fit"),
        ({"a": [-1]}, "does not fit"),
    ],
)
def test_tokens_that_were_not_asked_for_are_refused_and_nobody_loses_anything(sampled, words):
    core = core_of(request("a", [1, 2, 3]), request("b", [4, 5, 6]), max_num_batched_tokens=4)
    output = core.schedule()
    assert output.num_scheduled_tokens == {"a": 3, "b": 1}
    with pytest.raises(WrongAnswer, match=words):
        core.update_from_output(output, answer(output, sampled))
    made = core.update_from_output(output, answer(output, {"a": [5]}))
    assert made[0].outputs[0].new_token_ids == [5]
    assert core.check() == []


def test_a_runner_that_says_nothing_of_a_request_is_told_which_and_a_step_ends_once():
    core = core_of(request("a", [1, 2, 3]), request("b", [4]))
    output = core.schedule()
    whole, told = (answer(output, {"a": [5], "b": [6]}) for _ in range(2))
    del told.req_id_to_index["b"]
    with pytest.raises(WrongAnswer, match='given request "b", and its output has nothing of it'):
        core.update_from_output(output, told)
    core.update_from_output(output, whole)
    with pytest.raises(WrongAnswer, match="is not out"):
        core.update_from_output(output, whole)


def test_priorities_count_where_vllm_says_so():
    first = {}
    for policy in ("fcfs", "priority"):
        core = plug_in(max_num_seqs=1, policy=policy)
        core.add_request(request("a", [1], arrival_time=1.0, priority=1))
        core.add_request(request("b", [2], arrival_time=2.0, priority=0))
        first[policy] = list(step(core)[1])
    assert first == {"fcfs": ["a"], "priority": ["b"]}
