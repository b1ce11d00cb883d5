"""Drafts change nothing but the number of steps: by text, by lookahead and by a draft model; all, some or none of them right."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from paged import Engine, SamplingParams
from paged.decoding.drafter import Drafter
from paged.scheduler import Drafts
from paged.testing.tiny_model import tiny_model

from ..driving import driven, tokens_of  # noqa: TID252

PROMPTS = ["The with statement", "def", "a, b, c, a, b, c, a, b", "Changed in version 3.", "A generator is"]
WISHES = {
    "greedy": {},
    "drawn": {"temperature": 0.9, "seed": 4},
    "cut": {"temperature": 1.2, "top_p": 0.8, "top_k": 20, "seed": 9},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.3},
    "several": {"n": 2, "temperature": 0.8, "seed": 2},
}
TOKENS = 32


def run(model, **options):
    """Tokens of each sequence of each prompt and wish, all at once; logits of those that are alone; the engine."""
    engine = Engine(model, block_size=4, **options)
    logits = {}
    engine.on_logits = lambda id, place, row: logits.__setitem__((id, place), row.clone())
    live = {}
    for (wish, fields), (number, prompt) in itertools.product(WISHES.items(), enumerate(PROMPTS)):
        params = SamplingParams(max_tokens=TOKENS, **fields)
        live[wish, number] = engine.live_request(engine.add_request(prompt, params, id=f"{wish} {number}"))
    driven(engine)
    assert engine.manager.device.num_used == 0
    tokens = {key: [each.token_ids for each in request.completion().outputs] for key, request in live.items()}
    return tokens, {key: row for key, row in logits.items() if not key[0].startswith("several")}, engine


@pytest.fixture(scope="module")
def plain_hybrid(hybrid):
    return run(hybrid, num_blocks=900)[:2]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("lookup", {}), ("lookup", {"num_blocks": 40}), ("lookahead", {"prefix_caching": False})],
    ids=str,
)
def test_states_have_seen_what_was_right_and_nothing_else(hybrid, plain_hybrid, kind, options):
    tokens, logits, engine = run(hybrid, speculate=kind, **{"num_blocks": 900, **options})
    expected, their_logits = plain_hybrid
    assert tokens == expected
    assert all(torch.equal(logits[which], row) for which, row in their_logits.items())
    stats, decided = engine.stats(), engine.scheduler.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    # Behind wrong drafts what is known is computed again.
    assert decided.recomputed_tokens > 0
    assert decided.preemptions > 0 or "num_blocks" not in options


class Scripted(Drafter):
    """Guesses what it was told: from the tokens of whoever has one, by how many it knows."""

    def __init__(self, known):
        self.known, self.tried = known, []

    def begin(self, row, *, drafts=True):
        pass

    def propose(self, tokens, num_tokens, rows):
        lines = [self.known[int(num_tokens[row]) : int(num_tokens[row]) + 3] for row in rows]
        counts = np.array([len(line) for line in lines], np.int64)
        return Drafts(rows, counts, np.concatenate([*map(np.asarray, lines), []]).astype(np.int32))

    def learn(self, tried):
        self.tried += tried.num_right.tolist()


def scripted(change, model):
    """A prompt of three tokens and 16 outputs, of which the drafts are `change`d; (tokens, plain ones, how many were right each time)."""
    alone = Engine(model, num_blocks=40, block_size=4)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    live = alone.live_request(alone.add_request([1, 2, 3], params))
    tokens_of(alone)
    engine = Engine(model, num_blocks=40, block_size=4)
    changed = [change(place, token) for place, token in enumerate(live.token_ids)]
    drafter = engine._steps._drafter = Scripted([1, 2, 3, *changed])
    ours = engine.live_request(engine.add_request([1, 2, 3], params))
    driven(engine)
    return ours.token_ids, live.token_ids, drafter.tried


@pytest.mark.parametrize(
    ("change", "expected", "with_states"),
    [
        (lambda place, token: token, [3, 3, 3, 2], [3, 3, 3, 2]),
        # Behind wrong ones, states need a step without drafts, which has a token, too.
        (lambda place, token: token if place % 3 else (token + 1) % 8, [2, 2, 2, 2, 2], [2, 1, 1, 1, 1]),
        (lambda place, token: (token + 1) % 8, [0] * 14, [0] * 7),
    ],
    ids=["all are right", "the third is wrong", "none is right"],
)
def test_drafts_are_accepted_up_to_the_first_wrong_one(hybrid, change, expected, with_states):
    for model, accepted in ((tiny_model(), expected), (hybrid, with_states)):
        ours, plain, right = scripted(change, model)
        assert (ours, right) == (plain, accepted)


@pytest.mark.parametrize(
    "options", [{"num_blocks": 60}, {"num_blocks": 20}, {"num_blocks": 20, "host_blocks": 20}], ids=str
)
def test_a_draft_model_that_is_the_model_itself_is_always_right(options):
    """However its blocks were taken and given back: it would guess otherwise if its K and V were anywhere else."""
    model = tiny_model()
    engine = Engine(model, block_size=2, max_tokens_per_step=40, speculate="draft", draft_model=model, **options)
    for number in range(6):
        engine.add_request([1, 2, number, 1, 2], SamplingParams(max_tokens=16, ignore_eos=True))
    tokens_of(engine)
    stats, decided = engine.stats(), engine.scheduler.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 50
    assert decided.preemptions > 0 or options["num_blocks"] == 60
    assert decided.preemptions_swap > 0 or "host_blocks" not in options


def test_lookahead_drafts_no_more_than_a_step_may_compute():
    engine = Engine(tiny_model(), num_blocks=16, speculate="lookahead", num_drafts=10**12, max_tokens_per_step=20)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=12, ignore_eos=True), id="a")
    assert len(tokens_of(engine)["a"]) == 12


def test_a_block_takes_the_memory_of_both_models(model):
    with_draft = Engine(model, kv_cache_bytes=2**20, speculate="draft")
    without = Engine(model, kv_cache_bytes=2**20)
    # Four layers of two heads, and three of one.
    assert with_draft.manager.num_blocks == without.manager.num_blocks * 8 // 11
    assert with_draft._drafter._runner.pool.num_blocks == with_draft.manager.num_blocks


def test_a_hit_is_one_for_both_models(model):
    found = {}
    for prefix_caching in (False, True):
        engine = Engine(model, speculate="draft", prefix_caching=prefix_caching, block_size=4)
        for _ in range(2):
            engine.add_request("The with statement is used to wrap", SamplingParams(max_tokens=24))
            tokens_of(engine)
        found[prefix_caching] = engine.stats().accepted_tokens
        assert (engine.scheduler.stats().hit_tokens > 0) == prefix_caching
    assert found[True] == found[False] > 0


def test_a_draft_model_may_be_as_short_as_the_sequences_are():
    short = dataclasses.replace(tiny_model(), max_length=10)
    assert Engine(tiny_model(), speculate="draft", draft_model=short, max_model_len=10)


def test_logits_of_a_draft_model_that_are_no_numbers_cost_no_answer():
    engine = Engine(tiny_model(), num_blocks=40, speculate="draft", draft_model=tiny_model(noise=float("nan")))
    live = engine.live_request(engine.add_request([1, 2, 3], SamplingParams(max_tokens=12, ignore_eos=True)))
    tokens_of(engine)
    assert live.completion().finish_reason == "length" and len(live.token_ids) == 12
