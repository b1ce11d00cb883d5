"""What is wrong with where a report is to go. Knows a path and why. Does not know what would have been written."""

import os
from pathlib import Path

from paged import PagedError


class UnwritablePath(PagedError, OSError):
    """A report cannot be written there: `path`, and `problem`, why not."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: cannot be written, {problem}")
        self.path = path
        self.problem = problem


def writable(path: str | Path) -> Path:
    """The path, if a file can be written there now; asked before a long run. A file that is there stays as it is, and none is left.

    Raises UnwritablePath.
    """
    path = Path(path)
    is_new = not os.path.lexists(path)
    try:
        # Permissions, read-only disks and odd names are the system's to judge; opening asks all of them.
        with path.open("ab"):
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        if not path.parent.exists():
            reason = f"there is no folder {path.parent}"
        elif path.is_dir():
            reason = "it is a folder"
        raise UnwritablePath(path, reason[0].lower() + reason[1:]) from None
    if is_new:
        path.unlink()
    return path
