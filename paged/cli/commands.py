"""Typer's commands and groups, with our own help of flags, and commands that share the options of a function."""

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from paged.errors import InvalidConfig

T = TypeVar("T")


class _PlainFlags:
    """A command whose help names no type of its flags, which take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return its options and arguments."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return params


class Command(_PlainFlags, TyperCommand):
    """A command that refuses empty paths."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Refuse an empty path, which means the current folder and mostly comes from an unset variable of a shell."""
        is_named = "." in args
        has_empty = any(each == "" or (each.startswith("-") and each.endswith("=")) for each in args)
        left = super().parse_args(ctx, args)
        for param in self.params:
            if has_empty and not is_named and ctx.params.get(param.name) == Path():
                raise typer.BadParameter("it is empty; a path is needed", param_hint=f"'{param.opts[0]}'")
        return left


class Group(_PlainFlags, TyperGroup):
    """A command that has commands."""


def group_of(help: str, *commands: Callable[..., None]) -> typer.Typer:  # noqa: A002
    """Return a command with these commands; without one it shows its help."""
    group = typer.Typer(help=help, cls=Group, no_args_is_help=False)
    for command in commands:
        group.command(cls=Command)(command)
    group.callback(invoke_without_command=True)(show_help)
    return group


def show_help(context: typer.Context) -> None:
    """Print the help of a command that was called without one of its commands."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def must_be_read(context: typer.Context, read: Collection[str], why: str) -> None:
    """Raise InvalidConfig, which says `why`, for an option on the command line whose parameter is not one of `read`."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in read and source is not None and source.name == "COMMANDLINE":
            raise InvalidConfig(f"--{name.replace('_', '-')} {why}; leave it out")


def made_of(kind: type[T], given: Mapping[str, Any], **others: Any) -> T:
    """Return a struct from the options that have its fields' names; `others` are further fields, and win over options."""
    fields = kind.__struct_fields__  # type: ignore[attr-defined]
    return kind(**{name: given[name] for name in fields if name in given} | others)


def with_options_of(make: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command: `make` makes its first parameter, and the options of `make` (what it annotates as one) stand in its place."""
    named = inspect.signature(make, eval_str=True).parameters
    made = {name: each for name, each in named.items() if get_origin(each.annotation) is Annotated}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def taking(**given: Any) -> None:
            its = {name: given.pop(name) for name in made}
            command(make(**its), **given)

        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        # Required parameters first, also in the help.
        ordered = sorted((*made.values(), *own), key=lambda parameter: parameter.default is not parameter.empty)
        by_keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in ordered]
        taking.__signature__ = inspect.Signature(by_keyword)  # type: ignore[attr-defined]
        return taking

    return decorate
