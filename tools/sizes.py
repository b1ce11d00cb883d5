"""Lines of Python a folder, docstrings included, and what is longest in it: `[tool.paged.budget]` of pyproject.toml holds them.

python tools/sizes.py        # a table; exit status 1 where a folder is over its budget
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent


def sources(folder: Path) -> list[Path]:
    """The folder's Python files that are tracked, or would be; what is reached by a link belongs to another folder."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", folder.name]
    names = subprocess.run(listed, cwd=folder.parent, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [folder.parent / name for name in sorted(set(names)) if name.endswith(".py")]
    return [file for file in files if file.is_file()]


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """The tree and all statements in it: no expression holds a class, or an assignment that counts, and most nodes are in expressions."""
    yield tree
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        for node in getattr(tree, part, ()):
            yield from statements(node)


def lines_of(files: list[Path]) -> int:
    """Count the files' lines."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def longest_of(files: list[Path]) -> tuple[tuple[str, int], tuple[str, int]]:
    """Find the longest function and its lines, and the class of most public methods and their number."""
    functions, classes = [("", 0)], [("", 0)]
    for file in files:
        for node in statements(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append((f"{file.name}: {node.name}", (node.end_lineno or 0) - node.lineno + 1))
            elif isinstance(node, ast.ClassDef):
                methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
                classes.append((f"{file.name}: {node.name}", sum(not name.startswith("_") for name in methods)))
    return max(functions, key=lambda each: each[1]), max(classes, key=lambda each: each[1])


class Coupling(NamedTuple):
    """How the files of a room hang together: how many functions take each type, and the assignments to a field of a class in another file
    than its own, and to an element of one."""

    taken: Counter[str]
    fields: int
    elements: int


def coupling_of(files: list[Path]) -> Coupling:
    """Count what functions take, and fields and their elements that are set outside their owner's file: by name, so of equal names any owner
    counts."""
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    owners: defaultdict[str, set[Path]] = defaultdict(set)
    taken, foreign = Counter[str](), Counter[bool]()
    for file, tree in trees.items():
        for kind in (node for node in statements(tree) if isinstance(node, ast.ClassDef)):
            for target, _ in _targets(kind):
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    owners[target.attr].add(file)
            for field in (node.target for node in kind.body if isinstance(node, ast.AnnAssign)):
                owners[ast.unparse(field)].add(file)
        for node in statements(tree):
            if isinstance(node, ast.FunctionDef):
                taken.update({ast.unparse(each.annotation) for each in node.args.args if each.annotation})
    for file, tree in trees.items():
        for target, is_element in _targets(tree):
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self":
                foreign[is_element] += file not in owners[target.attr]
    plain = {"int", "bool", "str", "float", "Any"}
    ours = Counter({name: number for name, number in taken.items() if name.isidentifier() and name not in plain})
    return Coupling(ours, foreign[False], foreign[True])


def _targets(tree: ast.AST) -> list[tuple[ast.expr, bool]]:
    """What is assigned to or deleted in a tree; of an element, what it is an element of, and True."""
    found: list[ast.expr] = []
    for node in statements(tree):
        if isinstance(node, ast.Assign | ast.Delete):
            found += node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            found.append(node.target)
    found = [part for target in found for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [_whole(target) for target in found]


def _whole(target: ast.expr) -> tuple[ast.expr, bool]:
    is_element = isinstance(target, ast.Subscript)
    while isinstance(target, ast.Subscript):
        target = target.value
    return target, is_element


def couplings(repository: Path = REPOSITORY) -> dict[str, tuple[Coupling, int]]:
    """The coupling of each room, and how many elements of fields may be set elsewhere in it; fields may not."""
    document = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))
    limits = document["tool"]["paged"]["foreign_elements"]
    return {name: (coupling_of(sources(repository / name)), limit) for name, limit in limits.items()}


def sizes(repository: Path = REPOSITORY) -> dict[str, tuple[int, int]]:
    """The lines of each folder that has a budget, and the budget."""
    budgets = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["paged"]["budget"]
    return {name: (lines_of(sources(repository / name)), budget) for name, budget in budgets.items()}


def main() -> int:
    found = sizes()
    print(f"{'folder':<14} {'lines':>7} {'budget':>7}  longest function, widest class")
    for name, (lines, budget) in found.items():
        longest, widest = (f"{what} ({number})" for what, number in longest_of(sources(REPOSITORY / name)))
        print(f"{name:<14} {lines:>7,} {budget:>7,}  {longest}, {widest}")
    for name, (coupling, limit) in couplings().items():
        most = ", ".join(f"{kind} ({number})" for kind, number in coupling.taken.most_common(2))
        print(
            f"{name}: most functions take {most}; outside their owner's file are set {coupling.fields} fields, and elements of them in "
            f"{coupling.elements} places, {limit} may be."
        )
    return int(any(lines > budget for lines, budget in found.values()))


if __name__ == "__main__":
    sys.exit(main())
