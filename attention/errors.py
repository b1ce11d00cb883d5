"""What a caller can get wrong about attention. Each error names the value and the limit.

AttentionError            a PagedError
  UnknownBackend          no backend has this name; the known ones are listed
  UnsupportedByBackend    the backend cannot do this shape, dtype, device or option; says which ones it can
  BuildFailed             C code cannot be compiled here; with the compiler's message
  InvalidPool             a pool's sizes, or block ids that are not in it
"""

from __future__ import annotations

from collections.abc import Iterable

from paged.errors import PagedError


class AttentionError(PagedError):
    """The root of the errors of this package. Each keeps what it was made from as its `args`."""


class UnknownBackend(AttentionError):
    """No backend has this name."""

    def __init__(self, name: object, known: Iterable[str]) -> None:
        super().__init__(name, tuple(known))

    def __str__(self) -> str:
        name, known = self.args
        return f"unknown attention backend {name!r}; known ones are {', '.join(known)}."


class UnsupportedByBackend(AttentionError):
    """The backend cannot do what is asked."""

    def __init__(self, backend: str, what: str, instead: str) -> None:
        super().__init__(backend, what, instead)

    def __str__(self) -> str:
        backend, what, instead = self.args
        return f'backend "{backend}" cannot do {what}; {instead}'


class InvalidPool(AttentionError):
    """A pool of these sizes cannot be made, or a block is not in it."""


class BuildFailed(AttentionError):
    """C code cannot be compiled or loaded here."""
