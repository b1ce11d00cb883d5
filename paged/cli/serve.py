"""`paged serve`: a model behind OpenAI's interface, until a signal ends it.

An option is a field of a setting, by the same name; one that is not given is as the file of --config has it. Knows options, and what is said
when the server begins. Does not know what a server does.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paged.cli import signals
from paged.cli.show import printed
from paged.extras import import_with_extra
from paged.serving.settings import EngineSettings, Settings, read_settings

if TYPE_CHECKING:
    from paged.serving.front import Front

_LISTEN, _WHO, _LIMITS, _TIMES, _ENGINE, _MEMORY, _TELLING = (
    "Where it listens",
    "Who may ask",
    "How much",
    "For how long",
    "The model",
    "Memory and steps",
    "What it tells",
)


def _usual(name: str) -> str:
    """What a field is where nobody names it, as the help shows it."""
    kind: Any = Settings if name in Settings.__struct_fields__ else EngineSettings
    value = getattr(kind(), name)
    if value is None or value == ():
        return "none"
    return f"{value:,}" if isinstance(value, int) and name != "port" else f"{value}"


# fmt: off
Model = Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A checkpoint folder in the Hugging Face layout.", show_default="the small one that ships")]
Config = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="TOML with these settings by name, and tenants; options win over it.", show_default="none")]
Host = Annotated[str | None, typer.Option(help="An address of this machine; 0.0.0.0: all of them.", show_default=_usual("host"), rich_help_panel=_LISTEN)]
Port = Annotated[int | None, typer.Option(help="0: any that is free.", show_default=_usual("port"), rich_help_panel=_LISTEN)]
# fmt: on


def serve(
    context: typer.Context, model: Model = None, config: Config = None, host: Host = None, port: Port = None
) -> None:
    """Answer OpenAI's clients over HTTP.

    Example: `paged serve --port 8000`
    """
    said = {name: value for name, value in context.params.items() if value not in (None, [])}
    said.pop("config", None)
    of_engine = {name: said.pop(name) for name in EngineSettings.__struct_fields__ if name in said}
    settings = read_settings(config, {**said, "engine": of_engine})
    with signals.at_once():
        server = import_with_extra("paged.serving.server", "serve")
    with _handled_by_the_server():
        server.serve(settings, on_ready=_announce)


@contextmanager
def _handled_by_the_server() -> Iterator[None]:
    """Within the block signals are the server's, which lets requests end; a terminal that is closed asks for the same as SIGTERM."""
    with signals.unhurried():
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
        yield


def _announce(front: "Front", port: int) -> None:
    host = front.settings.host
    printed(f"paged: ready at http://{host}:{port}")
    import sys

    sys.stdout.flush()
