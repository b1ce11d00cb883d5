"""Cost models by hand: each figure of fixtures/figures.txt is what the line below its call says."""
# ruff: noqa: F401  # the calls of the file take them from here

from math import inf

import numpy as np
import pytest
from msgspec.structs import astuple, replace

from paged.study.bench.floor import Floor
from paged.study.hardware import (
    Experts,
    Faster,
    Latent,
    ModelShape,
    Roofline,
    StepWork,
    budgets,
    device_named,
    model_named,
    suiting_budget,
)
from paged.study.hardware.device import Link, link_of
from paged.study.hardware.step_work import Span
from paged.study.simulator import Device as RunsOn, Load, Scenario, StepTime

from .files_of_others import PRICES, TILED, TINY, assert_by_hand, by_hand_in  # noqa: TID252

IDEAL = {"compute_efficiency": 1.0, "memory_efficiency": 1.0, "link_efficiency": 1.0, "host_overhead_s": 0.0}
DECODE = StepWork(computed_tokens=1, sampled_rows=1, context_tokens=1000, attended_pairs=1000)
EIGHT = StepWork(computed_tokens=8, sampled_rows=8, context_tokens=8000, attended_pairs=8000)
SWAP = StepWork(computed_tokens=0, moved_tokens=1000)
EXPERTS = Experts(count=6, per_token=2, shared=1, intermediate=4, dense_layers=1)
MIXTURE = replace(
    model_named("smollm-135m"), experts=Experts(count=4, per_token=1, intermediate=1), published_parameters=0
)
SPANS = (Span("full", 0, 0.75, 0.5), Span("window", 8, 0.25, 0.5))
FORMULA = StepTime(weights_ms=5, context_us=0.1, token_us=20, swap_us=2)
rows = StepWork.of_rows


def shape(**changes):
    return ModelShape(**{**TINY, **changes})


LATENT = shape(
    layers=1, heads=2, head_dim=4, intermediate=8,
    latent=Latent(kv_rank=6, rope_dim=2, query_rank=4, nope_dim=4, value_dim=3),
)  # fmt: skip
SMALL = shape(hidden=32, head_dim=8, intermediate=48, vocab=64, tied_embeddings=True)
KEPT = 2 * 2 * 2 * 8
"""Numbers that SMALL keeps of a token."""


def roofline(model="llama-2-13b", device="a100-40g", **options):
    return Roofline(model=model_named(model), device=device_named(device), **options)


def on_a100(**options):
    return roofline("llama-3-8b", "a100-80g", **options)


def floor(bytes_per_s, flops_per_s):
    limits = pytest.importorskip("paged.model.limits")
    return Floor(SMALL, limits.Limits(1, "float32", bytes_per_s, flops_per_s))


@pytest.mark.parametrize(("call", "by_hand"), by_hand_in("figures.txt"))
def test_a_figure_is_what_it_is_by_hand(call, by_hand):
    assert_by_hand(call, by_hand, globals())
