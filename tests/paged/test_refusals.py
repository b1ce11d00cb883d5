"""Command lines that are refused: each says why in one line on standard error, ends with status 2, and writes nothing."""

import re
from pathlib import Path

import pytest

from .files_of_others import write_folder, write_run  # noqa: TID252

# "$ paged COMMAND" and the line that it gets, in which … stands for anything.
TEXT = (Path(__file__).parent / "fixtures" / "refusals.txt").read_text(encoding="utf-8")
REFUSALS = re.findall(r"^\$ paged (.*)\n(.+)$", TEXT, flags=re.MULTILINE)
RUN_A_MODEL = ("generate", "profile", "bench attention", "bench engine", "bench step")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands are given: wrong files of several kinds, a recorded run, and a folder of layers' tables."""
    path = tmp_path_factory.mktemp("refused")
    (path / "bad.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,many,1\n")
    (path / "torn.json").write_text('{"name": "mine", "hidden": "wide"}')
    (path / "old.json").write_text('{"format": 99, "seconds_per_step": 0.1}')
    (path / "notes.toml").write_text("name = 1\n")
    (path / "latin-1.txt").write_bytes(b"fine\nna\xefve\n")
    (path / "tables").mkdir()
    write_folder(path / "tables")
    write_run(path / "run")
    requests = (path / "run" / "requests.jsonl").read_text()
    (path / "broken.run").mkdir()
    (path / "broken.run" / "meta.json").write_text((path / "run" / "meta.json").read_text())
    (path / "broken.run" / "requests.jsonl").write_text(requests.replace('"output_toks": 20', '"output_toks": null', 1))
    return path


@pytest.mark.parametrize(("command", "said"), REFUSALS, ids=[command for command, _ in REFUSALS])
def test_a_command_that_is_refused_says_why_in_a_line_and_writes_nothing(refused, folder, monkeypatch, command, said):
    if command.startswith(RUN_A_MODEL):
        pytest.importorskip("torch")
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    line = refused(*command.split())
    assert re.fullmatch(re.escape(said).replace("…", ".*") + "\n", line), line
    assert sorted(folder.rglob("*")) == before
