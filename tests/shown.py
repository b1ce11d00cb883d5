"""Files of what is asked and what is said to it, in which … stands for anything."""

import re
from pathlib import Path

import pytest

from paged.errors import PagedError


def shown_in(name, prompt):
    """What stands behind the prompt in this file below tests/, each with the lines below it."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    blocks = [block.strip("\n").partition("\n") for block in f"\n{text}".split(f"\n{prompt} ")[1:]]
    return [pytest.param(asked, f"{lines}\n", id=asked) for asked, _, lines in blocks]


def assert_shown(lines, shown):
    assert re.fullmatch(re.escape(shown).replace("…", ".*"), lines), lines


def assert_refused(call, shown, names, kinds=(PagedError, OSError)):
    """Fail unless this expression raises a typed error of ours, or one of these kinds, that says so; the error."""
    with pytest.raises(kinds) as refusal:
        eval(call, {**names})
    assert_shown(f"{type(refusal.value).__name__}: {refusal.value}\n", shown)
    return refusal.value
