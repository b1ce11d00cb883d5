"""docs/quantisation.md: its commands do what it says, and its figures are those that a pool has."""

import re
import shlex

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from paged.attention import KVPool
from paged.cli.app import run

PAGE = "docs/quantisation.md"


def test_every_command_answers(page, fences, repository, capsys, monkeypatch):
    found = [line for block in fences(page, "") for line in block.splitlines()]
    assert len(found) == 9
    monkeypatch.chdir(repository)
    for line in found:
        program, *arguments = shlex.split(line)
        assert program == "paged"
        assert run(arguments) == 0, line
        out = capsys.readouterr().out
        if "--quantization" in arguments and arguments[0] != "generate":
            assert f"{arguments[arguments.index('--quantization') + 1]} and bf16" in out, line
        if arguments[0] == "generate":
            assert len(out.strip()) > len("The with statement")
        else:
            kv_dtype = arguments[
                arguments.index(next(each for each in arguments if "dtype" in each and "kv" in each)) + 1
            ]
            assert kv_dtype in out, line


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
