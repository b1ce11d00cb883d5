"""vLLM's KV connectors through the plug-in: loads that come with their step and late ones, saves, failures, and all of that at random."""

import random
from types import SimpleNamespace

import pytest
from integrations.plugged import Runner
from integrations.vllm_things import answer, asked_connector, plug_in, reasons, request, step, transferred

SIZE = 2


def connected(*requests, elsewhere=(0, False), name="Scripted", policy="recompute", **given):
    core = plug_in(kv_transfer_config=asked_connector(name, kv_load_failure_policy=policy), **given)
    core.connector.elsewhere = elsewhere if callable(elsewhere) else lambda request, hit: elsewhere
    for each in requests:
        core.add_request(each)
    return core


def test_what_comes_with_a_step_is_loaded_and_the_rest_computed_in_that_step():
    core = connected(request("a", [1, 2, 3, 4, 5, 6, 7]), elsewhere=(4, False))
    output, made = step(core)
    (new,) = output.scheduled_new_reqs
    assert (new.num_computed_tokens, output.num_scheduled_tokens, output.has_sync_kv_loads) == (4, {"a": 3}, True)
    assert core.connector.told == [("a", [1, 2, 3, 4], 4, 4)]
    assert output.kv_connector_metadata.blocks == {"a": [1, 2, 3, 4]}
    assert output.kv_connector_block_state is None, "workers are not sent it"
    assert made["a"].new_token_ids == [5] and core._live["a"].request.num_computed_tokens == 7
    assert core.manager.lookup([1, 2, 3, 4, 5, 6, 9]).num_tokens == 6


def test_what_is_here_is_not_asked_for():
    core = connected(request("a", [1, 2, 3, 4, 5], most=1))
    step(core)
    asked = []
    core.connector.elsewhere = lambda request, hit: (asked.append(hit), (2, False))[1]
    core.add_request(request("b", [1, 2, 3, 4, 6, 7, 8]))
    output, _ = step(core)
    assert asked == [4], "once, as it is admitted behind what it was asked about"
    assert output.num_scheduled_tokens == {"b": 1}
    assert core.connector.told[-1][2:] == (2, 2), "two blocks of the four have content"


def test_of_a_prompt_that_exists_elsewhere_as_a_whole_the_last_token_is_computed():
    core = connected(request("a", [1, 2, 3, 4, 5]), elsewhere=(5, True))
    output, _ = step(core)
    each = core._live["a"].request
    assert not output.has_sync_kv_loads and each.status == type(each.status).WAITING_FOR_REMOTE_KVS
    step(core, told=transferred(finished_recving={"a"}))
    assert len(core.connector.told[0][1]) == 3, "there is a block for each token that is loaded"
    output, made = step(core)
    assert output.num_scheduled_tokens == {"a": 1} and made["a"].new_token_ids == [5]


def test_a_connector_that_does_not_know_yet_is_asked_again_and_nothing_is_held_meanwhile():
    answers = [(None, False), (None, False), (2, False)]
    core = connected(request("a", [1, 2, 3]), elsewhere=lambda *_: answers.pop(0), log_stats=True)
    for _ in range(2):
        output, _ = step(core)
        assert output.num_scheduled_tokens == {} and core.manager.device.num_used == 0
    assert core._hits.requests == 0
    output, _ = step(core)
    assert output.num_scheduled_tokens == {"a": 1} and answers == []


def test_blocks_and_id_of_a_request_that_is_being_saved_are_held_until_it_is():
    core = connected(request("a", [1, 2, 3], most=2))
    core.connector.delays = lambda each, blocks: (True, {"blocks": blocks})
    step(core)
    _, made = step(core)
    assert (reasons(made), made["a"].kv_transfer_params) == ({"a": "LENGTH"}, {"blocks": [1, 2]})
    assert core.get_num_unfinished_requests() == 0
    assert core.manager.device.num_used == 2 and not core.reset_prefix_cache()
    step(core)
    assert core.has_finished_requests() and core.has_requests(), "the engine goes on until it is saved"
    core.add_request(request("a", [4, 5], most=1))
    assert step(core, told=transferred(finished_sending={"a"}))[0].num_scheduled_tokens == {}
    assert core.manager.device.num_used == 0 and not core.has_finished_requests()
    assert core.manager.lookup([1, 2, 3]).num_tokens == 2, "what was saved is content as usual"
    assert step(core)[0].num_scheduled_tokens == {"a": 2}


@pytest.mark.parametrize("name", ["Scripted", "OfAllGroups"])
def test_a_connector_that_needs_nothing_longer_is_told_of_the_end_and_the_blocks_go(name):
    core = connected(request("a", [1, 2, 3], most=1), name=name)
    step(core)
    assert core.connector.come == ["a"] and core.connector.ended == [("a", [1, 2])]
    assert core.manager.device.num_used == 0


