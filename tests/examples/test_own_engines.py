"""Engines of one's own, in forty lines each, check themselves."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "says"),
    [("one_step_ahead", "tokens as alone; 2 preemptions, 5 tokens void"), ("drafts", "drafts were right")],
)
def test_an_engine_of_ones_own_says_what_it_should_in_forty_lines(name, says):
    page = EXAMPLES / f"{name}.py"
    run = subprocess.run([sys.executable, page], capture_output=True, text=True, cwd=EXAMPLES.parent, check=True)
    assert says in run.stdout
    assert sum(1 for line in page.read_text().splitlines() if line.strip()) <= 40
    imported = {line.split()[1] for line in page.read_text().splitlines() if line.startswith(("import ", "from "))}
    assert imported <= {"numpy", "numpy.typing", "paged", "collections.abc"}


def test_a_streaming_server_outlives_its_clients_in_ninety_lines():
    page = EXAMPLES / "async_server.py"
    run = subprocess.run(
        [sys.executable, "-W", "error", page], capture_output=True, text=True, cwd=EXAMPLES.parent, check=True
    )
    assert "48 clients, 3 hung up" in run.stdout
    assert "no answer differs" in run.stdout
    assert run.stderr == ""
    assert " 0 preemptions" not in run.stdout
    assert sum(1 for line in page.read_text().splitlines() if line.strip()) <= 90
