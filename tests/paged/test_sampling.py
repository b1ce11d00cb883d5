"""What sampling refuses, that a row's draw is its own affair, and that tokens come up as often as they should."""

import math

import numpy as np
import pytest
import torch
import transformers.generation.logits_process as warpers

from paged import Engine
from paged.errors import BadLogits, PagedError
from paged.sampling import SamplingParams, sample, sampler as the_sampler, seed_of, weights as weights_of  # noqa: F401
from paged.testing.tiny_model import tiny_model

from ..driving import outputs_of  # noqa: TID252
from .files_of_others import assert_by_hand, by_hand_in  # noqa: TID252

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
INF, NAN = math.inf, math.nan


def drawn(logits, *, temperature=1.0, top_k=2**62, top_p=1.0, min_p=0.0, typical_p=1.0, seeds=0, places=0):
    """`sample` with one value for all rows where no array is given."""
    floats = {"temperature": temperature, "top_p": top_p, "min_p": min_p, "typical_p": typical_p}
    columns = {name: (value, np.float64) for name, value in floats.items()}
    columns |= {"top_k": (top_k, np.int64), "seeds": (seeds, np.uint64), "places": (places, np.int64)}
    broadcast = {
        name: np.broadcast_to(np.asarray(value, dtype), len(logits)).copy() for name, (value, dtype) in columns.items()
    }
    return sample(logits, **broadcast)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_without_temperature_the_likeliest_is_taken_and_the_first_of_equals(device, dtype):
    logits = torch.tensor(
        [[0, 3, 3, 1], [5, 5, 5, 5], [-9, -INF, -8, -INF]], dtype=getattr(torch, dtype), device=device
    )
    tokens = drawn(logits, temperature=0.0)
    assert (tokens.dtype, tokens.tolist()) == (np.dtype(np.int32), [1, 0, 2])


COUNT = 2000


def seen(row, **options) -> set[int]:
    """Tokens that come up in many draws from one row of logits."""
    return set(drawn(torch.tensor([row]).repeat(COUNT, 1), seeds=np.arange(COUNT), **options).tolist())


QUARTERS, TIES, IMPOSSIBLE = [0.0] * 4, [1.0, 2.0, 1.0, 1.0], [-INF, 0.0, -INF, 0.0, -INF]
GOLDEN = 0x9E3779B97F4A7C15


@pytest.mark.parametrize(("call", "by_hand"), by_hand_in("draws.txt"))
def test_a_draw_is_what_it_is_by_hand(call, by_hand):
    assert_by_hand(call, by_hand, globals())


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.9}])
def test_the_largest_uniform_number_draws_the_last_possible_token_and_the_smallest_the_first(options, monkeypatch):
    for uniform, token in ((0.0, 1), (1 - 2.0**-53, 2)):
        monkeypatch.setattr(
            the_sampler, "_uniforms", lambda seeds, places, uniform=uniform: np.full(len(seeds), uniform)
        )
        assert drawn(torch.tensor([[-INF, 0.3, 0.1, -INF]]), **options).tolist() == [token]


