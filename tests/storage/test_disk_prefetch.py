"""A hint brings what only the disk has to free blocks of the device, before a request asks for it; nothing waits for that, and
nothing gives way."""

import asyncio
import random
from itertools import count

import pytest

pytest.importorskip("torch")

from paged import AsyncEngine, Hint, SamplingParams
from paged.testing.engine_rig import EngineRig, alone
from paged.testing.engine_world import EngineRequest, EngineWorld, build_engine
from paged.testing.tiny_model import tiny_model

from ..driving import driven  # noqa: TID252
from .asking import PROMPT, Memory, ask, assert_same, begun  # noqa: TID252

ASKED = Hint(action="prefetch", tokens=PROMPT)
OTHER = [5 * place % 59 + 1 for place in range(43)]


def said(outcome):
    return outcome.status, outcome.num_tokens


def prefetched(engine, hint=ASKED):
    """What became of a hint, once it is carried out."""
    outcome = engine.hint(hint)
    driven(engine)
    return said(outcome)


def test_after_a_restart_a_prompt_that_was_prefetched_is_on_the_device_and_its_request_reads_no_disk(made, tmp_path):
    first = made(disk_cache=tmp_path)
    expected = ask(first)
    first.close()
    second = made(disk_cache=tmp_path)
    outcome = second.hint(ASKED)
    assert said(outcome) == ("accepted", 40)
    assert outcome.reason == "10 blocks are on the device, or will be once they are read from the disk."
    assert second.has_unfinished
    driven(second)
    assert second.scheduler.explain_prefix(PROMPT).device_tokens == 40
    assert_same(ask(second), expected, cached=40)
    stats = second.disk.stats()
    assert (stats.prefetched, stats.asked, stats.loaded) == (10, 0, 0)
    assert (second.scheduler.stats().hit_tokens, second.manager.stats().queries) == (40, 1)


def test_an_answer_is_prefetched_by_its_session_until_that_ends(made):
    engine = made(Memory())
    answer, *_ = ask(engine, max_tokens=10, session_id="s")
    engine.manager.reset_cache()
    assert prefetched(engine, Hint(action="prefetch", session="s")) == ("accepted", 52)
    assert ask(engine, PROMPT + answer + [1, 2, 3], session_id="s")[2] == 52
    assert engine.disk.stats().asked == 0
    engine.hint(Hint(action="end", session="s"))
    engine.manager.reset_cache()
    assert prefetched(engine, Hint(action="prefetch", session="s")) == ("missing", 0)


def test_a_turn_that_left_nothing_is_not_what_its_session_is_prefetched_by(made):
    engine = made(Memory())
    ask(engine, session_id="s")
    engine.add_request([1] * 20, SamplingParams(max_tokens=4), id="b", session_id="s")
    engine.abort("b")
    engine.manager.reset_cache()
    assert prefetched(engine, Hint(action="prefetch", session="s")) == ("accepted", 48)


def test_sessions_that_ended_longest_ago_are_forgotten_first(made, monkeypatch):
    monkeypatch.setattr("paged.engine.disk_tier.SESSION_TOKENS", 60)
    engine = made(Memory())
    for session in ("a", "b", "b"):
        ask(engine, session_id=session, id=session)
    engine.manager.reset_cache()
    assert prefetched(engine, Hint(action="prefetch", session="a")) == ("missing", 0)
    assert prefetched(engine, Hint(action="prefetch", session="b")) == ("accepted", 48)


def test_the_prompt_of_a_request_that_waits_is_prefetched_and_a_salted_one_by_its_salt(made):
    store = Memory()
    ask(made(store), salt="a")
    engine = made(store, max_sequences=1)
    begun(engine, [9] * 8, "runs", max_tokens=80)
    engine.step()
    begun(engine, PROMPT, "a", max_tokens=2, salt="a")
    assert engine.hint(ASKED).status == "missing"
    assert said(engine.hint(Hint(action="prefetch", request="a"))) == ("accepted", 40)
    while engine.disk.prefetches.is_busy:
        engine.disk.wait()
        engine.step()
    assert engine.scheduler.status("a") == "waiting"
    assert [each.usage.hit_tokens for each in driven(engine) if each.finished] == [0, 40]
    assert engine.disk.stats().asked == 0


def test_what_memory_has_is_not_read_again(made, filled):
    store, expected = filled
    engine = made(store)
    ask(engine, PROMPT[:21])
    before = engine.disk.stats()
    for _ in range(2):
        assert prefetched(engine) == ("accepted", 40)
        assert engine.disk.stats().prefetched == 5
    assert_same(ask(engine, id="b"), expected)
    assert engine.disk.stats().asked == before.asked


