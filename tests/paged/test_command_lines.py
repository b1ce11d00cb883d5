"""What command lines print, and what those that are refused get: one line on standard error, and status 2."""

import pytest

from ..shown import assert_shown, shown_in  # noqa: TID252
from .files_of_others import write_folder, write_run  # noqa: TID252


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands are given: a trace, wrong files of several kinds, a recorded run, and a folder of layers' tables."""
    path = tmp_path_factory.mktemp("commands")
    (path / "long.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,8,3\n1,4090,9\n2,4090,6\n")
    (path / "bad.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,many,1\n")
    (path / "torn.json").write_text('{"name": "mine", "hidden": "wide"}')
    (path / "old.json").write_text('{"format": 99, "seconds_per_step": 0.1}')
    (path / "notes.toml").write_text("name = 1\n")
    (path / "latin-1.txt").write_bytes(b"fine\nna\xefve\n")
    (path / "empty.txt").write_text("")
    (path / "link.csv").symlink_to("long.csv")
    (path / "loops.csv").write_text("")
    (path / "tables").mkdir()
    write_folder(path / "tables")
    write_run(path / "run")
    requests = (path / "run" / "requests.jsonl").read_text()
    (path / "broken.run").mkdir()
    (path / "broken.run" / "meta.json").write_text((path / "run" / "meta.json").read_text())
    (path / "broken.run" / "requests.jsonl").write_text(requests.replace('"output_toks": 20', '"output_toks": null', 1))
    return path


def contents_of(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(("command", "shown"), shown_in("paged/fixtures/printed.txt", "$ paged"))
def test_a_command_prints_these_lines(printed, folder, monkeypatch, command, shown):
    monkeypatch.chdir(folder)
    assert_shown(printed(*command.split()), shown)


@pytest.mark.parametrize(("command", "shown"), shown_in("paged/fixtures/refused_commands.txt", "$ paged"))
def test_a_command_that_is_refused_says_why_in_a_line_and_writes_nothing(refused, folder, monkeypatch, command, shown):
    monkeypatch.chdir(folder)
    before = contents_of(folder)
    assert_shown(refused(*command.split()), shown)
    assert contents_of(folder) == before
