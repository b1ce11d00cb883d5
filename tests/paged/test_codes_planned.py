"""Weights in codes where runs are planned: every command takes them, counts them, or refuses them by name."""

import json

import pytest

from paged.errors import BadHardwareFile
from paged.study.hardware import Roofline, StepWork, device_named, model_named
from paged.study.hardware.measured import layers_in

from .files_of_others import CONFIGS  # noqa: TID252

LLAMA = {"model": model_named("llama-3-8b"), "device": device_named("h100")}
ON = ("--model", "llama-3-8b", "--device", "h100")
LOAD = ("synthetic:poisson,rate=2,requests=4,prompt=100,output=5", *ON)
CODES = ("-q", "int4", "--quantize-head")


def test_a_head_in_codes_has_a_byte_a_weight_and_a_scale_a_token_and_a_step_reads_it():
    plain, coded = Roofline(**LLAMA, quantization="int4"), Roofline(**LLAMA, quantization="int4", quantize_head=True)
    vocab, hidden = 128_256, 4096
    assert plain.weight_bytes - coded.weight_bytes == 2 * vocab * hidden - (vocab * hidden + 4 * vocab)
    sampled, silent = (StepWork.of_rows([1], [10], sampled_rows=rows) for rows in (1, 0))
    assert coded.bytes_read(sampled) - coded.bytes_read(silent) == vocab * hidden + 4 * vocab + 4 * vocab
    assert "the output projection int8" in coded.notes[0]


def test_an_embedding_that_shares_the_head_s_weights_shares_its_codes():
    model = model_named("smollm-135m")
    tied = [
        Roofline(model=model, device=device_named("h100"), quantization="int8", quantize_head=head)
        for head in (False, True)
    ]
    head = model.vocab * model.hidden
    assert tied[0].weight_bytes - tied[1].weight_bytes == 2 * head - (head + 4 * model.vocab)
    assert any("The embedding shares the head's codes" in note for note in tied[1].notes)


def test_capacity_simulate_and_plan_count_them_alike(document):
    capacity = document("capacity", "llama-3-8b", "--device", "h100", *CODES)
    assert (capacity["quantization"], capacity["quantize_head"]) == ("int4", True)
    plain, coded = (document("simulate", *LOAD, *more)[0] for more in ((), CODES))
    assert (coded["quantization"], coded["quantize_head"]) == ("int4", True)
    assert "weights in int4 were not timed" in coded["timed_by"]
    assert coded["num_blocks"] > plain["num_blocks"]
    (plan,) = document("plan", *LOAD, *CODES, "--find", "rate", "--ttft", 10, "--no-explain", "--jobs", 1)
    assert (plan["quantization"], plan["quantize_head"], plan["notes"][0]) == ("int4", True, capacity["notes"][0])


def test_simulate_and_plan_say_as_capacity_does_what_a_model_is_stored_as(document, tmp_path):
    pytest.importorskip("torch")
    stored = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["LLAMA"], "quantization_config": stored}))
    on = ("--model", str(tmp_path), "--device", "h100")
    capacity = document("capacity", str(tmp_path), "--device", "h100")
    (simulated,) = document("simulate", LOAD[0], *on)
    (plan,) = document("plan", LOAD[0], *on, "--find", "rate", "--ttft", 10, "--no-explain", "--jobs", 1)
    assert [each["quantization"] for each in (capacity, simulated, plan)] == ["GPTQ, 4 bits, groups of 32"] * 3


def test_windows_stay_in_floats_beside_full_layers_in_codes(document):
    gemma, stored = ("gemma-3-27b", "--device", "h100"), ("--kv-dtype", "int4")
    skip = (*stored, "--kv-dtype-skip-layers", "sliding_window")
    plain, coded, mixed = (document("capacity", *gemma, *more) for more in ((), stored, skip))
    full, windows, token = 10, 52, 2 * 16 * 128
    in_codes = 2 * 16 * (64 + 2)
    assert mixed["kv_bytes_per_token"] == full * in_codes + windows * token * 2
    assert coded["kv_bytes_per_token"] < mixed["kv_bytes_per_token"] < plain["kv_bytes_per_token"]
    assert "K and V of sliding_window layers are kept in bf16" in mixed["notes"]
    held = {str(length): mixed["pages"]["bytes_of_a_sequence"][str(length)]["held"] for length in (8192, 131072)}
    kept = full * in_codes * 131072 + windows * token * 2 * 1023
    assert kept <= held["131072"] <= 1.04 * kept
    (found,) = document("simulate", LOAD[0], "--model", *gemma, *skip, "--limit", 2)
    assert found["kv_dtype_skip_layers"] == ["sliding_window"]


def test_kernels_and_layers_that_were_timed_with_floats_say_nothing_of_codes(tmp_path):
    path = tmp_path / "kernels.json"
    path.write_text("{}")
    with pytest.raises(BadHardwareFile, match="timed with weights as floats, and these are in int8"):
        layers_in(path, Roofline(**LLAMA, quantization="int8"))
