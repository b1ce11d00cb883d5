"""The server's pages, a file each without anything from elsewhere: page (the dashboard), index (links) and docs (the interface)."""

from importlib.resources import files


def page(name: str = "page") -> bytes:
    """A page, UTF-8."""
    return (files(__name__) / f"{name}.html").read_bytes()
