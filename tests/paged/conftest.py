"""What tests of the command line share."""

import pytest

from paged.cli.app import run


@pytest.fixture
def paged(capsys):
    """Run a command line in this process: exit status, standard output, standard error."""

    def call(*arguments):
        status = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call
