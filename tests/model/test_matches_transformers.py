"""Eleven architectures on paged memory write what transformers' own `generate` writes."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from paged import Request
from paged.attention import LayerOptions
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


WANTS = [
    ("mistral", {"window": None}), ("gemma2", {"window": None}), ("gemma2", {"soft_cap": None}),
    ("gemma2", {"scale": 16**-0.5}), ("gpt2", {"scale": 12**-0.5}), ("gpt_oss", {"window": None}),
    ("gpt_oss", {"sinks": None}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "ignored", "backend"),
    # With "native" a Mistral is one call, which asks no backend.
    [(*want, "torch_gather" if want[0] == "mistral" else "native") for want in WANTS],
)
def test_what_a_layer_asks_for_would_be_missed(architecture, ignored, backend, loaded, generated):
    run = small_pool_run(loaded(architecture), backend)
    attend = run.worker.runner.backend.attend

    def ignore(queries, pool, layer, plan, options: LayerOptions):
        return attend(queries, pool, layer, plan, replace(options, **ignored))

    run.worker.runner.backend.attend = ignore
    assert written(run) != generated(architecture)
