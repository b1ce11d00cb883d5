"""The watcher: its pictures and its stories against a naive account of the same run, from what the engine says to anybody."""

import itertools
from collections import Counter

import msgspec
import numpy as np
import pytest

from paged import EngineOutput
from paged.errors import UnknownRequest
from paged.serving.block_map import CACHED, FREE, HELD, RETAINED, SHARED, block_cells, merged
from paged.serving.sight import KINDS, Snapshot, Story

from .watched import Load, with_sessions  # noqa: TID252

TINY = {"num_blocks": 40, "block_size": 4, "num_clients": 14, "longest": 60}
TINY |= {"max_sequences": 8, "max_tokens_per_step": 32}


@pytest.fixture
def ticks():
    """A clock that is a second further each time it is read."""
    return itertools.count(100).__next__


def kinds_of(load, name):
    return [kind for _, kind, _ in load.watcher.story(name).timeline]


def of_kind(events, *kinds):
    return [(event.id, event.kind) for event in events if event.kind in kinds]


def test_pictures_and_stories_agree_with_a_naive_account(ticks):
    load = Load(seed=5, policy="paged-fair", host_blocks=8, clock=ticks, **TINY)
    manager, scheduler, watcher = load.engine.manager, load.engine.scheduler, load.watcher
    preempted, ended, events = Counter(), {}, []
    for step in range(150):
        batch, outputs = load.step()
        if batch is not None:
            preempted.update(batch.preempted)
        ended.update((output.id, output.finish_reason) for output in outputs if output.finished)
        if step % 50 == 49 and scheduler.waiting_ids():
            name = scheduler.waiting_ids()[-1]
            ended[name] = load.abort(name).finish_reason
        seen = watcher.snapshot()
        events += [event for event in seen.happened if event.number > len(events)]
        # None is lost from one step to the next.
        assert [event.number for event in events] == list(range(1, len(events) + 1))

        blocks, states = seen.blocks, manager.device.states
        assert blocks.free == np.count_nonzero(states == 0) == manager.device.num_free
        assert blocks.cached + blocks.retained == np.count_nonzero(states == 1) == manager.device.num_cached
        assert blocks.own + blocks.shared + blocks.held == np.count_nonzero(states == 2) == manager.device.num_used
        cells = [state for state, count in blocks.runs for _ in range(count)]
        assert len(cells) == manager.num_blocks
        numbers = {each.id: each.number for each in seen.requests}
        holders = [set() for _ in cells]
        for name in numbers:
            for row in scheduler.rows_of(name):
                for block in manager.rows.block_tables[row, : manager.rows.num_blocks[row]].tolist():
                    holders[block].add((name, row))
        for cell, held in zip(cells, holders, strict=True):
            if len(held) == 1:
                assert cell == numbers[next(iter(held))[0]]
            else:
                assert cell == SHARED if held else cell in (FREE, CACHED)

        counts = scheduler.counts()
        assert {name: getattr(seen.queues, name) for name in seen.queues.__struct_fields__}.items() <= counts.items()
        order = [each.id for each in seen.requests if each.status == "waiting"]
        assert order == scheduler.waiting_ids()
        assert [each.id for each in seen.requests][: seen.queues.running] == scheduler.running_ids()
        for each in seen.requests:
            assert each.reason == ("" if each.status == "running" else scheduler.explain(each.id).reason)
            live = load.engine.live_request(each.id)
            assert (each.output_tokens, each.prompt_tokens) == (len(live.token_ids), len(live.prompt_ids))
            assert each.waited_s <= each.alive_s

    assert preempted.total() > 0
    assert Counter(of_kind(events, "preempted_recompute", "preempted_swap")) == {
        (name, f"preempted_{how}"): count for (name, how), count in preempted.items()
    }
    totals = watcher.snapshot().totals
    assert totals.preemptions_recompute + totals.preemptions_swap == preempted.total()
    kinds = {"length": "finished", "stop": "finished", "abort": "aborted"}
    assert dict(of_kind(events, "finished", "aborted", "rejected", "error")) == {
        name: kinds[reason] for name, reason in ended.items()
    }
    assert len(of_kind(events, "came")) == load.num_added
    assert {event.kind for event in events} <= set(KINDS)

    for name in ended:
        story = watcher.story(name)
        # The first moment of each kind.
        at = {kind: when for when, kind, _ in reversed(story.timeline)}
        assert [when for when, _, _ in story.timeline] == sorted(when for when, _, _ in story.timeline)
        assert story.timeline[0][1] == "came"
        assert story.timeline[-1][1] == story.status == kinds[ended[name]]
        if story.status == "finished":
            assert at["came"] <= at["admitted"] <= at["first_token"] <= at["finished"]
        away = Counter(kind for _, kind, _ in story.timeline if kind.startswith("preempted") or kind == "returned")
        kept_all = sum("none of its blocks" in detail for _, _, detail in story.timeline)
        assert away["preempted_recompute"] + away["preempted_swap"] >= away["returned"] - kept_all
        for _, kind, detail in story.timeline:
            assert detail or kind not in ("waits", "preempted_recompute", "preempted_swap")
    for name in {each.id for each in watcher.snapshot().requests}:
        story, answer = watcher.story(name), scheduler.explain(name)
        assert (story.status, story.why) == (answer.status, str(answer))
        assert story.holders == list(answer.holders[:20])
    assert load.engine.check() == []


