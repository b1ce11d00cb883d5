"""What all rigs share: the calls so far, what happened, and how a broken rule is reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, ClassVar

from paged.errors import InvalidProgram
from paged.testing.violation import Call, Program, Violation, sentence_of


class NotThere(InvalidProgram):
    """A call about a sequence or a batch that there is not: a program runs on without it."""


def _blaming(method: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a rig, of which an error that the subject may not raise becomes a violation with its program."""

    @wraps(method)
    def blaming(rig: Rig, *arguments: Any, **named: Any) -> Any:
        try:
            return method(rig, *arguments, **named)
        except (Violation, InvalidProgram):
            raise
        except Exception as error:
            rig._fail_on([sentence_of(error)])

    return blaming


class Rig:
    """The program that was run on one subject. `kind`: the name by which a saved program finds the rig again.

    What the subject raises within a public method is a violation, but for what that method expects.
    """

    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        for name, method in list(vars(cls).items()):
            if isinstance(method, FunctionType) and not name.startswith("_"):
                setattr(cls, name, _blaming(method))

    def __init__(self, world: Any) -> None:
        self.world = world
        self.options: dict[str, Any] = {}
        self.calls: list[Call] = []
        # How often each thing occurred that the tests of the machines ask for.
        self.events: Counter[str] = Counter()
        self.has_failed = False

    @property
    def program(self) -> Program:
        """The calls so far."""
        return Program(self.kind, self.world, tuple(self.calls), self.options)

    def _fail_on(self, found: list[str]) -> None:
        if found:
            self.has_failed = True
            raise Violation(found, self.program)

    def _expect(self, holds: object, otherwise: str) -> None:
        self._fail_on([] if holds else [otherwise])
