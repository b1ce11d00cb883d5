"""docs/architecture.md and docs/decisions are what the sources are."""

import re
import subprocess
import sys

import pytest


@pytest.fixture(scope="session")
def pages(repository):
    """Every page under docs/, by its path from there."""
    docs = repository / "docs"
    return {page.relative_to(docs).as_posix(): page.read_text(encoding="utf-8") for page in docs.rglob("*.md")}


def test_the_tree_is_what_the_modules_say_of_themselves(repository):
    done = subprocess.run(
        [sys.executable, str(repository / "tools" / "architecture_tree.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_path_that_a_page_of_architecture_or_decisions_links_to_exists(repository, pages):
    for name, text in pages.items():
        if name != "architecture.md" and not name.startswith("decisions/"):
            continue
        folder = (repository / "docs" / name).parent
        for target in re.findall(r"\]\(([^)#]+)", text):
            assert target.startswith("http") or (folder / target).exists(), f"{name}: {target}"


def test_decisions_are_numbered_from_001_and_each_is_in_the_index(pages):
    decisions = sorted(name for name in pages if re.match(r"decisions/\d{3}-[a-z0-9-]+\.md", name))
    assert [int(name[10:13]) for name in decisions] == list(range(1, len(decisions) + 1))
    index = " ".join(pages["decisions/README.md"].split())
    for name in decisions:
        title = pages[name].splitlines()[0].removeprefix("# ")
        assert f"[{title}]({name.removeprefix('decisions/')})" in index


def test_a_decision_says_its_context_what_was_decided_the_figures_and_what_would_change_it(pages):
    for name, text in pages.items():
        if re.match(r"decisions/\d{3}-", name):
            headings = re.findall(r"^## (.*)$", text, re.M)
            assert headings == ["Context", "Decision", "Figures", "What would change it"], name
