"""The page about sessions: its Python runs and prints what the page says, its options and fields exist, and its table is the results' own."""

import re

PAGE = "docs/sessions.md"


def test_the_python_of_the_page_prints_what_it_says(page, fences, capsys):
    (program,), (shown,) = fences(page, "python"), fences(page, "text")
    exec(compile(program, "sessions.md", "exec"), {})
    assert capsys.readouterr().out == shown


def test_every_option_of_the_page_is_one_of_the_command(page, options_of):
    options = set(re.findall(r"--[a-z][a-z-]+", page))
    assert len(options) > 8
    assert options <= options_of("sessions")


def test_the_tables_of_the_page_are_those_of_the_results(page, text_of):
    rows = [line for line in text_of("benchmarks/results/session_study.md").splitlines() if line.startswith("| ")]
    assert len(rows) > 4
    assert [row for row in rows if row not in page] == []