def test_blocks_of_saves_that_end_together_go_in_the_order_of_their_ids():
    core = connected(*(request(id, [k, 2, 3], most=1) for k, id in enumerate("abcdef")), num_blocks=12)
    core.connector.delays = lambda *_: (True, None)
    step(core)
    # The second block of each is not full, and no content. What is released last is drawn first.
    partial = [blocks[1] for _, blocks, _, _ in core.connector.told]
    step(core, told=transferred(finished_sending=set("abcdef")))
    core.add_request(request("next", [9] * 11, most=1))
    step(core)
    assert core.connector.told[-1][1] == partial[::-1]


def test_with_the_policy_to_fail_those_end_whose_load_failed_and_only_they():
    def elsewhere(each, _):
        return {"now": (2, False), "late": (2, True)}.get(each.request_id, (0, False))

    core = connected(
        *(request(id, [k, 2, 3]) for k, id in enumerate(("now", "late", "other"))), elsewhere=elsewhere, policy="fail"
    )
    output = core.schedule()
    told = transferred(invalid_block_ids={ids[0] for id, ids, _, _ in core.connector.told if id != "other"})
    made = core.update_from_output(output, answer(output, {"now": [5], "other": [5]}, kv_connector_output=told))
    assert reasons({each.request_id: each for each in made[0].outputs}) == {"now": "ERROR", "late": "ERROR"}
    assert step(core)[0].num_scheduled_tokens == {"other": 3}
    step(core, told=transferred(finished_recving={"late"}))
    assert core.manager.device.num_used == 2


@pytest.mark.parametrize(
    ("failure", "computed"),
    [(lambda ids: {"invalid_block_ids": {ids[1]}}, 5), (lambda ids: {"failed_recving": {"a"}}, 7)],
)
def test_of_a_late_load_that_failed_in_part_the_rest_is_computed(failure, computed):
    core = connected(request("a", [1, 2, 3, 4, 5, 6, 7]), elsewhere=(6, True))
    output = core.schedule()
    told = transferred(finished_recving={"a"}, **failure(core.connector.told[0][1]))
    core.update_from_output(output, answer(output, {}, kv_connector_output=told))
    output, made = step(core)
    assert output.num_scheduled_tokens == {"a": computed} and made["a"].new_token_ids == [5]


def step_that_reports(core, block, **more):
    """A step at whose end a block of an earlier one is reported as not loaded; from then on nothing exists elsewhere."""
    output = core.schedule()
    told = transferred(invalid_block_ids={block}, **more)
    made = core.update_from_output(output, answer(output, {"r": [5], "a": [5]}, kv_connector_output=told))
    core.connector.elsewhere = lambda *_: (0, False)
    return reasons({each.request_id: each for each in made[0].outputs}) if made else {}


def loading_a(*requests, delays=False, **given):
    """One that loads 4 tokens with its step, behind others that load nothing, after that step; and the first block that it loaded."""
    core = connected(*requests, elsewhere=lambda each, _: (4 * (each.request_id == "a"), False), **given)
    core.connector.delays = lambda *_: (delays, None)
    step(core)
    return core, next(blocks[0] for id, blocks, _, _ in core.connector.told if id == "a")


def test_one_that_answered_behind_a_load_that_failed_late_ends_with_an_error_and_others_go_on():
    core, block = loading_a(request("a", [1, 2, 3, 4, 5]), request("r", [9, 9, 9]))
    assert step_that_reports(core, block) == {"a": "ERROR"}
    output, made = step(core)
    assert output.num_scheduled_tokens == {"r": 4} and made["r"].new_token_ids == [5]
    assert core.check() == []


def test_what_one_that_has_ended_left_of_a_load_that_failed_late_is_found_no_more():
    core, block = loading_a(request("a", [1, 2, 3, 4, 5], most=1), request("r", [9, 9, 9]))
    assert core.manager.lookup([1, 2, 3, 4, 5]).num_tokens == 4
    assert step_that_reports(core, block) == {}
    assert step(core)[0].num_scheduled_tokens == {"r": 4}
    assert core.manager.lookup([1, 2, 3, 4, 5]).num_tokens == 0


def test_after_a_load_that_failed_late_none_comes_in_before_blocks_that_are_saved_are_let_go():
    both = request("s", [7, 7, 7], most=1), request("a", [*range(9)])
    core, block = loading_a(*both, delays=True, max_num_batched_tokens=5)
    step_that_reports(core, block)
    assert step(core)[0].num_scheduled_tokens == {}
    core.add_request(request("new", [3, 3, 3]))
    assert step(core, told=transferred(finished_sending={"s"}))[0].num_scheduled_tokens == {}
    assert step(core)[0].num_scheduled_tokens == {"a": 5}


