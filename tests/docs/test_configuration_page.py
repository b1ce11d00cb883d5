"""The page of all settings: each has its row, and its program runs; test_architecture_page.py has what the rows say."""

from paged import EngineConfig
from paged.engine.config import fields_of
from paged.serving.settings import Settings

PAGE = "docs/configuration.md"


def test_every_setting_is_in_one_row_and_each_of_an_engine_says_when_to_change_it(page):
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    named = [row[0].split("`")[1] for row in rows if not row[0].startswith("`paged ")]
    assert sorted(named) == sorted({**fields_of(EngineConfig), **fields_of(Settings)}.keys() - {"tenants"})
    assert all(
        len(row) == 6 and row[5].endswith(".") for row in rows if row[0].split("`")[1] in fields_of(EngineConfig)
    )


def test_the_program_of_the_page_says_what_it_says(page, fences, capsys):
    (program,) = fences(page, "python")
    exec(program, {})
    said = capsys.readouterr().out.strip()
    assert said and said in program
