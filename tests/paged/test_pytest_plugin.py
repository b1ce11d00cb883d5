"""The pytest plugin, as somebody who has paged installed meets it: in a folder of their own, with their own tests."""

import json
import shutil
from pathlib import Path

import pytest

FIXTURES = Path(__file__).with_name("fixtures")


def test_rigs_are_drained_what_is_watched_is_checked_what_shows_at_the_end_is_an_error_and_its_program_is_saved(
    run_python, tmp_path
):
    for name, text in (("theirs", "theirs"), ("test_theirs", "their_tests")):
        shutil.copy(FIXTURES / f"{text}.txt", tmp_path / f"{name}.py")
    options = ("--paged-examples", "7", "--paged-failures", "found")
    result = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", *options)
    out = result.stdout + result.stderr
    assert result.returncode == 1
    assert "5 passed, 2 errors" in out, out
    assert "rig = ManagerRig(ManagerWorld(" in out
    assert "paged check replay found" in out
    assert "Theirs: 2: a block too many" in out
    (file,) = (tmp_path / "found").iterdir()
    assert json.loads(file.read_bytes())["build"] == "theirs:build"


def test_a_number_of_examples_that_is_no_number_is_refused(pytestconfig):
    with pytest.raises(pytest.UsageError, match="'none' is no number of examples; at least 1 is needed"):
        pytestconfig._parser.parse(["--paged-examples", "none"])