def test_a_request_that_gave_way_is_asked_about_anew_and_the_connector_is_told_of_it():
    both = (request(id, prompt, most=4) for id, prompt in (("a", [1, 2, 3]), ("b", [4, 5, 6])))
    core = connected(*both, num_blocks=4, additional_config={"paged": {"policy": "vllm"}})
    gave_way = [step(core)[0].preempted_req_ids for _ in range(2)]
    output, _ = step(core)
    assert (gave_way, output.preempted_req_ids) == ([None, None], {"b"})
    assert core._live["b"].request.num_computed_tokens == 0
    core.connector.elsewhere = lambda each, hit: (4 - hit, False)
    step(core)
    output, _ = step(core)
    assert output.num_scheduled_tokens == {"b": 1}
    told = output.scheduled_cached_reqs
    assert (told.resumed_req_ids, told.all_token_ids) == ({"b"}, {"b": [4, 5, 6, 5, 5]})


def test_statistics_count_what_was_found_elsewhere_and_add_up_both_sides_of_the_connector():
    class Figures(SimpleNamespace):
        def is_empty(self):
            return not self.n

        def aggregate(self, other):
            return Figures(n=self.n + other.n)

        def to_dict(self):
            return {"n": self.n}

    core = connected(request("a", [1, 2, 3, 4, 5]), elsewhere=(4, False), log_stats=True)
    core.connector.figures = Figures(n=2)
    output = core.schedule()
    told = transferred(kv_connector_stats=Figures(n=3))
    made = core.update_from_output(output, answer(output, {"a": [5]}, kv_connector_output=told))
    stats = made[0].scheduler_stats
    assert stats.kv_connector_stats == {"n": 5}
    found = stats.connector_prefix_cache_stats
    assert (found.requests, found.queries, found.hits) == (1, 5, 4)
    core.connector.figures = Figures(n=0)
    assert core.make_stats().kv_connector_stats is None


def test_resetting_pausing_and_ending_reach_the_connector():
    core = connected(request("a", [1, 2, 3], most=1))
    step(core)
    assert core.reset_prefix_cache(reset_connector=True) and core.reset_connector_cache()
    core.connector.can_reset = False
    assert not core.reset_prefix_cache(reset_connector=True)
    step(core)
    assert not core.has_requests()
    core.connector.pushes = True
    assert core.has_requests() and core.get_kv_connector() is core.connector
    core.shutdown()
    assert core.connector.is_shut
    assert plug_in().reset_connector_cache(), "where there is none there is nothing to forget"


def test_resetting_takes_back_what_runs_and_not_what_loads():
    core = connected(
        request("a", [1, 2, 3]), request("b", [4, 5, 6]), elsewhere=lambda each, _: (2 * (each.request_id == "b"), True)
    )
    step(core)
    assert not core.reset_prefix_cache(reset_running_requests=True)
    step(core, told=transferred(finished_recving={"b"}))
    assert step(core)[0].num_scheduled_tokens == {"a": 1, "b": 1}
    # One that was taken back, and loads in the next step, has what it loads.
    core.finish_requests("b", type(core._live["a"].request.status).FINISHED_ABORTED)
    assert core.reset_prefix_cache(reset_running_requests=True)
    core.connector.elsewhere = lambda *_: (4, True)
    assert core.schedule().preempted_req_ids == {"a"}
    assert core._live["a"].request.num_computed_tokens == 4


