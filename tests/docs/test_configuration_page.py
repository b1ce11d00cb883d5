"""The page of all settings: its tables are what the settings declare, and its program runs."""

import io
import subprocess
import sys
from contextlib import redirect_stdout

from paged import EngineConfig
from paged.engine.config import fields_of
from paged.serving.settings import Settings

PAGE = "docs/configuration.md"


def test_the_tables_are_what_the_settings_declare(repository):
    tool = [sys.executable, str(repository / "tools" / "configuration_page.py"), "--check"]
    done = subprocess.run(tool, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_setting_is_in_one_row_and_each_of_an_engine_says_when_to_change_it(page):
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    named = [row[0].split("`")[1] for row in rows if not row[0].startswith("`paged ")]
    assert sorted(named) == sorted({**fields_of(EngineConfig), **fields_of(Settings)}.keys() - {"tenants"})
    assert all(
        len(row) == 6 and row[5].endswith(".") for row in rows if row[0].split("`")[1] in fields_of(EngineConfig)
    )


def test_the_program_of_the_page_says_what_it_says(page, fences):
    (program,) = fences(page, "python")
    said = io.StringIO()
    with redirect_stdout(said):
        exec(program, {})
    assert said.getvalue().strip() and said.getvalue().strip() in program
