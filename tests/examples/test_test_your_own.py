"""The example of a manager of one's own: it runs in an empty folder, and what the kit says of its bug points at the bug."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "test_your_own.py"


@pytest.fixture
def run_example(tmp_path):
    """The example as somebody has it who installed `paged[testing]` and nothing else: in a folder of its own, without our settings."""
    shutil.copy(EXAMPLE, tmp_path)

    def run(*options):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_your_own.py", *options]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    return run


def test_the_bug_is_expected_and_the_mended_manager_passes(run_example):
    done = run_example("--paged-examples", "40")
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 xfailed" in done.stdout


def test_the_report_names_the_rule_and_the_program_and_is_the_one_in_the_docstring(run_example):
    done = run_example("-k", "not mended", "--runxfail")
    assert done.returncode == 1
    lines = [line.removeprefix("E").strip() for line in done.stdout.splitlines() if line.startswith("E ")]
    report = "\n".join(lines).split("Violation: ", 1)[1].strip()
    assert report.startswith("content that should be gone: ")
    shown = EXAMPLE.read_text().split('"""')[1]
    for line in report.splitlines():
        assert line in shown, report
