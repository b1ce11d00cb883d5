"""`paged bench step`: the parts are a step's, nothing stays watched, and what wrong input gets."""

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from paged.errors import BuildFailed
from paged.model.native.packed import model_library
from paged.study.bench.step import StepParts

TINY = ["--rows", 3, "--context", 8, "--steps", 4]
HOST = ("schedule_us", "inputs_us", "sampling_us", "update_us", "outputs_us")


def can_compile():
    try:
        model_library()
    except BuildFailed:
        return False
    return True


@pytest.fixture
def parts(paged):
    """Run the command, and return what its JSON holds."""

    def call(*arguments):
        status, out, err = paged("bench", "step", *TINY, *arguments, "--json")
        assert (status, err) == (0, "")
        return msgspec.json.decode(out, type=StepParts)

    return call


@pytest.mark.skipif(not can_compile(), reason="nothing can be compiled here")
def test_a_decoder_that_is_one_call_is_divided_within(parts):
    found = parts()
    assert (found.model, found.backend, found.rows, found.context, found.steps) == ("embedded", "native", 3, 8, 4)
    assert found.attention_us + found.products_us + found.rest_us == pytest.approx(found.forward_us.median)
    assert found.products_us > 0


@pytest.mark.parametrize("mode", [[], ["--fast"]])
def test_the_parts_make_up_a_step_and_the_host_has_what_is_not_the_forward_pass(parts, mode):
    found = parts("--backend", "torch_gather", *mode)
    assert found.attention_us is found.products_us is found.rest_us is None
    all_parts = [getattr(found, name) for name in (*HOST, "forward_us")]
    for part in all_parts:
        assert 0 < part.least <= part.median <= part.most
    # Each step is the sum of its parts.
    assert sum(part.least for part in all_parts) <= found.step_us.most
    assert sum(part.most for part in all_parts) >= found.step_us.least
    assert found.host_share == pytest.approx(1 - found.forward_us.median / found.step_us.median)
    assert found.batch_invariant is not bool(mode)


@pytest.mark.skipif(not can_compile(), reason="nothing can be compiled here")
def test_nothing_stays_watched(parts):
    before = model_library().paged_decoder_forward
    parts()
    assert model_library().paged_decoder_forward is before


def test_parts_are_rows_of_a_table(paged):
    status, out, err = paged("bench", "step", *TINY)
    assert (status, err) == (0, "")
    head, *lines = out.splitlines()
    assert head.split() == ["part", "µs", "fastest", "slowest", "of", "a", "step"]
    names = [line[:14].strip() for line in lines]
    assert names.index("schedule") < names.index("forward pass") < names.index("sampling") < names.index("a step")
    assert any(line.startswith("the host's share: ") for line in lines)
    assert "rows: 3, prompts of 8 tokens, 4 steps" in lines


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rows", "0"], "--rows"),
        (["--context", "0"], "--context"),
        (["--steps", "0"], "--steps"),
        (["--block-size", "0"], "--block-size"),
        (["--context", "2000"], "the model takes 1,024. Lower context, rows or steps"),
        (["--backend", "nativ"], "unknown attention backend 'nativ'"),
        (["--dtype", "int8"], "known ones are auto, float32"),
        (["nowhere", "--shape", "smollm-135m"], "MODEL and --shape both say which model"),
    ],
    ids=" ".join,
)
def test_wrong_input_is_one_line_and_status_2(paged, arguments, words):
    status, out, err = paged("bench", "step", *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("paged: ")
    assert words in err
