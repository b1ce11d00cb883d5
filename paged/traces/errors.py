"""What is wrong with a trace file, and where; or with the description of a trace that is to be made up.

Knows paths, lines and columns, and the parts of a description. Does not know any format.
"""

from paged import PagedError


class TraceError(PagedError, ValueError):
    """A trace that cannot be read: malformed, empty, not sorted by arrival, or of no known format.

    `path` is the file, `line` counts from 1 (None: the file as a whole), `column` is a column's name, or a character's place in the
    line counted from 1 where the line does not even parse (None: the line as a whole).
    """

    def __init__(self, path: str, line: int | None, column: str | int | None, problem: str) -> None:
        where = [path]
        if line is not None:
            where.append(f"line {line}")
        if column is not None:
            where.append(f"column {column}")
        super().__init__(f"{', '.join(where)}: {problem}")
        self.path = path
        self.line = line
        self.column = column
        self.problem = problem


class InvalidSpec(PagedError, ValueError):
    """A description of a synthetic trace that cannot be understood: `spec`, and `part`, the piece of it that is wrong."""

    def __init__(self, spec: str, part: str, problem: str) -> None:
        super().__init__(f'{spec}: in "{part}", {problem}' if part else f"{spec}: {problem}")
        self.spec = spec
        self.part = part
        self.problem = problem
