"""The page about several processes: its program that splits a model runs as it stands there."""

import io
from contextlib import redirect_stdout

import pytest

pytest.importorskip("torch")

from paged.model.threads import usable_cores

PAGE = "docs/scaling.md"


@pytest.mark.skipif(usable_cores() < 2, reason="two ranks want two cores")
def test_the_program_that_splits_a_model_prints_an_answer(page, fences):
    (program,) = (each for each in fences(page, "python") if "tensor_parallel_size" in each)
    said = io.StringIO()
    with redirect_stdout(said):
        exec(compile(program, PAGE, "exec"), {"__name__": "__main__"})
    assert said.getvalue() == " is used to wrap the execu\n"
