"""Numbers at the doors of Engine and LLM: numpy's small ones do not overflow, and any sequence of integers is a prompt."""

import sys

import numpy as np
import pytest

from paged import LLM, Engine, SamplingParams
from paged.testing.tiny_model import tiny_model

NAN = float("nan")
PROMPT = [1, 2, 3]


def answer(prompt=PROMPT, params=None, **options):
    return LLM(tiny_model(), **{"num_blocks": 40, "block_size": 4, **options}).generate([prompt], params)[0].token_ids


def test_numpys_small_integers_are_taken_for_what_they_are():
    small = {
        "num_blocks": np.int8(127), "block_size": np.int8(64), "host_blocks": np.int8(127),
        "max_sequences": np.int8(127), "max_model_len": np.uint8(255), "max_tokens_per_step": np.int8(127),
        "max_retries": np.int8(1), "seed": np.uint64(2**64 - 1),
    }  # fmt: skip
    prompt = [number % 8 for number in range(100)]
    plain = {name: int(value) for name, value in small.items()}
    params = SamplingParams(max_tokens=100, min_tokens=50)
    numpys = SamplingParams(max_tokens=np.int8(100), min_tokens=np.int8(50), stop_token_ids=(np.int8(7),))
    assert answer(prompt, params, **small) == answer(prompt, params, **plain)
    without_blocks = {**small, "num_blocks": None}
    assert Engine(tiny_model(), **without_blocks).pool.num_blocks == 127 * -(-255 // 64)
    stopped = SamplingParams(max_tokens=100, min_tokens=50, stop_token_ids=(7,))
    assert answer(prompt, numpys, **small) == answer(prompt, stopped, **plain)


def test_max_tokens_beyond_any_sequence_mean_no_limit():
    to_the_end = answer(params=SamplingParams(max_tokens=29), num_blocks=8)
    for most in (sys.maxsize, 2**64):
        assert answer(params=SamplingParams(max_tokens=most, min_tokens=most), num_blocks=8) == to_the_end


@pytest.mark.parametrize(
    "prompt", [(1, 2, 3), range(1, 4), np.array([1, 2, 3], np.int8), np.array([1, 2, 3], np.uint64)]
)
def test_a_prompt_is_any_sequence_of_integers(prompt):
    assert answer(prompt) == answer([1, 2, 3])


@pytest.mark.parametrize("arrival", [1, np.float32(1), np.int8(1)])
def test_an_arrival_is_any_finite_number(arrival):
    engine = Engine(tiny_model(), num_blocks=8, clock=lambda: 3.0)
    engine.add_request(PROMPT, SamplingParams(max_tokens=1), arrival=arrival)
    assert engine.step()[0].timings.e2e_s == 2.0
