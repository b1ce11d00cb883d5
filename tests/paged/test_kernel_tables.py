"""Tables of kernels, and of one model's layers: read from others' folders, fitted, kept in a file, and asked."""

import pyarrow
import pytest
from pyarrow import parquet

from paged.errors import BadHardwareFile
from paged.study.hardware import device_named, model_named
from paged.study.hardware.kernels import KernelTables, fit_folder, kernel_names, read_folder
from paged.study.hardware.kernels.layer_measurements import described, read_layers
from paged.study.hardware.kernels.layer_tables import LayerTables

from .files_of_others import assert_by_hand, by_hand_in, kernel_tables, product_ms, seconds, write_folder, write_kernels  # noqa: TID252


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


def test_the_tables_that_ship_are_those_of_three_devices():
    assert kernel_names() == ["a100-80g", "h100", "h200"]


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
    assert_by_hand(call, by_hand, {"fitted": fitted, "layers": layers})
