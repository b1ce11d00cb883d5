"""What sampling accepts and refuses, and that a row's draw is its own affair."""

import math

import numpy as np
import pytest

from paged.errors import BadLogits, InvalidSampling, PagedError
from paged.sampling import SamplingParams, sample, sampler as the_sampler, seed_of, weights as weights_of
from paged.sampling.weights import weights

torch = pytest.importorskip("torch")

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
INF, NAN = math.inf, math.nan


def drawn(logits, *, temperature=1.0, top_k=2**62, top_p=1.0, seeds=0, places=0):
    """`sample` with one value for all rows where no array is given."""
    num_rows = len(logits)

    def column(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), num_rows).copy()

    return sample(
        logits,
        temperature=column(temperature, np.float64),
        top_k=column(top_k, np.int64),
        top_p=column(top_p, np.float64),
        seeds=column(seeds, np.uint64),
        places=column(places, np.int64),
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1},
        {"temperature": 1e-300},
        {"temperature": np.float32(0.5), "top_k": np.int64(3)},
        {"temperature": 0.7, "top_k": 1, "top_p": 1.0, "seed": 2**64 - 1},
        {"temperature": 0.7, "top_k": 10**6, "top_p": 1e-9, "seed": 0},
        {"max_tokens": 5, "min_tokens": 5, "stop_token_ids": (0, 9), "ignore_eos": True},
    ],
)
def test_what_makes_sense_is_accepted(fields):
    SamplingParams(**fields).check(10)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": NAN}, "temperature has to be a finite number of at least 0; got nan."),
        ({"temperature": INF}, "temperature has to be a finite number of at least 0; got inf."),
        ({"temperature": 10**400}, "temperature has to be a finite number of at least 0; got 1000"),
        ({"temperature": 10**5000}, "temperature has to be .* got an integer too long to write."),
        ({"temperature": -0.5}, "temperature has to be a finite number of at least 0; got -0.5."),
        ({"temperature": True}, "temperature has to be a finite number of at least 0; got True."),
        ({"temperature": "1"}, "temperature has to be a finite number of at least 0; got '1'."),
        ({"temperature": None}, "temperature has to be a finite number of at least 0; got None."),
        ({"temperature": 1j}, "temperature has to be a finite number of at least 0; got 1j."),
        ({"temperature": np.ones(2)}, "temperature has to be a finite number of at least 0; got array"),
        ({"temperature": 1.0, "top_k": 0}, "top_k has to be an integer from 1 to 2^31 - 1, or None; got 0."),
        ({"temperature": 1.0, "top_k": -1}, "top_k has to be an integer from 1 to 2^31 - 1, or None; got -1."),
        (
            {"temperature": 1.0, "top_k": 2**31},
            "top_k has to be an integer from 1 to 2^31 - 1, or None; got 2147483648.",
        ),
        ({"temperature": 1.0, "top_k": True}, "top_k has to be an integer from 1 to 2^31 - 1, or None; got True."),
        ({"temperature": 1.0, "top_k": 2.0}, "top_k has to be an integer from 1 to 2^31 - 1, or None; got 2.0."),
        ({"temperature": 1.0, "top_p": 0}, "top_p has to be a number above 0 and at most 1, or None; got 0."),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p has to be a number above 0 and at most 1, or None; got 1.5."),
        ({"temperature": 1.0, "top_p": -0.1}, "top_p has to be a number above 0 and at most 1, or None; got -0.1."),
        ({"temperature": 1.0, "top_p": NAN}, "top_p has to be a number above 0 and at most 1, or None; got nan."),
        ({"temperature": 1.0, "top_p": True}, "top_p has to be a number above 0 and at most 1, or None; got True."),
        ({"temperature": 1.0, "top_p": "all"}, "top_p has to be a number above 0 and at most 1, or None; got 'all'."),
        ({"temperature": 1.0, "seed": -1}, "seed has to be an integer from 0 to 2^64 - 1; got -1."),
        (
            {"temperature": 1.0, "seed": 2**64},
            "seed has to be an integer from 0 to 2^64 - 1; got 18446744073709551616.",
        ),
        ({"temperature": 1.0, "seed": False}, "seed has to be an integer from 0 to 2^64 - 1; got False."),
        ({"temperature": 1.0, "seed": 1.0}, "seed has to be an integer from 0 to 2^64 - 1; got 1.0."),
        ({"max_tokens": 0}, "max_tokens has to be an integer of at least 1; got 0."),
        ({"max_tokens": True}, "max_tokens has to be an integer of at least 1; got True."),
        ({"max_tokens": 3.0}, "max_tokens has to be an integer of at least 1; got 3.0."),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens has to be an integer from 0 to max_tokens (3); got 4."),
        ({"min_tokens": -1}, "min_tokens has to be an integer from 0 to max_tokens (64); got -1."),
        ({"min_tokens": None}, "min_tokens has to be an integer from 0 to max_tokens (64); got None."),
        ({"stop_token_ids": (10,)}, "stop_token_ids have to be token ids from 0 to 9; got 10."),
        ({"stop_token_ids": (3, -1)}, "stop_token_ids have to be token ids from 0 to 2,147,483,647; got -1."),
        ({"stop_token_ids": (True,)}, "stop_token_ids have to be token ids from 0 to 2,147,483,647; got True."),
        ({"stop_token_ids": ("a",)}, "stop_token_ids have to be token ids from 0 to 2,147,483,647; got 'a'."),
        ({"stop_token_ids": 3}, "stop_token_ids has to be a tuple of token ids; got 3."),
        ({"stop_token_ids": "abc"}, "stop_token_ids has to be a tuple of token ids; got 'abc'."),
        ({"ignore_eos": 1}, "ignore_eos has to be True or False; got 1."),
        ({"top_k": 5}, "top_k 5 goes with a temperature above 0; temperature 0 is greedy and draws nothing."),
        ({"top_p": 0.9}, "top_p 0.9 goes with a temperature above 0; temperature 0 is greedy and draws nothing."),
        ({"seed": 7}, "seed 7 goes with a temperature above 0; temperature 0 is greedy and draws nothing."),
    ],
)
def test_what_does_not_is_refused_with_the_value_and_the_limit(fields, message):
    with pytest.raises(InvalidSampling) as refusal:
        SamplingParams(**fields).check(10)
    assert isinstance(refusal.value, PagedError) and isinstance(refusal.value, ValueError)
    start, _, end = message.partition(" .* ")
    assert str(refusal.value).startswith(start) and end in str(refusal.value)


