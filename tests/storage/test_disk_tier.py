"""An engine with a disk below its memory: answers are the same to the last bit, and a prompt that is there is not
computed again."""

import gc
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from paged import Engine, SamplingParams
from paged.sampling.search_params import BeamSearchParams
from paged.testing.tiny_model import tiny_model

from ..driving import driven, outputs_of, tokens_of  # noqa: TID252
from ..shown import assert_refused, shown_in  # noqa: TID252
from .asking import PROMPT, Memory, ask, assert_same, begun  # noqa: TID252

DRAFT = {"speculate": "draft", "draft_model": tiny_model(64, 0.03)}


def test_the_next_engine_finds_what_this_one_computed_and_answers_with_the_same_bits(made, tmp_path):
    # More than there is: no limit.
    first = made(disk_cache=tmp_path, disk_cache_gb=1e300)
    expected = ask(first)
    first.close()
    second = made(disk_cache=tmp_path)
    found = ask(second)
    # The last block of a prompt that ends with it is not asked for: its last token is computed.
    assert_same(found, expected, cached=40)
    assert expected[2] == 0
    # What memory has is not read, and the next turn finds the answer, too.
    assert ask(second, id="b")[2] == 40
    assert (second.disk.stats().asked, second.disk.stats().loaded) == (10, 10)
    second.close()
    assert ask(made(disk_cache=tmp_path), [*PROMPT, *found[0], 1, 2, 3])[2] == 48


def test_what_is_before_a_block_that_cannot_be_read_is_loaded(made, filled):
    store, expected = filled
    store.breaks = 6
    assert_same(ask(made(store)), expected, cached=24)


@pytest.mark.parametrize(("call", "hits"), [("look_up", 0), ("read", 0), ("write", 40)])
def test_a_store_that_raises_is_a_miss(made, filled, monkeypatch, call, hits):
    store, expected = filled
    monkeypatch.setattr(store, call, lambda *_: 1 / 0)
    engine = made(store)
    for id, cached in (("a", hits), ("b", 40)):
        # The second one is in memory, and its request forgets the first one's.
        assert_same(ask(engine, id=id), expected, cached)


def test_others_go_on_while_a_request_waits_for_its_blocks(made, filled):
    store, expected = filled
    engine = made(store)
    store.may_read.clear()
    logits = begun(engine, PROMPT, "a")
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True), id="b")
    outputs = []
    while not any(each.finished for each in outputs):
        outputs += engine.step()
    assert {each.id for each in outputs} == {"b"}
    assert (engine.scheduler.status("a"), engine.disk.is_loading) == ("loading", True)
    store.may_read.set()
    assert driven(engine)[-1].usage.hit_tokens == 40
    assert np.array_equal(logits, expected[1])


def test_blocks_that_come_too_late_are_computed_and_never_copied(made, filled, monkeypatch):
    monkeypatch.setattr("paged.engine.disk_tier.PATIENCE_S", 0.0)
    store, expected = filled
    store.may_read.clear()
    engine = made(store)
    assert_same(ask(engine), expected, cached=0)
    assert engine.disk.stats().late == 1
    monkeypatch.undo()
    store.may_read.set()
    assert_same(ask(engine, id="again"), expected)


def test_a_request_that_ends_while_it_waits_leaves_nothing_behind(made, filled):
    store, expected = filled
    engine = made(store)
    store.may_read.clear()
    engine.add_request(PROMPT, SamplingParams(max_tokens=6), id="a")
    for _ in range(3):
        engine.step()
    assert engine.scheduler.status("a") == "loading"
    engine.abort("a")
    store.may_read.set()
    assert_same(ask(engine, id="b"), expected)
    assert (engine.manager.device.num_used, engine.disk.is_loading) == (0, False)


def test_what_is_cheaper_to_compute_is_not_asked_for(made, store):
    engine = made(store)
    assert ask(engine)[2] == 40
    engine.disk._block_s, engine.disk._token_s = 1.0, 0.001
    engine.manager.reset_cache()
    assert ask(engine, id="b")[2] == 0
    assert engine.disk.stats().cheaper == 1
    engine.disk._block_s, engine.disk._token_s = 0.001, 1.0
    engine.manager.reset_cache()
    assert ask(engine, id="c")[2] == 40


def test_what_memory_lets_go_while_a_request_waits_is_read(made, filled):
    store, expected = filled
    engine = made(store, num_blocks=16, max_sequences=1)
    ask(engine)
    begun(engine, [9] * 50, "evicts")
    logits = begun(engine, PROMPT, "b")
    before = engine.disk.stats().asked
    assert driven(engine)[-1].usage.hit_tokens == 40
    assert np.array_equal(logits, expected[1])
    assert engine.disk.stats().asked > before


def test_a_request_that_gave_its_blocks_reads_them_when_it_returns_and_they_are_no_hit(made):
    prompts = {id: [place * step % 61 + 1 for place in range(21)] for id, step in (("a", 5), ("b", 7))}
    alone = {id: ask(made(), prompt, id, max_tokens=20)[0] for id, prompt in prompts.items()}
    engine = made(Memory(), num_blocks=14, policy="vllm")
    for id, prompt in prompts.items():
        begun(engine, prompt, id, max_tokens=20)
    found = outputs_of(engine)
    assert {id: [token for each in outputs for token in each.token_ids] for id, outputs in found.items()} == alone
    assert [outputs[-1].usage.hit_tokens for outputs in found.values()] == [0, 0]
    assert engine.scheduler.stats().preemptions_recompute > 0
    assert engine.disk.stats().loaded > 0


