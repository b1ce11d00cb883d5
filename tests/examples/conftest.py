"""What the tests of examples share: their modules, and what they print."""

import runpy
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def example(repository):
    """example(name): what that example defines."""
    return lambda name: SimpleNamespace(**runpy.run_path(str(repository / "examples" / f"{name}.py"), run_name=name))


@pytest.fixture
def said(repository, capsys, monkeypatch):
    """said(name): the lines that the example prints when it is run as a program; it warns of nothing."""
    monkeypatch.syspath_prepend(str(repository / "examples"))

    def lines(name):
        runpy.run_path(str(repository / "examples" / f"{name}.py"), run_name="__main__")
        out, err = capsys.readouterr()
        assert err == ""
        return out.splitlines()

    return lines
