"""What can be wrong with a model or a device that somebody names.

    PagedError
    ├── UnknownModel       no model that ships has this name
    ├── UnknownDevice      no device that ships has this name
    └── BadHardwareFile    a file that does not describe a model, a device or a profile

Knows names and files. Does not know what is computed from them.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from paged import PagedError


class _UnknownName(PagedError, ValueError):
    """`name`, `known` (the names that ship) and `nearest` (the known name of its family most like it, or None)."""

    kind = ""
    own = "a path that ends in .json names a file of your own"

    def __init__(self, name: str, known: Iterable[str], reason: str = "") -> None:
        self.name = name
        self.known = tuple(known)
        wanted = name.lower()
        longer = [known for known in self.known if wanted and known.startswith(wanted)]
        relatives = [known for known in self.known if _is_one_family(wanted, known)]
        self.nearest = next(iter(longer or get_close_matches(wanted, relatives, n=1)), None)
        hint = f" {reason}" if reason else f" Did you mean {self.nearest}?" if self.nearest else ""
        super().__init__(f'unknown {self.kind} "{name}".{hint} Known are {", ".join(self.known)}; {self.own}.')


def _is_one_family(name: str, other: str) -> bool:
    """Whether the words that two names begin with are alike, typing errors aside."""
    first, second = (re.split(r"[^a-z]", each, maxsplit=1)[0] for each in (name, other))
    return bool(get_close_matches(first, [second], cutoff=0.8))


class UnknownModel(_UnknownName):
    """A model's name that is not known."""

    kind = "model"
    own = "a path names a checkpoint folder, its config.json, or a .json file of your own"


class UnknownDevice(_UnknownName):
    """A device's name that is not known."""

    kind = "device"


class BadHardwareFile(PagedError, ValueError):
    """A file that does not describe what it should: `path`, `field` (None where the file as a whole is no JSON), `problem`."""

    def __init__(self, path: Path, field: str | None, problem: str) -> None:
        where = f"{path}, field {field}" if field else str(path)
        super().__init__(f"{where}: {problem}")
        self.path = path
        self.field = field
        self.problem = problem
