"""Kernel tables: read from a folder, fitted, kept in a file, and asked."""

import csv
import itertools
import json
import math

import numpy as np
import pytest

from paged.errors import BadHardwareFile, BadKernelRow, UnknownDevice, UnknownKernel
from paged.study.hardware import device_named
from paged.study.hardware.kernels import KernelTables, fit_folder, kernel_names, kernels_named, read_folder
from paged.study.hardware.kernels.completion import completed

LAUNCH_MS = 0.004
ROWS = (1, 16, 17, 32, 33, 64, 65, 128, 129, 256)
WIDTHS = (256, 1024, 4096)
COUNTS = (1, 2, 4, 8)
TOKENS = (16, 256, 4096)


def product_ms(m, n, k):
    """A staircase: rows are computed 16 at a time, at half the H100's peak, and weights are read at half its bandwidth."""
    tiles = 16 * math.ceil(m / 16)
    return LAUNCH_MS + 1e3 * 2 * max(2 * tiles * n * k / 989.4e12, 2 * n * k / 3.35e12)


def attention_ms(batch, heads, tokens, is_prefill):
    seconds = batch * heads * tokens * (tokens / 2 if is_prefill else 1) * 128 * 4 / 100e12
    return 2 * LAUNCH_MS + 1e3 * (seconds + batch * tokens * 1e-9)


def tables():
    """A folder's tables by their names: rows of a known law."""
    attention = {"num_key_value_heads": 1, "head_dim": 128, "kv_cache_dtype": "bfloat16", "window_size": 0}
    sizes = list(itertools.product(COUNTS, (2, 8), TOKENS))
    return {
        "gemm_perf": [
            {"version": "1", "gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": product_ms(m, n, k)}
            for m, n, k in itertools.product(ROWS, WIDTHS, WIDTHS)
        ],
        "context_attention_perf": [
            {**attention, "batch_size": b, "num_heads": h, "isl": t, "latency": attention_ms(b, h, t, True)}
            for b, h, t in sizes
        ],
        "generation_attention_perf": [
            {**attention, "batch_size": b, "num_heads": h, "step": t - 1, "latency": attention_ms(b, h, t, False)}
            for b, h, t in sizes
        ],
        "custom_allreduce_perf": [
            {"backend": f"vllm_{how}", "num_gpus": g, "message_size": s, "latency": LAUNCH_MS + s * g * 1e-8}
            for how, g, s in itertools.product(("graph", "eager"), (2, 4), (1024, 65536, 1048576))
        ],
    }


def written(folder, of):
    for name, rows in of.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return folder


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    return fit_folder(written(tmp_path_factory.mktemp("kernels"), tables()), "h100")


def is_the_law(found):
    """Whether a product is answered as it was measured, to the rounding."""
    return found.product("bf16", 64, 1024, 1024) == pytest.approx(product_ms(64, 1024, 1024) * 1e-3, rel=0.021)


def test_measured_kernels_are_answered_to_the_rounding(fitted):
    law = [product_ms(m, 1024, 4096) * 1e-3 for m in ROWS]
    assert [fitted.product("bf16", m, 1024, 4096) for m in ROWS] == pytest.approx(law, rel=0.021)
    prefill = fitted.prefill_attention("bf16", 4, 256, heads=8, kv_heads=1, head_dim=128)
    decode = fitted.decode_attention("bf16", 4, 256, heads=8, kv_heads=1, head_dim=128)
    assert prefill == pytest.approx(attention_ms(4, 8, 256, True) * 1e-3, rel=0.021)
    assert decode == pytest.approx(attention_ms(4, 8, 256, False) * 1e-3, rel=0.021)
    assert fitted.all_reduce(4, 65536) == pytest.approx((LAUNCH_MS + 65536 * 4e-8) * 1e-3, rel=0.021)
    assert fitted.all_reduce(1, 65536) == 0


def test_rows_that_were_left_out_are_filled_from_their_neighbours(tmp_path):
    of = tables()
    of["gemm_perf"] = [row for place, row in enumerate(of["gemm_perf"]) if place % 10 != 4]
    holed = fit_folder(written(tmp_path, of), "h100")
    whole = read_folder(written(tmp_path, tables()), device_named("h100")).product
    assert holed.error("product", whole).p90 < 0.03


def products(change):
    """Tables whose products are changed row by row; None leaves a row as it is."""
    of = tables()
    of["gemm_perf"] = [{**row, **(change(place, row) or {})} for place, row in enumerate(of["gemm_perf"])]
    return of


