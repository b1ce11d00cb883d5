"""`paged quantise` and `paged accuracy`: what is written can be read, what is read is compared, and what goes wrong leaves nothing."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from paged.errors import BrokenCheckpoint, InvalidConfig, UnwritablePath
from paged.model.checkpoint import checkpoint_path, draft_path
from paged.model.loading import load_model
from paged.model.quantised import writing
from paged.model.quantised.checkpoints import reader_of
from paged.model.quantised.weights import quantise
from paged.model.quantised.writing import packed, write_quantised
from paged.study.accuracy import Read, compared, pieces_of  # noqa: F401

from ..shown import assert_refused, shown_in  # noqa: TID252

LAYER = "model.layers.0.mlp.down_proj"


@pytest.fixture
def draft(tmp_path):
    """A copy of the smallest model that ships, with a tokenizer."""
    folder = Path(shutil.copytree(draft_path(), tmp_path / "draft"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint_path() / name, folder)
    return folder


def test_words_hold_codes_the_first_in_the_lowest_bits():
    assert packed(torch.tensor([[1, 2, 3]], dtype=torch.uint8), 4).tolist() == [[0x321]]
    assert packed(torch.tensor([[255, 0, 0, 255, 7]], dtype=torch.uint8), 8).tolist() == [[0xFF0000FF - 2**32, 7]]


@pytest.mark.parametrize(("weights", "group_size", "bits"), [("int4", None, 4), ("int8", None, 8), ("int8", 64, 8)])
def test_what_is_written_is_read_as_the_nearest_codes(draft, tmp_path, weights, group_size, bits):
    out = tmp_path / "out"
    made = write_quantised(draft, out, weights=weights, group_size=group_size)
    found = reader_of(AutoConfig.from_pretrained(out), out)
    assert found is not None and len(found.layers) == len(made.layers) == 3 * 7
    floats = load_file(draft / "model.safetensors")
    groups = group_size or (32 if bits == 4 else None)
    for layer in made.layers:
        weight, ours = floats[f"{layer.name}.weight"], found.weight_of(layer.name)
        expected = quantise(weight, bits=bits, group_size=groups, scale_dtype=torch.float16)
        assert ours is not None and torch.equal(ours.dequantised(), expected.dequantised())
        assert layer.error == pytest.approx(float((ours.dequantised() - weight).norm() / weight.float().norm()))
    assert made.bytes_after == sum(each.nbytes for each in load_file(out / "model.safetensors").values())
    assert made.bytes_after < made.bytes_before * (0.55 if bits == 4 else 0.75)
    embedding = "model.embed_tokens.weight"
    assert torch.equal(load_file(out / "model.safetensors")[embedding], floats[embedding])
    assert load_model(out).tokenizer is not None


def test_a_large_checkpoint_is_written_in_shards(draft, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_SHARD_BYTES", 60_000)
    write_quantised(draft, tmp_path / "out", weights="int4")
    names = {each.name for each in (tmp_path / "out").glob("*.safetensors")}
    assert len(names) > 2 and not (tmp_path / "out" / "model.safetensors").exists()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == names
    assert load_model(tmp_path / "out").num_layers == 3


def harmed(folder, change):
    """The folder, this being done to a weight."""
    held = load_file(folder / "model.safetensors")
    weight = change(held.pop(f"{LAYER}.weight"))
    save_file(held if weight is None else {**held, f"{LAYER}.weight": weight}, folder / "model.safetensors")
    return folder


def with_text(folder, name, text):
    (folder / name).write_text(text)
    return folder


def coded(folder):
    """The folder, which says that its weights are codes."""
    config = json.loads((folder / "config.json").read_text())
    return with_text(
        folder, "config.json", json.dumps(config | {"quantization_config": {"quant_method": "compressed-tensors"}})
    )


@pytest.mark.parametrize(("call", "shown"), shown_in("paged/fixtures/refused_quantising.txt", ">>>"))
def test_what_cannot_be_written_is_refused_before_a_folder_is_made(draft, tmp_path, monkeypatch, call, shown):
    monkeypatch.setattr(writing, "_made_whole", None)
    assert_refused(call, shown, globals() | {"draft": draft, "out": tmp_path / "out"})
    assert {each.name for each in tmp_path.iterdir()} == {"draft"}


def assert_nothing_is_left(draft, error, words, **options):
    """Fail unless writing this folder's weights raises that, and leaves nothing behind."""
    with pytest.raises(error, match=words):
        write_quantised(draft, draft.parent / "out", weights="int4", **options)
    assert {each.name for each in draft.parent.iterdir()} == {"draft"}


