"""Acceptance tests see what a user sees: the door, and no room behind it."""

import ast
import sys
from pathlib import Path

import pytest

ACCEPTANCE = sorted((Path(__file__).resolve().parent.parent / "acceptance").glob("*.py"))
ALLOWED = {"paged", "numpy", "pytest", "hypothesis", *sys.stdlib_module_names}


def imported_packages(source: str) -> set[str]:
    """The top-level packages that a module imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", ACCEPTANCE, ids=lambda path: path.name)
def test_acceptance_tests_import_only_paged(path):
    assert imported_packages(path.read_text()) <= ALLOWED
