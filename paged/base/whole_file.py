"""A file that is written whole or not at all: an interrupt, a full disk or an error leaves what was there before."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from paged.errors import UnwritablePath


@contextmanager
def whole_file(path: str | Path, *, newline: str | None = None) -> Iterator[IO[str]]:
    """Open a UTF-8 text file that takes the path's place when the block ends. If the block raises, the old file stays
    as it is.

    What is no regular file (a pipe, /dev/stdout) is written directly. Raises UnwritablePath, for a full disk, too.
    """
    path = Path(path)
    target = _target(path)
    is_regular = _is_regular(target)
    written = _beside(target) if is_regular else target
    try:
        file = _opened(path, written, "x" if is_regular else "w", encoding="utf-8", newline=newline)
        try:
            with file:
                yield file
        except BrokenPipeError:
            raise
        except OSError as error:
            # An error that names a file comes from another file, which the block reads.
            if error.filename is None and not isinstance(error, UnwritablePath):
                raise UnwritablePath(path, _reason(path, error)) from None
            raise
        if is_regular:
            if target.exists():
                written.chmod(target.stat().st_mode & 0o7777)
            written.replace(target)
    finally:
        if is_regular:
            written.unlink(missing_ok=True)


def writable(path: str | Path) -> Path:
    """Return the path if a file can be written there now, for before a long run. Leaves none. Raises UnwritablePath."""
    path = Path(path)
    target = _target(path)
    if _is_regular(target) or target.is_dir():
        # Open it: the system checks permissions, read-only disks and odd names.
        if target.exists():
            _opened(path, target, "a").close()
        _opened(path, _beside(target), "x").close()
        _beside(target).unlink()
    return path


def _target(path: Path) -> Path:
    """Return where a link points, so that the link stays."""
    try:
        return Path(os.path.realpath(path))
    except ValueError as error:
        raise UnwritablePath(path, str(error)) from None


def _is_regular(target: Path) -> bool:
    return target.is_file() or not target.exists()


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.partial")


def _opened(path: Path, file: Path, mode: str, **how: Any) -> IO[Any]:
    try:
        return file.open(mode, **how)
    except OSError as error:
        raise UnwritablePath(path, _reason(path, error)) from None


def _reason(path: Path, error: OSError) -> str:
    if path.is_dir():
        return "it is a folder"
    if not path.parent.exists():
        return f"there is no folder {path.parent}"
    reason = error.strerror or str(error)
    return reason[0].lower() + reason[1:]
