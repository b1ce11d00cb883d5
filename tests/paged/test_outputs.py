"""Files that commands write: whole or as they were, and never one that is read or written already."""

import pytest

from paged.base.whole_file import whole_file, writable
from paged.cli.app import run
from paged.errors import UnwritablePath

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,100,20\n2023-11-16 18:17:04.97,50,20\n"
POOL = ["--blocks", "500"]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(TRACE)
    return path


@pytest.mark.parametrize("option", ["--csv", "--html", "--log", "--trace-events"])
def test_no_output_overwrites_the_trace(trace, option, capsys):
    trace.with_name("link.csv").symlink_to(trace)
    for name in ("mine.csv", "link.csv"):
        assert run(["simulate", str(trace), *POOL, option, str(trace.with_name(name))]) == 2
        assert f"{option} would overwrite" in capsys.readouterr().err
    assert trace.read_text() == TRACE


def test_two_outputs_are_two_files(trace, capsys):
    path = trace.with_name("x")
    assert run(["simulate", str(trace), *POOL, "--csv", str(path), "--html", str(path)]) == 2
    assert "--csv and --html are both" in capsys.readouterr().err
    assert not path.exists()


def test_a_profile_does_not_overwrite_the_shape_that_it_is_of(tmp_path, capsys):
    shape = tmp_path / "shape.json"
    shape.write_text("{}")
    assert run(["profile", "--shape", str(shape), "--out", str(shape)]) == 2
    assert "which is read" in capsys.readouterr().err and shape.read_text() == "{}"


def write_half(path):
    with whole_file(path) as file:
        file.write("half")
        raise KeyboardInterrupt


def test_what_raises_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt):
        write_half(path)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_what_is_written_takes_the_place_with_its_rights_behind_a_link(tmp_path):
    path, link = tmp_path / "a.txt", tmp_path / "link"
    path.write_text("before")
    path.chmod(0o640)
    link.symlink_to(path)
    with whole_file(link) as file:
        file.write("after")
        assert path.read_text() == "before"
    assert link.is_symlink() and path.read_text() == "after" and path.stat().st_mode & 0o777 == 0o640


def test_what_is_no_regular_file_is_written_as_it_comes(tmp_path):
    assert writable("/dev/null").name == "null"
    with whole_file("/dev/null") as file:
        file.write("gone")
    with (
        pytest.raises(UnwritablePath, match="/dev/full: cannot be written, no space left"),
        whole_file("/dev/full") as file,
    ):
        file.write("x" * 100_000)


def test_an_error_of_another_file_names_that_one(tmp_path):
    with pytest.raises(FileNotFoundError, match="other"), whole_file(tmp_path / "a.txt"):
        (tmp_path / "other").read_text()
    with pytest.raises(BrokenPipeError), whole_file(tmp_path / "a.txt"):
        raise BrokenPipeError
    assert list(tmp_path.iterdir()) == []
