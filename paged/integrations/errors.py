"""What every plug-in raises. Knows no engine."""

from paged.errors import PagedError


class UnsupportedEngine(PagedError, ImportError):
    """The engine that is installed lacks a name, or a field, that the plug-in uses, or none is installed."""


class RefusedByPaged(PagedError, ValueError):
    """A configuration of an engine, or an option of ours, that a plug-in does not carry; the message says why and what to do."""
