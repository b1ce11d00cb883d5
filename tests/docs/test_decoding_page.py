"""docs/decoding.md: every command on the page does what it says."""

import io
import json
import re
import shlex

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("llguidance")

from paged.cli.app import run

PAGE = "docs/decoding.md"


def test_every_command_answers(page, fences, repository, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is a list?\nAnd a tuple?\n"))
    found = [line for block in fences(page, "") for line in block.splitlines()]
    assert len(found) == 13
    monkeypatch.chdir(repository)
    for line in found:
        program, *arguments = shlex.split(line)
        assert program == "paged"
        assert run(arguments) == 0, line
        out = capsys.readouterr().out
        if "--beam-groups" in arguments:
            first, second = re.findall(r"^\[1\.[12]\] (The with statement.*?)$", out, re.M)
            assert first != second
        elif "--json-schema" in arguments:
            assert json.loads(out.removeprefix("The with statement"))["name"] in ("with", "def", "class")
        elif "--choice" in arguments:
            assert out.strip() in ("Is it a list?yes", "Is it a list?no")
        elif "--beam-width" in arguments:
            assert re.findall(r"^\[1\.(\d)\] The with statement", out, re.M) == ["1", "2"]
        elif "--n" in arguments:
            assert re.findall(r"^\[1\.(\d)\] The with statement", out, re.M) == ["1", "2", "3", "4"]
        elif "--stop" in arguments:
            assert " of" not in out.removeprefix("The with statement")
        elif "--logprobs" in arguments:
            assert re.search(r"^token +likely +rank +instead$", out, re.M)
        elif "chat" in arguments:
            first, second = re.findall(r"\[(\d+) of (\d+) blocks of the conversation found; \d+ tokens said\]", out)
            assert int(second[0]) >= int(first[1]) - 1 > 0
        else:
            assert len(out.strip()) > len("The with statement")


def test_the_python_of_the_page_runs(page, fences, capsys):
    (program,) = fences(page, "python")
    exec(compile(program, "decoding.md", "exec"), {})
    assert len(capsys.readouterr().out) > 8
