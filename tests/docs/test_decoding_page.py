"""docs/decoding.md: every command on the page does what it says."""

import io
import json
import re

PAGE = "docs/decoding.md"


def test_every_command_answers(answers, repository, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is a list?\nAnd a tuple?\n"))
    monkeypatch.chdir(repository)
    num_found = 0
    for _, arguments, out in answers():
        num_found += 1
        if "--beam-groups" in arguments:
            first, second = re.findall(r"^\[1\.[12]\] (The with statement.*?)$", out, re.M)
            assert first != second
        elif "--json-schema" in arguments:
            assert json.loads(out.removeprefix("The with statement"))["name"] in ("with", "def", "class")
        elif "--choice" in arguments:
            assert out.strip() in ("Is it a list?yes", "Is it a list?no")
        elif "--n" in arguments:
            answers_asked = int(arguments[arguments.index("--n") + 1])
            assert re.findall(r"^\[1\.(\d)\] The with statement", out, re.M) == [*"1234"[:answers_asked]]
        elif "--stop" in arguments:
            assert " of" not in out.removeprefix("The with statement")
        elif "--logprobs" in arguments:
            assert re.search(r"^token +likely +rank +instead$", out, re.M)
        elif "chat" in arguments:
            first, second = re.findall(r"\[(\d+) of (\d+) blocks of the conversation found; \d+ tokens said\]", out)
            assert int(second[0]) >= int(first[1]) - 1 > 0
        else:
            assert len(out.strip()) > len("The with statement")
    assert num_found == 13
