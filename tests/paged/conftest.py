"""What tests of the command line and of the model that ships share."""

import io
import json

import pytest
from rich.console import Console

from paged.attention import backend
from paged.attention.native import backend as native, build
from paged.cli.app import run
from paged.model.checkpoint import checkpoint_path
from paged.model.loading import load_model
from paged.model.native import coded, packed


@pytest.fixture
def paged(capsys):
    """Run a command line in this process: exit status, standard output, standard error."""

    def call(*arguments):
        status = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def printed(paged):
    """What a command line prints that ends well and complains of nothing."""

    def call(*arguments):
        status, out, err = paged(*arguments)
        assert (status, err) == (0, "")
        return out

    return call


@pytest.fixture
def document(printed):
    """The JSON of such a command line."""
    return lambda *arguments: json.loads(printed(*arguments, "--json"))


@pytest.fixture
def refused(paged):
    """The one line of a command line that is refused with status 2."""

    def call(*arguments):
        status, out, err = paged(*arguments)
        assert (status, out, err.count("\n"), err[:7]) == (2, "", 1, "paged: ")
        return err

    return call


@pytest.fixture
def terminal(monkeypatch):
    """terminal(width, ...): what these modules draw goes to a terminal as wide, and comes back as the text of a file."""

    def made(width, modules=("show",), **options):
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=True, width=width, **options)
        for module in modules:
            monkeypatch.setattr(f"paged.cli.{module}.console", lambda: console)
        return screen

    return made


@pytest.fixture
def nothing_built(monkeypatch, tmp_path):
    """The folder for native code, which is not there yet: nothing is loaded, as in a new process."""

    def forget():
        remembered = (build.library, native.attention_function, backend._say_once, coded.coded_library)
        for each in (*remembered, packed.model_library):
            each.cache_clear()

    monkeypatch.setenv("PAGED_CACHE", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    forget()


@pytest.fixture
def trace_file(tmp_path):
    """Write a trace of rows "arrival_s,prompt_tokens,output_tokens", and return its path."""

    def write(*rows):
        path = tmp_path / "trace.csv"
        path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows, ""]))
        return path

    return write


@pytest.fixture(scope="session")
def model():
    """The model that ships."""
    return load_model(checkpoint_path())


@pytest.fixture(scope="session")
def hybrid():
    """The hybrid that ships."""
    return load_model("hybrid")
