"""What the tests of pages share: the text of a page, and the code on it."""

import re
import shlex

import pytest


@pytest.fixture(scope="session")
def text_of(repository):
    """text_of("README.md"): a page, by its path in the repository."""
    return lambda path: (repository / path).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(request, text_of):
    """The page that the file tests, which is named in its PAGE."""
    return text_of(request.module.PAGE)


@pytest.fixture(scope="session")
def fences():
    """fences(page, language): the blocks of that language, of none where it is empty."""
    every = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
    return lambda page, language: [text for name, text in every.findall(page) if name == language]


@pytest.fixture
def answers(page, fences, capsys):
    """The command lines of the page in order, one after the other: each with its arguments, and what it prints. Each has to end well."""

    def each():
        from paged.cli.app import run

        for line in (line for block in fences(page, "") for line in block.splitlines()):
            program, *arguments = shlex.split(line)
            assert (program, run(arguments)) == ("paged", 0), line
            yield line, arguments, capsys.readouterr().out

    return each


@pytest.fixture(scope="session")
def options_of():
    """options_of(command): every spelling of every option of a command."""
    from typer.main import get_command

    from paged.cli.app import app

    def options(command):
        params = get_command(app).commands[command].params
        return {name for param in params for name in (*param.opts, *param.secondary_opts)}

    return options
