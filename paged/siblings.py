"""The guard that keeps somebody else's `scheduler.py` from being taken for ours.

`block_manager`, `scheduler` and `attention` are ordinary top-level packages beside `paged`, and their names are common:
an engine may have its own `scheduler.py`, and other distributions install a `scheduler` or an `attention`. Python
imports whichever comes first on `sys.path`. This module finds out which one that is. It knows where files lie and which
names a sibling must offer, not what they do, and it imports nothing before the places are right.
"""

import sys
from collections.abc import Collection
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_SIBLINGS = ("attention", "block_manager", "scheduler")
_HOME = Path(__file__).resolve().parent.parent


class ShadowedPackage(ImportError):
    """A sibling package of `paged` is hidden by something else of the same name, or is missing.

    `name` is the sibling's name; `path` the file in the way, None when there is no file to name.
    """


def check_siblings() -> None:
    """Return when each sibling that `import` finds, or has already imported, is the one installed beside `paged`.

    Raises ShadowedPackage, one sentence that names the file in the way and says what to do. Nothing is imported: a
    shadowing file is not run.
    """
    for name in _SIBLINGS:
        ours = (_HOME / name).resolve()
        found = _location(name)
        if found is None:
            raise ShadowedPackage(
                f"paged finds no package `{name}` where it keeps its own ({ours}): "
                "install paged again, and take what stands for it out of sys.modules if something does.",
                name=name,
            )
        if found != ours:
            culprit = found / "__init__.py" if (found / "__init__.py").is_file() else found
            raise ShadowedPackage(
                f"{culprit} shadows the package `{name}` that belongs to paged ({ours}): rename it, "
                "move it into a package of your own, or uninstall the distribution that it came with.",
                name=name,
                path=str(culprit),
            )


def import_sibling(name: str, public: Collection[str]) -> ModuleType:
    """Import the sibling `name`, which must offer every name in `public`.

    Raises ShadowedPackage when another one would be imported, or when another distribution was installed over ours in
    the same folder: then the place is right, and only the names tell.
    """
    check_siblings()
    module = import_module(name)
    missing = sorted(each for each in public if not hasattr(module, each))
    if missing:
        raise ShadowedPackage(
            f"{module.__file__} is not the package `{name}` that belongs to paged, for it lacks {_listed(missing)}: "
            "uninstall the distribution that wrote over it, and install paged again.",
            name=name,
            path=module.__file__,
        )
    return module


def _listed(names: list[str]) -> str:
    """Three names, and how many more."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _location(name: str) -> Path | None:
    """The folder of the package, or the file of the module, that `import name` gives; None when it gives none."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        file, folders = getattr(loaded, "__file__", None), getattr(loaded, "__path__", ())
    else:
        spec = find_spec(name)
        if spec is None:
            return None
        file, folders = spec.origin if spec.has_location else None, spec.submodule_search_locations or ()
    # A folder without __init__.py is a package of its own kind: it has folders and no file.
    place = file or next(iter(folders), None)
    if place is None:
        return None
    path = Path(place).resolve()
    return path.parent if path.stem == "__init__" else path