def mixed_rows(num_rows=64, vocabulary_size=3000, seed=0):
    """Logits in four dtypes' reach, with ties, and every combination of parameters."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(np.round(rng.normal(0, 3, (num_rows, vocabulary_size)), 2)).float()
    some = np.arange(num_rows)
    columns = {
        "temperature": np.choose(some % 4, [0.0, 0.3, 1.0, 5.0]),
        "top_k": rng.choice([1, 7, 1000, 1024, 1025, 2999, 3000, 2**62], num_rows),
        "top_p": rng.choice([0.05, 0.5, 0.99, 0.999999, 1.0], num_rows),
        "seeds": rng.integers(0, 2**64, num_rows, np.uint64),
        "places": rng.integers(0, 10**6, num_rows),
    }
    return logits, columns


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_rows_token_is_the_same_alone_shuffled_and_in_any_batch(device, dtype):
    logits, columns = mixed_rows(24)
    logits = logits.to(device, getattr(torch, dtype))
    expected = drawn(logits, **columns)
    for size in (1, 5, 17):
        shuffled = np.random.default_rng(size).permutation(len(expected))
        for start in range(0, len(shuffled), size):
            rows = shuffled[start : start + size]
            part = drawn(logits[torch.from_numpy(rows)], **{name: column[rows] for name, column in columns.items()})
            assert part.tolist() == expected[rows].tolist()


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        *((the_sampler, "_NUM_CANDIDATES", count) for count in (1, 40, 1025, 3000)),
        (weights_of, "_CELLS_AT_ONCE", 3000 * 5),
    ],
)
def test_how_many_candidates_are_looked_at_first_and_rows_at_once_changes_nothing(module, name, value, monkeypatch):
    logits, columns = mixed_rows(32)
    expected = drawn(logits, **columns).tolist()
    monkeypatch.setattr(module, name, value)
    assert drawn(logits, **columns).tolist() == expected


def test_logits_are_left_as_they_were():
    logits, columns = mixed_rows()
    logits = logits.double().requires_grad_()
    before = logits.detach().clone()
    drawn(logits, **columns)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("options", [{}, {"top_k": 9}, {"top_p": 0.9}])
def test_rows_that_do_not_lie_in_one_piece_are_drawn_alike(options):
    logits, columns = mixed_rows(24)
    seeds = columns["seeds"]
    expected = drawn(logits, seeds=seeds, **options).tolist()
    assert drawn(logits.t().contiguous().t(), seeds=seeds, **options).tolist() == expected


def by_hand(row, temperature, top_k, top_p, uniform) -> int:
    """The oracle: one row, in plain floats."""
    if temperature == 0:
        return row.index(max(row))
    ids = sorted(range(len(row)), key=lambda id: (-row[id], id))[:top_k]
    if top_k >= len(row) and top_p == 1:
        ids.sort()
    weights = [math.exp((row[id] - max(row)) / temperature) for id in ids]
    share, count = top_p * math.fsum(weights), 1
    while top_p < 1 and math.fsum(weights[:count]) < share:
        count += 1
    weights = weights[:count] if top_p < 1 else weights
    target, id = uniform * math.fsum(weights), 0
    while math.fsum(weights[: id + 1]) <= target:
        id += 1
    return ids[id]


def test_every_row_is_drawn_as_by_hand():
    logits, columns = mixed_rows(400, 60, seed=1)
    columns["top_k"] = np.random.default_rng(2).choice([1, 2, 7, 59, 60, 99], 400)
    uniforms = the_sampler._uniforms(columns["seeds"], columns["places"]).tolist()
    lists = [columns[name].tolist() for name in ("temperature", "top_k", "top_p")]
    expected = [by_hand(*of_row) for of_row in zip(logits.tolist(), *lists, uniforms, strict=True)]
    assert drawn(logits, **columns).tolist() == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0.0, NAN, -INF], "row 2: a logit is NaN"), ([NAN, INF, 0.0], "row 2: a logit is NaN"),
        ([-INF, -INF, -INF], "row 2: all its logits are -inf"), ([0.0, INF, 0.0], "row 2: a logit is inf"),
    ],
)  # fmt: skip
def test_logits_that_no_token_can_be_chosen_from_are_refused(row, message, temperature, dtype, device):
    logits = torch.zeros(4, 3, dtype=getattr(torch, dtype), device=device)
    logits[2] = torch.tensor(row)
    with pytest.raises(BadLogits, match=message) as refusal:
        drawn(logits, temperature=temperature)
    assert isinstance(refusal.value, PagedError)
    assert refusal.value.row == 2 and not math.isfinite(refusal.value.value)


# A right sampler's counts have a chi-square of k - 1 degrees of freedom, for k tokens that can come up. By chance one run
# in a million exceeds the value whose upper tail is this; the seeds here are fixed, so that a test that passes once always
# does.
LEAST_P = 1e-6


MANY = 20_000
LOGITS = [0.2, 2.0, -1.0, 1.1, 2.0, -0.3, 0.7, 1.5, -2.0, 0.0, 1.3, -math.inf]

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
    counts, expected = np.asarray(counts), np.asarray(probabilities) * MANY
    assert counts.sum() == MANY and math.isclose(expected.sum(), MANY)
    can_come = expected > 0
    assert expected[can_come].min() > 5, "too few for a chi-square"
    if counts[~can_come].any():
        return 0.0
    chi_square = ((counts - expected)[can_come] ** 2 / expected[can_come]).sum()
    # The probability that a chi-square of so many degrees of freedom is at least that large.
    freedom = can_come.sum() - 1
    return float(torch.special.gammaincc(*torch.tensor([freedom / 2, chi_square / 2], dtype=torch.float64)))


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


SEEDS_AND_PLACES = {
    "first tokens of many requests": (np.arange(MANY, dtype=np.uint64), np.zeros(MANY, np.int64)),
    "tokens of one sequence": (np.full(MANY, 5, np.uint64), np.arange(MANY)),
}


@pytest.mark.parametrize("which", SEEDS_AND_PLACES)
@pytest.mark.parametrize("name", LAWS)
def test_tokens_come_up_as_often_as_they_should(name, which):
    seeds, places = SEEDS_AND_PLACES[which]
    tokens = drawn(torch.tensor([LOGITS]).repeat(MANY, 1), seeds=seeds, places=places, **LAWS[name])
    counts = np.bincount(tokens, minlength=len(LOGITS))
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
    expected = drawn(rows, temperature=6.0, seeds=7, places=np.arange(40))
    assert live.token_ids == expected.tolist()
    assert engine.stats().accepted_tokens > 0 or not drafts
