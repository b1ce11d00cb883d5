"""The example of a manager of one's own: it runs in an empty folder, and what the kit says of its bug points at the bug."""

import dataclasses
import re
import shutil
import textwrap
from pathlib import Path

import pytest

from paged.testing import Capabilities, ManagerRig, ManagerWorld, Violation

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "test_your_own.py"
TESTING = EXAMPLE.parents[1] / "docs" / "testing.md"


def test_the_mended_manager_passes_and_the_bug_is_expected_and_reported_by_its_rule_and_a_short_program(
    run_python, tmp_path
):
    # As a user has it who installed `paged[testing]` and nothing else: in a folder of its own, without our settings.
    shutil.copy(EXAMPLE, tmp_path)
    # With a seed, because which rule the bug breaks first is drawn.
    options = ["--xfail-tb", "--paged-examples", "40", "--hypothesis-seed=0"]
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_your_own.py", *options)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 xfailed" in done.stdout
    lines = [line.removeprefix("E").strip() for line in done.stdout.splitlines() if line.startswith("E ")]
    report = "\n".join(lines).split("Violation: ", 1)[1].strip()
    said, _, program = report.partition("The program:")
    assert said.startswith(("content that should be gone: ", "lookup found "))
    # Which one is found first depends on what was drawn; that it is short does not.
    assert program.strip().startswith("rig = ManagerRig(")
    assert 3 <= program.count("rig.") <= 12


@pytest.mark.parametrize("page", [EXAMPLE, TESTING], ids=["docstring", "docs"])
def test_the_program_that_is_shown_ends_in_what_is_shown(page, example):
    text = page.read_text(encoding="utf-8")
    shown = r"^ *(content that should be gone: .*)\n\n *The program:\n *rig = ManagerRig\((.*)\)\n((?: *rig.*\n)+)"
    said, world, program = re.findall(shown, text, re.M)[0]
    rig = ManagerRig(eval(world, {"ManagerWorld": ManagerWorld}), example("test_your_own").OurManager)
    # Found by the last call, or when all that was begun is brought to its end.
    with pytest.raises(Violation) as caught:
        exec(textwrap.dedent(program) + "rig.drain()", {"rig": rig})
    assert str(caught.value).startswith(said)


def test_the_page_begins_with_a_bug_and_what_is_said_of_it():
    text = TESTING.read_text(encoding="utf-8")
    code, said = re.findall(r"```(?:python)?\n(.*?)```", text, re.S)[:2]
    assert len([line for line in code.splitlines() if line.strip()]) == 10
    with pytest.raises(Violation) as caught:
        exec(compile(code, "testing.md", "exec"), {"__name__": "page"})
    assert str(caught.value) == said.strip()


def test_the_table_of_what_may_be_left_out_has_every_capability():
    table = TESTING.read_text(encoding="utf-8").split("## What may be left out")[1]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", table, re.M)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(Capabilities))
