"""The cost model from published figures: its arithmetic by hand, its laws, and the memory that it leaves."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from paged import Costs
from paged.study.hardware import Experts, Latent, ModelShape, Placement, Roofline, StepWork, device_named, model_named

IDEAL = {"compute_efficiency": 1.0, "memory_efficiency": 1.0, "link_efficiency": 1.0, "host_overhead_s": 0.0}
AMOUNTS = StepWork.__struct_fields__


def roofline(model="llama-2-13b", device="a100-40g", **options):
    return Roofline(model=model_named(model), device=device_named(device), **options)


ROOFLINES = [
    roofline(),
    roofline("llama-3-70b", "h100", tensor_parallel=4),
    roofline("deepseek-v2", "h200", tensor_parallel=8),
    roofline("deepseek-v2", "h200", tensor_parallel=8, split_context=True),
    roofline("opt-13b", "cpu"),
    roofline("llama-2-70b", "groq-lpu", dtype="fp16", tensor_parallel=1024, split_context=True),
]


@st.composite
def works(draw):
    """Steps of up to 64 rows, each as the rows' lengths make it."""
    tokens = draw(st.lists(st.integers(1, 600), min_size=1, max_size=64))
    before = draw(st.lists(st.integers(0, 30_000), min_size=len(tokens), max_size=len(tokens)))
    context = np.add(tokens, before)
    return StepWork.of_rows(
        tokens,
        context,
        sampled_rows=draw(st.integers(0, len(tokens))),
        moved_tokens=draw(st.sampled_from([0, 16, 4096])),
    )


def test_the_work_of_rows_is_counted_by_hand():
    # The first row computes positions 3 and 4 (they attend to 4 and 5), the second position 0.
    work = StepWork.of_rows([2, 1], [5, 1], sampled_rows=1, moved_tokens=16)
    assert msgspec.structs.astuple(work) == (3, 1, 6, 4 + 5 + 1, 16, 1, 1, 1, 0, 0, 0, 2)


def test_a_decode_step_is_as_long_as_its_bytes_take_to_read():
    step = roofline(**IDEAL)
    work = StepWork(computed_tokens=1, sampled_rows=1, context_tokens=1000, attended_pairs=1000)
    # Everything is read once but the embedding and the last norm, of which a token reads a row; then KV of 1,001 tokens.
    weights = (13_015_864_320 - 32_000 * 5120 - 5120) * 2
    activations = 40 * (8 * 5120 + 2 * (4 * 5120 + 3 * 13_824)) * 2 + 4 * 32_000
    assert step.seconds(work) == pytest.approx((weights + 819_200 * 1001 + activations) / 1.555e12, rel=1e-9)


def test_a_long_prefill_is_as_long_as_its_operations_take():
    step = roofline(**IDEAL)
    work = StepWork.of_rows([4096], [4096], sampled_rows=1)
    layers = 13_015_864_320 - 2 * 32_000 * 5120 - 5120
    pairs = 4096 * 4097 / 2 * 4 * 40 * 5120
    head = (32_000 * 5120 * 2 + 32_000 * 4) / 1.555e12
    assert step.seconds(work) == pytest.approx((2 * layers * 4096 + pairs) / 312e12 + head, rel=1e-9)


def test_efficiencies_and_overheads_do_what_their_names_say():
    work = StepWork(computed_tokens=1, context_tokens=1000, attended_pairs=1000)
    swap = StepWork(computed_tokens=0, moved_tokens=1000)
    ideal = roofline(**IDEAL)
    assert roofline(**{**IDEAL, "memory_efficiency": 0.5}).seconds(work) == pytest.approx(2 * ideal.seconds(work))
    assert roofline(**{**IDEAL, "host_overhead_s": 0.01}).seconds(work) == pytest.approx(0.01 + ideal.seconds(work))
    assert ideal.seconds(swap) == pytest.approx(819_200 * 1000 / 32e9)
    assert roofline(**{**IDEAL, "link_efficiency": 0.5}).seconds(swap) == pytest.approx(2 * ideal.seconds(swap))


def test_a_step_that_does_nothing_takes_no_time_and_numbers_give_a_number():
    found = [step.seconds(StepWork(computed_tokens=0)) for step in ROOFLINES]
    assert (found, {type(seconds) for seconds in found}) == ([0.0] * len(ROOFLINES), {float})


def test_four_devices_share_the_reading_and_pay_for_two_all_reduces_a_layer():
    work = StepWork(computed_tokens=8, sampled_rows=8, context_tokens=8000, attended_pairs=8000)
    alone = roofline("llama-3-70b", "h100", **IDEAL)
    four = roofline("llama-3-70b", "h100", tensor_parallel=4, all_reduce_latency_s=0.0, **IDEAL)
    reduced = 160 * 2 * 3 / 4 * 8 * 8192 * 2 / 450e9
    # What is not split: eight reads and writes of the residual width in each layer.
    copied = 80 * 8 * 8192 * 2 * 8 / 3.35e12
    assert four.seconds(work) == pytest.approx((alone.seconds(work) - copied) / 4 + copied + reduced, rel=1e-9)
    late = msgspec.structs.replace(four, all_reduce_latency_s=1e-5)
    assert late.seconds(work) == pytest.approx(four.seconds(work) + 160e-5, rel=1e-9)