def test_what_the_host_has_takes_its_room_first(made):
    store = Memory()
    ask(made(store), longer := [*PROMPT, *range(1, 21)])
    engine = made(store, host_blocks=12, host_caching=True, num_blocks=12)
    ask(engine, PROMPT[:24], max_tokens=1)
    ask(engine, [9] * 40, id="evicts", max_tokens=1, writes_cache=False)
    assert (engine.manager.lookup(longer).host_tokens, engine.manager.device.num_free) == (16, 10)
    assert prefetched(engine, Hint(action="prefetch", tokens=longer)) == ("clipped", 48)
    assert engine.scheduler.explain_prefix(longer).device_tokens == 48


def test_it_takes_free_blocks_alone_and_says_how_many(made, store):
    engine = made(store, num_blocks=16)
    ask(engine, [9] * 40, max_tokens=1)
    assert engine.manager.device.num_free == 6
    outcome = engine.hint(ASKED)
    assert said(outcome) == ("clipped", 24)
    assert outcome.reason == "6 of 10 blocks are on the device, or will be once they are read from the disk."
    driven(engine)
    assert engine.scheduler.explain_prefix([9] * 40).device_tokens == 40
    assert engine.scheduler.explain_prefix(PROMPT).device_tokens == 24
    outcome = engine.hint(ASKED)
    assert said(outcome) == ("clipped", 24)
    assert outcome.reason == (
        "16 tokens lie on the disk alone; no block of the device is free for them, and others are not evicted."
    )


def test_hints_that_name_the_same_prompt_are_read_once_and_count_for_the_room(made, store):
    engine = made(store, num_blocks=16)
    ask(made(store), OTHER)
    assert [said(engine.hint(ASKED)) for _ in range(2)] == [("accepted", 40)] * 2
    assert said(engine.hint(Hint(action="prefetch", tokens=OTHER))) == ("clipped", 24)
    driven(engine)
    assert engine.disk.stats().prefetched == 16


def test_no_more_than_so_many_are_read(made, store, monkeypatch):
    monkeypatch.setattr("paged.engine.disk_prefetch.MOST", 1)
    engine = made(store)
    ask(made(store), OTHER)
    engine.hint(ASKED)
    outcome = engine.hint(Hint(action="prefetch", tokens=OTHER))
    assert said(outcome) == ("rejected", 0)
    assert outcome.reason == "40 tokens lie on the disk alone; 1 prefetches are read from it already."


def test_nothing_on_the_disk_is_missing_and_a_prompt_longer_than_the_model_takes_is_clipped(made, store):
    engine = made(store, max_model_len=24)
    assert prefetched(engine, Hint(action="prefetch", tokens=[1] * 20)) == ("missing", 0)
    assert prefetched(engine) == ("clipped", 24)
    assert engine.disk.stats().prefetched == 6


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_running_request_keeps_its_blocks_and_its_bits_and_takes_what_was_prefetched(made, store, steps_ahead):
    prompt = [3 * place % 61 + 1 for place in range(9)]
    expected = ask(made(), prompt, max_tokens=50)
    engine = made(store, num_blocks=16, steps_ahead=steps_ahead, max_sequences=1)
    begun(engine, prompt, "a", max_tokens=50)
    tokens, was_there = [token for output in engine.step() for token in output.token_ids], False
    assert said(engine.hint(ASKED)) == ("accepted", 40)
    while engine.has_unfinished:
        if engine.disk.is_loading:
            engine.disk.wait()
        tokens += [token for output in engine.step() for token in output.token_ids]
        was_there |= engine.scheduler.explain_prefix(PROMPT).device_tokens == 40
        assert engine.check() == []
    assert tokens == expected[0] and was_there
    # It needed 15 blocks of 16.
    assert engine.scheduler.stats().preemptions == 0
    assert engine.scheduler.explain_prefix(PROMPT).device_tokens <= 4


def test_a_slow_disk_holds_no_request_up(made, filled):
    store, expected = filled
    engine = made(store)
    store.may_read.clear()
    engine.hint(ASKED)
    begun(engine, [1, 2, 3], "b", max_tokens=3)
    outputs = []
    while not any(each.finished for each in outputs):
        outputs += engine.step()
    assert engine.scheduler.explain_prefix(PROMPT).device_tokens == 0
    begun(engine, PROMPT, "a")
    store.may_read.set()
    assert [each.usage.hit_tokens for each in driven(engine) if each.finished] == [40]
    assert engine.disk.stats().prefetched == 10
    assert_same(ask(engine, id="again"), expected)


