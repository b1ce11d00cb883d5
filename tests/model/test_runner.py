"""A runner's logits: how many places a tile has, which rows are there, and what is written beside them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from paged import Request
from paged.attention import StepTokens
from paged.model import capacity
from paged.model.loading import load_model
from paged.model.runner import runner_for
from paged.testing.engine_world import EngineWorld
from paged.testing.pressure import differences
from paged.testing.pressure_run import PressureRun, run_alone

ROOMY = EngineWorld(num_blocks=64, block_size=4, prefix_caching=False, max_tokens_per_step=4096, max_sequences=64)
# Logits are of size 10 at most, and float32 has 7 digits.
CLOSE = 5e-5

each_mode = pytest.mark.parametrize("batch_invariant", [True, False], ids=["invariant", "packed"])


def pool_for(model, num_blocks=16):
    return capacity.pool_for(model, num_blocks=num_blocks, block_size=4)


def requests_of(*lengths):
    words = np.random.default_rng(5)
    prompts = [words.integers(3, 97, length).tolist() for length in lengths]
    return [Request(id=str(i), prompt=prompt, max_tokens=6) for i, prompt in enumerate(prompts)]


@torch.inference_mode()
def logits_of(runner, step, token_ids, is_sampled):
    return runner.forward(step, np.asarray(token_ids, np.int32), np.asarray(is_sampled, np.bool_))


def whole_prompt(prompt, first_block=0):
    """A step of one sequence that comes whole, its blocks being in a row."""
    places, count = np.arange(len(prompt)), np.array([len(prompt)])
    table = np.arange(first_block, first_block + -(-len(prompt) // 4), dtype=np.int32)
    return StepTokens(places, first_block * 4 + places, np.append(0, count), count, table[None], 4)


FUSED = ["llama", "qwen2", "qwen3", "mistral"]
OTHERS = ["gemma2", "phi", "gpt2", "mixtral", "gpt_oss"]


@pytest.mark.parametrize("architecture", FUSED + OTHERS)
def test_a_tile_is_32_places_and_packed_or_fused_there_are_none(loaded, architecture):
    model = loaded(architecture)
    assert runner_for(model, pool_for(model), backend="torch_gather").tile == 32
    assert runner_for(model, pool_for(model), batch_invariant=False).tile is None
    runner = runner_for(model, pool_for(model))
    assert runner.backend.name == "native"
    assert (runner.tile, runner.tiling is None) == ((None, True) if architecture in FUSED else (32, False))


def test_a_module_that_gives_logits_of_all_tokens_is_asked_for_some(checkpoint, monkeypatch):
    model = load_model(checkpoint("gpt2"))
    step, ids = whole_prompt([5, 6, 7, 8]), [5, 6, 7, 8]
    wanted = [False, True, False, True]
    runner = runner_for(model, pool_for(model), batch_invariant=False)
    expected, forward = logits_of(runner, step, ids, wanted), model.module.forward
    monkeypatch.setattr(model.module, "forward", lambda logits_to_keep, **arguments: forward(**arguments))
    found = logits_of(runner, step, ids, wanted)
    torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE)


def test_where_rows_go_to_experts_that_are_not_in_c_each_token_goes_by_itself(loaded):
    model = loaded("dbrx")
    assert runner_for(model, pool_for(model)).tile == 1


def test_a_small_model_runs_on_one_thread_and_leaves_the_number_as_it_was(loaded, monkeypatch):
    model, seen = loaded("llama"), []
    runner = runner_for(model, pool_for(model), backend="torch_gather")
    attend = runner.backend.attend

    def noted(*arguments):
        seen.append(torch.get_num_threads())
        return attend(*arguments)

    monkeypatch.setattr(runner.backend, "attend", noted)
    torch.set_num_threads(3)
    logits_of(runner, whole_prompt([5, 6]), [5, 6], [False, True])
    assert (set(seen), torch.get_num_threads()) == ({1}, 3)
    torch.set_num_threads(1)


@pytest.fixture
def place_matters(loaded):
    """A Llama whose logits are a little higher the later in a tile they stand."""
    model = replace(loaded("llama"))  # which has not been tried

    def lift(module, inputs, logits):
        return logits + torch.arange(logits.shape[1]).view(1, -1, 1) * 1e-3

    hook = model.module.lm_head.register_forward_hook(lift)
    yield model
    hook.remove()


def test_where_places_do_not_agree_each_token_goes_by_itself_and_depends_on_nobody(place_matters):
    assert runner_for(place_matters, pool_for(place_matters), backend="torch_gather").tile == 1
    requests = requests_of(3, 9)
    together = PressureRun(place_matters, replace(ROOMY, max_chunk=2, backend="torch_gather")).run(requests)
    assert differences(together, run_alone(place_matters, requests, "torch_gather")) == []


@each_mode
def test_there_is_a_row_of_logits_for_each_token_that_is_asked_for(loaded, batch_invariant):
    model = loaded("llama")
    pool = pool_for(model)
    runner = runner_for(model, pool, batch_invariant=batch_invariant)
    prompt = range(3, 43)
    every = logits_of(runner, whole_prompt(prompt), prompt, [True] * 40)
    some = logits_of(runner, whole_prompt(prompt), prompt, np.isin(range(40), [4, 31, 32]))
    assert every.shape == (40, 97) and every.dtype is torch.float32
    torch.testing.assert_close(some, every[[4, 31, 32]], atol=0 if batch_invariant else CLOSE, rtol=0)
    # Where none is asked for, K and V are written all the same.
    pool.poison(torch.arange(16))
    assert logits_of(runner, whole_prompt(prompt[:8], first_block=5), prompt[:8], [False] * 8).shape == (0, 97)
    assert [block for block in range(16) if pool.keys(1)[block].isfinite().all()] == [5, 6]
    # A step without tokens delivers the outputs of requests that ended outside any other.
    none = np.zeros(0, np.int64)
    step = StepTokens(none, none, np.zeros(1, np.int64), none, np.zeros((0, 1), np.int32), 4)
    assert logits_of(runner, step, none, none).shape == (0, 97)


def test_logits_of_16_bit_weights_are_float32(checkpoint):
    model = load_model(checkpoint("llama"), dtype="bfloat16")
    runner = runner_for(model, pool_for(model))
    assert logits_of(runner, whole_prompt([5, 6, 7]), [5, 6, 7], [True] * 3).dtype is torch.float32
