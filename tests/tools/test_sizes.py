"""tools/sizes.py: no folder holds more lines of Python than its budget in pyproject.toml."""

import pytest


@pytest.fixture
def tool(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "tools")
    import sizes

    return sizes


def test_no_folder_is_over_its_budget(tool):
    over = {name: (size.lines, size.budget) for name, size in tool.sizes().items() if size.lines > size.budget}
    assert over == {}


def test_a_budget_is_hardly_more_than_what_is_there(tool):
    loose = {name: (size.lines, size.budget) for name, size in tool.sizes().items() if size.budget > size.lines + 100}
    assert loose == {}, "lower them in pyproject.toml"


def test_what_is_longest_is_found(tool, tmp_path):
    (tmp_path / "a.py").write_text(
        "def f():\n    pass\n\n\nclass C:\n    def one(self): ...\n    def two(self): ...\n    def _own(self): ...\n"
    )
    size = tool.size_of([tmp_path / "a.py"], 9)
    assert size == (8, 9, ("a.py: f", 2), ("a.py: C", 2))


@pytest.mark.parametrize("room", ["block_manager", "scheduler"])
def test_no_function_of_the_core_has_more_than_70_lines(tool, room):
    assert tool.sizes()[room].longest[1] <= 70
