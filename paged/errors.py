"""The roots of every error and every warning of paged. Knows nothing of what raises them, and imports nothing of ours."""

from typing import Any


class PagedError(Exception):
    """Base of everything that paged raises on purpose.

    A copy, and what pickle makes of it in another process, has the same text and attributes.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own would call the class with the finished text in place of what that was made from.
        reduced = super().__reduce__()
        assert isinstance(reduced, tuple), "an exception is no global"
        return _rebuilt, (type(self), reduced[1]), *reduced[2:]


def _rebuilt(kind: type[PagedError], arguments: tuple[object, ...]) -> PagedError:
    error = kind.__new__(kind, *arguments)
    if not error.args:
        # An OSError with an `__init__` of its own leaves them to it.
        error.args = arguments
    return error


class PagedWarning(UserWarning):
    """What works, and is slower than it could be: said once a process, by the command line in a line."""
