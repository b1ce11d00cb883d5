"""The tutorial's programs print what stands below them."""

import re
import shlex

from paged.cli.app import run

PAGE = "docs/tutorial.md"


def test_the_programs_of_the_tutorial_print_what_it_shows(page, capsys):
    names = {}
    steps = re.findall(r"^```python\n(.*?)^```\n\n(?:```text\n(.*?)^```$)", page, flags=re.MULTILINE | re.DOTALL)
    assert len(steps) == page.count("```python") == 5
    for program, shown in steps:
        exec(compile(program, PAGE, "exec"), names)
        assert capsys.readouterr().out == shown


def test_the_command_of_the_tutorial_prints_the_lines_that_it_shows(page, capsys):
    command, shown = re.search(
        r"^```sh\npaged (simulate.*?)\n```\n\n```text\n(.*?)^```$", page, flags=re.M | re.S
    ).groups()
    assert run(shlex.split(command)) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in shown.splitlines() if line not in printed] == []
