"""Words that several findings share."""

from __future__ import annotations

from collections.abc import Sequence

REPORT = "That is a bug: please report it, with what `paged doctor --json` says."
# Of a library's message: it may be pages.
_LONGEST_CAUSE = 300


def cause(error: Exception) -> str:
    """The error's class and what it says, in a line and without a full stop."""
    words = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".: ")
    return words if len(words) <= _LONGEST_CAUSE else f"{words[:_LONGEST_CAUSE]} …"


def listed(names: Sequence[str]) -> str:
    """One, or several with "and" before the last."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
