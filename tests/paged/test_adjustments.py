"""What is done to logits before a draw: each as transformers does it, all in its order, and each row's its own affair."""

import numpy as np
import pytest
import torch
import transformers.generation.logits_process as processors

from paged.errors import ProcessorFailed
from paged.sampling import SamplingParams
from paged.sampling.adjustments import NO_LANE, Adjustments

VOCABULARY = 40
STOPS = (3, 4)
WISHES = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition the other way": {"repetition_penalty": 0.6},
    "unigrams": {"no_repeat_ngram_size": 1},
    "bigrams": {"no_repeat_ngram_size": 2},
    "trigrams": {"no_repeat_ngram_size": 3},
    "longer than the text": {"no_repeat_ngram_size": 60},
    "bad words": {"bad_words": ((7,), (1, 2), (0, 1, 2), (5, 5))},
    "least length": {"min_tokens": 6},
    "bias": {"logit_bias": {3: 2.5, 0: -100.0}},
    "allowed": {"allowed_token_ids": (1, 2, 3, 30)},
    "all": {
        "logit_bias": {9: 4.0}, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words": ((7,), (1, 2)),
        "min_tokens": 6, "allowed_token_ids": tuple(range(0, 40, 3)),
    },
}  # fmt: skip


def theirs(params, num_prompt):
    """transformers' own processors, in the order of its `generate`."""
    found = []
    if params.logit_bias:
        bias = {(token,): float(value) for token, value in params.logit_bias.items()}
        found.append(processors.SequenceBiasLogitsProcessor(bias))
    if params.repetition_penalty != 1:
        found.append(processors.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.no_repeat_ngram_size:
        found.append(processors.NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size))
    if params.bad_words:
        found.append(processors.NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if params.min_tokens:
        found.append(
            processors.MinNewTokensLengthLogitsProcessor(num_prompt, params.min_tokens, list(STOPS), device="cpu")
        )
    if params.allowed_token_ids is not None:
        found.append(processors.PrefixConstrainedLogitsProcessor(lambda *_: list(params.allowed_token_ids), 1))
    return found


def opened(adjustments, params, prompt, outputs):
    lane = adjustments.open(params, prompt, stops=STOPS, bad_words=params.bad_words)
    count = len(outputs)
    adjustments.note(
        np.full(count, lane), np.arange(count), np.array(outputs, np.int32), np.full(count, adjustments.number_of(lane))
    )
    return lane


def apply(adjustments, logits, lanes, places):
    numbers = np.array([adjustments.number_of(lane) for lane in lanes], np.int64)
    adjustments.apply(logits, np.array(lanes, np.int64), np.array(places, np.int64), numbers)


def texts(seed, count):
    """Prompts and outputs of few different tokens, so that all of it repeats itself."""
    chance = np.random.default_rng(seed)
    for _ in range(count):
        lengths = chance.integers(1, 12), chance.integers(0, 12)
        yield tuple(chance.integers(0, 10, length).tolist() for length in lengths)


def changed(params, seed):
    """Texts, logits, and what becomes of them where each text's sequence wants this."""
    several = list(texts(seed, 30))
    adjustments = Adjustments()
    lanes = [opened(adjustments, params, *text) for text in several]
    before = torch.randn(len(several), VOCABULARY, generator=torch.manual_seed(seed))
    found = before.clone()
    apply(adjustments, found, lanes, [len(outputs) for _, outputs in several])
    return several, before, found


@pytest.mark.parametrize("name", WISHES)
def test_each_is_what_transformers_does(name):
    params = SamplingParams(max_tokens=100, **WISHES[name])
    several, before, found = changed(params, 0)
    assert not torch.equal(found, before) or name == "longer than the text"
    for (prompt, outputs), row, ours in zip(several, before, found, strict=True):
        known, expected = torch.tensor([prompt + outputs]), row[None].clone()
        for each in theirs(params, len(prompt)):
            expected = each(known, expected)
        assert torch.equal(ours, expected[0])


@pytest.mark.parametrize(
    "wish", [{"presence_penalty": 0.7}, {"frequency_penalty": -0.4}, {"presence_penalty": 2, "frequency_penalty": 1}]
)
def test_presence_and_frequency_are_taken_for_outputs_alone(wish):
    params = SamplingParams(**wish)
    several, before, found = changed(params, 1)
    for (_, outputs), row, ours in zip(several, before, found, strict=True):
        counts = torch.bincount(torch.tensor(outputs, dtype=torch.int64), minlength=VOCABULARY)
        expected = row - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        torch.testing.assert_close(ours, expected)


def test_a_row_is_changed_in_a_batch_as_it_is_alone_and_one_that_wants_nothing_is_not():
    every = [SamplingParams(max_tokens=100, **wish) for wish in WISHES.values()] + [
        SamplingParams(presence_penalty=1, frequency_penalty=0.3)
    ]
    several = list(texts(2, len(every)))
    adjustments = Adjustments()
    lanes = [opened(adjustments, params, *text) for params, text in zip(every, several, strict=True)]
    lanes.insert(4, NO_LANE)
    places = [len(outputs) for _, outputs in several]
    places.insert(4, 0)
    before = torch.randn(len(lanes), VOCABULARY, generator=torch.manual_seed(2))
    together = before.clone()
    apply(adjustments, together, lanes, places)
    assert torch.equal(together[4], before[4])
    for i, (lane, place) in enumerate(zip(lanes, places, strict=True)):
        alone = before[i : i + 1].clone()
        apply(adjustments, alone, [lane], [place])
        assert torch.equal(alone[0], together[i])


def test_a_sequence_that_has_ended_wants_nothing_even_if_another_has_its_lane():
    params = SamplingParams(allowed_token_ids=(1,))
    adjustments = Adjustments()
    first = opened(adjustments, params, [1], [])
    number = adjustments.number_of(first)
    adjustments.close(first)
    second = opened(adjustments, SamplingParams(allowed_token_ids=(2,)), [1, 1], [])
    assert second == first
    logits = torch.ones(1, VOCABULARY)
    adjustments.apply(logits, np.array([first]), np.array([0]), np.array([number]))
    adjustments.note(np.array([first]), np.array([0]), np.array([9], np.int32), np.array([number]))
    assert torch.equal(logits, torch.ones(1, VOCABULARY))
    apply(adjustments, logits, [second], [0])
    assert torch.isfinite(logits).nonzero().tolist() == [[0, 2]]


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda ids, logits: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda ids, logits: None, r"it has to return logits \[1, 40\]; got NoneType"),
        (lambda ids, logits: logits[:, 1:], r"it has to return logits \[1, 40\]; got \[1, 39\]"),
    ],
)
def test_a_processor_that_fails_is_named_with_its_row(processor, message):
    adjustments = Adjustments()
    lane = opened(adjustments, SamplingParams(logits_processors=(processor,)), [5], [])
    with pytest.raises(ProcessorFailed, match=message) as failure:
        apply(adjustments, torch.ones(3, VOCABULARY), [NO_LANE, NO_LANE, lane], [0, 0, 0])
    assert failure.value.row == 2
