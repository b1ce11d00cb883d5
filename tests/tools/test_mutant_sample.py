"""tools/mutant_sample.py makes changes of one place that are Python, the same ones for the same seed."""

import pytest


@pytest.fixture
def tool(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "tools")
    import mutant_sample

    return mutant_sample


@pytest.fixture
def source(tool, tmp_path, monkeypatch):
    """Make the two rooms one file of this source; all of its mutants as what was added, in order of their lines."""

    def mutants_of(text):
        (tmp_path / "scheduler").mkdir()
        (tmp_path / "scheduler" / "made.py").write_text(text)
        monkeypatch.setattr(tool, "REPOSITORY", tmp_path)
        return sorted(mutant.added for mutant in tool.sampled(1000, 0, ""))

    return mutants_of


def test_the_same_seed_gives_the_same_mutants_and_another_one_others(tool):
    first, again, other = (tool.sampled(20, seed, "scheduler/queues") for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_mutant_changes_one_file_and_is_python(tool, repository):
    for mutant in tool.sampled(20, 0, "block_manager/moves"):
        assert mutant.source != (repository / mutant.path).read_text()
        compile(mutant.source, mutant.path, "exec")


def test_comparisons_constants_nots_and_conditions_change(source):
    assert source("def f(a, b):\n    return a < b and not a\n") == [
        "return a < b and a",
        "return a < b or not a",
        "return a <= b and not a",
    ]


def test_calls_assignments_to_attributes_and_raises_are_dropped(source):
    assert source("def f(a):\n    a.b = a\n    a.c()\n    raise ValueError(1 < 2)\n") == ["pass", "pass", "pass"]


def test_keyword_arguments_are_dropped_and_others_are_not(source):
    assert source("def f(g, a):\n    return g(a, b=a)\n") == ["return g(a)"]


def test_assertions_annotations_and_messages_stay(source):
    assert (
        source('def f(a: "int | None" = None):\n    """Says 1 < 2."""\n    assert a == 1, f"{a < 2}"\n    return a\n')
        == []
    )


@pytest.mark.parametrize(("line", "lines"), [(2, [1, 2]), (3, [3]), (4, [4, 5, 6]), (5, [4, 5, 6]), (7, [7])])
def test_a_line_stands_in_a_statement_or_in_the_head_of_one(tool, line, lines):
    source = "def f(a,\n      b=1):\n    if a:\n        g(\n            a,\n        )\n    return b\n"
    assert list(tool.statement_at(line, source)) == lines
