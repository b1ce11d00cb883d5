"""tools/memory_calls.py counts what the scheduler asks of the memory layer."""

import re
import sys

import pytest

from paged.block_manager import BlockManager

TOOL = "memory_calls"


@pytest.fixture
def count(tool, monkeypatch, capsys):
    """Run the tool on 4 rows; exit status and output."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["memory_calls.py", "--rows", "4", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            tool.main()
        return int(ended.value.code), capsys.readouterr().out

    return run


def test_both_steps_are_counted_every_call_is_named_and_how_many_rows_decode_does_not_count(count):
    status, said = count()
    assert status == 0
    totals = re.findall(r"^a (?:step with one admission|steady step): (\d+)", said, re.M)
    times = re.findall(r"^  (\d+) × \w+\.\w+$", said, re.M)
    assert len(totals) == 2
    assert sum(map(int, times)) == sum(map(int, totals)) > 0
    assert count("--rows", 40) == (0, said)


@pytest.mark.parametrize(("most_steady", "status"), [(4, 0), (0, 1)])
def test_a_steady_step_is_4_calls_at_most_and_one_with_an_admission_7(count, most_steady, status):
    ended, said = count("--most-steady", most_steady, "--most-admission", 7)
    assert ended == status, said
    assert bool(re.search(r"^a steady step: \d+ calls into memory, at most 0 allowed$", said, re.M)) == bool(status)


def test_a_property_that_is_read_by_the_scheduler_counts_as_a_call(tool, repository):
    manager = BlockManager(num_blocks=4, block_size=4).claim()
    step, file = {"manager": manager}, repository / "paged" / "scheduler" / "core.py"
    exec(compile("def read():\n    manager.growth.num_unpromised", str(file), "exec"), step)
    assert tool.counted(step["read"]) == {"Growth.num_unpromised": 1}
    assert tool.counted(lambda: manager.growth.num_unpromised) == {}