def test_one_token_reads_the_experts_that_it_is_routed_to_and_many_read_all():
    step = roofline("deepseek-v2", "h200")
    one, many = (step.parts(StepWork(computed_tokens=n))[1] for n in (1, 100_000))
    each = 3 * 5120 * 1536 * 59
    assert one.bytes == pytest.approx(6 * each * 2, rel=1e-9)
    assert many.bytes == pytest.approx(160 * each * 2, rel=1e-9)
    assert many.flops == pytest.approx(100_000 * 6 * each * 2, rel=1e-9)


def test_a_latent_is_attended_to_in_the_cheaper_of_two_ways():
    model = ModelShape(
        name="latent", hidden=8, layers=1, heads=2, kv_heads=2, head_dim=4, intermediate=8, vocab=10, max_length=64,
        latent=Latent(kv_rank=6, rope_dim=2, query_rank=4, nope_dim=4, value_dim=3),
    )  # fmt: skip
    step = Roofline(model=model, device=device_named("h100"))
    expand = 2 * 6 * 2 * (4 + 3)

    def flops(work):
        return step.parts(work)[1].flops

    # A decode: the query is brought into the latent's space once. A prefill: each latent is expanded once.
    decode = StepWork(computed_tokens=1, context_tokens=40, attended_pairs=40)
    assert flops(decode) == 2 * 2 * (6 + 2 + 6) * 40 + expand
    prefill = StepWork.of_rows([40], [40], sampled_rows=1)
    assert flops(prefill) == 2 * 2 * (6 + 3) * 820 + expand * 40


@pytest.mark.parametrize("step", ROOFLINES, ids=lambda step: f"{step.model.name}-{step.device.name}")
@settings(max_examples=10)
@given(steps=st.lists(works(), min_size=1, max_size=5))
def test_many_steps_at_once_take_what_each_takes(step, steps):
    columns = {name: np.array([getattr(work, name) for work in steps], np.float64) for name in AMOUNTS}
    together = step.seconds(StepWork(**columns))
    assert together.shape == (len(steps),)
    assert together.tolist() == pytest.approx([step.seconds(work) for work in steps], rel=1e-12)


@pytest.mark.parametrize("step", ROOFLINES, ids=lambda step: f"{step.model.name}-{step.device.name}")
@settings(max_examples=20)
@given(work=works(), amount=st.sampled_from(AMOUNTS), more=st.integers(1, 10_000))
def test_no_amount_makes_a_step_shorter(step, work, amount, more):
    larger = msgspec.structs.replace(work, **{amount: getattr(work, amount) + more})
    assert step.seconds(larger) >= step.seconds(work)


def test_costs_are_the_price_of_a_full_step_and_of_the_link():
    latent = roofline("deepseek-v2", "h200", **IDEAL)
    prefill = latent.seconds(StepWork.of_rows([65_536], [65_536], sampled_rows=0))
    assert latent.costs(16).recompute(0, 65_536) == pytest.approx(prefill, rel=0.01)
    step = roofline(**IDEAL)
    costs = step.costs(16)
    assert isinstance(costs, Costs)
    assert costs.seconds_per_swapped_block == pytest.approx(16 * 819_200 / 32e9)
    # Recomputing is the same arithmetic as a prefill, without the output projection.
    prefill = step.seconds(StepWork.of_rows([4096], [4096], sampled_rows=0))
    assert costs.recompute(0, 4096) == pytest.approx(prefill, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "degree", "split", "of_device"),
    [
        *(("llama-2-70b", *case) for case in ((1, False, 1), (2, False, 1 / 2), (8, False, 1 / 8), (32, False, 1 / 8))),
        ("llama-2-70b", 32, True, 1 / 32),
        # A latent is on every device.
        ("deepseek-v2", 8, False, 1),
        ("deepseek-v2", 8, True, 1 / 8),
    ],
)
def test_beyond_its_kv_heads_a_model_keeps_copies_unless_contexts_are_split(model, degree, split, of_device):
    place = roofline(model, "h100", tensor_parallel=degree, split_context=split)
    assert place.kv_bytes_per_token == {"llama-2-70b": 2 * 80 * 8 * 128 * 2, "deepseek-v2": 60 * 576 * 2}[model]
    assert place.kv_bytes_per_token_of_device == place.kv_bytes_per_token * of_device


def test_opt_13b_leaves_the_12_gib_of_kv_that_the_vllm_paper_has_on_a_40_gb_a100():
    # Kwon et al., SOSP '23, table 1: 26 GB of parameters, 12 GB for the KV cache, 15.7 K slots.
    place = Placement(model=model_named("opt-13b"), device=device_named("a100-40g"), dtype="fp16")
    slots = place.num_blocks(16) * 16
    assert place.weight_bytes == pytest.approx(26e9, rel=0.02)
    assert slots == pytest.approx(15_700, rel=0.06)


def test_a_small_mixture_touches_as_many_experts_as_are_expected():
    model = msgspec.structs.replace(
        model_named("smollm-135m"), experts=Experts(count=4, per_token=1, intermediate=1), published_parameters=0
    )
    step = Roofline(model=model, device=device_named("h100"))
    # Two tokens, one of four experts each: they share one in a quarter of cases.
    each = 3 * 576 * 30 * 2
    assert step.parts(StepWork(computed_tokens=2))[1].bytes == pytest.approx(each * (2 - 1 / 4))
