"""Tokens come up as often as they should: thousands against the exact probabilities, and an engine's are drawn the same way."""

import math

import numpy as np
import pytest
import torch
import transformers.generation.logits_process as warpers

from paged import Engine, SamplingParams
from paged.sampling import sample
from paged.testing.tiny_model import tiny_model

from ..driving import outputs_of  # noqa: TID252

# A right sampler's counts have a chi-square of k - 1 degrees of freedom, for k tokens that can come up. By chance one run
# in a million exceeds the value whose upper tail is this; the seeds here are fixed, so that a test that passes once always
# does.
LEAST_P = 1e-6


def upper_tail(chi_square: float, freedom: int) -> float:
    """Probability that a chi-square of so many degrees of freedom is at least that large."""
    half = torch.tensor([freedom / 2, chi_square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*half))


COUNT = 20_000
LOGITS = [0.2, 2.0, -1.0, 1.1, 2.0, -0.3, 0.7, 1.5, -2.0, 0.0, 1.3, -math.inf]
ALL = len(LOGITS)

LAWS = {
    "nothing": {},
    "cold": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "top_k and top_p": {"top_k": 6, "top_p": 0.75},
    "cold, top_k and top_p": {"temperature": 0.7, "top_k": 6, "top_p": 0.9},
    "hot, top_k and top_p": {"temperature": 3.0, "top_k": 8, "top_p": 0.9},
    "min_p": {"min_p": 0.3},
    "typical": {"typical_p": 0.6},
    "hot and typical": {"temperature": 2.0, "typical_p": 0.5},
    "all": {"temperature": 1.5, "top_k": 9, "top_p": 0.97, "min_p": 0.1, "typical_p": 0.7},
}


def likelihood(counts, probabilities) -> float:
    """How likely counts so far from the expected ones are."""
    counts, expected = np.asarray(counts), np.asarray(probabilities) * COUNT
    assert counts.sum() == COUNT and math.isclose(expected.sum(), COUNT)
    can_come = expected > 0
    assert expected[can_come].min() > 5, "too few for a chi-square"
    if counts[~can_come].any():
        return 0.0
    chi_square = ((counts - expected)[can_come] ** 2 / expected[can_come]).sum()
    return upper_tail(float(chi_square), int(can_come.sum()) - 1)


WARPERS = {
    "temperature": warpers.TemperatureLogitsWarper,
    "top_k": warpers.TopKLogitsWarper,
    "top_p": warpers.TopPLogitsWarper,
    "min_p": warpers.MinPLogitsWarper,
    "typical_p": warpers.TypicalLogitsWarper,
}


def law(**wish):
    """Each token's probability, as transformers has it."""
    logits = torch.tensor([LOGITS], dtype=torch.float64)
    for field, warper in WARPERS.items():
        if field in wish:
            logits = warper(wish[field])(None, logits)
    return logits.softmax(-1)[0].numpy()


def drawn(seeds, places, temperature=1.0, top_k=ALL, top_p=1.0, min_p=0.0, typical_p=1.0):
    """How often each token comes up."""
    tokens = sample(
        torch.tensor([LOGITS]).repeat(COUNT, 1), temperature=np.full(COUNT, temperature), top_k=np.full(COUNT, top_k),
        top_p=np.full(COUNT, top_p), min_p=np.full(COUNT, min_p), typical_p=np.full(COUNT, typical_p), seeds=seeds,
        places=places,
    )  # fmt: skip
    return np.bincount(tokens, minlength=ALL)


SEEDS_AND_PLACES = {
    "first tokens of many requests": (np.arange(COUNT, dtype=np.uint64), np.zeros(COUNT, np.int64)),
    "tokens of one sequence": (np.full(COUNT, 5, np.uint64), np.arange(COUNT)),
}


@pytest.mark.parametrize("which", SEEDS_AND_PLACES)
@pytest.mark.parametrize("name", LAWS)
def test_tokens_come_up_as_often_as_they_should(name, which):
    counts = drawn(*SEEDS_AND_PLACES[which], **LAWS[name])
    assert likelihood(counts, law(**LAWS[name])) > LEAST_P


@pytest.mark.parametrize(
    "drafts", [{}, {"speculate": "draft", "draft_model": tiny_model(noise=0.03)}], ids=["none", "a model"]
)
def test_an_engine_draws_each_token_by_the_seed_of_its_request_and_its_place(drafts):
    engine, logits = Engine(tiny_model(), num_blocks=40, **drafts), {}
    engine.on_logits = lambda id, place, row: logits.__setitem__(place, row.clone())
    params = SamplingParams(max_tokens=40, temperature=6.0, seed=7, ignore_eos=True)
    live = engine.live_request(engine.add_request([1, 2, 1, 2], params))
    outputs_of(engine)
    rows = torch.stack([logits[place] for place in range(40)])
    columns = {"temperature": np.full(40, 6.0), "top_k": np.full(40, 8), "top_p": np.ones(40)}
    expected = sample(rows, **columns, seeds=np.full(40, 7, np.uint64), places=np.arange(40))
    assert live.token_ids == expected.tolist()
    assert engine.stats().accepted_tokens > 0 or not drafts