def test_of_a_kernel_timed_twice_the_fastest_counts_and_a_device_may_be_named(tmp_path):
    of = tables()
    of["gemm_perf"] += [{**row, "latency": 3 * row["latency"]} for row in of["gemm_perf"]]
    assert is_the_law(fit_folder(written(tmp_path, of), "h100"))
    named = products(lambda place, row: {"device": "NVIDIA H100 80GB HBM3"})
    assert fit_folder(written(tmp_path, named), "h100").name == "h100"


def test_parquet_files_are_read_like_csv(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, rows in tables().items():
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    assert is_the_law(fit_folder(tmp_path, "h100"))


def without(name):
    return {table: rows for table, rows in tables().items() if table != name}


def without_column(name):
    of = tables()
    of["gemm_perf"] = [{other: row[other] for other in row if other != name} for row in of["gemm_perf"]]
    return of


def latency_of_row_7(value):
    return products(lambda place, row: {"latency": value} if place == 7 else None)


def in_microseconds(place, row):
    return {"latency": 1000 * row["latency"]}


def on(device, of_row_5=None):
    return products(lambda place, row: {"device": of_row_5 or device if place == 5 else device})


LATENCY = "gemm_perf.csv, field latency.*row 7 has "


@pytest.mark.parametrize(
    ("of", "error", "words"),
    [
        (without("gemm_perf"), BadHardwareFile, "field gemm_perf: there is neither a .parquet nor a .csv"),
        (without_column("k"), BadHardwareFile, "field k: the column is missing; there are version, gemm_dtype, m, n"),
        (latency_of_row_7(0.0), BadKernelRow, f"{LATENCY}0.0; it has to be finite and above 0"),
        (latency_of_row_7("nan"), BadKernelRow, f"{LATENCY}nan; it has to be finite and above 0"),
        (latency_of_row_7("soon"), BadKernelRow, f"{LATENCY}'soon'; it has to be a number"),
        (latency_of_row_7(1e-7), BadKernelRow, f"{LATENCY}1e-07 ms; at its published rates the device takes"),
        (products(in_microseconds), BadKernelRow, "the shortest has to be below 2 ms: is it in another unit"),
        (on("NVIDIA A100-SXM4-80GB"), BadKernelRow, "NVIDIA A100-SXM4-80GB; kernels of h100 were asked for"),
        (on("NVIDIA H100 80GB HBM3", "NVIDIA H200"), BadKernelRow, "row 5 has NVIDIA H200; the rows before have"),
        (
            products(lambda place, row: {"gemm_dtype": "fp8_block"}),
            BadHardwareFile,
            "no row has one of the dtypes bfloat16, float16, fp8",
        ),
    ],
)
def test_tables_that_cannot_be_are_refused_with_what_is_wrong(tmp_path, of, error, words):
    with pytest.raises(error, match=words) as caught:
        fit_folder(written(tmp_path, of), "h100")
    assert "row 7" not in words or caught.value.row == 7


def test_a_kernel_that_was_not_measured_is_named(fitted, tmp_path):
    with pytest.raises(UnknownKernel, match="of h100 there is no product/fp8; measured are product/bf16"):
        fitted.product("fp8", 1, 1024, 1024)
    with pytest.raises(UnknownKernel, match="of h100 there is no all_reduce/graph; measured are none"):
        fit_folder(written(tmp_path, without("custom_allreduce_perf")), "h100").all_reduce(2, 1024)


def test_a_sum_of_two_effects_is_completed():
    places = (np.arange(6.0), np.arange(5.0))
    whole = np.array([3.0, 1, 4, 1, 5, 9])[:, None] + np.array([2.0, 7, 1, 8, 2])
    holed = whole.copy()
    holed[2, 3] = np.nan
    assert completed(holed, places)[2, 3] == pytest.approx(whole[2, 3], abs=0.2)


def test_a_tiles_edge_stays_a_step(fitted):
    before, after = fitted.product("bf16", [128, 129], 4096, 4096)
    assert after / before == pytest.approx(product_ms(129, 4096, 4096) / product_ms(128, 4096, 4096), rel=0.042)


def test_beyond_the_most_rows_a_full_device_goes_on_in_a_straight_line(fitted):
    rows = np.array([256, 2048, 4096, 6144])
    seconds = fitted.product("bf16", rows, 4096, 4096)
    assert seconds[2] - seconds[1] == pytest.approx(seconds[3] - seconds[2])
    assert seconds == pytest.approx([product_ms(m, 4096, 4096) * 1e-3 for m in rows], rel=0.15)


def test_kv_heads_that_were_not_measured_are_answered_by_more_sequences_of_fewer(fitted):
    asked = {"heads": 16, "kv_heads": 2, "head_dim": 128}
    instead = fitted.decode_attention("bf16", 8, 256, heads=8, kv_heads=1, head_dim=128)
    assert fitted.decode_attention("bf16", 4, 256, **asked) == instead
    assert fitted.attention_coverage("decode", "bf16", 4, 256, **asked).instead == "decode/bf16/128/0/1"


def test_coverage_says_on_which_axis_and_how_far_a_size_is_outside(fitted):
    assert fitted.product_coverage("bf16", [1, 64], 1024, 300).is_inside
    coverage = fitted.product_coverage("bf16", [1, 512], 1024, 64)
    assert coverage.beyond == {"m": 2.0, "k": 4.0}
    assert not coverage.is_inside


def test_a_saved_file_answers_alike(fitted, tmp_path):
    fitted.save(tmp_path / "mine.json")
    loaded = KernelTables.load(tmp_path / "mine.json")
    assert (loaded.errors, loaded.device, loaded.launch) == (fitted.errors, fitted.device, fitted.launch)
    for key, grid in fitted.grids.items():
        assert loaded.grids[key].axes == grid.axes
        assert (loaded.grids[key].steps == grid.steps).all()
        assert (loaded.grids[key].is_measured == grid.is_measured).all()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda file: file.update(format=9), "field format: kernel tables of format 9; this paged reads 1"),
        (lambda file: file.pop("format"), "field format: no kernel tables"),
        (lambda file: file["grids"].update(steps="cc"), "packed numbers are damaged"),
        (lambda file: file["grids"].update(measured=file["grids"]["steps"]), "its axes want"),
        (lambda file: file["grids"]["axes"].update({"product/fp8": {"m": 99}}), "axes has 99 as m of product/fp8"),
        (lambda file: file["launch"].pop("decode"), "it has no seconds of decode"),
        (lambda file: file.update(colour="red"), "colour"),
    ],
)
def test_a_damaged_file_is_named(fitted, tmp_path, change, problem):
    path = tmp_path / "mine.json"
    fitted.save(path)
    file = json.loads(path.read_text())
    change(file)
    path.write_text(json.dumps(file))
    with pytest.raises(BadHardwareFile, match="mine.json") as caught:
        KernelTables.load(path)
    assert problem in str(caught.value)


