"""Files of what is asked and what is said to it, in which … stands for anything."""

import re
from pathlib import Path

import pytest


def shown_in(name, prompt):
    """What stands behind the prompt in this file below tests/, each with the lines below it."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    blocks = [block.strip("\n").partition("\n") for block in f"\n{text}".split(f"\n{prompt} ")[1:]]
    return [pytest.param(asked, f"{lines}\n", id=asked) for asked, _, lines in blocks]


def assert_shown(lines, shown):
    assert re.fullmatch(re.escape(shown).replace("…", ".*"), lines), lines
