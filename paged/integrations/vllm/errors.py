"""What the plug-in raises before an engine starts, or when a runner answers something else than it was asked. Knows no vLLM."""

from paged.errors import PagedError


class UnsupportedVllm(PagedError, ImportError):
    """The vLLM that is installed lacks a name, or a field, that the plug-in uses, or none is installed."""


class RefusedByPaged(PagedError, ValueError):
    """A configuration of vLLM, or an option of ours, that the plug-in does not carry; the message says why and what to do."""


class WrongAnswer(PagedError, ValueError):
    """A runner's output that does not belong to what was scheduled. Nothing has changed."""
