"""Files that commands write: whole or as they were. That none is one that is read or written already is said in refused_commands.txt."""

import pytest

from paged.base.whole_file import whole_file, writable
from paged.errors import UnwritablePath


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
