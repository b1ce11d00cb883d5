"""What the plug-in raises before a manager starts, or gives to a request as the reason of its end. Knows no transformers."""

from paged.errors import PagedError
from paged.integrations.errors import RefusedByPaged, UnsupportedEngine

__all__ = ["RefusedByPaged", "Unfinished", "UnsupportedTransformers"]


class UnsupportedTransformers(UnsupportedEngine):
    """No transformers, or one whose continuous batching is not what the plug-in knows."""


class Unfinished(PagedError, RuntimeError):
    """A request that ended before its length, because a cache of this size could hold no more of it."""
