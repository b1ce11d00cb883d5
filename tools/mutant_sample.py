"""Random small changes of the memory layer and the scheduler: what `mutants.py` tries.

A mutant is one change in one file: a comparison or an arithmetic operator swapped, a constant raised by 1, a `not`, a
keyword argument or a statement dropped, one arm of a conditional expression taken always. Expressions are changed by
mutmut's mutators. Those whose changes fail at any call (None for an argument) or change a message alone are left out.
"""

from __future__ import annotations

import ast
import difflib
import random
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from mutmut.mutation import mutators

REPOSITORY = Path(__file__).resolve().parent.parent
ROOMS = ("block_manager", "scheduler")

EXPRESSIONS = (
    mutators.operator_augmented_assignment,
    mutators.operator_if_exp,
    mutators.operator_keywords,
    mutators.operator_match,
    mutators.operator_name,
    mutators.operator_number,
    mutators.operator_remove_unary_ops,
    mutators.operator_swap_op,
)
# Nothing below these is changed: types, what is imported, our own mistakes (`strict` of a zip, too), and what an error says.
LEFT_OUT = (cst.Annotation, cst.Assert, cst.Decorator, cst.Import, cst.ImportFrom, cst.BaseString, cst.FormattedString)


@dataclass(frozen=True)
class Mutant:
    """A change of one place: `source` is the file with it, `removed` and `added` are its lines without indentation.

    `statement` are the lines of the statement that is changed, of a compound one its head.
    """

    path: str
    line: int
    removed: str
    added: str
    statement: range
    diff: str
    source: str


class Places(cst.CSTVisitor):
    """Collects every (node, what may stand in its place) of a module."""

    def __init__(self) -> None:
        self.found: list[tuple[cst.CSTNode, cst.CSTNode]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, LEFT_OUT):
            return False
        if isinstance(node, cst.Arg) and node.keyword is not None and node.keyword.value == "strict":
            return False
        if isinstance(node, cst.SimpleStatementLine) and len(node.body) == 1:
            if is_droppable(node.body[0]):
                self.found.append((node.body[0], cst.Pass()))
            if isinstance(node.body[0], cst.Raise):
                return False
        if isinstance(node, cst.Call):
            for place, argument in enumerate(node.args):
                if argument.keyword is not None and argument.keyword.value != "strict":
                    kept = [*node.args[:place], *node.args[place + 1 :]]
                    kept[-1:] = [each.with_changes(comma=cst.MaybeSentinel.DEFAULT) for each in kept[-1:]]
                    self.found.append((node, node.with_changes(args=kept)))
        for kind, operator in mutators.mutation_operators:
            if operator in EXPRESSIONS and isinstance(node, kind):
                self.found.extend((node, changed) for changed in operator(node))
        return True


def is_droppable(statement: cst.BaseSmallStatement) -> bool:
    """Whether the names that follow are still bound without this statement."""
    match statement:
        case cst.Expr(value=cst.Call()) | cst.AugAssign() | cst.Del() | cst.Raise() | cst.Return(value=None):
            return True
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Attribute() | cst.Subscript())]):
            return True
        case cst.Continue() | cst.Break():
            return True
    return False


def sampled(count: int, seed: int, only: str) -> list[Mutant]:
    """`count` mutants, or all there are, of the files whose path has `only` in it; the same for one seed and source."""
    candidates: list[tuple[str, int]] = []
    modules: dict[str, tuple[cst.Module, list[tuple[cst.CSTNode, cst.CSTNode]]]] = {}
    for room in ROOMS:
        for file in sorted((REPOSITORY / room).rglob("*.py")):
            path = file.relative_to(REPOSITORY).as_posix()
            if only not in path or file.name == "__init__.py":
                continue
            module, places = cst.parse_module(file.read_text(encoding="utf-8")), Places()
            module.visit(places)
            modules[path] = module, places.found
            candidates += [(path, number) for number in range(len(places.found))]
    random.Random(seed).shuffle(candidates)
    chosen: dict[tuple[str, str], Mutant] = {}
    for path, number in candidates:
        if len(chosen) == count:
            break
        module, found = modules[path]
        mutant = changed(path, module, *found[number])
        if mutant is not None:
            chosen.setdefault((path, mutant.source), mutant)
    return list(chosen.values())


def changed(path: str, module: cst.Module, node: cst.CSTNode, other: cst.CSTNode) -> Mutant | None:
    """The module with `other` in the place of `node`; None where that is no Python, or no change."""
    new = module.deep_replace(node, other)
    assert isinstance(new, cst.Module)
    before, after = module.code.splitlines(), new.code.splitlines()
    try:
        compile(new.code, path, "exec")
    except SyntaxError:
        return None
    lines = list(difflib.unified_diff(before, after, path, path, n=1, lineterm=""))
    if not lines:
        return None
    removed = [line[1:].strip() for line in lines[2:] if line.startswith("-")]
    added = [line[1:].strip() for line in lines[2:] if line.startswith("+")]
    line = next(number for number, text in enumerate(before, 1) if number > len(after) or text != after[number - 1])
    statement = statement_at(line, module.code)
    return Mutant(path, line, "\n".join(removed), "\n".join(added), statement, "\n".join(lines), new.code)


def statement_at(line: int, source: str) -> range:
    """The lines of the innermost statement that stands in this one; of a compound one, those before its body."""
    around = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line)
    ]
    innermost = max(around, key=lambda node: node.lineno)
    body = getattr(innermost, "body", None)
    last = max(line, body[0].lineno - 1) if body else innermost.end_lineno or line
    return range(innermost.lineno, last + 1)
