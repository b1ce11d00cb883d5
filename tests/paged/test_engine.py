"""The engine and LLM: what ends a request, seeds, times, memory, and numpy's numbers in place of Python's."""

import sys
from itertools import count

import numpy as np
import pytest

from paged import LLM, BeamSearchParams, Engine, SamplingParams
from paged.errors import BudgetTooSmall, InvalidRequest, UnknownRequest
from paged.testing.tiny_model import tiny_model

from ..driving import driven, outputs_of  # noqa: TID252

PROMPT = "The with statement"


def test_what_ends_a_sequence_is_no_text_of_it(model):
    engine = Engine(model)
    first = LLM(model).generate(PROMPT, SamplingParams(max_tokens=20))[0]
    stop = first.token_ids[5]
    engine.add_request(PROMPT, SamplingParams(max_tokens=20, stop_token_ids=(stop,)), id="a")
    outputs = outputs_of(engine)["a"]
    tokens = [token for output in outputs for token in output.token_ids]
    assert (outputs[-1].finish_reason, tokens) == ("stop", first.token_ids[: first.token_ids.index(stop) + 1])
    assert "".join(output.text for output in outputs) == model.tokenizer.decode(tokens[:-1])


# The model knows its text by heart: cooler, and chance has little to decide.
HOT = 3.0


def test_seeds_decide_and_ids_stand_in_for_them(model):
    def drawn(id, seed=None, engine_seed=0):
        engine = Engine(model, seed=engine_seed)
        engine.add_request(PROMPT, SamplingParams(max_tokens=15, temperature=HOT, seed=seed), id=id)
        return [token for output in outputs_of(engine)[id] for token in output.token_ids]

    assert drawn("a", seed=1) == drawn("b", seed=1) != drawn("a", seed=2)
    assert drawn("a") == drawn("a") != drawn("b")
    assert drawn("a") != drawn("a", engine_seed=1)


def test_a_request_without_an_id_gets_one_that_no_other_has(model):
    engine = Engine(model)
    engine.add_request(PROMPT, id="request-1")
    assert [engine.add_request(PROMPT) for _ in range(2)] == ["request-2", "request-3"]


def test_times_are_the_clocks(model):
    engine = Engine(model, clock=count(1.0).__next__)
    engine.add_request(PROMPT, SamplingParams(max_tokens=3), id="a", arrival=0.5)
    last = outputs_of(engine)["a"][-1]
    assert 0 < last.timings.ttft_s < last.timings.e2e_s
    assert last.timings.longest_gap_s >= last.timings.itl_s > 0
    assert last.timings.tokens_per_s == 3 / last.timings.e2e_s


def test_a_request_ends_with_a_reason_of_the_callers(model):
    engine = Engine(model)
    engine.add_request(PROMPT, SamplingParams(max_tokens=20), id="a")
    tokens = [token for _ in range(3) for output in engine.step() for token in output.token_ids]
    last = engine.finish("a")
    assert (last.finish_reason, last.token_ids, last.usage.output_tokens) == ("stop", [], len(tokens))
    assert last.timings is not None
    assert engine.finish("a") is None
    assert not engine.has_unfinished and engine.check() == []
    engine.add_request(PROMPT, id="b")
    with pytest.raises(InvalidRequest, match='reason has to be "stop" or "length"'):
        engine.finish("b", "abort")
    assert engine.finish("b", "length").finish_reason == "length"
    for end in (engine.finish, engine.abort):
        with pytest.raises(UnknownRequest):
            end("nobody")


# Four beams and a request share four seats, so that beams come in again as requests of their own: "a/branch-1" and so on.
CROWDED = {"num_blocks": 24, "max_sequences": 4}
BEAMS, PLAIN = BeamSearchParams(beam_width=4, max_tokens=12), SamplingParams(max_tokens=40, ignore_eos=True)


def answer_to(model, params):
    return LLM(model).generate([[1, 2, 3, 4, 5]], params)[0].token_ids


def test_a_request_may_have_the_id_of_a_beam(model):
    engine = Engine(model, **CROWDED)
    alive = [
        engine.live_request(engine.add_request([1, 2, 3, 4, 5], params, id=id))
        for id, params in (("a/branch-1", PLAIN), ("a", BEAMS))
    ]
    driven(engine)
    assert [each.completion().token_ids for each in alive] == [answer_to(model, params) for params in (PLAIN, BEAMS)]


def test_a_beam_is_no_request_and_gives_its_id_back(model):
    engine = Engine(model, **CROWDED)
    scheduler = engine.scheduler
    engine.add_request([1, 2, 3], PLAIN, id="other")
    search = engine.live_request(engine.add_request([1, 2, 3, 4, 5], BEAMS, id="a"))

    def is_alive():
        return scheduler.counts()["submitted"] > 2 and scheduler.status("a/branch-1") in ("waiting", "running")

    while not is_alive():
        engine.step()
    for end in (engine.finish, engine.abort):
        with pytest.raises(UnknownRequest):
            end("a/branch-1")
    while is_alive():
        engine.step()
    assert search.last is None
    later = engine.live_request(engine.add_request([1, 2, 3, 4, 5], PLAIN, id="a/branch-1"))
    driven(engine)
    assert search.completion().token_ids == answer_to(model, BEAMS)
    assert later.completion().token_ids == answer_to(model, PLAIN)


def test_a_byte_budget_is_pages_and_holds_one_longest_sequence(model):
    assert Engine(model, kv_cache_bytes=10**6).pool.num_blocks == 30
    with pytest.raises(BudgetTooSmall, match="hold 480 tokens; one sequence of 1,024 takes 2.10 MB") as caught:
        Engine(model, kv_cache_bytes=10**6, max_model_len=1024)
    assert Engine(model, kv_cache_bytes=caught.value.wanted, max_model_len=1024).pool.num_blocks == 64


def answer(prompt=(1, 2, 3), params=None, **options):
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
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=1), arrival=arrival)
    assert engine.step()[0].timings.e2e_s == 2.0
