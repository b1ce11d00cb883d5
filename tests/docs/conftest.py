"""What the tests of pages share: what their programs and commands print, and which options there are."""

import shlex

import pytest
from typer.main import get_command

from paged.cli.app import app, run


@pytest.fixture
def ran(text_of, fences, capsys):
    """ran(page): what the one Python program of docs/page.md prints, which runs with these names."""

    def of_page(page, names=None):
        (program,) = fences(text_of(f"docs/{page}.md"), "python")
        exec(compile(program, f"{page}.md", "exec"), {"__name__": page} if names is None else names)
        return capsys.readouterr().out

    return of_page


@pytest.fixture
def answers(page, fences, capsys):
    """The command lines of the page in order, one after the other: each with its arguments, and what it prints. Each has to end well."""

    def each():
        for line in (line for block in fences(page, "") for line in block.splitlines()):
            program, *arguments = shlex.split(line)
            assert (program, run(arguments)) == ("paged", 0), line
            yield line, arguments, capsys.readouterr().out

    return each


@pytest.fixture(scope="session")
def options_of():
    """options_of(command): every spelling of every option of a command."""

    def options(command):
        params = get_command(app).commands[command].params
        return {name for param in params for name in (*param.opts, *param.secondary_opts)}

    return options
