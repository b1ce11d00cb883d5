"""Programs that broke a rule once, as the kit saved them: each runs to its end and breaks none any more.

What was wrong stands in a file's `found`, and in its name where somebody wrote the program down.
"""

from pathlib import Path

import pytest

from paged.testing.saved import load, rerun
from paged.testing.shrinking import replay

FOLDER = Path(__file__).parent / "found_programs"
FILES = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_breaks_no_rule_any_more(file):
    violation = rerun(load(file))
    assert violation is None, f"{violation}"


def test_a_step_ends_the_batch_that_only_its_second_look_finds():
    program = load(FOLDER / "a-second-look-finds-work-where-the-first-took-blocks.json").program
    rig = replay(program.world, program.calls[:-2])
    before = rig.scheduler.stats().output_tokens
    rig.step(ahead=1, is_patient=False)
    assert (rig.flights, rig.scheduler.stats().output_tokens) == ([], before + 1)
