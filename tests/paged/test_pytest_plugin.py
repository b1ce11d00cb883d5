"""The pytest plugin, as somebody who has paged installed meets it: in a folder of their own, with their own tests."""

import json
import shutil
from pathlib import Path

import pytest

FIXTURES = Path(__file__).with_name("fixtures")


@pytest.fixture
def tested(run_python, tmp_path):
    """tested(source, *options): exit status and output of pytest on a file with these tests."""

    def call(source, *options):
        (tmp_path / "test_theirs.py").write_text(source)
        result = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", *options, timeout=600)
        return result.returncode, result.stdout + result.stderr

    return call


def test_rigs_are_drained_what_is_watched_is_checked_what_shows_at_the_end_is_an_error_and_its_program_is_saved(
    tested, tmp_path
):
    shutil.copy(FIXTURES / "theirs.txt", tmp_path / "theirs.py")
    tests = (FIXTURES / "their_tests.txt").read_text()
    status, out = tested(tests, "--paged-examples", "7", "--paged-failures", "found")
    assert status == 1
    assert "5 passed, 2 errors" in out, out
    assert "rig = ManagerRig(ManagerWorld(" in out
    assert "paged check replay found" in out
    assert "Theirs: 2: a block too many" in out
    (file,) = (tmp_path / "found").iterdir()
    assert json.loads(file.read_bytes())["build"] == "theirs:build"


def test_a_number_of_examples_that_is_no_number_is_refused(tested):
    status, out = tested("def test_theirs(): pass", "--paged-examples", "none")
    assert status == 4
    assert "'none' is no number of examples; at least 1 is needed" in out
