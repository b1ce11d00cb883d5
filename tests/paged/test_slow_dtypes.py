"""Dtypes that a processor is slow in: which are, what is faster, and that it is said once."""

import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from paged import LLM, SamplingParams  # noqa: E402
from paged.errors import BuildFailed, PagedWarning  # noqa: E402
from paged.model import dtypes  # noqa: E402
from paged.model.native import packed  # noqa: E402

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture
def processor(monkeypatch):
    """processor(*instructions): what it has."""

    def has(*instructions):
        monkeypatch.setattr(dtypes, "has_instructions", lambda *names: set(names) <= set(instructions))

    return has


@pytest.fixture
def no_compiler(monkeypatch):
    def refuse(*_arguments):
        raise BuildFailed("there is no C compiler.")

    for module in (dtypes, packed):
        monkeypatch.setattr(module, "model_library", refuse)


def test_float32_is_never_slow_and_bfloat16_not_in_native_code(processor):
    processor()
    assert [dtypes.faster_dtypes(SINGLE, is_native) for is_native in (True, False)] == [(), ()]
    assert dtypes.faster_dtypes(BRAIN, True) == ()


@pytest.mark.parametrize("units", ["avx512_bf16", "amx_bf16", "bf16"])
def test_bfloat16_in_torch_is_slow_without_units_for_it(processor, units):
    processor("avx2", units)
    assert dtypes.faster_dtypes(BRAIN, False) == ()
    processor("avx2")
    assert dtypes.faster_dtypes(BRAIN, False) == ("float32",)


def test_float16_is_always_slow(processor, no_compiler):
    processor("avx512_bf16")
    assert dtypes.faster_dtypes(HALF, False) == ("float32", "bfloat16")
    processor("avx2")
    assert dtypes.faster_dtypes(HALF, False) == ("float32",)


def warned(dtype):
    """What an LLM of this dtype warns of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        LLM(dtype=dtype, num_blocks=8, backend="torch_gather").generate(
            ["a"], SamplingParams(max_tokens=1), use_tqdm=False
        )
    assert {each.category for each in said} <= {PagedWarning}
    return [str(each.message) for each in said]


def test_it_is_said_once_a_process_and_dtype(processor, no_compiler):
    processor("avx2")
    dtypes._say_once.cache_clear()
    half, brain = (f"dtype {name} is slow on this processor; float32 is faster." for name in ("float16", "bfloat16"))
    assert [warned(name) for name in ("float16", "bfloat16", "float16", "bfloat16", "float32", "auto")] == [
        [half], [brain], [], [], [], [],
    ]  # fmt: skip
    dtypes._say_once.cache_clear()
