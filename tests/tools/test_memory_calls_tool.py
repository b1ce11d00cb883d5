"""tools/memory_calls.py counts what the scheduler asks of the memory layer."""

import re
import subprocess
import sys

import pytest

from paged.block_manager import BlockManager


@pytest.fixture
def count(repository):
    """Run the tool on 4 rows; exit status and output."""

    def run(*arguments):
        tool = [sys.executable, str(repository / "tools" / "memory_calls.py"), "--rows", "4", *map(str, arguments)]
        done = subprocess.run(tool, capture_output=True, text=True, cwd=repository)
        return done.returncode, done.stdout

    return run


def test_both_steps_are_counted_and_every_call_is_named(count):
    status, said = count()
    assert status == 0
    totals = [
        int(number)
        for number in re.findall(r"^a step with one admission: (\d+)|^a steady step: (\d+)", said, re.M)
        for number in number
        if number
    ]
    assert len(totals) == 2
    times = [int(number) for number in re.findall(r"^  (\d+) × \w+\.\w+$", said, re.M)]
    assert sum(times) == sum(totals) > 0


def test_the_numbers_do_not_depend_on_how_many_rows_decode(count):
    assert count()[1] == count("--rows", 40)[1]


def test_a_steady_step_is_3_calls_at_most_and_one_with_an_admission_6(count):
    status, said = count("--most-steady", 3, "--most-admission", 6)
    assert status == 0, said


def test_a_number_above_its_limit_ends_with_status_1(count):
    assert count("--most-steady", 1000, "--most-admission", 1000)[0] == 0
    status, said = count("--most-steady", 0)
    assert status == 1
    assert re.search(r"^a steady step: \d+ calls into memory, at most 0 allowed$", said, re.M)


def test_a_property_that_is_read_counts_as_a_call(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "tools")
    from memory_calls import counted

    manager = BlockManager(num_blocks=4, block_size=4).claim()
    # Code of a file of the scheduler, as the tool sees it.
    step = {"manager": manager}
    exec(
        compile(
            "def read():\n    manager.growth.num_unpromised",
            str(repository / "paged" / "scheduler" / "core.py"),
            "exec",
        ),
        step,
    )
    assert counted(step["read"]) == {"Growth.num_unpromised": 1}
    assert counted(lambda: manager.growth.num_unpromised) == {}
