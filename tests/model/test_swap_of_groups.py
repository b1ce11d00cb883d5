"""Models with layers of several kinds whose requests go to the host and come back: their tokens and their logits are those of each request alone, bit by bit."""

import os

import pytest

from paged import Engine, Policy
from paged.model.runner import Runner
from paged.testing.pressure import answers_of, differences

# A window, chunks, short convolutions and gated delta rules beside full layers: in each what a request keeps grows.
ARCHITECTURES = ("gemma3_text", "llama4_text", "lfm2", "qwen3_next")
# All of them: `make architectures`.
CHOSEN = ARCHITECTURES if os.environ.get("PAGED_ALL_FAMILIES") else ("gemma3_text", "lfm2")
SWAPS = Policy(name="swaps", take="tail", preemption="swap")


@pytest.fixture
def three(short_memory):
    return short_memory(24, lengths=(9, 21, 25))


def swapped(model, three, **options):
    """Answers to all at once, in pages for the longest of them, and how many pages came back from the host."""
    layout = Engine(model, num_blocks=500, block_size=4).manager.layout
    num_blocks = layout.pages_for(max(three.lengths) + three.max_tokens) + layout.state_pages
    engine = Engine(
        model, num_blocks=num_blocks, block_size=4, host_blocks=500, policy=SWAPS, max_tokens_per_step=64, **options
    )
    assert not engine.manager.layout.is_plain
    answers = answers_of(engine, three.requests())
    for who, tokens in answers.tokens.items():
        # A step ahead, logits behind the last token are shown, too.
        del answers.logits[who][len(tokens) :]
    assert (engine.manager.device.num_used, engine.manager.host.num_used) == (0, 0)
    return answers, engine.scheduler.stats().swapped_in_blocks


@pytest.mark.parametrize("architecture", CHOSEN)
def test_a_request_that_was_on_the_host_answers_as_it_does_alone(architecture, loaded, three):
    model = loaded(architecture)
    answers = three.alone(model)
    from_host = 0
    for options in ({"prefix_caching": False}, {"steps_ahead": 1}):
        found, num_pages = swapped(model, three, **options)
        from_host += num_pages
        assert differences(found, answers) + found.violations == [], options
    assert from_host > 0


def test_pages_that_do_not_come_back_are_found(loaded, monkeypatch, three):
    model = loaded("lfm2")
    answers = three.alone(model)
    monkeypatch.setattr(Runner, "copy", lambda runner, moves: None)
    assert differences(swapped(model, three)[0], answers) != []
