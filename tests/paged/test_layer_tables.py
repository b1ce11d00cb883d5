"""Tables of one model's layers: read from others' folders, fitted, saved, and asked."""

import numpy as np
import pytest

from paged.errors import BadHardwareFile, BadKernelRow
from paged.study.hardware import model_named
from paged.study.hardware.kernels.layer_measurements import described, read_layers
from paged.study.hardware.kernels.layer_tables import LayerTables
from paged.study.hardware.kernels.multilinear import Multilinear

from .files_of_others import seconds, write_folder  # noqa: TID252


def fitted(folder):
    return LayerTables.fit(read_layers(folder), name="own", device="rtx4090", model=model_named("llama-3.1-8b"))


def test_attention_is_met_where_it_was_timed_and_between(tmp_path):
    attention = fitted(write_folder(tmp_path)).layer_attention
    for at in ((16, 64, 8, 1024), (256, 0, 0, 0), (0, 0, 64, 128)):
        assert attention.at(*map(float, at)) == pytest.approx(seconds(*at), rel=0.003)
    # Linear in what decoding reads: exact between the lengths, and beyond them.
    assert attention.at(0.0, 0.0, 64.0, 500.0) == pytest.approx(seconds(0, 0, 64, 500), rel=0.01)
    assert attention.at(0.0, 0.0, 64.0, 4096.0) == pytest.approx(seconds(0, 0, 64, 4096), rel=0.02)
    assert attention.at(0.0, 0.0, 0.0, 0.0) == 0


def test_a_hole_is_filled_from_its_neighbours(tmp_path):
    hole = (64, 64, 8, 128)
    write_folder(tmp_path, lambda name, rows: [row for row in rows if tuple(row[:4]) != hole])
    assert fitted(tmp_path).layer_attention.at(*map(float, hole)) == pytest.approx(seconds(*hole), rel=0.05)


def test_dense_layers_are_counted_as_often_as_a_step_goes_through_them(tmp_path):
    tables = fitted(write_folder(tmp_path))
    each = (10 + 0.1 * 8) * 1e-6
    # A product and two norms a layer, an embedding once.
    assert tables.dense_seconds(np.array([8.0]))[0] == pytest.approx((32 * 3 + 1) * each, rel=1e-3)
    assert tables.dense_seconds(np.array([1024.0]))[0] == pytest.approx((32 * 3 + 1) * (10 + 102.4) * 1e-6, rel=1e-3)
    assert tables.head_seconds(np.array([16.0]))[0] == pytest.approx(72e-6)


def test_a_file_is_what_was_fitted(tmp_path):
    tables = fitted(write_folder(tmp_path))
    tables.save(tmp_path / "t.json")
    again = LayerTables.load(tmp_path / "t.json")
    assert again == tables
    assert again.is_of(model_named("meta-llama/Llama-3.1-8B"))
    assert not again.is_of(model_named("qwen3-8b"))
    (tmp_path / "t.json").write_text(
        (tmp_path / "t.json").read_text().replace(tables.attention, tables.attention[:-20])
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


def of_row(row, column, value):
    return lambda rows: [*rows[:row], [*rows[row][:column], value, *rows[row][column + 1 :]], *rows[row + 1 :]]


@pytest.mark.parametrize(
    ("table", "spoil", "error", "words"),
    [
        ("attention", of_row(3, 4, -2.0), BadKernelRow, "row 4.*-2"),
        ("attention", of_row(3, 4, 0.005), BadKernelRow, "row 4.*another unit"),
        ("attention", of_row(3, 4, 1e9), BadKernelRow, "row 4.*another unit"),
        ("attention", of_row(3, 4, "soon"), BadKernelRow, "row 4.*number"),
        ("attention", of_row(3, 2, -1), BadKernelRow, "row 4.*0 or more"),
        ("attention", lambda rows: [*rows, [*rows[5][:4], 99.0]], BadKernelRow, "row 6 has .* for the same sizes"),
        ("dense", of_row(2, 2, "nan"), BadKernelRow, "row 3.*another unit"),
        ("dense", lambda rows: [row[:-1] for row in rows], BadHardwareFile, "time_us"),
    ],
)
def test_a_table_that_cannot_be_is_named_with_its_row(tmp_path, table, spoil, error, words):
    write_folder(tmp_path, lambda name, rows: spoil(rows) if name == table else rows)
    with pytest.raises(error, match=words) as caught:
        read_layers(tmp_path)
    assert caught.value.path.name == f"{table}.csv"


def test_a_missing_file_is_named(tmp_path):
    (write_folder(tmp_path) / "dense.csv").unlink()
    with pytest.raises(BadHardwareFile, match=r"dense\.csv.*no such file"):
        read_layers(tmp_path)


def test_numbers_and_arrays_are_answered_alike():
    table = np.random.default_rng(1).random((3, 4, 2))
    lines = Multilinear([(0, 1, 5), (0, 2, 3, 9), (1, 2)], table)
    draws = np.random.default_rng(2).uniform(-1, 11, (50, 3))
    one_by_one = [lines.at(*map(float, sizes)) for sizes in draws]
    np.testing.assert_allclose(lines.at(*draws.T), one_by_one)
    assert lines.at(5.0, 9.0, 2.0) == table[2, 3, 1]
