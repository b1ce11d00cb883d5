"""Tables of one model's layers: read from others' folders, fitted, saved, and asked."""

import numpy as np
import pytest

from paged.errors import BadHardwareFile
from paged.study.hardware import model_named
from paged.study.hardware.kernels.layer_measurements import described, read_layers
from paged.study.hardware.kernels.layer_tables import LayerTables

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
