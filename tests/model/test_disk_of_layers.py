"""Models of several kinds of layers with a disk below their memory: what one engine wrote the next one reads, and the bits are the same."""

import pytest

from paged import Engine

from ..driving import tokens_of  # noqa: TID252
from ..storage.asking import PROMPT, Memory, ask, assert_same, begun  # noqa: TID252
from .conftest import poisoned  # noqa: TID252

# Windows, chunks, latents with an index, entries of several tokens, states; and a window beside a state.
FAMILIES = (
    "gemma3_text", "llama4_text", "glm_moe_dsa", "deepseek_v4", "falcon_h1", "jamba", "qwen3_next", "recurrent_gemma"
)  # fmt: skip


@pytest.fixture
def made(loaded):
    """made(family, stores, ...): an engine on the stores of a dictionary, by identity; every page that it gives back is NaN."""
    engines = []

    def make(family, stores, **options):
        usual = {"block_size": None, "max_tokens_per_step": 16, "num_blocks": 400}
        open_store = lambda identity, _: stores.setdefault(identity, Memory())  # noqa: E731
        engines.append(poisoned(Engine(loaded(family), open_store=open_store, **usual | options)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def checked(engine):
    assert engine.scheduler.check() == []
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_engine_reads_what_this_one_wrote_and_the_bits_are_the_same(made, family):
    stores = {}
    expected = ask(made(family, {}))
    assert_same(ask(made(family, stores)), expected, cached=0)
    engine = made(family, stores)
    found = ask(engine)
    assert_same(found, expected)
    assert found[2] >= 16 and engine.disk.stats().loaded > 0
    # Its own memory has it now.
    assert_same(ask(checked(engine), id="b"), expected)
    assert engine.disk.stats().asked == engine.disk.stats().loaded


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next"])
def test_of_what_does_not_come_whole_nothing_counts_and_it_is_not_asked_for_again(made, family):
    stores = {}
    expected = ask(made(family, stores))
    for store in stores.values():
        # Of a store of states none is read, of a store of blocks some are.
        store.breaks = 1 if len(store.blocks) > 3 else 0
    engine = made(family, stores)
    assert_same(ask(checked(engine)), expected, cached=0)
    assert engine.disk.stats().loaded == 0 < engine.disk.stats().asked
    checked(engine)


@pytest.mark.parametrize("family", ["recurrent_gemma", "gemma3_text"])
@pytest.mark.parametrize("options", [{}, {"speculate": "lookup"}, {"host_blocks": 40, "host_caching": True}])
def test_in_a_pool_that_is_too_small_requests_give_up_and_read_and_the_answers_are_the_same(made, family, options):
    def answers(stores, **options):
        engine = made(family, stores, **options)
        for number in range(6):
            begun(engine, PROMPT[number % 3 : number + 25], f"{number}", max_tokens=20)
        return tokens_of(checked(engine)), engine

    stores = {}
    expected, ample = answers({})
    least = ample.manager.num_blocks - ample.manager.device.num_free
    for _ in range(3):
        found, engine = answers(stores, num_blocks=max(least // 3, 30), **options)
        assert found == expected
    assert engine.disk.stats().loaded > 0
