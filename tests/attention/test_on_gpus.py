"""What `triton` and `xformers_splitk` refuse, said without what they need; and the start of the tests that run their kernels.

Triton decides when it is imported whether it interprets, so those tests (`test_interpreted.py`, and `triton` in the tests of all backends) have a process to themselves.
"""

import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.lib import NumpyVersion

from paged.attention import LayerShape, best_backend, get_backend, triton_blocks
from paged.attention.xformers_splitk import Backend, _operator
from paged.errors import UnsupportedByBackend

from ..shown import assert_refused, shown_in  # noqa: TID252

GPU = torch.device("cuda")
CPU = torch.device("cpu")


def shape_with(**changes):
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "block_size": 16, "dtype": torch.float16, "device": GPU}
    return LayerShape(**{**shape, **changes})


@pytest.mark.parametrize("missing", ["xformers.ops.fmha", "triton"])
def test_a_missing_package_is_named_with_what_installs_it(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UnsupportedByBackend, match=r"cannot do anything here \(.*\); paged's extra `gpu` brings"):
        get_backend("xformers_splitk")


def test_a_triton_without_block_pointers_is_refused_with_what_replaces_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.9.0"))
    monkeypatch.setitem(sys.modules, "xformers.ops.fmha", SimpleNamespace())
    with pytest.raises(UnsupportedByBackend, match="anything with Triton 3.9.0, .*; pip install 'triton<3.9'"):
        get_backend("xformers_splitk")


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_on_a_gpu_is_taken(block_size, dtype):
    Backend.check(shape_with(block_size=block_size, dtype=dtype))


@pytest.mark.parametrize(("call", "shown"), shown_in("attention/refused_on_gpus.txt", ">>>"))
def test_a_shape_that_one_does_not_take_is_refused_with_those_that_it_takes(monkeypatch, call, shown):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert_refused(call, shown, {**globals(), "Ours": triton_blocks.Backend})


def test_the_interpreter_takes_float16_alone(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    Backend.check(shape_with(device=CPU))
    with pytest.raises(UnsupportedByBackend, match="torch.bfloat16 on cpu; it takes torch.float16; the backends"):
        Backend.check(shape_with(device=CPU, dtype=torch.bfloat16))


@pytest.mark.parametrize("invariant", [False, True])
def test_on_a_gpu_ours_is_chosen_by_itself_where_it_can_do_the_layers(monkeypatch, invariant):
    monkeypatch.setitem(sys.modules, "paged.attention.block_kernel", SimpleNamespace())
    able = {"head_dim": 80}, {"has_soft_cap": True}, {"has_sinks": True}, {"kv_dtype": "int4"}, {"dtype": torch.float32}
    for changes in ({}, *able):
        chosen = best_backend([shape_with(**changes)], invariant=invariant)
        assert (chosen.name, chosen.is_invariant) == ("triton", invariant)
    for changes in ({"head_dim": 520}, {"dtype": torch.float64}, {"device": CPU, "head_dim": 257}):
        assert best_backend([shape_with(**changes)], invariant=invariant).name == "torch_gather"


def test_where_triton_is_not_installed_another_one_is_chosen(monkeypatch):
    for missing in ("paged.attention.block_kernel", "triton"):
        monkeypatch.setitem(sys.modules, missing, None)
    assert best_backend([shape_with()]).name == "torch_gather"
    with pytest.raises(
        UnsupportedByBackend, match=r'"triton" cannot do anything here .* paged\'s extra `gpu` brings Triton'
    ):
        get_backend("triton")


def test_an_xformers_built_for_another_cuda_is_no_hindrance_and_other_reasons_are():
    class Theirs:
        NAME, SUPPORTED_ATTN_BIAS_TYPES = "triton_splitK", ()

        @classmethod
        def not_supported_reasons(cls, inputs):
            return ["xFormers wasn't build with CUDA support", f"{cls.NAME} cannot {inputs}"]

    ours = _operator(SimpleNamespace(triton_splitk=SimpleNamespace(FwOp=Theirs)), 16, object)
    assert ours.not_supported_reasons("swim") == ["triton_splitK_blocks_of_16 cannot swim"]


def test_a_gpu_older_than_ampere_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(UnsupportedByBackend, match="compute capability 7.5; it takes 8.0 and above"):
        Backend.check(shape_with())


@pytest.mark.slow
def test_the_kernels_give_in_the_interpreter_what_the_reference_gives(run_python, repository):
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: the extra gpu brings it")
    if NumpyVersion(np.__version__) >= "2.4.0" and NumpyVersion(version("triton")) < "3.7.0":
        pytest.skip("the interpreter of Triton before 3.7 needs numpy before 2.4")
    # The interpreter is numpy: it takes numbers out of arrays of one, and -inf from -inf before it selects.
    ignored = "RuntimeWarning", "Conversion of an array with ndim > 0:DeprecationWarning"
    warnings = [word for each in ignored for word in ("-W", f"ignore:{each}" if ":" in each else f"ignore::{each}")]
    names = "interpreted", "backends_agree", "invariance"
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in names]
    files.append(str(Path(__file__).parents[1] / "model" / "test_captured.py"))
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *warnings, "-k", "triton or interpreted", *files)
    result = run_python(*arguments, cwd=repository, env={"TRITON_INTERPRET": "1"}, timeout=1200)
    assert result.returncode == 0, result.stdout + result.stderr
