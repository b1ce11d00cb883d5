"""Checks of the files that a command writes, before a long run: each can be written, and none is one that it reads."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from paged.base.whole_file import writable
from paged.errors import InvalidConfig


def check_outputs(written: Mapping[str, Path | None], read: Iterable[str | Path | None] = ()) -> None:
    """Raises InvalidConfig where an option's file is another one's or one that is `read`, and UnwritablePath where it cannot be written."""
    names = {os.path.realpath(path): "" for path in read if path and Path(path).exists()}
    for option, path in written.items():
        if path is None:
            continue
        writable(path)
        other = names.setdefault(os.path.realpath(path), option)
        if not other:
            raise InvalidConfig(f"{option} would overwrite {path}, which is read; give it another file")
        if other is not option:
            raise InvalidConfig(f"{other} and {option} are both {path}; give each a file of its own")
