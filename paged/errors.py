"""The roots of every error and every warning of paged, and the errors that every room raises."""

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


class InvalidConfig(PagedError, ValueError):
    """A size, share or option outside its range."""


class InvalidTokens(PagedError, ValueError):
    """No tokens where some are needed, or values that are no token ids (int32, 0 or more)."""


class CannotCopy(PagedError, TypeError):
    """A copy or a pickle of an object that counts one KV memory: `kind`, its class's name."""

    def __init__(self, kind: str) -> None:
        super().__init__(
            f"a {kind} cannot be copied or pickled: its blocks are places in one KV memory, and a copy would hand out the"
            " same ones. Make another one of the same sizes, and give it the prompts again."
        )
        self.kind = kind


class PagedWarning(UserWarning):
    """What works, and is slower than it could be: said once a process, by the command line in a line."""
