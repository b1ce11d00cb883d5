"""Processes that are killed, and objects that are spoiled: `make disk` in short."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))
from kill_disk import Killed, is_wrong

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("field", ["wrong", "lost", "most_over"])
def test_each_fault_that_is_counted_makes_the_campaign_fail(field):
    killed = Killed()
    assert not is_wrong(killed, {"flip": (3, 3)})
    assert is_wrong(killed, {"flip": (3, 2)})
    setattr(killed, field, 1)
    assert is_wrong(killed, {"flip": (3, 3)})


def test_no_kill_loses_a_written_block_and_no_spoiled_object_is_read(tmp_path):
    page = tmp_path / "disk.md"
    command = [sys.executable, "tools/kill_disk.py", "--kills", "12", "--corruptions", "450", "--out", str(page)]
    ran = subprocess.run([*command, "--folder", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([\d,.]+) \|$", page.read_text(), re.M))
    assert rows["processes killed"] == "12"
    assert int(rows["blocks read afterwards"].replace(",", "")) > 100
    assert (rows["of those with a wrong byte"], rows["of those lost"]) == ("0", "0")
    over = "most objects over the limit, once those were found that the index did not know"
    assert rows[over] == "0"
    spoiled = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \|$", page.read_text(), re.M)
    assert len(spoiled) == 9 and all(tried == missed for _, tried, missed in spoiled)
    assert sum(int(tried) for _, tried, _ in spoiled) == 450
