"""The page that shows a running server, one file without anything from elsewhere.

Knows where the file lies. Does not know what it shows.
"""

from importlib.resources import files


def page() -> bytes:
    """The page, UTF-8."""
    return (files(__name__) / "page.html").read_bytes()
