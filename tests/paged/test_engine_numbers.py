"""Numbers at the doors of Engine and LLM: what is no number of its kind is refused, and numpy's small ones do not overflow."""

import sys

import numpy as np
import pytest

pytest.importorskip("torch")

from paged import LLM, Engine, SamplingParams
from paged.engine.door import checked_text
from paged.errors import InvalidConfig, InvalidRequest, InvalidSampling
from paged.testing.tiny_model import tiny_model

NAN = float("nan")
PROMPT = [1, 2, 3]


def answer(prompt=PROMPT, params=None, **options):
    return LLM(tiny_model(), **{"num_blocks": 40, "block_size": 4, **options}).generate([prompt], params)[0].token_ids


def test_numpys_small_integers_are_taken_for_what_they_are():
    small = {
        "num_blocks": np.int8(127),
        "block_size": np.int8(64),
        "host_blocks": np.int8(127),
        "max_sequences": np.int8(127),
        "max_model_len": np.uint8(255),
        "max_tokens_per_step": np.int8(127),
        "max_retries": np.int8(1),
        "seed": np.uint64(2**64 - 1),
    }
    prompt = [number % 8 for number in range(100)]
    plain = {name: int(value) for name, value in small.items()}
    params = SamplingParams(max_tokens=100, min_tokens=50)
    numpys = SamplingParams(max_tokens=np.int8(100), min_tokens=np.int8(50), stop_token_ids=(np.int8(7),))
    assert answer(prompt, params, **small) == answer(prompt, params, **plain)
    without_blocks = {**small, "num_blocks": None}
    assert Engine(tiny_model(), **without_blocks).pool.num_blocks == 127 * -(-255 // 64)
    stopped = SamplingParams(max_tokens=100, min_tokens=50, stop_token_ids=(7,))
    assert answer(prompt, numpys, **small) == answer(prompt, stopped, **plain)


@pytest.mark.parametrize("most", [sys.maxsize, 2**64])
def test_max_tokens_beyond_any_sequence_mean_no_limit(most):
    to_the_end = answer(params=SamplingParams(max_tokens=157), num_blocks=40, block_size=4)
    assert answer(params=SamplingParams(max_tokens=most), num_blocks=40, block_size=4) == to_the_end
    assert answer(params=SamplingParams(max_tokens=most, min_tokens=most)) == to_the_end


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "empty"),
        ([1.7, 2.9], r"integers; got 1\.7"),
        ([True, 2], "integers; got True"),
        (["1", "2"], "integers; got '1'"),
        ([1, None], "integers; got None"),
        ([NAN], "integers; got nan"),
        (np.array([1.0, 2.0]), None),
        ([[1, 2]], None),
        (np.ma.masked_array([1, 2], mask=[0, 1]), None),
        ([-1], "-1"),
        ([2**40], "token id 1099511627776 is larger than int32 holds"),
        ([5, 8], "8 is outside the vocabulary of 8"),
        (b"abc", "has to be text"),
        ({1, 2}, "has to be text"),
        (7, "has to be text"),
        ({"role": "user"}, "apply_chat_template"),
        ([{"role": "user", "content": "hi"}], "apply_chat_template"),
        ("a text", "no tokenizer there, so prompts have to be token ids"),
    ],
    ids=repr,
)
def test_a_prompt_that_is_no_text_and_no_token_ids_is_refused_and_leaves_nothing(prompt, said):
    engine = Engine(tiny_model(), num_blocks=8)
    with pytest.raises(InvalidRequest, match=said):
        engine.add_request(prompt)
    assert not engine.has_unfinished and not engine.scheduler.has_unfinished


def test_half_a_surrogate_pair_is_no_text():
    assert checked_text("µ😀") == "µ😀"
    with pytest.raises(InvalidRequest, match=r"character 1 of the prompt is '\\ud800'"):
        checked_text("a\ud800")


@pytest.mark.parametrize(
    "prompt", [(1, 2, 3), range(1, 4), np.array([1, 2, 3], np.int8), np.array([1, 2, 3], np.uint64)]
)
def test_a_prompt_is_any_sequence_of_integers(prompt):
    assert answer(prompt) == answer([1, 2, 3])


@pytest.mark.parametrize("arrival", [NAN, float("inf"), True, "0", 10**400])
def test_an_arrival_that_is_no_time_is_refused(arrival):
    engine = Engine(tiny_model(), num_blocks=8)
    with pytest.raises(InvalidRequest, match="arrival has to be a finite number of seconds"):
        engine.add_request(PROMPT, arrival=arrival)
    assert not engine.has_unfinished


@pytest.mark.parametrize("arrival", [1, np.float32(1), np.int8(1)])
def test_an_arrival_is_any_finite_number(arrival):
    engine = Engine(tiny_model(), num_blocks=8, clock=lambda: 3.0)
    engine.add_request(PROMPT, SamplingParams(max_tokens=1), arrival=arrival)
    assert engine.step()[0].timings.e2e_s == 2.0


@pytest.mark.parametrize("id", [7, [], True])
def test_an_id_that_is_no_string_is_refused(id):
    with pytest.raises(InvalidRequest, match="id has to be a non-empty string"):
        Engine(tiny_model(), num_blocks=8).add_request(PROMPT, id=id)


@pytest.mark.parametrize(
    ("prompts", "params", "error", "words"),
    [
        (7, None, InvalidRequest, "prompts have to be text, or a list of prompts"),
        ([1, 2, 3], None, InvalidRequest, "One prompt of token ids is a list within a list"),
        ([PROMPT], 7, InvalidConfig, "params have to be SamplingParams, or a list of them; got 7"),
        (
            [PROMPT],
            [{"max_tokens": 3}],
            InvalidSampling,
            "params have to be SamplingParams, or None; got {'max_tokens': 3}",
        ),
    ],
)
def test_what_generate_cannot_take_is_refused_before_anything_runs(prompts, params, error, words):
    llm = LLM(tiny_model(), num_blocks=8)
    with pytest.raises(error, match=words):
        llm.generate(prompts, params)
    assert not llm.engine.has_unfinished