def test_without_a_vocabulary_int32_is_the_limit_of_stop_ids():
    SamplingParams(stop_token_ids=(2**31 - 1,)).check(None)
    with pytest.raises(InvalidSampling, match="from 0 to 2,147,483,647; got 2147483648"):
        SamplingParams(stop_token_ids=(2**31,)).check(None)


@pytest.mark.parametrize("wrong", [0, -1, True, 3.0, "10"])
def test_a_vocabulary_has_a_size(wrong):
    with pytest.raises(InvalidSampling, match="vocabulary_size has to be an integer of at least 1, or None; got"):
        SamplingParams().check(wrong)


def test_a_message_stays_short_however_long_the_value_is():
    with pytest.raises(InvalidSampling) as refusal:
        SamplingParams(stop_token_ids={*range(10**5)}).check(None)
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_without_temperature_the_likeliest_is_taken_and_the_first_of_equals(device, dtype):
    logits = torch.tensor(
        [[0, 3, 3, 1], [5, 5, 5, 5], [-9, -INF, -8, -INF]], dtype=getattr(torch, dtype), device=device
    )
    tokens = drawn(logits, temperature=0.0)
    assert (tokens.dtype, tokens.tolist()) == (np.dtype(np.int32), [1, 0, 2])


def test_when_all_rows_are_greedy_nothing_is_drawn(monkeypatch):
    monkeypatch.delattr(the_sampler, "_uniforms")
    assert drawn(torch.tensor([[0.0, 1.0]]), temperature=0.0).tolist() == [1]


def test_greedy_rows_stay_greedy_beside_rows_that_are_drawn():
    logits = torch.zeros(200, 50)
    logits[:, 7] = 0.1
    temperature = np.where(np.arange(200) % 2, 0.0, 9.0)
    tokens = drawn(logits, temperature=temperature, seeds=np.arange(200))
    assert set(tokens[1::2].tolist()) == {7}
    assert len(set(tokens[::2].tolist())) > 25


def test_no_rows_have_no_tokens():
    tokens = drawn(torch.zeros(0, 5))
    assert (tokens.dtype, tokens.shape) == (np.dtype(np.int32), (0,))


