"""`paged serve`: a model behind OpenAI's interface, until a signal ends it.

Its options are made from the settings of a server and of an engine. A setting without an option comes from the environment, the file of
--config, or the defaults.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from paged.base.budget import as_bytes
from paged.base.extras import import_with_extra, leave_torch_out
from paged.cli import signals
from paged.cli.commands import Command, takes
from paged.cli.show import console, figures, printed, say
from paged.engine.vllm_flags import translated
from paged.errors import InvalidConfig, PagedError
from paged.serving.request_log import to_stderr
from paged.serving.settings import SERVED, Settings, read_settings

if TYPE_CHECKING:
    from paged.serving.wire import Ready

ENDED_AT_ONCE, CANNOT_BEGIN = 1, 2
_KEYS = "PAGED_API_KEY"


class ServeCommand(Command):
    """A command that takes vLLM's flags, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, with vLLM's flags translated."""
        return super().parse_args(ctx, translated(args))


@takes(server=Settings(), engine=SERVED)
def serve(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="A checkpoint folder in the Hugging Face layout, or a small model that ships: embedded or hybrid.", show_default="embedded")] = None,
    config: Annotated[Path | None, Option("--config", metavar="FILE", help="TOML with settings by name, those of the engine under [engine], and with tenants; options and PAGED_… win over it.", show_default="none")] = None,
    replicas: Annotated[int, Option("--replicas", metavar="N", min=1, help="Engines, each a replica on a Ray that begins and ends with the server; needs the ray extra (docs/scaling.md).", rich_help_panel="Limits")] = 1,
    *,
    server: dict[str, Any],
    engine: dict[str, Any],
) -> None:  # fmt: skip
    """Answer OpenAI's clients over HTTP, with a model that runs in a process of its own.

    SIGTERM (status 0) or Ctrl-C (130) lets running requests end first, a second one does not (1, 130). vLLM's flags are taken where they mean the same
    (docs/serving.md).

    Example: `paged serve --port 8000`
    """
    if os.environ.get(_KEYS) == "":
        raise InvalidConfig(f"{_KEYS} is empty, so that every client would have access; unset it, or set it to a key.")
    settings = read_settings(config, server, engine if model is None else {**engine, "model": model})
    # JSON for a collector of logs; a line for a person at a terminal.
    says_json = settings.log == "json" and not sys.stderr.isatty()
    with signals.at_once():
        leave_torch_out()
        serving = import_with_extra("paged.serving.server", "serve")
        # Raises UnsupportedRay.
        several = None if replicas == 1 else import_module("paged.integrations.ray.local")
    loading = f"loading {settings.engine.model.model or 'the model that ships'}"
    to_stderr("info", loading) if says_json else say(loading)
    try:
        with _handled_by_the_server(), ExitStack() as until_the_end:
            announce = partial(_announce, settings, replicas)
            if several is None:
                has_drained = serving.serve(settings, on_ready=announce)
            else:

                def make(settings: Settings) -> tuple[Any, Any]:
                    hosted = until_the_end.enter_context(several.replicas(settings, replicas))
                    return hosted, hosted

                has_drained = serving.serve(settings, on_ready=announce, make=make)
    except PagedError as error:
        if not says_json:
            raise
        to_stderr("error", str(error))
        raise typer.Exit(CANNOT_BEGIN) from None
    if not has_drained:
        raise typer.Exit(ENDED_AT_ONCE)


@contextmanager
def _handled_by_the_server() -> Iterator[None]:
    """Leave signals to the server within the block, which lets requests end. A closed terminal counts as SIGTERM."""
    before = signal.getsignal(signal.SIGHUP)
    with signals.unhurried():
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
        try:
            yield
        finally:
            signal.signal(signal.SIGHUP, before)


def _announce(settings: Settings, num_replicas: int, ready: "Ready", port: int) -> None:
    """Print the address and the limits of a server that takes requests now."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"{'http' if settings.tls_certificate is None else 'https'}://{host}:{port}"
    names = ", ".join(settings.names)
    unit = "pages, blocks" if ready.groups else "blocks"
    memory = f"{ready.num_blocks:,} {unit} of {ready.block_size} tokens"
    each = "" if num_replicas == 1 else f"{num_replicas} replicas of "
    if console().is_terminal:
        bytes_of_blocks = as_bytes(ready.num_blocks * ready.block_bytes)
        pairs = [
            ("interface", f"{url}/v1"),
            ("model", names),
            ("memory", f"{each}{memory}, {bytes_of_blocks}, {ready.cache_dtype} on {ready.device}"),
            ("a request", f"up to {ready.max_model_len:,} tokens"),
            ("a step", f"up to {ready.max_sequences:,} sequences and {ready.max_tokens_per_step:,} tokens"),
            ("waiting", f"up to {settings.max_waiting:,} requests{' a replica' if each else ''}"),
            ("keys", "needed" if settings.needs_key else "none: every client that reaches it has access"),
        ]
        if not each:
            pairs.append(("dashboard", f"{url}/dashboard"))
        figures(f"ready at {url}", pairs)
    else:
        printed(f"ready at {url}, model {names}, {each}{memory}, up to {ready.max_model_len:,} tokens a request")
    sys.stdout.flush()
