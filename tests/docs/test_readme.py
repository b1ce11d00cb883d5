"""The README and the page on embedding run: their Python as it stands, their commands as far as they exist; pictures and study follow from code."""

import json
import re
import runpy
from itertools import takewhile

import pytest

import paged
from paged.cli.app import run

PAGE = "README.md"
TOOL = "readme_pictures"


def test_the_python_of_the_readme_and_of_embedding_runs(page, fences, repository, text_of):
    embed = runpy.run_path(str(repository / "examples" / "embed.py"), run_name="embed")
    prompt, delivered = list(range(100)), []
    # What the page says is the reader's own.
    names = {
        "engine": embed["StandInEngine"](512, 16, 512),
        "prompt": prompt,
        "deliver": lambda *arguments: delivered.append(arguments),
    }
    programs = fences(page, "python") + fences(text_of("docs/embedding.md"), "python")
    assert len(programs) >= 5
    for program in programs:
        exec(compile(program, "README.md", "exec"), names)
    alone, _ = embed["serve"]([paged.Request(id="a", prompt=prompt, max_tokens=64)], num_blocks=64)
    assert [token for _, token_ids, _ in delivered for token in token_ids] == alone["a"]
    assert delivered[-1][2] == "length"


def test_the_pictures_of_the_readme_are_drawn_from_what_is_committed(tool, repository):
    for name, draw in tool.PICTURES.items():
        assert draw() == (repository / "docs" / "images" / name).read_text(encoding="utf-8"), name
    look = tool.run()
    # What the caption says.
    assert look.on_host["e"]
    assert list(look.reasons) == ["e"]
    assert all(len(table) > 4 for id, table in look.tables.items() if id != "e")


def test_the_commands_of_the_readme_exist(page, fences, text_of, options_of):
    makefile = text_of("Makefile")
    commands = [line.split("#")[0].split() for block in fences(page, "sh") for line in block.splitlines()]
    assert ["make", "demo"] in commands
    assert ["paged", "simulate", "TRACE", "--policy", "paged,vllm"] in commands
    subcommands = set()
    for program, *arguments in commands:
        if program == "make":
            assert re.search(rf"^{arguments[0]}:", makefile, flags=re.MULTILINE), arguments
        elif program == "vllm":
            # Its own page says whether it takes them; conformance/vllm asks it.
            assert "paged.integrations.vllm.Scheduler" in arguments
        else:
            subcommands.add((*takewhile(lambda argument: argument.islower() and argument.isalpha(), arguments),))
            assert {each for each in arguments if each.startswith("--")} <= options_of(arguments[0])
    for subcommand in subcommands:
        assert run([*subcommand, "--help"]) == 0


def test_no_page_and_no_message_installs_by_a_name_that_no_index_has(repository):
    wrong = re.compile(r"pip install (?:-\S+ )*['\"]?paged\b")
    folders = ("paged", "attention", "block_manager", "scheduler", "docs", "examples", "deploy", "benchmarks", "tools")
    pages = [file for folder in folders for file in (repository / folder).rglob("*") if file.suffix in (".py", ".md")]
    pages += [repository / "README.md", repository / "CONTRIBUTING.md"]
    assert [str(page) for page in pages if wrong.search(page.read_text(encoding="utf-8"))] == []


def test_the_glossary_has_every_word_once(text_of):
    rows = re.findall(r"^\| \*\*(.+?)\*\* \|(.*)\|$", text_of("docs/glossary.md"), flags=re.MULTILINE)
    words = [word for word, _ in rows]
    assert len(words) == len(set(words)) > 40
    assert [word for word, cells in rows if len(cells.split(" | ")) != 5] == []


def test_the_simulation_of_its_page_gives_its_table_and_policies_differ_in_it(text_of, tmp_path, capsys):
    page = text_of("docs/simulator.md").split("## What is simulated")[0]
    (line,) = re.findall(r"^paged (simulate azure .*orca-max.*)$", page, flags=re.MULTILINE)
    report = tmp_path / "report.html"
    # The table is of the highest of its rates; each is a run by itself.
    command = line.replace("--rate 0.3,0.5,0.7", "--rate 0.7").replace("report.html", str(report))
    assert command.count("--rate 0.7 ") == 1
    assert run([*command.split(), "--jobs", "1", "--json"]) == 0
    found = {
        each["policy"]: each for each in json.loads(capsys.readouterr().out) if round(each["load"]["per_s"], 2) == 0.7
    }
    rows = re.findall(r"^\| (\S+) \| ([\d.]+) s \| ([\d.]+) (m?s) \| (\d+) \|$", page, flags=re.MULTILINE)
    assert [row[0] for row in rows] == list(found)
    for policy, first, gap, unit, preemptions in rows:
        figures = found[policy]
        assert float(first) == pytest.approx(figures["ttft_s"]["p99"], rel=0.01)
        assert float(gap) / {"s": 1, "ms": 1000}[unit] == pytest.approx(figures["longest_gap_s"]["p99"], rel=0.01)
        assert int(preemptions) == sum(figures["preemptions"].values())
    # Ours carries this load: nobody stalls, nobody waits for minutes.
    ours = found.pop("paged")
    assert ours["longest_gap_s"]["p99"] * 4 < min(each["longest_gap_s"]["p99"] for each in found.values())
    assert ours["ttft_s"]["p99"] < 10
    assert "0.7 requests/s" in report.read_text()
