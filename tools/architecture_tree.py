"""The tree in docs/architecture.md, made from the first lines of the modules' docstrings.

The three rooms are shown file by file, each file after those of its room that it imports, folders last; of `paged` only its
top files, its folders and their folders.

    python tools/architecture_tree.py            # rewrite the tree in the page
    python tools/architecture_tree.py --check    # exit status 1 if it is stale
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from pathlib import Path

from page_parts import run

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "architecture.md"
ROOMS = ("block_manager", "scheduler", "attention")
DOOR = "paged"
BEGIN, END = "<!-- made by tools/architecture_tree.py -->\n", "<!-- end of the tree -->\n"
NAME_WIDTH, LINE_WIDTH = 22, 120


class ImportCircle(Exception):
    """Files of one room import one another in a circle, so that no order of reading exists."""


def first_line(file: Path) -> str:
    """The first sentence of the module's docstring, cut after a clause where it does not fit into the tree."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    if not docstring:
        raise ValueError(f"{file.relative_to(REPOSITORY)} has no docstring.")
    text = docstring.splitlines()[0].split(". ")[0].removesuffix(".")
    room = LINE_WIDTH - NAME_WIDTH - 3
    if len(text) > room:
        # What follows a colon says more of the same; a cut at a comma may tear a list.
        for pause in ("[:;] ", ", "):
            if ends := [match.start() for match in re.finditer(pause, text) if match.start() <= room]:
                return text[: ends[-1]]
        return text[: room - 1] + "…"
    return text


def imported(file: Path) -> set[str]:
    """The names of the files of its own room that this one imports when it is loaded."""
    found = set()
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom) and statement.level == 1:
            found |= {statement.module.split(".")[0]} if statement.module else {name.name for name in statement.names}
    return {name for name in found if (file.parent / f"{name}.py").exists()}


def in_reading_order(room: Path) -> list[Path]:
    """The files of a room, each after those that it imports, otherwise by name. Raises ImportCircle."""
    waits = {file.stem: imported(file) for file in room.glob("*.py") if file.name != "__init__.py"}
    ready = [name for name, needs in waits.items() if not needs]
    heapify(ready)
    order = []
    while ready:
        order.append(name := heappop(ready))
        for other, needs in waits.items():
            if name in needs:
                needs.remove(name)
                if not needs:
                    heappush(ready, other)
    if circle := sorted(waits.keys() - set(order)):
        raise ImportCircle(f"{room.name}: {', '.join(circle)} import one another, or what does.")
    return [room / f"{name}.py" for name in order]


def lines() -> Iterator[str]:
    """The tree, line by line."""
    for room in ROOMS:
        yield f"{room + '/':<{NAME_WIDTH + 2}} {first_line(REPOSITORY / room / '__init__.py')}"
        for file in in_reading_order(REPOSITORY / room):
            yield f"  {file.name:<{NAME_WIDTH}} {first_line(file)}"
        for folder in sorted((REPOSITORY / room).glob("*/__init__.py")):
            yield f"  {folder.parent.name + '/':<{NAME_WIDTH}} {first_line(folder)}"
    door = REPOSITORY / DOOR
    yield f"{DOOR + '/':<{NAME_WIDTH + 2}} {first_line(door / '__init__.py')}"
    entries = [file for file in door.glob("*.py") if file.name != "__init__.py"]
    # A link is one of the rooms.
    entries += [file for file in door.glob("*/__init__.py") if not file.parent.is_symlink()]
    for file in sorted(entries, key=lambda file: (file.name == "__init__.py", file)):
        name = f"{file.parent.name}/" if file.name == "__init__.py" else file.name
        yield f"  {name:<{NAME_WIDTH}} {first_line(file)}"
        for folder in sorted(file.parent.glob("*/__init__.py")) if file.name == "__init__.py" else ():
            yield f"    {folder.parent.name + '/':<{NAME_WIDTH - 2}} {first_line(folder)}"


if __name__ == "__main__":
    run(__doc__.splitlines()[0], PAGE, BEGIN, END, lambda: ["```", *lines(), "```"])
