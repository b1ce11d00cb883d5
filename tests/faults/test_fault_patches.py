"""The folder of planted faults stays alive: every patch applies, says what it does, and some are found each time (`make faults`: all)."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TOOL = HERE.parents[1] / "tools" / "try_faults.py"
PATCHES = sorted(HERE.glob("*.patch"))
# Each is found within a few seconds: one of each machine, and one of the random programs.
FOUND_SOON = ["lost-copy", "one-block-too-many", "preempted-token-lost", "hit-counts-one-block"]


def try_faults(*arguments):
    return subprocess.run(
        [sys.executable, str(TOOL), *map(str, arguments)], capture_output=True, text=True, timeout=600
    )


@pytest.fixture
def a_fault(tmp_path):
    """A folder with one patch of these changed lines in `stopping.py`."""

    def write(before, after, sentence="Something is wrong."):
        source = (HERE.parents[1] / "scheduler" / "stopping.py").read_text().splitlines()
        (place,) = [number for number, line in enumerate(source) if line == before]
        lines = [f" {source[place - 1]}", f"-{before}", f"+{after}", f" {source[place + 1]}"]
        head = ["--- a/scheduler/stopping.py", "+++ b/scheduler/stopping.py", f"@@ -{place},3 +{place},3 @@"]
        (tmp_path / "ours.patch").write_text("\n".join([sentence, "", *head, *lines, ""]))
        return tmp_path

    return write


LINE = "        done = (totals >= columns.max_total[rows]).nonzero()[0]"


def test_there_are_at_least_25_faults_and_12_in_either_package():
    texts = [patch.read_text() for patch in PATCHES]
    assert len(texts) >= 25
    for package in ("block_manager", "scheduler"):
        assert sum(f"+++ b/{package}/" in text for text in texts) >= 12


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_fault_is_a_sentence_and_a_change_of_one_to_six_lines(patch):
    header, _, diff = patch.read_text().partition("--- a/")
    assert re.match(r"[A-Z].*\.\n", " ".join(header.split()) + "\n")
    removed, added = (len(re.findall(rf"^[{sign}](?![-+]{{2}} )", diff, re.M)) for sign in "-+")
    assert 1 <= max(removed, added) <= 6


def test_every_patch_applies_to_the_source_of_today():
    done = try_faults("--apply-only")
    assert done.returncode == 0, done.stdout
    assert done.stdout == f"{len(PATCHES)} patches apply.\n"


def test_faults_are_found_and_their_programs_are_short(tmp_path):
    done = try_faults(*FOUND_SOON, "--no-control", "--programs", 1500, "--out", tmp_path / "faults")
    assert done.returncode == 0, done.stdout
    results = json.loads((tmp_path / "faults.json").read_text())["results"]
    assert [result["fault"] for result in results] == FOUND_SOON
    assert all(result["by"] and result["shrunk_calls"] <= 12 for result in results)


def test_a_patch_that_nobody_finds_ends_with_status_1(a_fault):
    folder = a_fault(LINE, f"{LINE}  # and nothing else")
    done = try_faults("--folder", folder, "--no-control", "--examples", 5)
    assert done.returncode == 1
    assert "nothing found" in done.stdout
    assert "0 of 1 faults found." in done.stdout


def test_a_patch_that_does_not_apply_any_more_is_named(a_fault):
    folder = a_fault(LINE, LINE)
    patch = folder / "ours.patch"
    patch.write_text(patch.read_text().replace("max_total", "most_in_all"))
    done = try_faults("--folder", folder, "--no-control")
    assert done.returncode == 1
    assert "ours.patch: does not apply to the current source" in done.stdout


def test_a_patch_without_a_sentence_or_outside_the_two_packages_is_refused(a_fault):
    folder = a_fault(LINE, LINE, sentence="")
    assert "no sentence stands before the diff" in try_faults("--folder", folder, "--apply-only").stdout
    patch = a_fault(LINE, LINE) / "ours.patch"
    patch.write_text(patch.read_text().replace("/scheduler/", "/tests/"))
    assert "a fault is in block_manager/ or scheduler/" in try_faults("--folder", folder, "--apply-only").stdout