def test_a_vocabulary_of_one_leaves_no_choice():
    assert drawn(torch.tensor([[-3.0]] * 3), temperature=[0, 1, 1], top_p=[1, 1, 0.5]).tolist() == [0, 0, 0]


COUNT = 2000


def seen(row, **options) -> set[int]:
    """Tokens that come up in many draws from one row of logits."""
    return set(drawn(torch.tensor([row]).repeat(COUNT, 1), seeds=np.arange(COUNT), **options).tolist())


def test_top_k_keeps_the_likeliest_and_the_lower_ids_of_equals():
    assert seen([1.0, 2.0, 1.0, 1.0], top_k=2) == {1, 0}
    assert seen([1.0, 2.0, 1.0, 1.0], top_k=1) == {1}


def test_top_p_keeps_the_token_that_reaches_it():
    quarters = [0.0] * 4
    assert seen(quarters, top_p=0.5) == {0, 1}
    assert seen(quarters, top_p=0.5001) == {0, 1, 2}
    assert seen(quarters, top_p=0.75) == {0, 1, 2}


def test_top_p_keeps_at_least_one_token():
    assert seen([0.0, 1.0, 0.5], top_p=1e-300) == {1}


def test_top_p_is_a_share_of_what_top_k_left():
    assert seen([0.0] * 10, top_k=4, top_p=0.5) == {0, 1}


def test_the_share_is_that_after_temperature():
    # 0.97, 0.01, 0.01, 0.01 is nearly a quarter each at a temperature of 1,000.
    assert seen([4.6, 0.0, 0.0, 0.0], top_p=0.9) == {0}
    assert seen([4.6, 0.0, 0.0, 0.0], top_p=0.9, temperature=1000.0) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 3}, {"top_p": 0.999}, {"temperature": 1e300}, {"temperature": 1e-300}]
)
def test_what_is_impossible_is_never_drawn(options):
    assert seen([-INF, 0.0, -INF, 0.0, -INF], **options) == {1, 3}


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.9}])
def test_the_coldest_draw_is_the_likeliest(options):
    assert seen([0.0, 1.0, 0.999], temperature=5e-324, **options) == {1}


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


@pytest.mark.parametrize("device", DEVICES)
def test_a_rows_weights_are_the_same_to_the_last_bit_wherever_it_stands(device):
    logits = torch.randn(9, 1003, generator=torch.Generator().manual_seed(0)).to(device)
    top, heat = logits.amax(-1, keepdim=True), torch.full((9, 1), 0.7, dtype=torch.float64, device=device)
    expected = weights(logits, top, heat).cumsum(-1)
    for row in range(9):
        only = slice(row, row + 1)
        assert torch.equal(weights(logits[only], top[only], heat[only]).cumsum(-1), expected[only])


@pytest.mark.parametrize("num_candidates", [1, 2, 40, 1023, 1025, 2999, 3000])
def test_how_many_candidates_are_looked_at_first_changes_nothing(num_candidates, monkeypatch):
    logits, columns = mixed_rows(32)
    expected = drawn(logits, **columns).tolist()
    monkeypatch.setattr(the_sampler, "_NUM_CANDIDATES", num_candidates)
    assert drawn(logits, **columns).tolist() == expected


def test_ties_at_the_last_candidate_are_broken_by_id(monkeypatch):
    monkeypatch.setattr(the_sampler, "_NUM_CANDIDATES", 4)
    assert seen([0.0] * 3 + [1.0] * 2 + [0.0] * 10, top_k=4) == {0, 1, 3, 4}


def test_how_many_rows_are_drawn_at_once_changes_nothing(monkeypatch):
    logits, columns = mixed_rows(32)
    expected = drawn(logits, **columns).tolist()
    monkeypatch.setattr(weights_of, "_CELLS_AT_ONCE", 3000 * 5)
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


def test_the_hash_is_splitmix64():
    golden = np.uint64(0x9E3779B97F4A7C15)
    first = the_sampler._mixed(np.array([0], np.uint64) + golden)
    second = the_sampler._mixed(np.array([0], np.uint64) + golden + golden)
    assert (hex(first[0]), hex(second[0])) == ("0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4")


