"""Eleven architectures on paged memory write what transformers' own `generate` writes."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from paged import Request
from paged.model.runner import runner_for
from paged.testing.engine_world import EngineWorld
from paged.testing.pressure_run import PressureRun

REST = [("native", False), ("torch_gather", False), ("torch_gather", True), ("reference", True)]
ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi", "gpt2", "gpt_neox", "gpt_oss", "opt"]
MAX_TOKENS = 12
# The four need 36 blocks in the end.
SMALL_POOL = EngineWorld(num_blocks=23, block_size=4, host_blocks=8, max_tokens_per_step=16, max_sequences=4)


def _prompts() -> list[list[int]]:
    """1, 5, 20 and 61 tokens; the last two begin alike."""
    words = np.random.default_rng(1)
    one, five, twenty, many = (words.integers(3, 97, length).tolist() for length in (1, 5, 20, 61))
    return [one, five, twenty, twenty[:9] + many[9:]]


@pytest.fixture(scope="module")
def generated(checkpoint, generate):
    """generated(architecture): what transformers writes after each prompt."""
    return cache(lambda architecture: generate(checkpoint(architecture), _prompts(), [MAX_TOKENS] * 4))


def small_pool_run(model, backend, *, batch_invariant=True):
    """All four prompts are to share a pool that holds hardly more than the longest of them."""
    run = PressureRun(model, replace(SMALL_POOL, backend=backend))
    run.worker.runner = runner_for(model, run.pool, backend=backend, batch_invariant=batch_invariant)
    return run


def written(run):
    requests = [Request(id=str(i), prompt=prompt, max_tokens=MAX_TOKENS) for i, prompt in enumerate(_prompts())]
    return list(run.run(requests).tokens.values())


@pytest.mark.parametrize(
    ("architecture", "backend", "batch_invariant"),
    [
        *((each, "native", True) for each in ARCHITECTURES),
        # The other ways to run one: where there are a soft cap and windows, and sinks.
        *((each, backend, is_so) for each in ("gemma2", "gpt_oss") for backend, is_so in REST),
    ],
)
def test_the_text_is_that_of_generate(architecture, backend, batch_invariant, loaded, generated):
    run = small_pool_run(loaded(architecture), backend, batch_invariant=batch_invariant)
    assert written(run) == generated(architecture)
    assert run.scheduler.stats().preemptions > 0
    # None is one word again and again.
    assert min(len(set(text)) for text in generated(architecture)) >= 5
