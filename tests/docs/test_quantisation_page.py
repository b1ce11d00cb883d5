"""docs/quantisation.md: its commands do what it says, and its figures are those that a pool has."""

import re

import torch

from paged.attention import KVPool

PAGE = "docs/quantisation.md"


def test_every_command_answers(answers, tmp_path, monkeypatch):
    num_found = 0
    held_out = ["The with statement is used to wrap the execution of a block with methods. " * 40]
    monkeypatch.setattr("paged.cli.accuracy.held_out_text", lambda: held_out)
    # Some write a folder, and others read it.
    monkeypatch.chdir(tmp_path)
    for line, arguments, out in answers():
        num_found += 1
        if "--quantization" in arguments and arguments[0] != "generate":
            assert f"in {arguments[arguments.index('--quantization') + 1]}" in out, line
        if "embedded-int4" in arguments and arguments[0] == "capacity":
            assert "in compressed-tensors, 4 bits, groups of 32 and" in out, line
        if arguments[0] == "generate":
            assert len(out.strip()) > len("The with statement")
        elif arguments[0] == "quantise":
            assert (tmp_path / arguments[-1] / "config.json").is_file()
        else:
            option = next(each for each in arguments if "kv" in each and each.endswith("dtype"))
            kv_dtype = arguments[arguments.index(option) + 1]
            assert all(each in out for each in kv_dtype.split(",")), line
    assert num_found == 19


def test_it_says_how_many_tokens_fit(page):
    told = {
        name: re.findall(r"(\d\.\d\d) ×", line)
        for name, line in re.findall(r"^\| `(int\d)`(.*)$", page.partition("## Weights")[0], re.M)
    }
    for kv_dtype, times in told.items():
        for size, value in zip((64, 128), times, strict=True):
            shape = {"num_layers": 1, "block_size": 16, "num_kv_heads": 1, "head_dim": size, "dtype": torch.bfloat16}
            found = KVPool.bytes_per_block(**shape) / KVPool.bytes_per_block(**shape, kv_dtype=kv_dtype)
            assert f"{found:.2f}" == value
    assert set(told) == {"int8", "int4"}
