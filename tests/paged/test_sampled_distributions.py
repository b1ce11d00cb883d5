"""Tokens come up as often as they should: 20,000 draws in one call against the exact probabilities."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from paged.sampling import sample  # noqa: E402

from .chi_square import LEAST_P, upper_tail  # noqa: E402, TID252

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


def softmax(logits, temperature=1.0):
    weights = np.exp((np.asarray(logits) - max(logits)) / temperature)
    return weights / weights.sum()


def only(probabilities, ids):
    kept = np.zeros(len(probabilities))
    kept[ids] = probabilities[ids]
    return kept / kept.sum()


def ranked(probabilities):
    return sorted(range(len(probabilities)), key=lambda id: (-probabilities[id], id))


def reaching(probabilities, share, extra=0):
    """The fewest likeliest ids that reach the share, and so many more."""
    ids = ranked(probabilities)
    count = next(count for count in range(1, len(ids) + 1) if probabilities[ids[:count]].sum() >= share)
    return ids[: max(1, count + extra)]


def law(temperature=1.0, top_k=ALL, top_p=1.0, min_p=0.0, typical_p=1.0, *, extra_k=0, extra_p=0):
    """Each token's probability. With extras: that of a sampler that counts wrong."""
    probabilities = softmax(LOGITS, temperature)
    probabilities = only(probabilities, ranked(probabilities)[: top_k + extra_k])
    if top_p < 1:
        probabilities = only(probabilities, reaching(probabilities, top_p, extra_p))
    probabilities = only(probabilities, np.flatnonzero(probabilities >= min_p * probabilities.max()))
    return typical(probabilities, typical_p) if typical_p < 1 else probabilities


def typical(probabilities, share):
    """Of those nearest to the expected information so many that they reach the share, and equally near ones."""
    can_come = np.flatnonzero(probabilities)
    information = -np.log(probabilities[can_come])
    nearness = np.abs(information - (probabilities[can_come] * information).sum())
    order = np.argsort(nearness)
    reached = probabilities[can_come][order].cumsum()
    farthest = nearness[order][min((reached < share).sum(), len(order) - 1)]
    return only(probabilities, can_come[nearness <= farthest + 1e-9])


def counts_of(tokens):
    return np.bincount(tokens, minlength=len(LOGITS))


def drawn(seeds, places, temperature=1.0, top_k=ALL, top_p=1.0, min_p=0.0, typical_p=1.0):
    """How often each token comes up."""
    tokens = sample(
        torch.tensor([LOGITS]).repeat(COUNT, 1),
        temperature=np.full(COUNT, temperature),
        top_k=np.full(COUNT, top_k),
        top_p=np.full(COUNT, top_p),
        min_p=np.full(COUNT, min_p),
        typical_p=np.full(COUNT, typical_p),
        seeds=seeds,
        places=places,
    )
    return counts_of(tokens)


SEEDS_AND_PLACES = {
    "first tokens of many requests": (np.arange(COUNT, dtype=np.uint64), np.zeros(COUNT, np.int64)),
    "tokens of one sequence": (np.full(COUNT, 5, np.uint64), np.arange(COUNT)),
}


@pytest.mark.parametrize("which", SEEDS_AND_PLACES)
@pytest.mark.parametrize("name", LAWS)
def test_tokens_come_up_as_often_as_they_should(name, which):
    counts = drawn(*SEEDS_AND_PLACES[which], **LAWS[name])
    assert likelihood(counts, law(**LAWS[name])) > LEAST_P


def temperature_after_top_p(temperature, top_k, top_p):
    plain = law(top_k=top_k, top_p=top_p)
    return only(softmax(LOGITS, temperature), np.flatnonzero(plain))


def share_of_the_whole(temperature, top_k, top_p):
    whole = softmax(LOGITS, temperature)
    by_share = set(reaching(whole, top_p))
    return only(whole, [id for id in ranked(whole)[:top_k] if id in by_share])


WRONG_LAWS = {
    "the token that reaches top_p is dropped": lambda **options: law(**options, extra_p=-1),
    "top_p keeps one token more": lambda **options: law(**options, extra_p=1),
    "top_k keeps one token less": lambda **options: law(**options, extra_k=-1),
    "top_k keeps one token more": lambda **options: law(**options, extra_k=1),
    "temperature comes after top_p": temperature_after_top_p,
    "top_p is a share of the whole and not of what top_k left": share_of_the_whole,
    "temperature is forgotten": lambda temperature, **options: law(**options),
    "temperature is squared": lambda temperature, **options: law(temperature**2, **options),
    "nothing is drawn": lambda **options: np.eye(len(LOGITS))[1],
}


@pytest.mark.parametrize("name", WRONG_LAWS)
def test_a_sampler_that_is_wrong_would_be_found(name):
    options = LAWS["hot, top_k and top_p"]
    wrong = WRONG_LAWS[name](**options)
    counts = np.random.default_rng(0).multinomial(COUNT, wrong)
    assert likelihood(counts, wrong) > LEAST_P
    assert likelihood(counts, law(**options)) < LEAST_P


def test_a_sampler_that_gives_one_token_a_fifth_more_would_be_found():
    wrong = law()
    wrong[1] *= 1.2
    counts = np.random.default_rng(0).multinomial(COUNT, wrong / wrong.sum())
    assert likelihood(counts, law()) < LEAST_P


@pytest.mark.parametrize(
    ("freedom", "chi_square", "tail"),
    [
        (1, 3.841, 0.05),
        (2, 5.991, 0.05),
        (5, 11.070, 0.05),
        (10, 18.307, 0.05),
        (10, 29.588, 0.001),
        (7, 24.322, 0.001),
    ],
)
def test_the_tail_is_that_of_the_printed_tables(freedom, chi_square, tail):
    assert math.isclose(upper_tail(chi_square, freedom), tail, rel_tol=1e-3)


@pytest.mark.parametrize("name", LAWS)
def test_the_laws_are_those_of_transformers(name):
    warpers = pytest.importorskip("transformers.generation.logits_process")
    wish = LAWS[name]
    logits = torch.tensor([LOGITS])
    for field, warper in (
        ("temperature", warpers.TemperatureLogitsWarper),
        ("top_k", warpers.TopKLogitsWarper),
        ("top_p", warpers.TopPLogitsWarper),
        ("min_p", warpers.MinPLogitsWarper),
        ("typical_p", warpers.TypicalLogitsWarper),
    ):
        if field in wish:
            logits = warper(wish[field])(None, logits)
    np.testing.assert_allclose(law(**wish), logits.softmax(-1)[0].numpy(), atol=1e-6)
