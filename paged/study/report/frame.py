"""The common parts of all pages: a head that forbids every request, styles, and plotly's script inside the file."""

import html
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from paged.base.extras import import_with_extra
from paged.study.report.drawing import Figure

# A browser that honours it cannot fetch anything, whatever a script in the file should try.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def framed(title: str, body: Sequence[str], figures: str, script: str) -> str:
    """A page: its heading, these parts of its body, and `script`, a file beside this one that draws `figures`, a JSON document.

    Raises MissingExtra without plotly.
    """
    plotly = import_with_extra("plotly.offline", "study.report.write_html")
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{_asset('page.css')}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        *body,
        f"<script>{plotly.get_plotlyjs()}</script>",
        f'<script type="application/json" id="figures">{figures}</script>',
        f"<script>{_asset(script)}</script>",
        "</body></html>\n",
    ]
    return "\n".join(parts)


def as_json(plot: Figure | None) -> str:
    """A plot as plotly's script reads it: checked against plotly's schema, arrays as base64."""
    if plot is None:
        return "null"
    made: Any = import_with_extra("plotly.graph_objects", "study.report.write_html").Figure(plot)
    return inert(made.to_json())


def inert(text: str) -> str:
    """JSON that cannot end the script element it stands in."""
    return text.replace("<", "\\u003c")


def _asset(name: str) -> str:
    return files("paged.study.report").joinpath(name).read_text(encoding="utf-8")
