"""The class for vLLM's asynchronous scheduling, driven in the order of `EngineCore.step_with_batch_queue`: two steps are out, and what the
runner is told of tokens that nobody knows yet is what vLLM's V1 runner needs."""

from types import SimpleNamespace

import pytest
from integrations.vllm_things import answer, core_of, reasons, request

from paged.errors import WrongAnswer


class Queue:
    """vLLM's batch queue: a step is scheduled, and when two are out the older one ends. `says` is sampled for every request."""

    def __init__(self, *requests, says=5, **given):
        self.core, self.says, self.out = core_of(*requests, is_ahead=True, **given), says, []

    def schedule(self):
        self.out.append(self.core.schedule())
        return self.out[-1]

    def end(self):
        output = self.out.pop(0)
        batch = next(batch for out, batch in self.core._out if out is output)
        sampling = [] if batch is None else zip(batch.ids.tolist(), batch.samples.tolist())
        sampled = {id: [self.says] for id, yes in sampling if yes}
        made = self.core.update_from_output(output, answer(output, sampled))
        return {each.request_id: each for outputs in made.values() for each in outputs.outputs}

    def step(self):
        output = self.schedule()
        return output, self.end() if len(self.out) == 2 else {}


def test_of_a_request_that_is_aborted_while_two_steps_have_it_nothing_is_said():
    queue = Queue(request("a", [1, 2]))
    queue.schedule()
    queue.schedule()
    queue.core.finish_requests("a", queue.core._live["a"].request.status.__class__.FINISHED_ABORTED)
    queue.core.add_request(request("a", [7, 8]))
    assert queue.end() == {}
    output = queue.schedule()
    # Its name is taken by a step that is out.
    assert output.finished_req_ids == {"a"} and output.num_scheduled_tokens == {}
    assert queue.end() == {}
    assert queue.schedule().scheduled_new_reqs[0].prompt_token_ids == [7, 8]


def test_a_request_that_a_step_left_out_is_told_its_tokens_though_it_kept_its_blocks():
    first = request("b", [1, 2, 3, 4], priority=1, arrival_time=1.0)
    queue = Queue(first, policy="priority", max_num_batched_tokens=4, additional_config={"paged": {"policy": "vllm"}})
    queue.step()
    queue.core.add_request(request("a", [6, 7, 8, 9, 1, 2, 3], priority=0, arrival_time=2.0))
    assert list(queue.step()[0].num_scheduled_tokens) == ["b", "a"]
    assert list(queue.step()[0].num_scheduled_tokens) == ["a"]
    told = queue.step()[0].scheduled_cached_reqs
    assert told.all_token_ids == {"b": [1, 2, 3, 4, 5, 5]} and told.resumed_req_ids == set()
    assert dict(zip(told.req_ids, told.num_output_tokens))["b"] == 2


def test_a_v2_runner_is_told_a_row_as_new_with_all_its_tokens():
    queue = Queue(*(request(id, [1, 2, 3], most=9) for id in "ab"), num_blocks=20, use_v2_model_runner=True)
    told = []
    while queue.core.get_num_unfinished_requests():
        output = queue.step()[0]
        assert output.scheduled_cached_reqs.all_token_ids == {}
        assert output.scheduled_cached_reqs.resumed_req_ids == set()
        for new in output.scheduled_new_reqs:
            told.append(new.req_id in output.preempted_req_ids)
            assert len(new.prefill_token_ids) == new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
    assert told[:2] == [False, False] and told[2:] and all(told[2:]), "one of them got another's blocks"


def test_a_grammar_masks_a_step_when_it_has_seen_the_token_of_the_one_before():
    grammar = SimpleNamespace(grammar=lambda token: True)
    core = core_of(request("a", [1, 2], most=3, structured_output_request=grammar), is_ahead=True)
    first = core.schedule()
    assert first.has_structured_output_requests and not first.pending_structured_output_tokens
    assert core.get_grammar_bitmask(first).structured_output_request_ids == ["a"]
    second = core.schedule()
    assert second.has_structured_output_requests and second.pending_structured_output_tokens
    core.update_from_output(first, answer(first, {"a": [5]}))
    assert list(core._live["a"].request.output_token_ids) == [5]
    assert core.get_grammar_bitmask(second).structured_output_request_ids == ["a"]


def test_a_grammar_of_a_request_that_has_ended_meanwhile_masks_nothing():
    core = core_of(
        request("a", [1, 2], structured_output_request=SimpleNamespace(grammar=lambda token: token != 9)), is_ahead=True
    )
    first, second = core.schedule(), core.schedule()
    made = core.update_from_output(first, answer(first, {"a": [9]}))
    assert made[0].outputs[0].finish_reason.name == "ERROR"
    core.add_request(request("a", [3], structured_output_request=SimpleNamespace(grammar=lambda token: True)))
    assert core.get_grammar_bitmask(second) is None
    made = core.update_from_output(second, answer(second, {"a": [4]}))
    assert made == {} or made[0].outputs == []
    assert core.schedule().scheduled_new_reqs[0].prompt_token_ids == [3]


def test_a_reset_while_two_steps_are_out_drops_what_they_sample_and_computes_it_again():
    queue = Queue(request("a", [1, 2, 3], most=4))
    queue.step()
    queue.step()
    queue.schedule()
    assert queue.core.reset_prefix_cache() is False
    assert queue.core.reset_prefix_cache(reset_running_requests=True) is True
    assert queue.end() == {}
    assert queue.schedule().num_scheduled_tokens == {}, "its steps are out"
    assert queue.end() == {}
    output = queue.schedule()
    told = output.scheduled_cached_reqs
    assert (told.resumed_req_ids, told.num_computed_tokens, told.num_output_tokens) == ({"a"}, [0], [1])
    assert told.all_token_ids == {"a": [1, 2, 3, 5]} and output.num_scheduled_tokens == {"a": 4}
    made = queue.end()
    while queue.core.get_num_unfinished_requests():
        made = queue.step()[1]
    assert reasons(made) == {"a": "LENGTH"}


def test_while_all_are_paused_nothing_runs_and_then_the_runner_is_told_all_tokens():
    from vllm.v1.core.sched.interface import PauseState

    queue = Queue(request("a", [1, 2, 3]))
    queue.step()
    queue.core.set_pause_state(PauseState.PAUSED_ALL)
    assert queue.core.get_num_unfinished_requests() == 0
    assert queue.step()[0].num_scheduled_tokens == {}
    queue.core.set_pause_state(PauseState.UNPAUSED)
    assert queue.step()[0].scheduled_cached_reqs.all_token_ids == {"a": [1, 2, 3, 5]}


def test_steps_end_in_order():
    core = core_of(request("a", [1, 2]), is_ahead=True)
    first, second = core.schedule(), core.schedule()
    with pytest.raises(WrongAnswer, match="an older one than this has not ended"):
        core.update_from_output(second, answer(second, {"a": [5]}))
    core.update_from_output(first, answer(first, {"a": [5]}))
    core.update_from_output(second, answer(second, {"a": [5]}))
    assert core.check() == []