def test_the_tables_that_ship_are_those_of_three_devices():
    assert kernel_names() == ["a100-80g", "h100", "h200"]
    with pytest.raises(UnknownDevice):
        kernels_named("h1000")


@pytest.mark.parametrize("name", kernel_names())
def test_a_product_is_never_faster_than_the_published_peak(name):
    tables = kernels_named(name)
    rows = np.unique(np.geomspace(1, 65536, 100).round())[:, None, None]
    widths, depths = np.array([256, 4096, 28672])[:, None], np.array([512, 4096, 14336])
    least = 2 * rows * widths * depths / tables.device.peak("bf16")
    assert (tables.product("bf16", rows, widths, depths) > 0.9 * least).all()


@pytest.mark.parametrize("name", kernel_names())
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (28, 4), (32, 32), (64, 16)])
def test_attention_takes_longer_for_more_tokens_and_never_less_than_memory_allows(name, heads, kv_heads):
    tables = kernels_named(name)
    batch, tokens = np.array([1, 16, 256])[:, None], np.geomspace(16, 65536, 40).round()
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": 128}
    decode = tables.decode_attention("bf16", batch, tokens, **sizes)
    prefill = tables.prefill_attention("bf16", batch, tokens, **sizes)
    read = batch * tokens * kv_heads * 128 * 2 * 2 / tables.device.bandwidth
    assert (decode > 0.9 * read).all()
    for seconds in (decode, prefill):
        assert (seconds[:, 1:] > 0.85 * seconds[:, :-1]).all()


@pytest.mark.parametrize("name", kernel_names())
def test_arrays_are_answered_like_numbers(name):
    tables = kernels_named(name)
    rows = np.array([1, 20, 300, 5000, 70000])
    sizes = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    assert tables.product("bf16", rows, 4096, 4096).tolist() == [tables.product("bf16", m, 4096, 4096) for m in rows]
    assert tables.decode_attention("bf16", rows, 900, **sizes).tolist() == [
        tables.decode_attention("bf16", b, 900, **sizes) for b in rows
    ]
    assert tables.all_reduce(4, rows).tolist() == [tables.all_reduce(4, size) for size in rows]
