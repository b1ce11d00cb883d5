"""What the tests of examples share: their modules, and what they print."""

import runpy
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def example(repository):
    """example(name): what that example defines."""
    return lambda name: SimpleNamespace(**runpy.run_path(str(repository / "examples" / f"{name}.py"), run_name=name))


@pytest.fixture
def said(run_python, repository):
    """said(name): the lines that the example prints; it ends with status 0 and warns of nothing."""

    def lines(name):
        result = run_python(str(repository / "examples" / f"{name}.py"))
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        return result.stdout.splitlines()

    return lines
