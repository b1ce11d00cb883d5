"""Commands as Typer makes them, but for flags: they take no value, and their help names no type of one.

Knows Typer. Does not know which commands there are.
"""

from typing import Any

from typer.core import TyperCommand, TyperGroup


def _without_types(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options and arguments."""
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    """A command that has commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options and arguments."""
        return _without_types(super().get_params(ctx))