def test_uniform_numbers_of_neighbouring_seeds_and_places_differ_and_are_even():
    seeds, places = (grid.ravel() for grid in np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(100)))
    uniforms = the_sampler._uniforms(seeds, places)
    assert len(set(uniforms.tolist())) == 20_000
    assert (uniforms >= 0).all() and (uniforms < 1).all()
    # 20,000 numbers have a mean of 1/2 ± 0.002.
    assert abs(uniforms.mean() - 0.5) < 0.01
    along = uniforms.reshape(100, 200)
    for axis in (0, 1):
        neighbours = np.corrcoef(np.roll(along, 1, axis).ravel(), along.ravel())[0, 1]
        assert abs(neighbours) < 0.035


def test_no_seed_is_another_one_some_places_later():
    golden = 0x9E3779B97F4A7C15
    one, other = the_sampler._uniforms(np.array([golden, 0], np.uint64), np.array([0, 1]))
    assert one != other


def test_a_seed_and_a_place_draw_the_same_token_again_and_others_another():
    logits = torch.zeros(3, 10**5)
    tokens = drawn(logits, seeds=[7, 7, 8], places=[3, 4, 3])
    assert tokens.tolist() == drawn(logits, seeds=[7, 7, 8], places=[3, 4, 3]).tolist()
    assert len(set(tokens.tolist())) == 3


def test_the_largest_seed_and_place_are_good():
    assert 0 <= drawn(torch.zeros(1, 9), seeds=2**64 - 1, places=2**63 - 1)[0] < 9


def test_a_request_without_a_seed_gets_that_of_its_id_and_the_engines_seed():
    seeds = {seed_of(name, engine) for name in ("a", "b", "", "é", "\udc80") for engine in (0, 1, 2**64 - 1)}
    assert len(seeds) == 15 and all(0 <= seed < 2**64 for seed in seeds)
    # Written down, so that a run can be repeated with the next version.
    assert seed_of("request-1", 42) == 18079846481647525942


@pytest.mark.parametrize("wrong", [-1, 2**64, True, 0.5, None])
def test_an_engine_seed_has_64_bits(wrong):
    with pytest.raises(InvalidSampling, match="engine_seed has to be an integer from 0 to 2.64 - 1; got"):
        seed_of("a", wrong)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0.0, NAN, -INF], "row 2: a logit is NaN"),
        ([NAN, INF, 0.0], "row 2: a logit is NaN"),
        ([-INF, -INF, -INF], "row 2: all its logits are -inf"),
        ([0.0, INF, 0.0], "row 2: a logit is inf"),
    ],
)
def test_logits_that_no_token_can_be_chosen_from_are_refused(row, message, temperature, dtype, device):
    logits = torch.zeros(4, 3, dtype=getattr(torch, dtype), device=device)
    logits[2] = torch.tensor(row)
    with pytest.raises(BadLogits, match=message) as refusal:
        drawn(logits, temperature=temperature)
    assert isinstance(refusal.value, PagedError)
    assert refusal.value.row == 2 and not math.isfinite(refusal.value.value)


@pytest.mark.parametrize(
    "logits", [torch.zeros(3), torch.zeros(3, 0), torch.zeros(3, 2, 2), torch.zeros(3, 2, dtype=torch.int64)]
)
def test_logits_are_floats_a_row_each(logits):
    with pytest.raises(InvalidSampling, match="logits have to be floats .rows, vocabulary.; got torch"):
        drawn(logits)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("temperature", np.ones(2)),
        ("temperature", np.ones((3, 1))),
        ("temperature", np.ones(3, np.float32)),
        ("top_k", np.ones(3)),
        ("top_p", np.ones(4)),
        ("seeds", np.ones(3, np.int64)),
        ("places", np.ones(3, np.uint64)),
    ],
)
def test_arrays_of_another_length_or_kind_are_refused(name, wrong):
    columns = {"temperature": np.ones(3), "top_k": np.ones(3, np.int64), "top_p": np.ones(3)}
    columns |= {"seeds": np.ones(3, np.uint64), "places": np.ones(3, np.int64), name: wrong}
    with pytest.raises(InvalidSampling, match=f"{name} has to be .* .3., one for each row of logits; got"):
        sample(torch.zeros(3, 5), **columns)


def test_importing_the_room_loads_no_torch(run_python):
    result = run_python("-c", "import paged.sampling, sys; print({'torch', 'transformers'} & {*sys.modules})")
    assert result.stdout == "set()\n", result.stderr
