"""Programs that broke a rule once, as the kit saved them: each runs to its end and breaks none any more.

What was wrong stands in a file's `found`, and in its name where somebody wrote the program down.
"""

from pathlib import Path

import pytest

from paged.testing.saved import load, rerun

FILES = sorted((Path(__file__).parent / "found_programs").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_breaks_no_rule_any_more(file):
    violation = rerun(load(file))
    assert violation is None, f"{violation}"


def test_there_are_some():
    assert len(FILES) >= 2
