"""A step's seconds, by published figures and by tables of kernels and layers, which are read and fitted."""

import math

import msgspec
import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings, strategies as st
from pyarrow import parquet

from paged.errors import BadHardwareFile
from paged.study.hardware import Faster, Roofline, StepWork, device_named, model_named
from paged.study.hardware.derived_layers import DerivedLayers, Timing
from paged.study.hardware.device import Link
from paged.study.hardware.kernels import KernelTables, fit_folder, kernel_names, read_folder  # noqa: F401
from paged.study.hardware.kernels.layer_measurements import described, read_layers
from paged.study.hardware.kernels.layer_tables import LayerTables
from paged.study.hardware.measured import holds_kernels, measured_layers, step_of
from paged.study.hardware.measured_step import MeasuredStep
from paged.study.simulator import Device

from .files_of_others import assert_by_hand, by_hand_in, kernel_tables, product_ms, seconds, write_folder, write_kernels  # noqa: TID252

SHIPPED = [
    ("llama-3-8b", "a100-80g", "bf16", 1), ("llama-3.1-8b", "h100", "bf16", 1), ("llama-3.1-70b", "h200", "fp8", 4),
    ("mixtral-8x7b", "h100", "bf16", 2), ("llama-3.1-8b", "rtx4090", "bf16", 1), ("qwen3-32b", "rtxpro6000", "bf16", 1),
]  # fmt: skip


def roofline(model="llama-3.1-8b", device="h100", dtype="bf16", degree=1, **more):
    return Roofline(model=model_named(model), device=device_named(device), dtype=dtype, tensor_parallel=degree, **more)


def decode(rows, length):
    return StepWork.of_rows([1] * rows, [length] * rows, sampled_rows=rows)


def prompt(tokens, context=None):
    return StepWork.of_rows([tokens], [context or tokens], sampled_rows=1)


@pytest.mark.parametrize(("model", "device", "dtype", "degree"), SHIPPED)
def test_measured_steps_are_no_faster_than_the_data_sheet_and_not_absurdly_slower(model, device, dtype, degree):
    figures = roofline(model, device, dtype, degree, compute_efficiency=1.0, memory_efficiency=1.0, host_overhead_s=0.0)
    step = step_of(figures)
    assert isinstance(step, MeasuredStep)
    for work in (decode(1, 1024), decode(32, 1024), decode(128, 512), prompt(512), prompt(2048)):
        # 8 % for a card whose sheet has its sustained clock.
        assert 0.92 * figures.seconds(work) <= step.seconds(work) <= 8 * figures.seconds(work)


@pytest.mark.parametrize(("model", "device", "dtype", "degree"), SHIPPED)
def test_arrays_are_answered_as_their_numbers(model, device, dtype, degree):
    step = step_of(roofline(model, device, dtype, degree))
    nothing = StepWork(computed_tokens=0.0)
    moved = StepWork(computed_tokens=0.0, moved_tokens=64.0)
    steps = [decode(1, 10), decode(7, 300), decode(300, 900), nothing, moved]
    mixed = [*steps, prompt(100), StepWork.of_rows([1, 1, 200], [40, 900, 500], sampled_rows=2)]
    for some in (steps, mixed):
        alone = [step.seconds(each) for each in some]
        np.testing.assert_allclose(step.seconds(StepWork.of_steps(some)), alone, rtol=1e-12)
    assert step.seconds(StepWork(computed_tokens=0)) == 0


@pytest.mark.parametrize("work", [decode(16, 1024), prompt(2048)])
def test_a_faster_device_is_faster_by_what_binds(work):
    step = step_of(roofline())
    better = {name: step_of(roofline(faster=Faster(**{name: 2.0}))) for name in ("arithmetic", "bandwidth")}
    gains = {name: step.seconds(work) / each.seconds(work) for name, each in better.items()}
    bound, other = ("bandwidth", "arithmetic") if work.decode_rows else ("arithmetic", "bandwidth")
    assert gains[bound] > 1.4
    assert gains[other] < 1.25
    no_host = step_of(roofline(faster=Faster(host=math.inf)))
    assert step.seconds(work) - no_host.seconds(work) == pytest.approx(step.launching.host_s)


