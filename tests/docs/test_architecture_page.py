"""docs/architecture.md, its brother about settings, and docs/decisions are what the sources are, and what a run does."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from paged import BlockManager, Request, Scheduler


@pytest.mark.parametrize("tool", ["architecture_tree", "configuration_page"])
def test_what_a_tool_writes_into_a_page_is_what_the_sources_say(monkeypatch, repository, tool):
    monkeypatch.setattr(sys, "argv", [tool, "--check"])
    monkeypatch.syspath_prepend(repository / "tools")
    runpy.run_module(tool, run_name="__main__")


def test_decisions_are_numbered_have_the_same_sections_and_are_in_the_index(repository, text_of):
    decisions = sorted((repository / "docs" / "decisions").glob("[0-9]*.md"))
    index = " ".join(text_of("docs/decisions/README.md").split())
    for number, page in enumerate(decisions, 1):
        text = page.read_text()
        assert re.fullmatch(rf"{number:03}-[a-z0-9-]+\.md", page.name)
        assert f"[{text.splitlines()[0].removeprefix('# ')}]({page.name})" in index
        headings = re.findall(r"^## (.*)$", text, re.M)
        assert headings == ["Context", "Decision", "Figures", "What would change it"], page.name


def walk_of(call, last):
    """The stack at the first call of `last` within `call`, of the two rooms, outermost first: (qualified name, file)."""
    found = []

    def watch(frame, event, _):
        if event != "call" or found or frame.f_code.co_qualname != last:
            return
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if file.parent.name in ("scheduler", "block_manager"):
                found.insert(0, (frame.f_code.co_qualname, f"{file.parent.name}/{file.name}"))
            frame = frame.f_back

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def a_sequence_ends():
    scheduler = Scheduler(BlockManager(8, 4))
    scheduler.add(Request(id="a", prompt=[1, 2, 3], max_tokens=1))
    batch = scheduler.schedule()
    return lambda: scheduler.update(batch, [7])


def a_victim_gives():
    scheduler = Scheduler(BlockManager(3, 4, prefix_caching=False), policy="vllm")
    for name in "abc":
        scheduler.add(Request(id=name, prompt=[1, 2, 3, 4], max_tokens=4))
    scheduler.update(scheduler.schedule(), [7, 7, 7])
    return scheduler.schedule


@pytest.mark.parametrize("begun", [a_sequence_ends, a_victim_gives])
def test_in_a_walk_of_the_page_each_function_is_called_by_the_one_before_it(text_of, begun):
    name = begun.__name__.replace("_", " ")
    written = text_of("docs/architecture.md").split(f"<!-- walk: {name} -->")[1].split("<!-- walk: end -->")[0]
    walk = re.findall(r"^\d+\. `(.+)`, (.+)$", written, flags=re.MULTILINE)
    frames = walk_of(begun(), walk[-1][0])
    # The guard of a public call stands around it.
    assert [each for each in frames if each[1] != "base/turns.py"] == walk
