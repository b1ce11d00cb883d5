"""The `paged` command: its subcommands, and the handling of errors.

A user's mistake ends in one line on standard error and exit status 2. A warning of ours is a line there. Any other
exception is a bug of ours, and keeps its traceback.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any

import typer

from paged import PagedError, __version__
from paged.cli import signals
from paged.cli.accuracy import accuracy
from paged.cli.bench import bench
from paged.cli.capacity import capacity
from paged.cli.chat import chat
from paged.cli.check import check
from paged.cli.commands import Command, Group, show_help
from paged.cli.demo import demo
from paged.cli.doctor import doctor
from paged.cli.generate import generate
from paged.cli.plan import plan
from paged.cli.policies import policies
from paged.cli.profile import profile
from paged.cli.quantise import quantise
from paged.cli.serve import ServeCommand, serve
from paged.cli.sessions import sessions
from paged.cli.show import printed, say
from paged.cli.simulate import simulate
from paged.cli.top import top
from paged.cli.validate import validate
from paged.errors import MissingExtra, PagedWarning

WRONG_INPUT = 2
READER_GONE = 1
INTERRUPTED = 130

# Typer exports one class of its usage errors; the others (missing argument, no such option) are its siblings.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="paged",
    help="A paged KV-cache memory manager and scheduler: under real load, and under a real model.",
    epilog="Begin with: `paged demo`",
    cls=Group,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (demo, doctor, generate, chat, serve, simulate, sessions, plan, validate):
    app.command(cls=ServeCommand if _command is serve else Command)(_command)
app.add_typer(bench, name="bench")
app.add_typer(check, name="check")
for _command in (capacity, profile, quantise, accuracy, policies, top):
    app.command(cls=Command)(_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        printed(f"paged {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _paged(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    show_help(context)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (None: this process's), and return its exit status."""
    try:
        with _warnings_in_a_line():
            given = None if arguments is None else list(arguments)
            status = _commands()(args=given, prog_name="paged", standalone_mode=False)
            sys.stdout.flush()
    except BaseException as problem:
        return signals.status() if signals.is_interrupt(problem) else _status_of(problem)
    # Typer turns every KeyboardInterrupt into one status.
    return signals.status() if status == INTERRUPTED else status if isinstance(status, int) else 0


@cache
def _commands() -> Callable[..., Any]:
    """Make the commands and their 400 options, once for all command lines of a process."""
    return typer.main.get_command(app)


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Within the block print each warning of ours in a line, and leave others to Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", PagedWarning)
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, PagedWarning):
                say(str(message))
            else:
                usual(message, category, *place, **more)

        warnings.showwarning = show
        yield


def _status_of(problem: BaseException) -> int:
    """Print a user's mistake in one line, and return the exit status. Raises the exception if it is a bug of ours."""
    if isinstance(problem, BrokenPipeError):
        # The reader (head, less) has gone.
        _forget_output()
        return READER_GONE
    if isinstance(problem, PagedError | MissingExtra | _UsageError):
        return _refused(_usage_message(problem) if isinstance(problem, _UsageError) else str(problem))
    if isinstance(problem, MemoryError):
        return _refused("this machine has too little memory for a pool of that size")
    if not isinstance(problem, OSError):
        raise problem
    if problem.filename:
        return _refused(f"{problem.filename}: {problem.strerror}")
    # An error of any file that we write has its name; this one has none.
    _forget_output()
    return _refused(f"standard output: {problem.strerror or problem}")


def _usage_message(problem: Any) -> str:
    """Return Typer's message of a usage error, without pydantic's additions, and with the wrong value."""
    message: str = problem.format_message().replace("Value error, ", "").partition(", unable to parse")[0]
    if message.startswith("Got unexpected extra") and problem.ctx.command.name in ("generate", "chat"):
        message += "; --model names a model"
    tried: list[Any] = getattr(problem.__cause__, "errors", list)()
    return message + "".join(f'; got "{each["input"]}"' for each in tried[:1] if repr(each["input"]) not in message)


def _forget_output() -> None:
    """Send buffered output to the null device: flushing it at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refused(message: str) -> int:
    say(message)
    return WRONG_INPUT