class Memory:
    """Slots that hold token ids, and what is stored elsewhere: tokens of block-aligned prefixes."""

    def __init__(self, core, num_blocks, chance, fails):
        self.core, self.chance, self.fails = core, chance, fails
        self.slots = [[0] * SIZE for _ in range(num_blocks)]
        self.stored, self.late, self.saving = set(), {}, {}
        core.connector.elsewhere, core.connector.delays = self.elsewhere, self.delays

    def tokens(self, each):
        return [*each.prompt_token_ids, *each.output_token_ids]

    def elsewhere(self, each, hit):
        if self.chance.random() < 0.1:
            return None, False
        tokens = self.tokens(each)
        most = max((n for n in range(hit + SIZE, len(tokens), SIZE) if tuple(tokens[:n]) in self.stored), default=hit)
        return most - hit, most > hit and self.chance.random() < 0.5

    def delays(self, each, blocks):
        if each.request_id in self.late:
            # A connector says once that it has finished with a request: here, that what it loads has come.
            return False, None
        tokens = self.tokens(each)[: each.num_computed_tokens]
        # One that is aborted in flight may be told of tokens that no step has ended for.
        known = tokens[: len(tokens) // SIZE * SIZE] if each.status != type(each.status).FINISHED_ABORTED else []
        self.save(known, blocks)
        if self.chance.random() < 0.5:
            return False, None
        self.saving[each.request_id] = known, blocks
        return True, None

    def save(self, tokens, blocks):
        held = [token for block in blocks for token in self.slots[block]][: len(tokens)]
        assert held == tokens, "what is saved is what was computed"
        self.stored |= {tuple(tokens[:n]) for n in range(SIZE, len(tokens) + 1, SIZE)}

    def load(self, each, blocks, first, stop):
        tokens = self.tokens(each)
        for position in range(first, min(stop, len(tokens))):
            self.slots[blocks[position // SIZE]][position % SIZE] = tokens[position]

    def begin(self, output):
        """Loads of the step's admissions: now, or later; of some nothing comes. Block ids that are invalid."""
        invalid, told = set(), self.core.connector.told
        for id, blocks, _, num in told:
            live = self.core._live[id]
            first = live.request.num_computed_tokens - num
            if id in output.num_scheduled_tokens:
                first -= output.num_scheduled_tokens[id]
            if not num:
                continue
            if id in self.core._transfers.loading:
                self.late[id] = live.request, blocks, first, first + num
            elif self.fails and self.chance.random() < 0.3:
                invalid.add(blocks[first // SIZE])
            else:
                self.load(live.request, blocks, first, first + num)
        told.clear()
        return invalid

    def end(self, invalid):
        """What the worker says of the step: transfers that have ended by now."""
        done = [id for id in self.late if self.chance.random() < 0.4]
        for id in done:
            each, blocks, first, stop = self.late.pop(id)
            if self.fails and self.chance.random() < 0.3:
                invalid.add(blocks[first // SIZE])
            else:
                self.load(each, blocks, first, stop)
        if self.fails == "late" and self.chance.random() < 0.05:
            invalid.add(self.chance.randrange(1, len(self.slots)))
        saved = [id for id in self.saving if self.chance.random() < 0.4]
        for id in saved:
            self.save(*self.saving.pop(id))
        return transferred(invalid_block_ids=invalid, finished_recving=set(done), finished_sending=set(saved))


@pytest.mark.parametrize("fails", ["", "in time", "late"])
@pytest.mark.parametrize("seed", range(4))
def test_every_row_attends_to_its_own_tokens_whatever_is_loaded_saved_or_lost(seed, fails):
    chance = random.Random(seed)
    core = connected(num_blocks=14, max_num_batched_tokens=16)
    memory, runner = Memory(core, 15, chance, fails), Runner(SIZE)
    counts = dict.fromkeys(("loaded at once", "loaded late", "saved", "taken back", "forgotten"), 0)
    num_added = 0
    for _ in range(600):
        if num_added < 60 and chance.random() < 0.3:
            prompt = [chance.randrange(2) for _ in range(chance.randint(1, 12))]
            core.add_request(request(f"r{num_added}", prompt, most=chance.randint(1, 8)))
            num_added += 1
        if core._live and chance.random() < 0.04:
            id = chance.choice(sorted(core._live))
            core.finish_requests(id, type(core._live[id].request.status).FINISHED_ABORTED)
        output = core.schedule()
        invalid = memory.begin(output)
        counts["loaded late"] += len(memory.late)
        counts["loaded at once"] += output.has_sync_kv_loads
        counts["saved"] += len(memory.saving)
        batch = core._out[-1][1]
        shares = runner.run(output, batch)
        for tokens, _, written in shares.values():
            for token, slot in zip(tokens, written):
                memory.slots[slot // SIZE + 1][slot % SIZE] = token
        for id, (_, positions, _) in () if invalid else shares.items():
            known = runner.known[id]
            for position in range(positions[-1] + 1):
                held = memory.slots[known.tables[0][position // SIZE]][position % SIZE]
                assert held == (known.prompt + known.outputs)[position], (id, position)
        rows = () if batch is None else zip(batch.ids.tolist(), batch.samples.tolist())
        sampled = {id: [chance.randrange(2)] for id, samples in rows if samples}
        runner.sampled(batch, sampled)
        counts["taken back"] += bool(invalid)
        core.update_from_output(output, answer(output, sampled, kv_connector_output=memory.end(invalid)))
        counts["forgotten"] += core._transfers._is_spoilt
        assert core.check() == []
        if num_added == 60 and not core.has_requests():
            break
    assert not core.has_requests() and core.manager.device.num_used == 0
    assert all(counts[what] for what in ("loaded at once", "loaded late", "saved")), counts
    assert bool(counts["taken back"]) == bool(fails) and bool(counts["forgotten"]) == (fails == "late")
