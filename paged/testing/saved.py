"""A failure as a small JSON file: the world, the calls, what was found and what built the subject; saved and run again.

    {"format": 1, "paged": "0.1.0", "rig": "ManagerRig", "build": "theirs.engine:build",
     "world": {"num_blocks": 3, ...},
     "calls": [["add", [0, 1], {"tuple": ["a", 1]}], ["allocate", [0], [2]], ["confirm"]],
     "found": ["2: blocks [0] have ..."]}

What JSON has no word for is an object with one name: a tuple, bytes (in hex), a Request, an EngineRequest or a Hint.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from importlib import import_module
from inspect import signature
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from paged.errors import InvalidProgram
from paged.scheduler import Hint, Request, Retention
from paged.testing.engine_world import EngineRequest, build_engine
from paged.testing.manager_rig import build_manager
from paged.testing.protocol import Capabilities
from paged.testing.shrinking import KINDS, replay
from paged.testing.violation import Program, Violation
from paged.testing.world import build_scheduler

FORMAT = 1
NAMELESS = "?"
_RIGS: dict[str, Any] = {rig.__name__: (world, rig) for world, rig in KINDS}
_STRUCTS: dict[str, Any] = {"request": Request, "engine_request": EngineRequest, "retention": Retention, "hint": Hint}


class SavedProgram(msgspec.Struct, frozen=True, kw_only=True):
    """The file. `build` is "module:name" of what builds the subject from a world; None for our own, and NAMELESS where
    no name finds it again: a lambda, something local, a method of an object."""

    format: int
    paged: str
    rig: str
    world: dict[str, Any]
    calls: list[list[Any]]
    found: list[str]
    build: str | None = None
    reference: str | None = None
    """Of an engine's rig, as `build`."""
    capabilities: Capabilities | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What the rig was given besides. Raises InvalidProgram."""
        if self.reference == NAMELESS:
            raise InvalidProgram("the reference that answers were held against cannot be found by a name.")
        given = {"reference": imported(self.reference), "capabilities": self.capabilities}
        return {name: each for name, each in given.items() if each is not None}

    @property
    def program(self) -> Program:
        """As it was. Raises InvalidProgram."""
        if self.rig not in _RIGS:
            raise InvalidProgram(f"unknown rig {self.rig!r}; known ones are {', '.join(_RIGS)}.")
        kind, rig = _RIGS[self.rig]
        try:
            world = msgspec.convert(self.world, kind)
        except msgspec.ValidationError as error:
            raise InvalidProgram(f"the world: {error}.") from error
        calls = []
        for number, (verb, *rest) in enumerate(call or [None] for call in self.calls):
            method = getattr(rig, verb, None) if isinstance(verb, str) and not verb.startswith("_") else None
            if not callable(method):
                raise InvalidProgram(f"call {number}: {verb!r} is no method of {self.rig}.")
            arguments = tuple(_restored(each) for each in rest)
            try:
                signature(method).bind(None, *arguments)
            except TypeError as error:
                raise InvalidProgram(f"call {number}: {verb}: {error}.") from error
            calls.append((verb, arguments))
        return Program(self.rig, world, tuple(calls), self.options)


def save(violation: Violation, folder: str | Path, build: Callable[..., Any] | None = None) -> Path:
    """Write the violation's program into a folder, under a name made from its content; return the file.

    `build` is named in it if it can be imported. Raises InvalidProgram for what no file can hold, and OSError.
    """
    from paged import __version__

    program = violation.program
    try:
        saved = SavedProgram(
            format=FORMAT,
            paged=__version__,
            rig=program.rig,
            world=msgspec.to_builtins(program.world),
            calls=[[verb, *map(_plain, arguments)] for verb, arguments in program.calls],
            found=violation.found,
            build=_name_of(build),
            reference=_name_of(program.options.get("reference")),
            capabilities=program.options.get("capabilities"),
        )
        data = msgspec.json.format(msgspec.json.encode(saved), indent=1)
    except UnicodeEncodeError as error:
        raise InvalidProgram(f"a text of the program cannot be saved: {error}.") from error
    name = f"{program.rig.removesuffix('Rig').lower()}-{blake2b(data, digest_size=4).hexdigest()}.json"
    file = Path(folder) / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data + b"\n")
    return file


def keep(violation: Violation, build: Callable[..., Any] | None = None) -> None:
    """Save it in the folder that PAGED_FAILURES names, if it is set, and note in the violation how to run it again."""
    folder = os.environ.get("PAGED_FAILURES")
    if not folder:
        return
    try:
        file = save(violation, folder, build)
    except (InvalidProgram, OSError) as error:
        # What was found is more than where it was to be kept.
        violation.add_note(f"Not saved: {error}")
        return
    more = " --build MODULE:NAME" if _name_of(build) == NAMELESS else ""
    violation.add_note(f"Saved. To run it again: paged check replay {file}{more}")


@contextmanager
def kept(build: Callable[..., Any] | None = None) -> Iterator[None]:
    """A violation that is raised inside is kept on its way out."""
    try:
        yield
    except Violation as violation:
        keep(violation, build)
        raise


def load(file: str | Path) -> SavedProgram:
    """Read a file that `save` wrote. Raises InvalidProgram, and OSError if there is none."""
    data = Path(file).read_bytes()
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidProgram(f"{file}: not JSON: {error}.") from error
    if not isinstance(document, dict) or document.get("format") is None:
        raise InvalidProgram(f"{file}: not a program that the kit saved: a JSON object with `format` is needed.")
    if document["format"] != FORMAT:
        theirs = f"format {document['format']!r} (paged {document.get('paged', 'unknown')})"
        raise InvalidProgram(f"{file}: a saved program of {theirs}; this version reads format {FORMAT}.")
    try:
        return msgspec.convert(document, SavedProgram)
    except msgspec.ValidationError as error:
        raise InvalidProgram(f"{file}: {error}.") from error


def rerun(saved: SavedProgram, build: Callable[..., Any] | None = None) -> Violation | None:
    """Run it from the start and drain it; return what it violates now, None if nothing.

    `build` takes the place of what built the subject then. Raises InvalidProgram.
    """
    program = saved.program
    if build is None and saved.build == NAMELESS:
        raise InvalidProgram(
            "what built the subject cannot be found by a name; say what builds it with --build MODULE:NAME."
        )
    builder = build if build is not None else imported(saved.build)
    try:
        replay(program.world, program.calls, builder, drain=True, **program.options)
    except Violation as violation:
        return violation
    return None


def imported(name: str | None) -> Callable[..., Any] | None:
    """What "module:name" names, the current folder being looked in, too. Raises InvalidProgram."""
    if name is None:
        return None
    module, _, path = name.partition(":")
    if not module or not path:
        raise InvalidProgram(f"{name!r} does not name what builds a subject; MODULE:NAME does.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = attrgetter(path)(import_module(module))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InvalidProgram(f"{name}: {error}.") from error
    if not callable(found):
        raise InvalidProgram(f"{name} cannot be called with a world; it is {type(found).__name__}.")
    return cast("Callable[..., Any]", found)


def _name_of(build: Callable[..., Any] | None) -> str | None:
    """Its "module:name", None for what builds our own, NAMELESS where no name would find it again."""
    if build is None or build in (build_manager, build_scheduler, build_engine):
        return None
    module, path = getattr(build, "__module__", ""), getattr(build, "__qualname__", "")
    try:
        is_found = module != "__main__" and attrgetter(path)(sys.modules[module]) is build
    except (KeyError, AttributeError):
        is_found = False
    return f"{module}:{path}" if is_found else NAMELESS


def _plain(value: Any) -> Any:
    """The value in JSON's words."""
    if value is None or isinstance(value, (bool, str, float)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (list, np.ndarray)):
        return [_plain(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(each) for each in value]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    for word, kind in _STRUCTS.items():
        if isinstance(value, kind):
            shown = [each.name for each in msgspec.structs.fields(kind) if _is_unusual(value, each)]
            return {word: {name: _plain(getattr(value, name)) for name in shown}}
    raise InvalidProgram(f"{value!r} of type {type(value).__name__} cannot be saved.")


def _is_unusual(value: Any, field: Any) -> bool:
    return field.required or getattr(value, field.name) != field.default


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(each) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise InvalidProgram(f"{value} is no saved value.")
    ((kind, content),) = value.items()
    try:
        if kind == "tuple":
            return tuple(_restored(each) for each in content)
        if kind == "bytes":
            return bytes.fromhex(content)
        if kind in _STRUCTS:
            return _STRUCTS[kind](**{name: _restored(each) for name, each in content.items()})
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidProgram(f"{value} is no saved {kind}: {error}.") from error
    raise InvalidProgram(f"{kind!r} is no kind of saved value; tuple, bytes, {', '.join(_STRUCTS)} are.")
