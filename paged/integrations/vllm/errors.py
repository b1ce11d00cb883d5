"""What the plug-in raises before an engine starts, or when a runner answers something else than it was asked. Knows no vLLM."""

from paged.errors import PagedError
from paged.integrations.errors import RefusedByPaged, UnsupportedEngine

__all__ = ["RefusedByPaged", "UnsupportedVllm", "WrongAnswer"]


class UnsupportedVllm(UnsupportedEngine):
    """No vLLM, or one whose scheduler interface is not what the plug-in knows."""


class WrongAnswer(PagedError, ValueError):
    """A runner's output that does not belong to what was scheduled. Nothing has changed."""
