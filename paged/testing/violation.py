"""The report of a broken rule: what was observed, and the program that led there, to paste into a test or to save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from traceback import extract_tb
from typing import Any

Call = tuple[str, tuple[Any, ...]]
"""One method of a rig and its arguments."""


class ShortRepr:
    """A dataclass that prints as the line to type again: its first two fields, and what is not as usual."""

    def __repr__(self) -> str:
        shown = [
            f"{each.name}={getattr(self, each.name)!r}"
            for place, each in enumerate(fields(self))  # type: ignore[arg-type]
            if place < 2 or getattr(self, each.name) != each.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True)
class Program:
    """The calls made on a subject: `rig` is the name of the class that made them, `world` what it was built from, and
    `options` what else the rig was given."""

    rig: str
    world: Any
    calls: tuple[Call, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        """Python, ready to paste: a constructor and its calls."""
        lines = [f"rig.{verb}({', '.join(map(repr, arguments))})" for verb, arguments in self.calls]
        return [f"rig = {self.rig}({self.world})", *lines]


class Violation(AssertionError):
    """`found`: every broken rule as a sentence. `program`: what led there."""

    def __init__(self, found: Sequence[str], program: Program) -> None:
        super().__init__("\n".join([*found, "", "The program:", *program.lines]))
        self.found = list(found)
        self.program = program


def sentence_of(error: Exception) -> str:
    """Return a forbidden error of a subject, and its place, as one sentence of a violation."""
    frames = extract_tb(error.__traceback__)[-4:]
    way = " < ".join(f"{frame.name} line {frame.lineno}" for frame in reversed(frames))
    return f"raised {type(error).__name__}: {error} ({way})"