def test_requests_are_read_first(made, store, monkeypatch):
    monkeypatch.setattr("paged.engine.disk_tier.PIECE_BYTES", 1)
    ask(made(store), OTHER)
    engine, read, order = made(store), store.read, []
    monkeypatch.setattr(store, "read", lambda keys, into: order.append(keys[0]) or read(keys, into))
    begun(engine, PROMPT, "a")
    while not engine.disk.is_loading:
        engine.step()
    assert said(engine.hint(Hint(action="prefetch", tokens=OTHER))) == ("accepted", 40)
    driven(engine)
    keys = list(store.blocks)
    assert order == keys[:10] + [key for key in order if key not in keys[:10]] and len(order) == 20


def test_a_read_that_is_late_is_a_miss_and_its_blocks_never_come(made, filled, monkeypatch):
    monkeypatch.setattr("paged.engine.disk_tier.PATIENCE_S", 3.0)
    store, expected = filled
    seconds = count()
    engine = made(store, clock=lambda: float(next(seconds)))
    store.may_read.clear()
    assert prefetched(engine) == ("accepted", 40)
    store.may_read.set()
    monkeypatch.undo()
    assert_same(ask(engine), expected)
    assert engine.disk.stats().prefetched == 0


def test_what_cannot_be_read_ends_a_prefetch_and_what_comes_before_stays(made, filled, monkeypatch):
    store, expected = filled
    store.breaks = 6
    engine = made(store)
    assert prefetched(engine) == ("accepted", 40)
    assert engine.scheduler.explain_prefix(PROMPT).device_tokens == 24
    monkeypatch.setattr(store, "read", lambda *_: 1 / 0)
    assert prefetched(engine) == ("accepted", 40)
    assert engine.disk.stats().prefetched == 6
    assert_same(ask(engine), expected)


def test_a_prompt_is_read_in_pieces_and_ends_where_what_came_before_has_gone(made, store, monkeypatch):
    monkeypatch.setattr("paged.engine.disk_tier.PIECE_BYTES", 1)
    engine = made(store)
    engine.hint(ASKED)
    while engine.disk.stats().prefetched < 4:
        engine.step()
    assert engine.scheduler.explain_prefix(PROMPT).device_tokens == 16
    engine.manager.reset_cache()
    driven(engine)
    assert engine.disk.stats().prefetched == 4
    assert prefetched(engine) == ("accepted", 40)
    assert engine.scheduler.explain_prefix(PROMPT).device_tokens == 40


def test_an_engine_that_is_closed_meanwhile_has_nothing_left_to_do(made, store):
    engine = made(store)
    engine.hint(ASKED)
    engine.step()
    engine.close()
    assert not engine.has_unfinished


def test_an_engine_for_asyncio_makes_the_steps_of_a_prefetch(store):
    async def asked():
        engine = AsyncEngine(tiny_model(64), block_size=4, num_blocks=40, open_store=lambda *_: store)
        try:
            assert said(await engine.hint(ASKED)) == ("accepted", 40)
            while (found := await engine.explain_prefix(PROMPT)).device_tokens < 40:
                assert "more lie on the disk" in found.says
        finally:
            await engine.close()

    asyncio.run(asked())


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_answers_under_pressure_with_a_disk_and_prefetches_are_those_without(tmp_path, steps_ahead):
    # When blocks come is not the same twice, so that programs are drawn here, and not by Hypothesis, which runs them again.
    loaded = brought = 0
    for seed in range(16):
        drawn = random.Random(seed)
        sizes = {"num_blocks": drawn.randint(6, 14), "block_size": drawn.randint(1, 3)}
        world = EngineWorld(**sizes, host_blocks=drawn.choice([0, 6]))
        alone_in = alone(build_engine, EngineWorld().ample(1))
        rig = EngineRig(world, lambda world: build_engine(world, steps_ahead, disk_cache=tmp_path), reference=alone_in)
        for number in range(10):
            prompt = [drawn.randrange(2) for _ in range(drawn.randint(1, 9))]
            if seed % 4:
                rig.engine.hint(Hint(action="prefetch", tokens=prompt))
                rig.step(drawn.randint(0, 2))
            rig.add(EngineRequest(id=f"r{number}", prompt=prompt, max_tokens=drawn.randint(1, 6)))
            rig.step(drawn.randint(1, 4))
            if drawn.random() < 0.2:
                rig.abort(f"r{number}")
        rig.drain()
        rig.engine.disk.store.flush()
        loaded += rig.engine.disk.stats().loaded
        brought += rig.engine.disk.stats().prefetched
        rig.engine.close()
    assert loaded > 5 and brought > 5
