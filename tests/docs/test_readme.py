"""The README runs: its Python as it stands, its commands as far as they exist, its links to files that are there."""

import importlib.util
import json
import re
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import paged
from paged.cli.app import run

RunPython = Callable[..., "CompletedProcess[str]"]


@pytest.fixture(scope="module")
def readme(repository: Path) -> str:
    return (repository / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_the_python_of_the_readme_runs(readme: str, repository: Path) -> None:
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("embed_for_readme", repository / "examples" / "embed.py")
    assert spec is not None
    assert spec.loader is not None
    embed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(embed)
    delivered: list[tuple[Any, ...]] = []
    # What the page says is the reader's own.
    names: dict[str, Any] = {
        "engine": embed.StandInEngine(512, 16, 512),
        "prompt": list(range(100)),
        "deliver": lambda *arguments: delivered.append(arguments),
    }
    programs = blocks(readme, "python")
    assert len(programs) >= 3
    for program in programs:
        exec(compile(program, "README.md", "exec"), names)
    tokens = [token for _, token_ids, _ in delivered for token in token_ids]
    alone, _ = embed.serve([paged.Request(id="a", prompt=list(range(100)), max_tokens=64)], num_blocks=64)
    assert tokens == alone["a"]
    assert delivered[-1][2] == "length"


def test_the_embedding_is_about_eight_lines(readme: str) -> None:
    lines = [line for line in blocks(readme, "python")[0].splitlines() if line and not line.startswith("from ")]
    assert len(lines) <= 8


def test_the_commands_of_the_readme_exist(readme: str, repository: Path) -> None:
    makefile = (repository / "Makefile").read_text()
    commands = [line.split("#")[0].split() for block in blocks(readme, "sh") for line in block.splitlines()]
    assert ["make", "demo"] in commands
    assert ["paged", "simulate", "TRACE"] in commands
    subcommands = set()
    for program, *arguments in commands:
        if program == "make":
            assert re.search(rf"^{arguments[0]}:", makefile, flags=re.MULTILINE), arguments
        elif program == "vllm":
            # Its own page says whether it takes them; conformance/vllm asks it.
            assert "paged.integrations.vllm.Scheduler" in arguments
        else:
            subcommands.add((*takewhile(lambda argument: argument.islower() and argument.isalpha(), arguments),))
    for subcommand in subcommands:
        assert run([*subcommand, "--help"]) == 0


def test_no_page_and_no_message_installs_by_a_name_that_no_index_has(repository: Path) -> None:
    wrong = re.compile(r"pip install (?:-\S+ )*['\"]?paged\b")
    folders = ("paged", "attention", "block_manager", "scheduler", "docs", "examples", "deploy", "benchmarks", "tools")
    pages = [file for folder in folders for file in (repository / folder).rglob("*") if file.suffix in (".py", ".md")]
    pages += [repository / "README.md", repository / "CONTRIBUTING.md"]
    assert [str(page) for page in pages if wrong.search(page.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/glossary.md"])
def test_every_link_within_the_repository_leads_somewhere(repository: Path, page: str) -> None:
    path = repository / page
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_the_glossary_has_every_word_once(repository: Path) -> None:
    rows = re.findall(
        r"^\| \*\*(.+?)\*\* \|(.*)\|$", (repository / "docs" / "glossary.md").read_text(), flags=re.MULTILINE
    )
    words = [word for word, _ in rows]
    assert len(words) == len(set(words)) > 40
    assert [word for word, cells in rows if len(cells.split(" | ")) != 5] == []


def test_the_simulation_of_the_readme_gives_its_table_and_policies_differ_in_it(
    readme: str, tmp_path: Path, run_python: RunPython
) -> None:
    pytest.importorskip("typer")
    pytest.importorskip("plotly")
    (line,) = re.findall(r"^paged (simulate azure .*)$", readme, flags=re.MULTILINE)
    page = tmp_path / "report.html"
    result = run_python("-m", "paged", *line.replace("report.html", str(page)).split(), "--jobs", "1", "--json")
    assert result.returncode == 0, result.stderr
    found = {each["policy"]: each for each in json.loads(result.stdout) if round(each["load"]["per_s"], 2) == 0.7}
    rows = re.findall(r"^\| (\S+) \| ([\d.]+) s \| ([\d.]+ m?s) \| (\d+) \|$", readme, flags=re.MULTILINE)
    assert [row[0] for row in rows] == list(found)
    for policy, first, gap, preemptions in rows:
        figures = found[policy]
        assert float(first) == pytest.approx(figures["ttft_s"]["p99"], rel=0.01)
        number, unit = gap.split()
        assert float(number) / {"s": 1, "ms": 1000}[unit] == pytest.approx(figures["longest_gap_s"]["p99"], rel=0.01)
        assert int(preemptions) == sum(figures["preemptions"].values())
    # Ours carries this load: nobody stalls, nobody waits for minutes.
    assert found["paged"]["longest_gap_s"]["p99"] * 4 < min(
        figures["longest_gap_s"]["p99"] for policy, figures in found.items() if policy != "paged"
    )
    assert found["paged"]["ttft_s"]["p99"] < 10
    assert "0.7 requests/s" in page.read_text()
