"""Typer's commands and groups, with our own help of flags; and commands that take the options of a function, a struct or settings."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin

import msgspec
import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from paged.engine.config import Config, EngineConfig, Field, fields_of
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
        return _signed(taking, ordered)

    return decorate


def _signed(command: Any, parameters: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """Return a command with these parameters, which Typer makes options of; each is given by its name."""
    by_keyword = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    command.__signature__ = inspect.Signature(by_keyword)
    return command  # type: ignore[no-any-return]


def takes(**configs: Config) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command with an option for each setting of these configurations, except for names among its own parameters.

    For each keyword the command gets a dictionary with the settings that were given. The help shows the defaults of the configurations.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = {name: each for name, each in inspect.signature(command).parameters.items() if name not in configs}
        settings = {
            name: {each.name: each for each in fields_of(type(config)).values() if each.name not in own}
            for name, config in configs.items()
        }

        @wraps(command)
        def taking(**given: Any) -> None:
            of_each = {
                name: {
                    each: its[each].parsed(value) if isinstance(value, str) else value
                    for each in its
                    if (value := given.pop(each, None)) not in (None, [], ())
                }
                for name, its in settings.items()
            }
            command(**given, **of_each)

        options = [
            _option(setting, getattr(config, setting.group, config))
            for name, config in configs.items()
            for setting in settings[name].values()
            if setting.options
        ]
        return _signed(taking, [*own.values(), *options])

    return decorate


def declared(name: str, panel: str = "") -> Any:
    """Return the option of one setting of an engine; `panel` is that of the help, by default the setting's own."""
    config = EngineConfig()
    setting = fields_of(EngineConfig)[name]
    return _info(msgspec.structs.replace(setting, panel=panel or setting.panel), getattr(config, setting.group))


def _option(setting: Field, config: Config) -> inspect.Parameter:
    kind: Any = {bool: bool, tuple: list[str]}.get(setting.kind, str)
    annotation = Annotated[kind | None, _info(setting, config)]
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _info(setting: Field, config: Config) -> Any:
    takes = f"{setting.takes[0].upper()}{setting.takes[1:]}." if setting.limits or setting.choices else ""
    return Option(
        *filter(None, [*setting.options, setting.letter]),
        help=f"{setting.help} {takes}".strip(),
        show_default=setting.shown(getattr(config, setting.name)),
        metavar=None if setting.kind is bool else setting.metavar or {int: "N", float: "S"}.get(setting.kind, "TEXT"),
        envvar=setting.variable,
        rich_help_panel=setting.panel,
    )