def test_pages_of_a_hybrid_are_shown_by_whose_they_are_and_by_layer_group(ticks):
    sizes = {"num_blocks": 120, "block_size": 8, "host_blocks": 0, "max_sequences": 6, "num_clients": 9, "longest": 60}
    load = Load(seed=4, is_hybrid=True, clock=ticks, **sizes)
    manager, scheduler = load.engine.manager, load.engine.scheduler
    for _ in range(60):
        load.step()
        seen = load.watcher.snapshot()
        blocks, device = seen.blocks, manager.device
        assert (blocks.free, blocks.cached + blocks.retained) == (device.num_free, device.num_cached)
        cells = np.repeat(*map(np.array, zip(*blocks.runs, strict=True)))
        numbers = {each.number: each for each in seen.requests}
        for number in set(cells[cells >= 0].tolist()):
            (row,) = scheduler.rows_of(numbers[number].id)
            pages = np.concatenate([manager.group_pages(group, row).ravel() for group in range(2)])
            assert set((cells == number).nonzero()[0].tolist()) <= set(pages.tolist())
        assert [each.group.kind for each in seen.groups] == ["full", "state"]
        assert sum(each.used for each in seen.groups) == device.num_used == blocks.own + blocks.shared + blocks.held
    assert seen.groups == manager.stats().groups
    name = next(each.id for each in seen.requests if each.hit_tokens and each.status == "running")
    why = load.watcher.story(name).why
    assert why == str(scheduler.explain(name))
    assert " Its hit ended at " in why
    assert " of full layers, 1 page of state layers. It can stand at " in why


def test_a_wait_has_its_reason_from_the_beginning_and_as_the_first_of_the_queue(ticks):
    load = Load(num_clients=0, num_blocks=40, block_size=4, max_sequences=1, clock=ticks, longest=20)
    first, second, third = (load.add(max_tokens=6) for _ in range(3))
    load.finish()
    (came, waits, leads, admitted, token, finished) = load.watcher.story(third).timeline
    assert (came[1], admitted[1], token[1], finished[1]) == ("came", "admitted", "first_token", "finished")
    assert waits[1:] == ("waits", f'it is behind 1 request in the queue, the first of which is "{second}".')
    assert leads[1:] == ("waits", "all 1 seats are taken (max_sequences).")
    assert kinds_of(load, first) == ["came", "admitted", "first_token", "finished"]
    assert load.watcher.story(first).why == f'request "{first}" is finished: by its length, after 6 tokens.'


