"""Lines of Python a folder, docstrings included, and what is longest in it: `[tool.paged.budget]` of pyproject.toml holds them.

python tools/sizes.py        # a table; exit status 1 where a folder is over its budget
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent


class Size(NamedTuple):
    """What a folder holds. `longest` is the longest function and its lines, `widest` the class of most public methods and their number."""

    lines: int
    budget: int
    longest: tuple[str, int]
    widest: tuple[str, int]


def sources(folder: Path) -> list[Path]:
    """The folder's Python files that are tracked, or would be; what is reached by a link belongs to another folder."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", folder.name]
    names = subprocess.run(listed, cwd=folder.parent, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [folder.parent / name for name in sorted(set(names)) if name.endswith(".py")]
    return [file for file in files if file.is_file()]


def size_of(files: list[Path], budget: int) -> Size:
    """Count the files' lines, and find what is longest in them."""
    lines, functions, classes = 0, [("", 0)], [("", 0)]
    for file in files:
        text = file.read_text(encoding="utf-8")
        lines += len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append((f"{file.name}: {node.name}", (node.end_lineno or 0) - node.lineno + 1))
            elif isinstance(node, ast.ClassDef):
                methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
                classes.append((f"{file.name}: {node.name}", sum(not name.startswith("_") for name in methods)))
    return Size(lines, budget, max(functions, key=lambda each: each[1]), max(classes, key=lambda each: each[1]))


def sizes(repository: Path = REPOSITORY) -> dict[str, Size]:
    """The size of each folder that has a budget."""
    budgets = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["paged"]["budget"]
    return {name: size_of(sources(repository / name), budget) for name, budget in budgets.items()}


def main() -> int:
    found = sizes()
    print(f"{'folder':<14} {'lines':>7} {'budget':>7}  longest function, widest class")
    for name, size in found.items():
        longest, widest = (f"{what} ({number})" for what, number in (size.longest, size.widest))
        print(f"{name:<14} {size.lines:>7,} {size.budget:>7,}  {longest}, {widest}")
    return int(any(size.lines > size.budget for size in found.values()))


if __name__ == "__main__":
    sys.exit(main())
