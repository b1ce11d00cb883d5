"""Commands as Typer makes them, but for flags: they take no value, and their help names no type of one."""

from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


def _without_types(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return its options and arguments. Refuse an empty path: it would be the current folder, and mostly comes from an unset variable of a shell."""
        is_named = "." in args
        has_empty = any(each == "" or (each.startswith("-") and each.endswith("=")) for each in args)
        left = super().parse_args(ctx, args)
        for param in self.params:
            if has_empty and not is_named and ctx.params.get(param.name) == Path():
                raise typer.BadParameter("it is empty; a path is needed", param_hint=f"'{param.opts[0]}'")
        return left

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options and arguments."""
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    """A command that has commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options and arguments."""
        return _without_types(super().get_params(ctx))
