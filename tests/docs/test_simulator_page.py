"""The page about the simulator: its Python runs, its commands' options exist, and the figures that it explains are there."""

import re

import pytest

from paged.cli.app import run
from paged.study.simulator import SimulationResult


@pytest.fixture(scope="module")
def page(repository):
    return (repository / "docs" / "simulator.md").read_text()


def test_the_python_of_the_page_runs(page, capsys):
    programs = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    for program in programs:
        exec(compile(program, "simulator.md", "exec"), {})
    *compared, planned = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in compared] == ["paged", "vllm"]
    answer, missed, *_, rate = planned.split()
    assert float(answer) == float(rate) < float(missed) <= float(answer) * 1.1


def test_every_option_of_the_page_is_one_of_the_command(page, run_python):
    wide = {"COLUMNS": "200", "PATH": ""}
    shown = "".join(
        run_python("-m", "paged", name, "--help", env=wide).stdout for name in ("simulate", "plan", "validate")
    )
    # Of vLLM's own command, whose results are read.
    shown += "--save-result --save-detailed"
    options = set(re.findall(r"--[a-z][a-z-]+", page))
    assert len(options) > 10
    assert {option for option in options if option not in shown} == set()


def test_the_figures_of_the_page_are_those_of_a_result(page):
    table = page.partition("## What the figures mean")[2].partition("## What comes out")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    names = [name.partition(".")[0] for cell in cells for name in re.findall(r"`([a-z_.0-9]+)`", cell)]
    assert len(names) > 12
    assert set(names) <= set(SimulationResult.__struct_fields__)


@pytest.mark.slow
def test_the_plans_of_the_page_are_what_the_commands_print(page, capsys):
    """The same question three times: without a budget, with one that suits, with one that binds."""
    (shown,) = re.findall(r"^```\n(\$ paged plan .*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    commands = [part.splitlines() for part in shown.split("$ paged ")[1:]]
    replicas = []
    for command, *lines in commands:
        assert run([*command.split(), "--jobs", "1"]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert [line for line in lines if line not in printed] == []
        assert len(lines) >= 3
        replicas.append(int(re.search(r": ([\d,]+) replicas?; missed", lines[0])[1]))
    unnamed, suiting, binding = replicas
    assert unnamed == suiting < binding
    assert f"What binds: token budget; with 512 tokens a step instead of 2,048: {suiting} replicas." in shown