@pytest.mark.parametrize(("model", "other"), [("qwen3-32b", "llama-3.1-8b"), ("llama-3.1-8b", "qwen3-32b")])
def test_layers_derived_from_another_models_are_near_to_those_that_were_timed(model, other):
    own, timed = step_of(roofline(model, "rtxpro6000")), measured_layers(roofline(other, "rtxpro6000"))
    layers = DerivedLayers((Timing(timed, model_named(other)),), own.roofline)
    derived = MeasuredStep(layers, own.roofline, own.launching)
    both = StepWork.of_rows([1] * 120 + [900, 900], [900] * 120 + [900, 900], sampled_rows=122)
    for work in (decode(1, 1000), decode(64, 1000), decode(256, 600), prompt(512), prompt(2048), both):
        assert derived.seconds(work) == pytest.approx(own.seconds(work), rel=0.11)


@pytest.mark.parametrize("published", [True, False])
def test_ranks_that_share_experts_take_as_long_as_the_slowest_and_what_all_do_together(published):
    pair = roofline("qwen3-30b-a3b", "rtxpro6000", data_parallel=2)
    step = step_of(pair, published=published)
    alike = step.together([decode(16, 500), decode(16, 500)])
    assert alike == pytest.approx(step.seconds(decode(16, 500)), rel=1e-9)
    uneven = step.together([decode(16, 500), decode(1, 10)])
    assert step.together([decode(1, 10), decode(1, 10)]) < uneven <= alike
    slow = Link(bytes_per_s=1e9, latency_s=1e-3)
    late = step_of(msgspec.structs.replace(pair, link=slow), published=published)
    # An all-gather and a reduce-scatter in each of 48 layers.
    assert late.together([decode(16, 500)] * 2) > alike + 48 * 2 * 0.9e-3


def test_kernels_in_a_file_are_those_of_the_device_that_is_asked_for(tmp_path):
    path = tmp_path / "own.json"
    measured_layers(roofline(device="rtx4090")).save(path)
    assert holds_kernels(path)
    own = Device(model="llama-3.1-8b", device="rtx4090", profile=str(path)).cost_model()
    assert own.seconds(decode(8, 100)) == step_of(roofline(device="rtx4090")).seconds(decode(8, 100))


ROOFLINES = [
    roofline("llama-2-13b", "a100-40g"),
    roofline("llama-3-70b", "h100", degree=4),
    roofline("deepseek-v2", "h200", degree=8),
    roofline("deepseek-v2", "h200", degree=8, split_context=True),
    roofline("opt-13b", "cpu"),
    roofline("llama-2-70b", "groq-lpu", dtype="fp16", degree=1024, split_context=True),
]


@st.composite
def works(draw):
    """Steps of up to 64 rows, each as the rows' lengths make it."""
    tokens = draw(st.lists(st.integers(1, 600), min_size=1, max_size=64))
    before = draw(st.lists(st.integers(0, 30_000), min_size=len(tokens), max_size=len(tokens)))
    context = np.add(tokens, before)
    work = StepWork.of_rows(tokens, context, sampled_rows=draw(st.integers(0, len(tokens))))
    return msgspec.structs.replace(work, moved_tokens=draw(st.sampled_from([0, 16, 4096])))


def test_a_step_that_does_nothing_takes_no_time_and_numbers_give_a_number():
    found = [step.seconds(StepWork(computed_tokens=0)) for step in ROOFLINES]
    assert (found, {type(seconds) for seconds in found}) == ([0.0] * len(ROOFLINES), {float})


@pytest.mark.parametrize("step", ROOFLINES, ids=lambda step: f"{step.model.name}-{step.device.name}")
@settings(max_examples=10)
@given(steps=st.lists(works(), min_size=1, max_size=5))
def test_many_steps_at_once_take_what_each_takes(step, steps):
    columns = {
        name: np.array([getattr(work, name) for work in steps], np.float64) for name in StepWork.__struct_fields__
    }
    together = step.seconds(StepWork(**columns))
    assert together.shape == (len(steps),)
    assert together.tolist() == pytest.approx([step.seconds(work) for work in steps], rel=1e-12)


@pytest.mark.parametrize("step", ROOFLINES, ids=lambda step: f"{step.model.name}-{step.device.name}")
@settings(max_examples=20)
@given(work=works(), amount=st.sampled_from(StepWork.__struct_fields__), more=st.integers(1, 10_000))
def test_no_amount_makes_a_step_shorter(step, work, amount, more):
    larger = msgspec.structs.replace(work, **{amount: getattr(work, amount) + more})
    assert step.seconds(larger) >= step.seconds(work)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    return fit_folder(write_kernels(tmp_path_factory.mktemp("kernels"), kernel_tables()), "h100")