def test_weights_that_are_no_numbers_and_files_that_are_cut_leave_nothing_behind(draft):
    held = load_file(draft / "model.safetensors")
    held[f"{LAYER}.weight"][0, 0] = torch.nan
    save_file(held, draft / "model.safetensors", metadata={"format": "pt"})
    assert_nothing_is_left(draft, InvalidConfig, f"{LAYER}.*NaN or infinite")
    (draft / "model.safetensors").write_bytes((draft / "model.safetensors").read_bytes()[:-9])
    assert_nothing_is_left(draft, BrokenCheckpoint, "model.safetensors cannot be read")


def test_a_full_disk_is_told_by_the_folder_and_leaves_nothing_behind(draft, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        assert_nothing_is_left(draft, UnwritablePath, f"^{tmp_path}/out: cannot be written, .*File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("call", ["chmod", "rename"])
def test_a_file_system_that_refuses_a_mode_or_a_name_is_told_by_the_folder(draft, tmp_path, monkeypatch, call):
    monkeypatch.setattr(Path, call, lambda *_: os.rmdir("/proc/self/task"))
    assert_nothing_is_left(draft, UnwritablePath, f"^{tmp_path}/out: cannot be written, .*Operation not permitted")


def test_files_have_the_mode_that_the_process_gives(draft, tmp_path):
    before = os.umask(0o027)
    try:
        write_quantised(draft, tmp_path / "out", weights="int4")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert {each.stat().st_mode & 0o777 for each in (tmp_path / "out").iterdir()} == {0o640}


def test_an_interrupt_leaves_nothing_behind(draft):
    def stop(layer, count):
        raise KeyboardInterrupt

    assert_nothing_is_left(draft, KeyboardInterrupt, None, on_layer=stop)


def test_the_command_reports_bytes_errors_losses_and_what_stays_floats(document, printed, draft, tmp_path):
    text = tmp_path / "text"
    text.write_text("The with statement is used to wrap the execution of a block with methods.")
    found = document("quantise", draft, "--out", tmp_path / "out", "--weights", "int8", "--text", text)
    assert found["bytes_after"] < found["bytes_before"]
    assert len(found["layers"]) == 21 and all(0 < each["error"] < 0.02 for each in found["layers"])
    assert found["loss_after"] == pytest.approx(found["loss_before"], rel=0.05)
    assert found["loss_after"] != found["loss_before"]
    # Of each of 3 layers two norms, of 64 float16.
    assert found["bytes_not_linear"] == 3 * 2 * 64 * 2
    said = printed("quantise", draft, "--out", tmp_path / "other")
    assert re.search(r"floats in layers: 768 bytes of no linear layer \(norms, experts\): 0% of what is written", said)


def test_accuracy_compares_each_way_with_floats(document, draft, tmp_path):
    text = tmp_path / "text"
    text.write_text("The with statement is used to wrap the execution of a block with methods. " * 12)
    found = document("accuracy", draft, "--text", text, "--length", 64)["ways"]
    ways = {(each["weights"], each["kv_dtype"]): each for each in found}
    assert set(ways) == {(one, other) for one in ("as-is", "int8", "int4") for other in ("auto", "int8", "int4")}
    base = ways["as-is", "auto"]
    assert base["change"] == base["differing"] == base["mean_error"] == 0 < base["loss"]
    assert 0 < ways["int8", "auto"]["mean_error"] < ways["int4", "auto"]["mean_error"]
    assert 0 < ways["as-is", "int8"]["mean_error"] < ways["as-is", "int4"]["mean_error"]
    assert all(each["p99_error"] >= each["mean_error"] for each in found)


def test_differences_are_counted_by_hand():
    base = Read(np.array([1, 2, 3, 4]), np.array([0.9, 0.9, 0.2, 0.8]), np.array([-1.0, -1.0, -1.0, -1.0]))
    found = Read(np.array([1, 5, 6, 4]), np.array([0.9, 0.9, 0.2, 0.8]), np.array([-1.0, -2.0, -1.0, -1.0]))
    told = compared(base, found, weights="int4", kv_dtype="auto")
    assert (told.loss, told.change, told.differing, told.mean_error) == (1.25, 0.25, 0.5, 0.25)
    assert told.differing_where_sure == pytest.approx(1 / 3) and told.sure == 0.75
    assert told.p99_error == pytest.approx(0.97)
