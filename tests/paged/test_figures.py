"""Cost models by hand: each figure of fixtures/figures.txt is what the line below its call says."""
# ruff: noqa: F401  # the calls of the file take them from here

from math import inf

import numpy as np
import pytest
from msgspec.structs import astuple, replace

from paged.model.layer_plan import Layers, Part
from paged.model.limits import Limits
from paged.model.model_shape import Mixers
from paged.study.bench.engine import Floor
from paged.study.hardware import (
    Device,
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
from paged.study.hardware.measured import measured_layers, step_of, timed_by
from paged.study.hardware.measured_step import Launching
from paged.study.hardware.step_work import Span
from paged.study.report.comparisons import cumulative
from paged.study.report.drawing import count_axis
from paged.study.report.over_time import averaged, edges_of
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
MANY = np.arange(1, 10_001) / 10
ENDS, TOOK = np.array([1.0, 3.0, 10.0]), np.array([1.0, 2.0, 1.0])
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


UNMEASURED = [
    roofline("llama-2-7b", "groq-lpu", dtype="fp16"),
    roofline("deepseek-v2", "h100", dtype="fp8", tensor_parallel=8),
    roofline("smollm-135m", "rtx4090"),
    roofline("smollm-135m", "a100-80g"),
    roofline("llama-3-8b", "a100-80g", dtype="int8"),
]
GRAPHS = Launching(graph_sizes=(1, 8, 64))
ALIKE = rows([1] * 32 + [256], [1000] * 32 + [256], sampled_rows=33)
SKEWED = rows([1] * 32 + [256], [500] * 31 + [16500, 256], sampled_rows=33)


def decode(count, length):
    return rows([1] * count, [length] * count, sampled_rows=count)


def measured(device="h100", launching=None, **options):
    launched = {} if launching is None else {"launching": launching}
    return step_of(roofline("llama-3.1-8b", device, **options), **launched)


def on_link(bytes_per_s):
    return measured("rtxpro6000", tensor_parallel=2, link=Link(bytes_per_s=bytes_per_s, latency_s=0.0))


def dense(step, tokens):
    return step.layers.dense_seconds(np.array([float(tokens)]))[0]


def hybrid(**options):
    """A layer of 2 KV heads of 2 elements in bf16, and one with a state of 256 bytes, on a small device."""
    kept = (
        Layers(kind="full", count=1, entry=(8, 8)),
        Layers(kind="state", count=1, parts=(Part(units=4, unit_bytes=64),)),
    )
    box = Device(
        name="box", memory_bytes=3_000_000, bandwidth=1e9, peak_flops={"bf16": 1e10}, host_link=1e8, interconnect=1e6
    )
    model = shape(kept=kept, mixers=Mixers(layers=1, parameters=100))
    return Roofline(model=model, device=box, host_overhead_s=0.0, **options)


def floor(bytes_per_s, flops_per_s):
    return Floor(SMALL, Limits(1, "float32", bytes_per_s, flops_per_s))


@pytest.mark.parametrize(("call", "by_hand"), by_hand_in("figures.txt"))
def test_a_figure_is_what_it_is_by_hand(call, by_hand):
    assert_by_hand(call, by_hand, globals())