def test_what_is_refused_or_fails_has_a_story_and_of_those_that_ended_the_last_thousand_are_known(ticks):
    load = Load(num_clients=0, clock=ticks)
    for number in range(1001):
        load.watcher.refused(f"r{number}", "research", 9000, "it never fits.", 250)
    story = load.watcher.story("r1")
    assert (story.status, story.tenant, story.prompt_tokens) == ("rejected", "research", 9000)
    assert story.why == 'request "r1" is rejected: it never fits.'
    assert {event.kind for event in load.watcher.snapshot().happened} == {"rejected"}
    with pytest.raises(UnknownRequest, match="r0"):
        load.watcher.story("r0")
    # An end is told once.
    name = load.add()
    load.step()
    load.engine.abort(name)
    error = EngineOutput(name, [], finish_reason="error", error="OutOfMemory: none left.", finished=True)
    for moment in (300, 301):
        load.watcher.ended(error, moment)
    assert load.watcher.story(name).status == "error"
    assert of_kind(load.watcher.snapshot().happened, "error") == [(name, "error")]
    assert "OutOfMemory" in load.watcher.story(name).why


def test_a_very_long_life_keeps_its_beginning_and_its_end(ticks):
    load = Load(num_clients=0, clock=ticks, longest=20)
    name = load.add()
    batch, _ = load.step()
    away = msgspec.structs.replace(batch, preempted=((name, "swap"),), admitted=())
    back = msgspec.structs.replace(batch, preempted=(), admitted=(name,))
    for turn in range(1000):
        load.watcher.stepped(away, [], 200 + 2 * turn, 0.1)
        load.watcher.stepped(back, [], 201 + 2 * turn, 0.1)
    kinds = kinds_of(load, name)
    assert (len(kinds), load.watcher.story(name).left_out) == (256, 2000 + 3 - 256)
    assert (kinds[:3], kinds[-1]) == (["came", "admitted", "first_token"], "returned")


def test_prefixes_are_counted_by_the_content_of_their_first_block(ticks):
    load = Load(seed=1, num_clients=0, num_prefixes=1, num_blocks=200, clock=ticks, longest=8)
    for _ in range(3):
        name = load.add(max_tokens=2)
        load.finish()
        assert load.watcher.story(name).status == "finished"
    (prefix,) = load.watcher.snapshot().prefixes
    totals = load.watcher.snapshot().totals
    assert (prefix.requests, prefix.hit_tokens, prefix.prompt_tokens) == (3, totals.hit_tokens, totals.prompt_tokens)
    assert prefix.hit_tokens > 0
    assert len(prefix.hash) == 8


def test_a_step_says_what_it_computed_of_decodes_and_of_prompts(ticks):
    load = Load(num_clients=0, num_prefixes=1, max_tokens_per_step=500, prefix_caching=False, clock=ticks, longest=20)
    first = load.add(max_tokens=9)
    load.step()
    second = load.add(max_tokens=9)
    load.step()
    before, after = load.watcher.snapshot().steps
    tokens = {name: len(load.engine.live_request(name).prompt_ids) for name in (first, second)}
    assert (before.number, before.sequences, before.decode_tokens, before.prompt_tokens) == (1, 1, 0, tokens[first])
    assert (after.sequences, after.decode_tokens, after.prompt_tokens) == (2, 1, tokens[second])


def test_who_looks_for_the_first_time_sees_the_last_three_minutes():
    now = [1000.0]
    load = Load(seed=5, num_clients=6, clock=lambda: now[0], num_blocks=64, longest=40)
    for _ in range(250):
        load.step()
        now[0] += 1.0
    seen = load.watcher.snapshot()
    at = [point.at for point in seen.history]
    assert at == sorted(at) and len(at) <= 180
    assert at[-1] - at[0] == pytest.approx(180, abs=4)
    assert max(after - before for before, after in itertools.pairwise(at)) <= 2.5
    blocks, newest = seen.blocks, seen.history[-1]
    assert (newest.used, newest.cached) == (blocks.own + blocks.shared + blocks.held, blocks.cached + blocks.retained)
    assert newest.output_tokens == seen.totals.output_tokens > seen.history[0].output_tokens


def test_a_rest_is_seen_as_one():
    now = [1000.0]
    load = Load(num_clients=0, clock=lambda: now[0], num_blocks=64)
    load.add(max_tokens=3)
    while load.engine.has_unfinished:
        load.step()
        now[0] += 0.1
    now[0] += 60
    rested = load.watcher.snapshot().history
    assert (rested[-2].used, rested[-2].output_tokens) == (rested[-1].used, rested[-1].output_tokens) == (0, 3)
    assert rested[-1].at - rested[-2].at == pytest.approx(60.1, abs=0.01)
    load.add(max_tokens=3)
    now[0] += 1000
    assert [point.output_tokens for point in load.watcher.snapshot().history] == [3, 3]


