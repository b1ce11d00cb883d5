"""What can be wrong with a checkpoint, and with the memory that is wanted for it.

    PagedError
    ├── ModelError
    │   ├── CheckpointNotFound    no such folder, or no checkpoint in it
    │   ├── BrokenCheckpoint      its files do not make a whole model
    │   └── UnsupportedModel      an architecture, dtype or shape that cannot run here
    └── BudgetTooSmall            bytes that hold not one block, or not one sequence

Each message says what would do.
"""

from __future__ import annotations

from paged.block_manager import PagedError

# Characters of a library's message that are quoted.
_LONGEST_CAUSE = 300


class ModelError(PagedError):
    """A checkpoint that cannot be run."""


class CheckpointNotFound(ModelError, FileNotFoundError):
    """There is no such folder, or no checkpoint in it."""


class BrokenCheckpoint(ModelError, ValueError):
    """Its files are truncated, missing or contradictory."""


class UnsupportedModel(ModelError, ValueError):
    """Its architecture, or what is asked of it, cannot run on paged memory."""


class BudgetTooSmall(PagedError, ValueError):
    """A byte budget that is too small; `wanted` and `given` are bytes."""

    def __init__(self, message: str, *, wanted: int, given: int) -> None:
        super().__init__(message)
        self.wanted = wanted
        self.given = given


def short_cause(error: BaseException) -> str:
    """What a library says of a file, as one line that a terminal can hold: its first words may be no cause."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= _LONGEST_CAUSE else f"{words[:_LONGEST_CAUSE]} …"
