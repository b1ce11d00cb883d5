"""What copying a block and computing a token cost can be timed by the engine itself, and decides what a hit on the host is worth."""

import pytest

from paged import Costs, Engine, Retention, SamplingParams
from paged.errors import InvalidConfig
from paged.testing.tiny_model import tiny_model

from ..driving import tokens_of  # noqa: TID252

FIRST, OTHER = [1, 2, 3, 4, 5, 6, 7, 0, 1], [7, 6, 5, 4, 3, 2, 1, 0, 7, 6, 5, 4]


def engine_with(**options):
    return Engine(tiny_model(8), num_blocks=4, block_size=4, host_blocks=8, host_caching=True, **options)


def answered(engine, prompt, **how):
    request_id = engine.add_request(prompt, SamplingParams(max_tokens=2, ignore_eos=True), **how)
    return tokens_of(engine)[request_id]


@pytest.mark.parametrize(("a_copy", "loaded"), [(1e-6, 8), (1e3, 0)])
def test_a_hit_on_the_host_is_loaded_where_the_machine_copies_faster_than_it_computes(a_copy, loaded):
    # The clock is read before each of two forward passes and copies, and after the second.
    engine = engine_with(costs="measured", clock=fixed(forward=16e-3, copy=4 * a_copy))
    alone = Engine(tiny_model(8), num_blocks=16, block_size=4, prefix_caching=False)
    for prompt in (FIRST, OTHER, FIRST):
        assert answered(engine, prompt) == answered(alone, prompt)
    assert engine.scheduler.stats().host_hit_tokens == loaded


def fixed(forward, copy):
    """A clock by which the second forward pass takes `forward` seconds, the second copy `copy`, and nothing else takes any time."""
    shown = iter([0.0, 0.0, forward, forward, forward, forward + copy])
    return lambda: next(shown, forward + copy)


@pytest.mark.parametrize("name", ["embedded", "hybrid"])
def test_the_real_clock_gives_costs_above_zero_of_blocks_and_of_pages_of_states(name):
    engine = Engine(name, num_blocks=30, host_blocks=8, costs="measured")
    costs, prompt = engine.scheduler.costs, list(b"It is said that ")
    assert costs.seconds_per_token > 0 and costs.seconds_per_swapped_block > 0
    assert answered(engine, prompt) == answered(Engine(name, num_blocks=30), prompt)


def test_memory_that_holds_no_token_is_refused_before_anything_is_written():
    with pytest.raises(InvalidConfig, match='costs="measured" computes a token, which takes 3 blocks; there are 2'):
        Engine("hybrid", num_blocks=2, costs="measured")


def test_costs_that_are_named_are_the_schedulers():
    assert engine_with(costs=Costs(seconds_per_token=1.0)).scheduler.costs.seconds_per_token == 1.0


def test_what_a_request_says_of_the_cache_is_passed_on():
    engine = engine_with()
    answered(engine, FIRST, writes_cache=False)
    assert engine.manager.stats().cached == 0
    answered(engine, FIRST, retention=Retention(priority=2))
    answered(engine, FIRST, reads_cache=False)
    assert (engine.scheduler.stats().hit_tokens, engine.manager.device.levels.max()) == (0, 2)
