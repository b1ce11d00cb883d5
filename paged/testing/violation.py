"""How the kit says that a rule was broken: what was seen, and the program that led there, ready to paste into a test."""

from __future__ import annotations

from collections.abc import Sequence


class Violation(AssertionError):
    """`found`: every broken rule as a sentence. `program`: the lines that led there, a constructor and its calls."""

    def __init__(self, found: Sequence[str], program: Sequence[str]) -> None:
        super().__init__("\n".join([*found, "", "The program:", *program]))
        self.found = list(found)
        self.program = list(program)
