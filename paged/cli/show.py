"""Output of results: tables in a terminal, plain lines without one, JSON on request."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import msgspec
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from paged.base.words import counted
from paged.cli.signals import at_once

T = TypeVar("T")
_LOOK: Any = {"title_justify": "left", "title_style": "bold", "pad_edge": False}


def console() -> Console:
    """Return standard output as a console, made anew, because tests and pipes replace it."""
    return Console(highlight=False)


def printed(text: str) -> None:
    """Print a line of plain text on standard output."""
    sys.stdout.write(text + "\n")


def say(text: str) -> None:
    """Print a line on standard error that is no result. Ignore a failure, such as a full disk."""
    with suppress(OSError):
        print(f"paged: {' '.join(text.split())}", file=sys.stderr)


@contextmanager
def loading(what: object) -> Iterator[None]:
    """Announce at a terminal that the block loads libraries and a model. A signal within it ends the process at once."""
    if sys.stderr.isatty():
        say(f"loading {what or 'the model that ships'}")
    with at_once():
        yield


@contextmanager
def at_work(words: str, is_silent: bool) -> Iterator[None]:
    """Show these words at a terminal within the block, unless it is silent. A signal within it ends the process at once."""
    out = console()
    with out.status(words) if out.is_terminal and not is_silent else nullcontext():
        # A process that ends at once could not show it again.
        out.show_cursor()
        with at_once():
            yield


def print_json(document: Any) -> None:
    """Print a JSON document on standard output."""
    printed(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def progress_bar(*columns: ProgressColumn) -> Progress | None:
    """Return a progress bar for standard error, a description and these columns; None if that is no terminal."""
    out = Console(stderr=True)
    if not out.is_terminal:
        # With some versions of Rich a disabled bar prints an empty line.
        return None
    return Progress(TextColumn("{task.description}"), *columns, console=out, transient=True)


@contextmanager
def counting(what: str, total: int | None) -> Iterator[Callable[..., None]]:
    """Show a progress bar within the block. Yield a function that advances it by one; its `more` is a text at the bar's end."""
    bar = progress_bar(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[more]}"))
    if bar is None:
        yield lambda advance=1, **_: None
        return
    task = bar.add_task(what, total=total, more="")
    with bar:
        yield lambda advance=1, **changes: bar.update(task, advance=advance, **changes)


def all_of(results: Iterable[T], total: int, word: str, show: Callable[[list[T]], None]) -> list[T]:
    """Return `total` results, with a progress bar until the last one. After an interrupt `show` those so far, and their number."""
    found: list[T] = []
    try:
        with counting(f"{word}s", total) as advance:
            for each in results:
                found.append(each)
                advance()
    except KeyboardInterrupt:
        if found:
            show(found)
        say(f"interrupted; {len(found)} of {counted(total, word)} had ended")
        raise
    return found


def as_time(seconds: float | None) -> str:
    """Return seconds as text, in s or ms."""
    if seconds is None:
        return "none"
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Print a table: in a terminal drawn, or a block a row if it is too narrow; else plain lines, cells two blanks apart. Columns in
    `right` are aligned right, and their cells never broken."""
    out = console()
    if not out.is_terminal:
        widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
        for row in [columns, *rows]:
            cells = [
                cell.rjust(width) if i in right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            printed("  ".join(cells).rstrip())
        return
    drawn = Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True, **_LOOK)
    for i, column in enumerate(columns):
        if i in right:
            width = max(map(len, [column, *(row[i] for row in rows)]))
            drawn.add_column(column, justify="right", no_wrap=True, min_width=width)
        else:
            drawn.add_column(column, overflow="fold", min_width=len(column))
    for row in rows:
        drawn.add_row(*row)
    if drawn.__rich_measure__(out, out.options).minimum <= out.width:
        out.print(drawn)
        return
    printed(title)
    for first, *others in rows:
        figures(f"{columns[0]} {first}", list(zip(columns[1:], others, strict=True)))


def figures(title: str, pairs: Sequence[tuple[str, str]]) -> None:
    """Print names and values: in a terminal a table without a header, else a line `name: value` each."""
    out = console()
    if not out.is_terminal:
        for name, value in pairs:
            printed(f"{name}: {value}")
        return
    drawn = Table(title=title, box=box.SIMPLE, show_header=False, **_LOOK)
    drawn.add_column(style="#9ca3af", no_wrap=True)
    drawn.add_column()
    for name, value in pairs:
        drawn.add_row(name, value)
    out.print(drawn)
