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


def console() -> Console:
    """Return standard output as a terminal to draw on; made when needed, because tests and pipes replace it."""
    return Console(highlight=False)


def printed(text: str) -> None:
    """Print a line of plain text on standard output."""
    sys.stdout.write(text + "\n")


def say(text: str) -> None:
    """Print a line that is no result on standard error. If that fails (a full disk), the work goes on without."""
    with suppress(OSError):
        print(f"paged: {' '.join(text.split())}", file=sys.stderr)


@contextmanager
def loading(what: object) -> Iterator[None]:
    """Announce at a terminal that the block loads libraries and a model; a signal within it ends the process
    where it is."""
    if sys.stderr.isatty():
        say(f"loading {what or 'the model that ships'}")
    with at_once():
        yield


@contextmanager
def at_work(words: str, is_silent: bool) -> Iterator[None]:
    """Show these words at a terminal within the block, unless nothing is to be shown; a signal ends the process there."""
    out = console()
    with out.status(words) if out.is_terminal and not is_silent else nullcontext():
        # What ends at once could not show it again.
        out.show_cursor()
        with at_once():
            yield


def print_json(document: Any) -> None:
    """One JSON document on standard output."""
    printed(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def progress_bar(*columns: ProgressColumn) -> Progress | None:
    """A line on standard error at a terminal: a description, then these columns. None elsewhere."""
    out = Console(stderr=True)
    if not out.is_terminal:
        # A bar that is disabled prints an empty line with some versions of Rich.
        return None
    return Progress(TextColumn("{task.description}"), *columns, console=out, transient=True)


@contextmanager
def counting(what: str, total: int | None) -> Iterator[Callable[..., None]]:
    """A bar on standard error at a terminal within the block. What is yielded moves it on by one; `more` is a text at its end."""
    bar = progress_bar(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[more]}"))
    if bar is None:
        yield lambda advance=1, **_: None
        return
    task = bar.add_task(what, total=total, more="")
    with bar:
        yield lambda advance=1, **changes: bar.update(task, advance=advance, **changes)


def show_all(results: Iterable[T], total: int, word: str, show: Callable[[list[T]], None]) -> None:
    """Show `total` results when the last one has come, behind a bar at a terminal. Interrupted, show those that have come, and say how many."""
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
    show(found)


def as_time(seconds: float | None) -> str:
    """Return seconds in the unit in which they read best."""
    if seconds is None:
        return "none"
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """A table in a terminal, or where that is too narrow a block a row. Without a terminal plain lines with the cells two blanks apart. `right`
    columns are aligned right, and never broken within a figure."""
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
    look: Any = {"box": box.SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
    drawn = Table(title=title, title_justify="left", title_style="bold", **look)
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
    """Names and values: a table without a header in a terminal, one `name: value` a line without one."""
    out = console()
    if not out.is_terminal:
        for name, value in pairs:
            printed(f"{name}: {value}")
        return
    drawn = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE, show_header=False, pad_edge=False
    )
    drawn.add_column(style="#9ca3af", no_wrap=True)
    drawn.add_column()
    for name, value in pairs:
        drawn.add_row(name, value)
    out.print(drawn)
