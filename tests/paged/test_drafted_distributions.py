"""With drafts tokens come up as often as without: thousands of answers of three tokens against the exact probability of each."""

import itertools
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from paged import Engine, SamplingParams  # noqa: E402
from paged.testing.tiny_model import tiny_model  # noqa: E402

from .chi_square import LEAST_P, upper_tail  # noqa: E402, TID252

VOCABULARY, PROMPT, HEAT = 8, [1, 2, 1, 2], 6.0
COUNT = 12_000
ANSWERS = list(itertools.product(range(VOCABULARY), repeat=3))


@pytest.fixture(scope="module")
def after():
    """Probabilities of the next token after the prompt and up to two more, of the model and of the one that guesses."""
    found = []
    for model in (tiny_model(VOCABULARY), tiny_model(VOCABULARY, 0.03)):
        engine, logits = Engine(model, num_blocks=400), {}
        engine.on_logits = lambda id, place, row, logits=logits: logits.__setitem__(id, row.double())
        for length in range(3):
            for more in itertools.product(range(VOCABULARY), repeat=length):
                engine.add_request([*PROMPT, *more], SamplingParams(max_tokens=1, ignore_eos=True), id=str(more))
        while engine.has_unfinished:
            engine.step()
        found.append({id: (row / HEAT).softmax(-1).numpy() for id, row in logits.items()})
    return found


def law(chances):
    """The probability of each answer."""
    return np.array(
        [math.prod(chances[str(answer[:place])][answer[place]] for place in range(3)) for answer in ANSWERS]
    )


def likelihood(counts, probabilities):
    """How likely counts so far from the expected ones are; answers that are expected less than eight times count together."""
    expected = probabilities * COUNT
    is_rare = expected < 8
    counts = np.append(counts[~is_rare], counts[is_rare].sum())
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    # The smallest freedom above it: the tail is the larger one.
    return upper_tail(chi_square, len(counts) - 1)


def drawn(**options):
    """How often each answer comes, and how many drafts were right."""
    engine = Engine(tiny_model(VOCABULARY), block_size=4, max_tokens_per_step=1024, max_sequences=128, **options)
    live = [
        engine.live_request(
            engine.add_request(PROMPT, SamplingParams(max_tokens=4, temperature=HEAT, seed=seed, ignore_eos=True))
        )
        for seed in range(COUNT)
    ]
    while engine.has_unfinished:
        engine.step()
    numbers = {answer: number for number, answer in enumerate(ANSWERS)}
    counts = np.bincount([numbers[tuple(request.token_ids[:3])] for request in live], minlength=len(ANSWERS))
    return counts, engine.stats().accepted_tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"speculate": "lookup"},
        {"speculate": "lookahead"},
        {"speculate": "draft", "draft_model": tiny_model(VOCABULARY, 0.03)},
    ],
    ids=["no drafts", "lookup", "lookahead", "a draft model"],
)
def test_answers_come_up_as_often_as_they_should(after, options):
    counts, num_right = drawn(**options)
    assert likelihood(counts, law(after[0])) > LEAST_P
    assert num_right > 50 or not options


def without_the_rest(model, draft):
    """A draft of the other model's is kept as often as it should be, and what takes its place is drawn from all instead of what is left over."""
    kept = np.minimum(model, draft)
    return kept + (1 - kept.sum()) * model


def always_kept(model, draft):
    return draft


def kept_where_it_is_likely(model, draft):
    """A draft is kept if it is no less likely than the middle one."""
    kept = np.where(model >= np.median(model), draft, 0)
    return kept + (1 - kept.sum()) * model


@pytest.mark.parametrize("wrong", [without_the_rest, always_kept, kept_where_it_is_likely])
def test_a_verification_that_is_wrong_would_be_found(after, wrong):
    ours, theirs = after
    # The first token comes with the prompt, and has no draft.
    chances = {id: wrong(ours[id], theirs[id]) if id != "()" else ours[id] for id in ours}
    counts = np.random.default_rng(0).multinomial(COUNT, law(chances))
    assert likelihood(counts, law(chances)) > LEAST_P
    assert likelihood(counts, law(ours)) < LEAST_P
