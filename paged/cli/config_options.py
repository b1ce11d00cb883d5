"""Command-line options made from settings: names, help, default and range as declared.

@takes(engine=EngineConfig())
def command(mine: Mine = None, *, engine: dict[str, Any]) -> None: ...
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import msgspec
from typer import Option

from paged.engine.config import Config, EngineConfig, Field, fields_of


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
        by_keyword = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own.values()]
        taking.__signature__ = inspect.Signature([*by_keyword, *options])  # type: ignore[attr-defined]
        return taking

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
