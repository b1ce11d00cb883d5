"""The part of a page that a tool writes, between two marks; the tool rewrites it, or with --check says whether it is stale."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path


def with_part(page: str, begin: str, end: str, lines: Iterable[str]) -> str:
    """The page with these lines between its two marks."""
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the page has no {begin.strip()} … {end.strip()}.")
    return "\n".join([before + begin.strip(), *lines, end + after])


def run(about: str, page: Path, begin: str, end: str, lines: Callable[[], Iterable[str]]) -> None:
    """The tool's main program. With --check it exits with status 1 if the page is stale."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is stale")
    check = parser.parse_args().check
    text = page.read_text(encoding="utf-8")
    if text == (wanted := with_part(text, begin, end, lines())):
        return
    if check:
        sys.exit(f"docs/{page.name} is stale; run `python {sys.argv[0]}`.")
    page.write_text(wanted, encoding="utf-8")
