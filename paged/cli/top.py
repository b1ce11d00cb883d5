"""`paged top`: a running server in the terminal: its blocks, its queues, why requests wait, and events."""

from typing import Annotated

import typer
from rich.live import Live

from paged.cli.show import console
from paged.cli.top_view import draw, print_plain
from paged.serving.feed import snapshots


def top(url: Annotated[str, typer.Argument(help="The server's address.")] = "http://127.0.0.1:8000", api_key: Annotated[str | None, typer.Option("--api-key", envvar="PAGED_API_KEY", help="The server's admin key, if it has one.", show_envvar=True)] = None, once: Annotated[bool, typer.Option("--once", help="Print one view and end.")] = False) -> None:  # fmt: skip
    """Watch a running server: the request of each block, running requests, waiting requests and their reasons.

    Reads what the server's dashboard reads, twice a second, until Ctrl-C. In a pipe it prints one view in plain lines.

    Example: `paged top http://127.0.0.1:8000`
    """
    out, feed = console(), snapshots(url, api_key)
    seen = next(feed)
    if not out.is_terminal:
        print_plain(seen)
    elif once:
        out.print(draw(seen, out.width, out.height - 1))
    else:
        with Live(draw(seen, out.width, out.height), console=out, screen=True, auto_refresh=False) as live:
            for seen in feed:
                live.update(draw(seen, out.width, out.height), refresh=True)
