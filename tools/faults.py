"""Planted faults: changes of the syntax tree of one function, which is found by its name.

A fault is an entry of `tests/faults/faults.toml`, or beside it of `layers.toml` if it shows only with layers of several kinds, and of
`sessions.toml` if it shows only with sessions and hints:

    [lost-copy]
    says = "A shared partial block is replaced, and the copy is not reported."
    breaks = 4                                 # the rule of docs/invariants.md
    in = "copy_shared_tails"                   # a function of the two rooms; or `Class.method`
    find = "self._put_copy(...)"               # one place in it
    put = "self.write(A, B, C)"                # what stands there instead

`find` is an expression or a statement. A single capital letter in it is any expression, the same each time, and `...` at the end of
a list of arguments, elements or statements is the rest of it; `put` may use both. So a function may move to another file, and its
class may go, and the fault still applies. A place that is gone, or is there twice, is an error.
"""

from __future__ import annotations

import ast
import copy
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOMS = ("block_manager", "scheduler")
KEYS = {"says", "breaks", "in", "find", "put"}
NOT_COMPARED = ("ctx", "kind", "type_comment", "type_ignores")


class FaultFailed(Exception):
    """A fault that is described wrongly, or that has no place in the sources, or more than one."""


@dataclass(frozen=True)
class Fault:
    """What is wrong, which rule of docs/invariants.md that breaks, and what is changed in which function."""

    name: str
    says: str
    breaks: int
    function: str
    find: str
    put: str
    layers: bool = False
    """It shows only where layers are of several kinds."""
    sessions: bool = False
    """It shows only with sessions and hints."""


def read(table: Path) -> dict[str, Fault]:
    """Return the faults of a table by name; those of layers.toml and sessions.toml show only with these. Raises FaultFailed."""
    found = {}
    for name, entry in tomllib.loads(table.read_text(encoding="utf-8")).items():
        if not isinstance(entry, dict) or entry.keys() != KEYS:
            raise FaultFailed(f"{name}: has {sorted(entry)}; a fault has {sorted(KEYS)}.")
        fault = Fault(
            name,
            entry["says"],
            entry["breaks"],
            entry["in"],
            entry["find"],
            entry["put"],
            layers=table.stem == "layers",
            sessions=table.stem == "sessions",
        )
        if not fault.says.endswith("."):
            raise FaultFailed(f"{name}: `says` is no sentence.")
        try:
            pattern_of(fault)
        except (SyntaxError, ValueError) as error:
            raise FaultFailed(f"{name}: `find` or `put` is no Python: {error}.") from None
        found[name] = fault
    return found


def pattern_of(fault: Fault) -> tuple[ast.AST, list[ast.AST]]:
    """Return what is looked for, and what is put there: two expressions, or a statement and any number of them."""
    (find,), put = ast.parse(fault.find).body, ast.parse(fault.put).body
    if isinstance(find, ast.Expr) and len(put) == 1 and isinstance(put[0], ast.Expr):
        return find.value, [put[0].value]
    return find, list(put) or [ast.Pass()]


@dataclass(frozen=True)
class Function:
    """A function of the two rooms, with the file and the tree that it stands in."""

    file: Path
    tree: ast.Module
    qualified: str
    node: ast.AST


def functions_of(folder: Path) -> list[Function]:
    """Return the functions of the two rooms in a copy of the sources."""
    found = []
    for file in [file for room in ROOMS for file in sorted((folder / room).rglob("*.py"))]:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found += [Function(file, tree, *named) for named in functions_in(tree)]
    return found


def functions_in(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield the functions of a tree with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        name = outer
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{outer}.{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield name, node
        if not isinstance(node, ast.expr):
            yield from functions_in(node, name)


def place_of(fault: Fault, functions: list[Function]) -> tuple[Function, ast.AST]:
    """Return the one place that the fault changes, and the function that has it. Raises FaultFailed."""
    find, _ = pattern_of(fault)
    named = [function for function in functions if function.qualified.endswith(f".{fault.function}")]
    places = {
        id(node): (function, node)
        for function in named
        for node in ast.walk(function.node)
        if node is not function.node and is_like(find, node, {})
    }
    if len(places) != 1:
        where = f"{len(named)} functions `{fault.function}` of {' and '.join(ROOMS)}"
        raise FaultFailed(f"{fault.name}: `{fault.find}` is in {len(places)} places of {where}; it has to be in one.")
    return next(iter(places.values()))


def plant(fault: Fault, folder: Path) -> Path:
    """Put the fault into a copy of the sources. Returns the file that was changed. Raises FaultFailed."""
    function, place = place_of(fault, functions_of(folder))
    find, put = pattern_of(fault)
    bound: dict[str, Any] = {}
    is_like(find, place, bound)
    new = [Filled(bound).visit(copy.deepcopy(node)) for node in put]
    changed = ast.fix_missing_locations(Exchanged(place, new).visit(function.tree))
    function.file.write_text(ast.unparse(changed) + "\n", encoding="utf-8")
    return function.file


def is_rest(node: Any) -> bool:
    """Return whether this is `...`."""
    value = node.value if isinstance(node, ast.Expr) else node
    return isinstance(value, ast.Constant) and value.value is ...


def is_like(pattern: Any, node: Any, bound: dict[str, Any]) -> bool:
    """Compare a pattern with a part of a syntax tree, and note in `bound` what its letters and `...` stand for."""
    if isinstance(pattern, ast.Name) and len(pattern.id) == 1 and pattern.id.isupper():
        if not isinstance(node, ast.expr):
            return False
        return ast.dump(bound.setdefault(pattern.id, node)) == ast.dump(node)
    if isinstance(pattern, list):
        if pattern and is_rest(pattern[-1]):
            pattern, bound["..."] = pattern[:-1], node[len(pattern) - 1 :]
            node = node[: len(pattern)]
        return len(pattern) == len(node) and all(is_like(*pair, bound) for pair in zip(pattern, node, strict=True))
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and bool(pattern == node)
    names = [name for name in pattern._fields if name not in NOT_COMPARED]
    return type(pattern) is type(node) and all(
        is_like(getattr(pattern, name), getattr(node, name), bound) for name in names
    )


class Filled(ast.NodeTransformer):
    """Puts what was found in the place of each letter and of `...`."""

    def __init__(self, bound: dict[str, Any]) -> None:
        self.bound = bound

    def visit(self, node: ast.AST) -> Any:
        if is_rest(node):
            return copy.deepcopy(self.bound.get("...", node))
        if isinstance(node, ast.Name) and node.id in self.bound:
            return copy.deepcopy(self.bound[node.id])
        return self.generic_visit(node)


class Exchanged(ast.NodeTransformer):
    """Puts other nodes in the place of one."""

    def __init__(self, old: ast.AST, new: list[ast.AST]) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        if node is not self.old:
            return self.generic_visit(node)
        return self.new if isinstance(node, ast.stmt) else self.new[0]
