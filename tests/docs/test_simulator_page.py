"""The page about the simulator: its Python runs, its plans are those of the commands, and the figures that it explains are there."""

import re

import pytest

from paged.cli.app import run
from paged.study.simulator import SimulationResult

PAGE = "docs/simulator.md"


def test_the_python_of_the_page_runs(page, fences, capsys):
    for program in fences(page, "python"):
        exec(compile(program, "simulator.md", "exec"), {})
    *compared, planned = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in compared] == ["paged", "vllm"]
    answer, missed, *_, rate = planned.split()
    assert float(answer) == float(rate) < float(missed) <= float(answer) * 1.1


def test_the_figures_of_the_page_are_those_of_a_result(page):
    table = page.partition("## What the figures mean")[2].partition("## What comes out")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    names = [name.partition(".")[0] for cell in cells for name in re.findall(r"`([a-z_.0-9]+)`", cell)]
    assert len(names) > 12
    assert set(names) <= set(SimulationResult.__struct_fields__)


@pytest.mark.slow
def test_the_plans_of_the_page_are_what_the_commands_print(page, fences, capsys):
    """The same question twice: without a budget, and with one that binds."""
    (shown,) = (block for block in fences(page, "") if block.startswith("$ paged plan "))
    commands = [part.splitlines() for part in shown.split("$ paged ")[1:]]
    replicas = []
    for command, *lines in commands:
        assert run([*command.split(), "--jobs", "1"]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert [line for line in lines if line not in printed] == []
        assert len(lines) >= 3
        replicas.append(int(re.search(r": ([\d,]+) replicas?; missed", lines[0])[1]))
    unnamed, binding = replicas
    assert unnamed < binding
    assert f"What binds: token budget; with 512 tokens a step instead of 2,048: {unnamed} replicas." in shown
