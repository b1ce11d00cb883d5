"""Numbers, callers' values and causes in sentences."""

from __future__ import annotations

# Characters of a library's message that are quoted.
_LONGEST_CAUSE = 300


def counted(number: int, word: str) -> str:
    """Return a number with its noun: "1 block", "2 blocks"."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def shown(value: object) -> str:
    """Return the value as Python prints it, cut short."""
    # Python refuses to write an integer of thousands of digits, and a list of a million stop ids is not worth reading.
    try:
        text = repr(value)
    except ValueError:
        return "an integer too long to write"
    return text if len(text) <= 80 else f"{text[:77]}..."


def short_cause(error: BaseException) -> str:
    """Return a library's message as one line for a terminal, cut after 300 characters."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= _LONGEST_CAUSE else f"{words[:_LONGEST_CAUSE]} …"
