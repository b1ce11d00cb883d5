"""Dtypes that a processor is slow in: which are, what is faster, and that it is said once."""

import warnings

import pytest
import torch

from paged import LLM, SamplingParams
from paged.errors import BuildFailed, PagedWarning
from paged.model import dtypes
from paged.model.native import packed

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture
def processor(monkeypatch):
    """processor(*instructions): what it has; and no C compiler."""

    def refuse(*_arguments):
        raise BuildFailed("there is no C compiler.")

    monkeypatch.setattr(packed, "model_library", refuse)

    def has(*instructions):
        monkeypatch.setattr(dtypes, "has_instructions", lambda *names: set(names) <= set(instructions))

    return has


@pytest.mark.parametrize(
    ("has", "dtype", "is_native", "faster"),
    [
        # float32 is never slow, bfloat16 not in native code, and in torch where there are units for it.
        ((), SINGLE, True, ()),
        ((), SINGLE, False, ()),
        ((), BRAIN, True, ()),
        *((("avx2", units), BRAIN, False, ()) for units in ("avx512_bf16", "amx_bf16", "bf16")),
        (("avx2",), BRAIN, False, ("float32",)),
        # float16 always is.
        (("avx512_bf16",), HALF, False, ("float32", "bfloat16")),
        (("avx2",), HALF, False, ("float32",)),
    ],
)
def test_what_is_faster_than_a_dtype_depends_on_the_processor(processor, has, dtype, is_native, faster):
    processor(*has)
    assert dtypes.faster_dtypes(dtype, is_native) == faster


def warned(dtype):
    """What an LLM of this dtype warns of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        LLM(dtype=dtype, num_blocks=8, backend="torch_gather").generate(
            ["a"], SamplingParams(max_tokens=1), use_tqdm=False
        )
    assert {each.category for each in said} <= {PagedWarning}
    return [str(each.message) for each in said]


def test_it_is_said_once_a_process_and_dtype(processor):
    processor("avx2")
    dtypes._say_once.cache_clear()
    half, brain = (f"dtype {name} is slow on this processor; float32 is faster." for name in ("float16", "bfloat16"))
    assert [warned(name) for name in ("float16", "bfloat16", "float16", "bfloat16", "float32", "auto")] == [
        [half], [brain], [], [], [], [],
    ]  # fmt: skip
    dtypes._say_once.cache_clear()