def test_what_crosses_to_the_browser_is_small_and_holds_no_token(ticks):
    load = Load(seed=2, clock=ticks, num_clients=60, num_blocks=4096, max_sequences=32)
    for _ in range(40):
        load.step()
    seen = load.watcher.snapshot()
    assert len(msgspec.json.encode(seen)) < 64_000
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(seen), type=Snapshot) == seen
    story = load.watcher.story(seen.requests[0].id)
    assert msgspec.json.decode(msgspec.json.encode(story), type=Story) == story
    names = {name for struct in (Snapshot, Story, type(seen.requests[0])) for name in struct.__struct_fields__}
    assert not names & {"prompt", "text", "token_ids", "tokens"}


def test_of_many_requests_two_hundred_are_shown_and_thirty_say_why_they_wait(ticks):
    load = Load(seed=2, num_clients=0, clock=ticks, max_sequences=4, longest=20)
    for _ in range(240):
        load.add()
    load.step()
    seen = load.watcher.snapshot()
    assert (len(seen.requests), seen.queues.waiting + seen.queues.running) == (200, 240)
    away = [each for each in seen.requests if each.status != "running"]
    assert [bool(each.reason) for each in away] == [True] * 30 + [False] * (len(away) - 30)


def test_branches_of_a_search_are_their_owners(ticks):
    from paged import BeamSearchParams

    load = Load(num_clients=0, clock=ticks, num_blocks=64, block_size=4)
    load.engine.add_request([7, 8, 9, 10, 11], BeamSearchParams(beam_width=3, max_tokens=12), id="beams")
    load.watcher.came("beams", "research", 5, None, 150)
    numbers = set()
    while load.engine.has_unfinished:
        load.step()
        numbers |= {each.number for each in load.watcher.snapshot().requests}
    assert (numbers, load.watcher.story("beams").status) == ({1}, "finished")


def test_a_block_is_retained_or_held():
    states, levels = np.array([1, 1, 2, 0], np.int8), np.array([0, 2, 0, 0], np.int8)
    cells = block_cells(np.empty((0, 4), np.int32), np.empty(0, np.int64), np.empty(0, np.int64), states, levels)
    assert cells.tolist() == [CACHED, RETAINED, HELD, FREE]


def test_a_large_pool_is_shown_in_cells_of_equal_size_each_of_which_is_what_most_of_its_blocks_are(ticks):
    load = Load(num_clients=3, num_blocks=40_000, block_size=1, max_model_len=512, clock=ticks, longest=40)
    load.step()
    blocks = load.watcher.snapshot().blocks
    assert (blocks.cell_blocks, sum(count for _, count in blocks.runs)) == (3, 13_334)
    assert blocks.free + blocks.cached + blocks.own + blocks.shared == 40_000
    assert merged(np.array([5, FREE, 5, CACHED, CACHED, CACHED, 8], np.int64), 3).tolist() == [5, CACHED, 8]


def test_sessions_are_shown_with_their_tenants_and_where_their_content_is(tmp_path):
    load = with_sessions(tmp_path)
    seen = load.watcher.snapshot()
    assert msgspec.json.decode(msgspec.json.encode(seen), type=Snapshot) == seen
    reader, running, tool = seen.sessions
    assert (reader.id, reader.tenant, reader.waits_for, reader.priority, reader.live) == ("reader", "", "person", 1, 0)
    assert (running.id, running.tenant, running.live, running.idle_s) == ("agent 1", "research", 1, None)
    assert (tool.id, tool.waits_for, tool.priority) == ("agent 0", "tool", 2)
    # 90 tokens and 8 more, of which the last is not computed, in blocks of 8.
    assert (tool.blocks, tool.device_blocks, tool.pinned_blocks, seen.pinned) == (12, 12, 12, 12)
    assert 0 < reader.retained_s <= 1800 and reader.expected_in_s > 0
    assert (seen.num_sessions, seen.disk.hit_tokens) == (3, 0)
    load.engine.close()
