"""tools/mutant_sample.py makes changes of one place that are Python, the same ones for the same seed."""

import pytest

TOOL = "mutant_sample"


def test_a_mutant_changes_one_file_and_is_python_and_the_same_seed_gives_the_same_ones(tool, repository):
    first, again, other = (tool.sampled(8, seed, "block_manager/moves") for seed in (1, 1, 2))
    assert first == again != other
    for mutant in first + other:
        assert mutant.source != (repository / mutant.path).read_text()
        compile(mutant.source, mutant.path, "exec")


@pytest.mark.parametrize(
    ("text", "mutants"),
    [
        ("return a < b and not a", ["return a < b and a", "return a < b or not a", "return a <= b and not a"]),
        ("a.b = a\n    a.c()\n    raise ValueError(1 < 2)", ["pass", "pass", "pass"]),
        ("return a(b, c=b)", ["return a(b)"]),
        ('"""Says 1 < 2."""\n    assert a == 1, f"{a < 2}"\n    return zip(a, strict=True)', []),
    ],
    ids=["comparisons, nots, conditions", "calls, assignments, raises", "keyword arguments", "assertions and messages"],
)
def test_mutants_of_a_function_are(tool, tmp_path, monkeypatch, text, mutants):
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "made.py").write_text(f'def f(a: "int | None" = None, b=None):\n    {text}\n')
    monkeypatch.setattr(tool, "REPOSITORY", tmp_path)
    assert sorted(mutant.added for mutant in tool.sampled(1000, 0, "")) == mutants


@pytest.mark.parametrize(("line", "lines"), [(2, [1, 2]), (3, [3]), (4, [4, 5, 6]), (5, [4, 5, 6]), (7, [7])])
def test_a_line_stands_in_a_statement_or_in_the_head_of_one(tool, line, lines):
    source = "def f(a,\n      b=1):\n    if a:\n        g(\n            a,\n        )\n    return b\n"
    assert list(tool.statement_at(line, source)) == lines