def test_an_engine_that_is_forgotten_frees_its_memory_at_once():
    engine = Engine(tiny_model(64), block_size=4, num_blocks=40, open_store=lambda identity, block_bytes: Memory())
    ask(engine)
    # What an answer left, and what this test saw of it.
    engine.on_logits = None
    engine.close()
    gc.collect()
    kept = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert kept() is None
    finally:
        gc.enable()


def test_a_prompt_goes_on_below_the_host(made):
    store = Memory()
    longer = [*PROMPT, *range(1, 21)]
    expected = ask(made(store), longer)
    engine = made(store, host_blocks=12, host_caching=True, num_blocks=18)
    ask(engine, PROMPT[:24])
    ask(engine, [9] * 60, id="evicts")
    hit = engine.manager.lookup(longer)
    assert hit.num_tokens + hit.host_tokens == 24
    assert_same(ask(engine, longer, id="b"), expected, cached=60)


@pytest.mark.parametrize("options", [{"salt": "a"}, {"reads_cache": False}])
def test_who_may_not_share_finds_nothing(made, filled, options):
    store, expected = filled
    assert_same(ask(made(store), **options), expected, cached=0)
    # A salted prompt is found by its salt.
    assert ask(made(store), **options)[2] == (40 if "salt" in options else 0)


def test_what_others_may_not_find_is_not_written(made):
    ask(made(store := Memory()), writes_cache=False)
    assert store.blocks == {}


def test_several_answers_to_a_prompt_are_written_and_not_read(made):
    store = Memory()
    engine = made(store)
    params = SamplingParams(n=2, max_tokens=6, temperature=1.0, seed=1, ignore_eos=True)
    for nth in range(2):
        engine.add_request(PROMPT, params, id=f"{nth}")
        driven(engine)
    assert len(store.blocks) in (13, 14)


def test_a_search_writes_nothing_and_reads_nothing(made, store):
    for each in (store, Memory()):
        engine, before = made(each), len(each.blocks)
        engine.add_request(PROMPT, BeamSearchParams(beam_width=2, max_tokens=8), id="a")
        driven(engine)
        assert (len(each.blocks), engine.disk.stats().asked) == (before, 0)


def assert_right(store, plain):
    """Each block is under the key of the tokens that it was computed of, though some were not known yet, or were guesses."""
    assert len(store.blocks) > 10
    assert all(np.array_equal(block, plain.blocks[key]) for key, block in store.blocks.items())


@pytest.mark.parametrize(
    "options", [{"steps_ahead": 1}, {"speculate": "lookup"}, {"policy": "vllm"}, {"policy": "tgi"}]
)
def test_it_goes_with_what_else_an_engine_does(made, options):
    store, plain = Memory(), Memory()
    expected = ask(made(plain), max_tokens=30)
    for _ in range(2):
        found = ask(made(store, **options), max_tokens=30)
        assert found[0] == expected[0]
    assert found[2] == 40
    assert_right(store, plain)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_batch_whose_rows_gave_blocks_up_before_it_ended_keeps_those_that_are_left(made, steps_ahead):
    # One step ahead the next batch is put out, and takes blocks, before this one's are written.
    def answers(store, **options):
        engine = made(store, **options)
        for number in range(5):
            begun(engine, PROMPT[number : number + 9], f"{number}", max_tokens=24)
        return tokens_of(engine), engine.scheduler.stats().preemptions

    store, plain = Memory(), Memory()
    expected, _ = answers(plain, num_blocks=100)
    for _ in range(2):
        found, preemptions = answers(store, num_blocks=14, steps_ahead=steps_ahead)
        assert found == expected and preemptions > 0
    assert_right(store, plain)


def test_late_blocks_of_a_request_that_ended_do_not_go_into_those_of_another(made, monkeypatch):
    in_store, computed = [11 * place % 53 + 2 for place in range(43)], [13 * place % 47 + 3 for place in range(43)]
    store = Memory()
    expected = ask(made(), computed, max_tokens=30)
    for prompt in (in_store, PROMPT):
        ask(made(store), prompt)
    engine = made(store)
    with monkeypatch.context() as patch:
        patch.setattr("paged.engine.disk_tier.PATIENCE_S", 0.0)
        store.may_read.clear()
        ask(engine)
    # It gets the row of the one that ended, and another one waits for its blocks.
    logits = begun(engine, computed, "b", max_tokens=30)
    for _ in range(5):
        engine.step()
    engine.add_request(in_store, SamplingParams(max_tokens=2, ignore_eos=True), id="c")
    for _ in range(3):
        engine.step()
    assert engine.disk.is_loading and engine.scheduler.row_of("b") == 0
    store.may_read.set()
    driven(engine)
    assert np.array_equal(logits, expected[1])


def test_another_model_finds_nothing(made, tmp_path):
    first = made(disk_cache=tmp_path)
    ask(first)
    first.close()
    for options in ({"block_size": 8}, {"batch_invariant": False}):
        other = made(disk_cache=tmp_path, **options)
        assert ask(other)[2] == 0
        other.close()


@pytest.mark.parametrize(("call", "shown"), shown_in("storage/refused_engines.txt", ">>>"))
def test_an_engine_that_cannot_be_is_refused_by_name_and_leaves_nothing(tmp_path, monkeypatch, call, shown):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("a file")
    engine, own = partial(Engine, num_blocks=40, block_size=4), {"open_store": lambda identity, block_bytes: Memory()}
    assert_refused(call, shown, {"engine": engine, "tiny": tiny_model(64), "own": own, "draft": DRAFT})
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
