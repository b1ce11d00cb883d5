"""The common parts of all pages: a head that forbids network requests, styles, tables, and plotly's script inside the file."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from paged.base.extras import import_with_extra
from paged.base.whole_file import whole_file
from paged.study.report.drawing import Figure

# With it, no script in the file can make a browser fetch anything.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write_page(path: str | Path, title: str, body: Sequence[str], figures: Iterable[str], script: str) -> None:
    """Write a page with a heading, these parts of its body, and `script`, a file beside this one that draws `figures`, JSON documents.

    Raises MissingExtra without plotly, and UnwritablePath.
    """
    plotly = import_with_extra("plotly.offline", "study.report.write_html")
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title>",
        f"<style>{_asset('page.css')}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *body,
        f"<script>{plotly.get_plotlyjs()}</script>",
        f'<script type="application/json" id="figures">[{",".join(figures)}]</script>',
        f"<script>{_asset(script)}</script>",
        "</body></html>\n",
    ]
    with whole_file(path) as file:
        file.write("\n".join(parts))


def paragraphs(lines: Iterable[str]) -> str:
    """Return a paragraph for each text."""
    return "".join(f"<p>{escape(text)}</p>" for text in lines)


def plot_place(label: str) -> str:
    """Return the place in which the page's script draws the next figure."""
    return f'<div class="plot" role="img" aria-label="{escape(label)}"></div>'


def table(head: Iterable[str], rows: Iterable[str], opening: str = "<table>") -> str:
    """Return a table with these names of columns."""
    cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    return f"{opening}<thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def row(name: str, cells: Iterable[tuple[str, bool]]) -> str:
    """Return a line of a table: its name as HTML, and texts, each with whether it is the best."""
    shown = (f'<td class="best">{escape(text)}</td>' if best else f"<td>{escape(text)}</td>" for text, best in cells)
    return f'<tr><th scope="row">{name}</th>{"".join(shown)}</tr>'


def scrolled(tables: str) -> str:
    """Return tables that scroll if they are too wide for the page."""
    return f'<div class="scroll" tabindex="0">{tables}</div>'


def as_json(plot: Figure | None) -> str:
    """Return a plot for plotly's script: checked against plotly's schema, arrays as base64."""
    if plot is None:
        return "null"
    made: Any = import_with_extra("plotly.graph_objects", "study.report.write_html").Figure(plot)
    return inert(made.to_json())


def inert(text: str) -> str:
    """Escape JSON so that it cannot end the script element around it."""
    return text.replace("<", "\\u003c")


def _asset(name: str) -> str:
    return files("paged.study.report").joinpath(name).read_text(encoding="utf-8")
