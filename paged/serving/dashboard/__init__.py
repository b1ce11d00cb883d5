"""The server's pages, each one file that loads nothing else: page (the dashboard), index (links) and docs (the interface)."""

from importlib.resources import files


def page(name: str) -> bytes:
    """Return a page, UTF-8."""
    return (files(__name__) / f"{name}.html").read_bytes()
