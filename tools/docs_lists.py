"""Lists in docstrings as tables, for the site's API reference: `name   text` in two columns, with what is indented below a text belonging to it."""

import re
from typing import Any

from griffe import Extension

ITEM = re.compile(r"(\S(?:.*?\S)?) {2,}(\S.*)$")


def with_tables(text: str) -> str:
    """The docstring with each of its lists as a table in Markdown."""
    lines = text.split("\n")
    found: list[str] = []
    items: list[list[str]] = []
    column = 0
    for place, line in enumerate([*lines, ""]):
        following = lines[place + 1] if place + 1 < len(lines) else ""
        is_item = not line.startswith(" ") and ITEM.match(line)
        if is_item:
            items.append([is_item[1], is_item[2]])
            column = is_item.start(2)
        elif items and re.fullmatch(r"\S+ ", line[:column]):
            # A name that fills its column.
            items.append([line[: column - 1], line[column:]])
        elif line and not line.startswith(" ") and re.match(r" {8,}\S", following):
            # A name that is too long for its column stands alone, above its text.
            items.append([line, ""])
        elif items and re.match(r" {4,}\S", line):
            items[-1][1] += f" {line.strip()}"
        else:
            if items:
                rows = [[each.replace("|", "\\|").strip() for each in item] for item in items]
                found += ["", "| | |", "|---|---|", *(f"| `{name}` | {words} |" for name, words in rows), ""]
                items = []
            found.append(line)
    return "\n".join(found[:-1])


class Lists(Extension):
    """Rewrites each docstring once it is read."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Replace the lists of an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = with_tables(obj.docstring.value)