def is_the_law(found):
    """Whether a product is answered as it was measured, to the rounding."""
    return found.product("bf16", 64, 1024, 1024) == pytest.approx(product_ms(64, 1024, 1024) * 1e-3, rel=0.021)


def test_rows_that_were_left_out_are_filled_from_their_neighbours(tmp_path):
    of = kernel_tables()
    of["gemm_perf"] = [row for place, row in enumerate(of["gemm_perf"]) if place % 10 != 4]
    holed = fit_folder(write_kernels(tmp_path, of), "h100")
    whole = read_folder(write_kernels(tmp_path, kernel_tables()), device_named("h100")).product
    assert holed.error("product", whole).p90 < 0.03


def test_of_a_kernel_timed_twice_the_fastest_counts_and_a_device_may_be_named(tmp_path):
    of = kernel_tables()
    of["gemm_perf"] += [{**row, "latency": 3 * row["latency"]} for row in of["gemm_perf"]]
    assert is_the_law(fit_folder(write_kernels(tmp_path, of), "h100"))
    of["gemm_perf"] = [{**row, "device": "NVIDIA H100 80GB HBM3"} for row in of["gemm_perf"]]
    assert fit_folder(write_kernels(tmp_path, of), "h100").name == "h100"


def test_parquet_files_are_read_like_csv(tmp_path):
    for name, rows in kernel_tables().items():
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    assert is_the_law(fit_folder(tmp_path, "h100"))


def test_a_saved_file_answers_alike(fitted, tmp_path):
    path = tmp_path / "mine.json"
    fitted.save(path)
    # A file of an earlier version says which cells were measured, too.
    path.write_text(path.read_text().replace('"grids":{', '"grids":{"measured":"",'))
    loaded = KernelTables.load(path)
    assert (loaded.errors, loaded.device, loaded.launch) == (fitted.errors, fitted.device, fitted.launch)
    for key, grid in fitted.grids.items():
        assert loaded.grids[key].axes == grid.axes
        assert (loaded.grids[key].steps == grid.steps).all()


def layers_of(folder):
    return LayerTables.fit(read_layers(folder), name="own", device="rtx4090", model=model_named("llama-3.1-8b"))


def test_a_hole_in_attention_is_filled_from_its_neighbours(tmp_path):
    hole = (64, 64, 8, 128)
    write_folder(tmp_path, lambda name, rows: [row for row in rows if tuple(row[:4]) != hole])
    assert layers_of(tmp_path).layer_attention.at(*map(float, hole)) == pytest.approx(seconds(*hole), rel=0.05)


def test_a_file_of_layers_is_what_was_fitted(tmp_path):
    tables = layers_of(write_folder(tmp_path))
    tables.save(tmp_path / "t.json")
    again = LayerTables.load(tmp_path / "t.json")
    assert again == tables
    assert again.model.differing(model_named("meta-llama/Llama-3.1-8B")) == []
    assert "layers 32, not 36" in again.model.differing(model_named("qwen3-8b"))
    (tmp_path / "t.json").write_text(
        (tmp_path / "t.json").read_text().replace(tables.packed_attention, tables.packed_attention[:-20])
    )
    with pytest.raises(BadHardwareFile):
        LayerTables.load(tmp_path / "t.json")


def test_a_description_is_read_as_far_as_it_is_plain(tmp_path):
    (tmp_path / "meta.yaml").write_text(
        "vllm_version: 0.19.0\nmodel: some/Model\nengine:\n  dtype: x\nfit:\n  per_tp:\n    1:\n      method: m\n"
        "      alpha_default: 0.05\n    2:\n      method: m\n      alpha_default: 0.09\n"
    )
    assert described(tmp_path) == {"vllm_version": "0.19.0", "model": "some/Model", "skew": "0.05"}
    assert described(tmp_path / "nowhere") == {}


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    return layers_of(write_folder(tmp_path_factory.mktemp("layers")))


@pytest.mark.parametrize(("call", "by_hand"), by_hand_in("kernels.txt"))
def test_an_answer_of_tables_is_the_law_of_their_rows(fitted, layers, call, by_hand):
    assert_by_hand(call, by_hand, globals() | {"fitted": fitted, "layers": layers})
